"""Settings of the interpreted kernels: every warpgroup and CTA needs a thread of XLA's pool."""

import os

os.environ.setdefault("NPROC", "16")  # XLA sizes its pool by it, once, when its client starts
