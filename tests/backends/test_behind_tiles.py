"""Signals that come only after a tile: what follows from waits and channels, in linear time."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from syncopate_jax.backends.behind_tiles import behind_tiles
from syncopate_jax.ir.build import build_plan
from syncopate_jax.ir.chunk import Box, Chunk
from syncopate_jax.ir.comm import P2P
from syncopate_jax.ir.plan import Tensor
from syncopate_jax.ir.schedule import Rows, Schedule

WHOLE = Chunk("t", Box((0,), (1,)))
Ops = Sequence[tuple[int, str, list[int], list[tuple[int, int]]]]


def scheduled(ranks: int, ops: Ops, signals: list[tuple[int, int]]) -> Schedule:
    """One tile a rank, the first of which raises ``signals``.

    ``ops`` in the order of their ranks: (rank, channel, slots it waits for, what it raises).
    """
    lists: list[list[P2P]] = [[] for _ in range(ranks)]
    for rank, channel, _, _ in ops:
        lists[rank].append(P2P(rank, rank, rank, WHOLE, WHOLE, channel=channel))
    none: list[list[tuple[int, ...]]] = [[] for _ in range(ranks)]
    empty, tiles = np.zeros(ranks, np.int32), np.zeros((ranks, 1), np.int32)
    return Schedule(
        plan=build_plan("chain", ranks, [Tensor("t", (1,), "float32")], [], [], lists),
        num_tiles=1,
        num_steps=1,
        workers=1,
        order=tiles,
        k_order=tiles,
        waits=Rows.of(none, 2),
        k_waits=Rows.of(none, 3),
        e_waits=Rows.of(none, 2),
        signals=Rows.of([signals, *none[1:]], 2),
        addends=Rows.of(none, 1),
        op_waits=Rows.of([[(slot, 1) for slot in waits] for _, _, waits, _ in ops], 2),
        op_signals=Rows.of([raised for *_, raised in ops], 2),
        landing=np.full(len(ops), -1, np.int32),
        num_slots=empty,
        num_landings=empty,
    )


def until_nothing_changes(ops: Ops, signals: list[tuple[int, int]]) -> set[tuple[int, int]]:
    found = set(signals)
    for _ in ops:
        behind = set()
        for rank, channel, waits, raised in ops:
            if (rank, channel) in behind or any((rank, slot) in found for slot in waits):
                behind.add((rank, channel))
                found.update(raised)
    return found


@st.composite
def schedules(draw: st.DrawFn) -> tuple[int, Ops, list[tuple[int, int]]]:
    ranks = draw(st.integers(1, 3))
    rank, slot = st.integers(0, ranks - 1), st.integers(0, 7)
    raised = st.lists(st.tuples(rank, slot), max_size=2)
    op = st.tuples(rank, st.sampled_from("ab"), st.lists(slot, max_size=2), raised)
    ops = sorted(draw(st.lists(op, max_size=12)), key=lambda op: op[0])
    return ranks, ops, draw(raised)


@given(schedules())
@settings(max_examples=200, deadline=None)
def test_it_is_what_following_the_waits_finds(
    case: tuple[int, Ops, list[tuple[int, int]]],
) -> None:
    ranks, ops, signals = case
    assert behind_tiles(scheduled(ranks, ops, signals)) == until_nothing_changes(ops, signals)


def test_a_long_chain_listed_backwards_takes_no_square_of_its_length() -> None:
    """By rounds over all operations these took half a minute: a round found one."""
    count = 4096
    ops: Ops = [(0, f"c{i}", [i], [(0, i + 1)]) for i in reversed(range(count))]
    chain = scheduled(1, ops, [(0, 0)])
    start = time.process_time()
    assert behind_tiles(chain) == {(0, slot) for slot in range(count + 1)}
    assert time.process_time() - start < 5
