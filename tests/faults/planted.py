"""Faults planted in the instruction sequences of the ``remote_dma`` backend."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest

from syncopate_jax.backends import dma_tables
from syncopate_jax.backends.in_order import SENT, START, WAIT, Sequence
from syncopate_jax.backends.interface import once_a_work
from syncopate_jax.ir.schedule import Schedule

Fault = Callable[[Schedule, list[Sequence]], bool]
"""Changes the sequences in place; says whether there was something to change."""


@contextlib.contextmanager
def planted(fault: Fault) -> Iterator[list[bool]]:
    """Kernels laid out inside have the fault; yields whether each could be given it."""
    honest, done = dma_tables.sequence, []

    def broken(schedule: Schedule) -> list[Sequence]:
        sequences = honest(schedule)
        done.append(fault(schedule, sequences))
        return sequences

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dma_tables, "sequence", broken)
        _forget(patch)
        yield done


def _forget(patch: pytest.MonkeyPatch) -> None:
    """Works that were laid out before are laid out anew, and again once the fault is gone."""
    patch.setattr(dma_tables, "lay_out", once_a_work(dma_tables.lay_out.__wrapped__))


def _remote(schedule: Schedule, row: int) -> bool:
    c = schedule.plan.columns
    return bool(c.src_rank[row] != c.dst_rank[row])


def _drop(schedule: Schedule, points: list[list[tuple[int, int]]], code: int) -> bool:
    """Removes the first remote instruction of a kind."""
    for point in points:
        for i, (found, row) in enumerate(point):
            if found == code and _remote(schedule, row):
                del point[i]
                return True
    return False


def drop_a_wait(schedule: Schedule, sequences: list[Sequence]) -> bool:
    """Rank 1 computes without waiting for what it needs."""
    one = sequences[1]
    return _drop(schedule, [*one.before, *one.epilogue, one.end], WAIT)


def drop_the_last_wait(schedule: Schedule, sequences: list[Sequence]) -> bool:
    """Rank 1 leaves the kernel before the last of its data has arrived."""
    one = sequences[1]
    for point in [one.end, *one.epilogue[::-1], *one.before[::-1]]:
        for i in reversed(range(len(point))):
            if point[i][0] == WAIT and _remote(schedule, point[i][1]):
                del point[i]
                return True
    return False


def forget_what_is_being_sent(schedule: Schedule, sequences: list[Sequence]) -> bool:
    """Rank 0 leaves the kernel while a copy may still read its memory."""
    return _drop(schedule, [sequences[0].end], SENT)


def never_start(schedule: Schedule, sequences: list[Sequence]) -> bool:
    """Rank 0 leaves out a copy, and so does not wait for it either; its peer waits for ever."""
    one = sequences[0]
    points = [*one.before, *one.epilogue, *one.after, one.end]
    for point in points:
        for i, (code, row) in enumerate(point):
            if code == START and _remote(schedule, row):
                del point[i]
                one.end.remove((SENT, row))
                return True
    return False


def start_before_the_tile_is_stored(schedule: Schedule, sequences: list[Sequence]) -> bool:
    """Rank 0 sends what its tile has not written yet."""
    one = sequences[0]
    for tile, point in enumerate(one.after):
        for i, (code, row) in enumerate(point):
            if code == START and _remote(schedule, row):
                del point[i]
                one.before[tile * schedule.num_steps].insert(0, (START, row))
                return True
    return False


@contextlib.contextmanager
def wrong_arrival_number() -> Iterator[None]:
    """Rank 0's first copy raises the semaphore of another copy to the same rank."""
    honest = dma_tables.Coder._encode

    def encode(self: dma_tables.Coder, rank: int, code: int, row: int) -> list[int]:
        fields = honest(self, rank, code, row)
        if code == START and row == 0:
            assert self.num_arrivals > 1, "the operator has no place for this fault"
            fields[1] = (fields[1] + 1) % self.num_arrivals
        return fields

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dma_tables.Coder, "_encode", encode)
        _forget(patch)
        yield
