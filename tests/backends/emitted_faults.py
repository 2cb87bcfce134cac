"""Faults planted in emitted GPU kernels: in their tables, or in how they wait, fence and publish.

Each is a context in which kernels that are traced have the fault.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from syncopate_jax.backends import gpu_signals
from syncopate_jax.backends.gpu_greeting import Greeting
from syncopate_jax.backends.gpu_kernel import FusedKernel
from syncopate_jax.backends.gpu_layout import Layout
from syncopate_jax.backends.rank_table import Lists, Section
from syncopate_jax.pallas_kernels import matmul_mosaic_gpu_kernel

Fault = Callable[[], contextlib.AbstractContextManager[Any]]
VICTIM = 1  # the rank whose table is changed
LISTS = ("waits", "k_waits", "e_waits", "op_waits", "exit_waits")


def _rows(lists: Lists, table: np.ndarray) -> np.ndarray:
    """A rank's rows of ``lists``, as a view into its vector."""
    start, rows = lists.start.offset, lists.rows
    points = (rows.offset - start) // lists.start.width
    count = int(table[start + points - 1])
    return table[rows.offset : rows.offset + count * rows.width].reshape(count, rows.width)


def _read_from_table(lists: Lists) -> Lists:
    """Lists of which nothing is known before the kernel runs."""
    width = lists.rows.width
    unknown = {"multiples": (1,) * width, "constants": (None,) * width}

    def forgotten(section: Section | None) -> Section | None:
        return None if section is None else dataclasses.replace(section, **unknown)

    rows = dataclasses.replace(lists.rows, **unknown)
    return dataclasses.replace(lists, rows=rows, short=forgotten(lists.short))


def _copy_short(lists: Lists, table: np.ndarray) -> None:
    """Brings the copy of a rank's rows that is read ahead up to date."""
    short, rows = lists.short, lists.rows
    if short is None or short.offset == rows.offset:
        return
    for point, (lo, hi) in enumerate(itertools.pairwise(table[lists.start.offset : rows.offset])):
        at = short.offset + point * lists.most * short.width
        part = table[rows.offset + lo * rows.width : rows.offset + hi * rows.width]
        table[at : at + len(part)] = part


def _set(layout: Layout, values: dict[str, Any]) -> None:
    for name, value in values.items():
        setattr(layout, name, value)


class NoPlace(AssertionError):
    """The kernel has nothing that could be wrong in this way."""


@contextlib.contextmanager
def _changed_table(change: Callable[[np.ndarray], bool], names: tuple[str, ...]) -> Iterator[None]:
    """Applies ``change`` to the rows of the victim's first list that has something to change."""

    honest_call = FusedKernel.call

    def call(kernel: FusedKernel, *given: Any, **options: Any) -> Any:
        layout = kernel.layout
        honest = {name: getattr(layout, name) for name in ("table", *names)}
        table = honest["table"].copy()
        found = {name: honest[name] for name in names if not honest[name].empty}
        mine = [rows for lists in found.values() if len(rows := _rows(lists, table[VICTIM]))]
        if not any(map(change, mine)):
            raise NoPlace(f"{kernel.work.schedule.plan.name}: rank {VICTIM} has no such wait")
        for lists in found.values():
            _copy_short(lists, table[VICTIM])
        planted = {name: _read_from_table(lists) for name, lists in found.items()}
        try:
            _set(layout, {"table": table} | planted)
            return honest_call(kernel, *given, **options)
        finally:
            _set(layout, honest)  # layouts are remembered

    with mock.patch.object(FusedKernel, "call", call):
        yield


def _last_new(rows: np.ndarray) -> np.ndarray:
    """Which rows wait for the (counter, count) that is the last to be waited for.

    Those before it may be implied by later ones, for instance of the next piece of a chunk.
    """
    pairs = [tuple(row) for row in rows[:, -2:].tolist()]
    last = [pair for at, pair in enumerate(pairs) if pair not in pairs[:at]][-1]
    return np.array([pair == last for pair in pairs])


def _drop_last(rows: np.ndarray) -> bool:
    rows[_last_new(rows), -1] = 0
    return True


def _drop_all(rows: np.ndarray) -> bool:
    rows[:, -1] = 0
    return True


def _wait_for_another(rows: np.ndarray) -> bool:
    """What is waited for last becomes what is waited for first."""
    last = _last_new(rows)
    if last.all():
        return False
    rows[last, -2:] = rows[np.flatnonzero(~last)[0], -2:]
    return True


def missing_wait() -> contextlib.AbstractContextManager[None]:
    """A rank uses what has not arrived, or what is not free."""
    return _changed_table(_drop_last, LISTS)


def leaves_early() -> contextlib.AbstractContextManager[None]:
    """A rank ends its launch while peers still use its memory."""
    return _changed_table(_drop_all, ("exit_waits",))


def wrong_chunk() -> contextlib.AbstractContextManager[None]:
    """A rank waits for a chunk that came before the one it uses."""
    return _changed_table(_wait_for_another, LISTS)


@contextlib.contextmanager
def signal_before_landing() -> Iterator[None]:
    """A signal follows copies that have been read, not yet written; and no copier publishes."""
    only_read = functools.partial(plgpu.wait_smem_to_gmem, wait_read_only=True)

    def wait(n: int, wait_read_only: bool = False) -> None:
        del wait_read_only
        only_read(n)

    with (
        mock.patch.object(plgpu, "wait_smem_to_gmem", wait),
        mock.patch.object(gpu_signals, "publish", lambda: None),
    ):
        yield


@contextlib.contextmanager
def signal_before_stored() -> Iterator[None]:
    """A tile is signalled by who loads, whatever those say who store it."""

    def signal(worker: Any, tile: Any) -> None:
        worker.loop.after_tile(tile)

    with mock.patch.object(matmul_mosaic_gpu_kernel._Worker, "signal", signal):
        yield


@contextlib.contextmanager
def missing_fence() -> Iterator[None]:
    """The copy unit reads without a fence after the wait."""
    with mock.patch.object(gpu_signals, "fence", lambda: None):
        yield


@contextlib.contextmanager
def meets_nobody() -> Iterator[None]:
    """A rank reaches into its peers' memory without knowing that they have begun."""
    with mock.patch.object(Greeting, "meet", lambda greeting: None):
        yield
