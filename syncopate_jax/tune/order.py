"""In which order ``compile`` asks backends: first what was fastest on two H200s, as a rule.

Of ``experiments/results``, ``two_gpus_h200.json`` and, for Triton, ``two_gpus_triton_h200.json``
have the figures. Where tiles read what peers had, the copy engine won, and Triton's tiles that
loaded from a peer took 4.7 times as long; where peers get what tiles made, tiles that send
themselves won. Loads and stores (``link`` in the former) use less of a link than the copy unit.
"""

from __future__ import annotations

from collections.abc import Iterable

READ = ("copy_engine", "tma_dedicated", "ldst_dedicated", "tma_colocated", "ldst_colocated")
MADE = ("tma_colocated", "tma_dedicated", "ldst_colocated", "ldst_dedicated", "copy_engine")


def by_speed(names: Iterable[str], reads: bool) -> tuple[str, ...]:
    """``names`` in the order to ask: what was measured, what was not by name, and ``xla`` last.

    ``reads``: whether tiles read what the plan moves, or only make it.
    """
    measured = READ if reads else MADE

    def place(name: str) -> tuple[bool, int, str]:
        known = measured.index(name) if name in measured else len(measured)
        return name == "xla", known, name

    return tuple(sorted(names, key=place))
