"""Tables for more ranks than a host has devices or a word has bits: nothing is of a fixed size."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest

from syncopate_jax.backends import dma_tables
from syncopate_jax.backends.dma_layout import Branch
from syncopate_jax.backends.in_order import SENT, START, WAIT
from syncopate_jax.backends.interface import Work
from syncopate_jax.compiler import compile as fuse
from syncopate_jax.options import Launch
from tests.backends import own_kernels
from tests.backends.test_gpu_counters import made_kernel, raised, waited
from tests.backends.test_gpu_lowering import folded, local_arrays
from tests.ops.cases import BY_NAME

RANKS, ROWS = 33, 2
OTHERS = [[peer for peer in range(RANKS) if peer != rank] for rank in range(RANKS)]


def instructions(work: Work, rank: int) -> Iterator[tuple[Branch, list[int]]]:
    """All of a rank's: what each does, and its arrival, send, peer, source and destination."""
    layout, tiles = dma_tables.lay_out(work), work.schedule.num_tiles
    vector, code = layout.table[rank], layout.code
    for program, points in (
        (layout.before, tiles * work.schedule.num_steps),
        (layout.epilogue, tiles),
        (layout.after, tiles),
        (layout.end, 1),
    ):
        for point in range(points):
            for i in range(*program.bounds(vector, point)):
                kind, *fields = (int(code.get(vector, i, field)) for field in range(code.width))
                yield layout.branches[kind], fields


def test_remote_dma_counts_and_addresses_every_rank() -> None:
    """Rows of x go to everyone and rows of the product to their owner."""
    shape_x, shape_y = (RANKS * ROWS, 3), (RANKS * ROWS, 6)
    plan = own_kernels.gather_and_scatter_plan(RANKS, shape_x, shape_y)
    kernel = own_kernels.product(RANKS * ROWS, 3, 6, ROWS, has_addend=True)
    bound = {"x": "x", "y": "out"}
    work = fuse(kernel, plan, bound, axis_name="t", backend="remote_dma").work
    layout = dma_tables.lay_out(work)
    raises: Counter[tuple[str, int, int]] = Counter()
    waits: Counter[tuple[str, int, int]] = Counter()
    written: Counter[tuple[int, object, tuple[int, ...]]] = Counter()
    for rank in range(RANKS):
        gathered, scattered = [], []
        for branch, (arrival, send, peer, *at) in instructions(work, rank):
            assert arrival < layout.num_arrivals and send < layout.num_sends
            if branch.code == WAIT:
                waits["arrived", rank, arrival] += 1
            elif branch.code == SENT:
                waits["sent", rank, send] += 1
            else:
                assert branch.code == START
                raises["arrived", peer, arrival] += 1
                written[peer, branch.dst, tuple(at[layout.ndim :])] += 1
                if not branch.remote:
                    continue
                raises["sent", rank, send] += 1
                if branch.dst == ("x", "gathered"):
                    assert at[layout.ndim] == ROWS * rank
                    gathered.append(peer)
                else:
                    assert at[0] == ROWS * peer
                    scattered.append(peer)
        assert sorted(gathered) == sorted(scattered) == OTHERS[rank]
    assert raises == waits
    assert set(raises.values()) == set(written.values()) == {1}


@pytest.mark.parametrize(
    ("name", "backend", "copies"),
    [
        ("gather_x_m", "tma_dedicated", 1),
        ("all_reduce", "tma_dedicated", 2),
        ("gather_x_m", "tma_colocated", 0),  # tiles read at peers
        ("scatter_m", "ldst_dedicated", 1),
    ],
)
def test_gpu_kernels_count_and_address_every_rank(
    name: str, backend: str, copies: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, launch = BY_NAME[name], Launch(sms=6 * RANKS)
    fn = folded(case, target="mosaic_gpu", backend=backend, launch=launch)
    operands = local_arrays(case, RANKS, m=64, k=64, n=16)
    kernel = made_kernel(fn, operands[:2], monkeypatch)
    assert raised(kernel) == waited(kernel)
    layout = kernel.layout
    for rank, vector in enumerate(layout.table):
        listed = int(layout.programs.get(vector, layout.channels))
        told = Counter(int(layout.ops.get(vector, row, 1)) for row in range(listed))
        del told[rank]
        assert told == dict.fromkeys(OTHERS[rank] if copies else [], copies)
