"""``python -m syncopate_jax``: the command line."""

import sys

from syncopate_jax.cli import main

sys.exit(main())
