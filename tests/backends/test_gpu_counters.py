"""Every signal of a fused GPU kernel is waited for on the rank that has the counter.

So none lands on a rank that has gone on, whose counters are being cleared for the next launch: what
the interpreter, which runs one launch, does not see.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from syncopate_jax.backends.gpu_kernel import FusedKernel
from syncopate_jax.backends.rank_table import Lists
from syncopate_jax.errors import UnsupportedError
from syncopate_jax.options import Launch
from tests.backends.test_gpu_lowering import arrays, lowered
from tests.backends.test_gpu_lowering_kinds import each_pair
from tests.ops import cases
from tests.ops.cases import BY_NAME, Case

Slot = tuple[int, int]
WAITS = ("waits", "k_waits", "e_waits", "op_waits", "exit_waits")


class Seen(Exception):
    """Ends the making of a kernel once its tables are there."""


def points(lists: Lists, vector: np.ndarray) -> list[np.ndarray]:
    """A rank's rows at every point."""
    start, rows = lists.start, lists.rows
    bounds = vector[start.offset : rows.offset]
    values = vector[rows.offset :]
    return [
        values[lo * rows.width : hi * rows.width].reshape(-1, rows.width)
        for lo, hi in itertools.pairwise(bounds)
    ]


def raised(kernel: FusedKernel) -> Counter[Slot]:
    """How often a launch raises each (rank, slot)."""
    layout, body = kernel.layout, kernel.work.kernel.loop_body
    found: Counter[Slot] = Counter()

    def add(rows: np.ndarray, times: int) -> None:
        for rank, slot in rows.tolist():
            found[rank, slot] += times

    copiers = kernel.communicating * body.warpgroups
    for vector in layout.table:
        for rows in points(layout.signals, vector):
            add(rows, 1)
        for rows in points(layout.exit_signals, vector):
            add(rows, kernel.work.schedule.workers)
        programs = vector[layout.programs.offset :][: layout.channels + 1]
        ops = points(layout.op_signals, vector)
        for channel in range(layout.channels if copiers else 0):
            for rows in ops[programs[channel] : programs[channel + 1]]:
                add(rows, len(range(channel, copiers, layout.channels)))
    return found


def waited(kernel: FusedKernel) -> dict[Slot, int]:
    """The most that each (rank, slot) is waited for."""
    found: dict[Slot, int] = {}
    for rank, vector in enumerate(kernel.layout.table):
        for name in WAITS:
            for rows in points(getattr(kernel.layout, name), vector):
                for *_, slot, count in rows.tolist():
                    found[rank, slot] = max(found.get((rank, slot), 0), count)
    return found


def made_kernel(fn: Any, arrays: Sequence[Any], monkeypatch: pytest.MonkeyPatch) -> FusedKernel:
    """The one kernel of ``fn``, of which no more is made than the tables."""
    made: list[FusedKernel] = []

    def call(kernel: FusedKernel, *_: Any, **__: Any) -> Any:
        made.append(kernel)
        raise Seen

    monkeypatch.setattr(FusedKernel, "call", call)
    with pytest.raises(Seen):
        lowered(fn, *arrays)
    (kernel,) = made
    return kernel


def check(
    case: Case, backend: str, ranks: int, monkeypatch: pytest.MonkeyPatch, split: int | None
) -> None:
    given = {"target": "mosaic_gpu", "backend": backend, "launch": Launch(sms=20), "split": split}
    fn = cases.sharded(case, cases.ranks_mesh(ranks), **given)
    kernel = made_kernel(fn, arrays(ranks, k=256)[:2], monkeypatch)
    assert raised(kernel) == waited(kernel)
    assert raised(kernel).total() > 0


@pytest.mark.parametrize("backend", ["tma_dedicated", "tma_colocated"])
@pytest.mark.parametrize("name", ["gather_x_m", "all_reduce"])
def test_no_signal_comes_late(name: str, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check(BY_NAME[name], backend, 3, monkeypatch, None)


@pytest.mark.slow
@pytest.mark.parametrize("split", [None, 2])
@pytest.mark.parametrize("ranks", [2, 4, 8])
@each_pair
def test_no_signal_of_any_kernel_comes_late(
    case: Case, backend: str, ranks: int, split: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    try:
        check(case, backend, ranks, monkeypatch, split)
    except UnsupportedError as refused:
        # Pieces of what is read at peers: then neither tile nor step says where all of it lies.
        assert (backend, split) == ("tma_colocated", 2)
        assert "depends on the tile and on the step" in str(refused)
