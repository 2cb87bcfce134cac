"""Is data there when it is read, and have its tiles run before it is read or overwritten?

Whoever writes a location is ordered with whoever reads it, or ``races`` says so; hence it is
enough that some plain write comes earlier in one legal order.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np

from syncopate_jax.check.collectives import PLAIN
from syncopate_jax.check.flow import Flow
from syncopate_jax.check.integers import distinct, distinct_rows, expand, is_member
from syncopate_jax.check.order import Order
from syncopate_jax.check.reach import Reach
from syncopate_jax.check.report import SHOWN, Report

Array = np.ndarray

Text = Callable[[int, str, int, int], str]
"""A message from a row, a box, a rank and one location."""

BLOCK = 1 << 20
"""Pairs that are asked for at a time."""


def check_sources(
    flow: Flow, order: Order, reach: Reach, collective: Array, report: Report
) -> None:
    """Finds reads of what is not there, reductions into nothing, and waits for tiles that the
    plan does not know or that are missing.

    ``collective`` [rows] says which rows are parts of collectives.
    """
    writes = flow.reduce == PLAIN
    first = np.full(len(flow.initial), len(order.position))
    np.minimum.at(first, flow.dst[writes], order.position[flow.dst_row[writes]])
    _check_there(
        flow, first, order, flow.src_row, flow.src, report, "not-available",
        "reads {box} of rank {rank}, which is neither there at the start nor written before",
    )  # fmt: skip
    adds = ~writes & ~collective[flow.dst_row]
    _check_there(
        flow, first, order, flow.dst_row[adds], flow.dst[adds], report, "nothing-to-reduce",
        "reduces into {box} of rank {rank}, which is neither there at the start nor written before",
    )  # fmt: skip
    unknown = ~flow.produced[flow.cdep_at]
    _group(
        flow, flow.cdep_row[unknown], flow.cdep_at[unknown], report, "no-producer",
        lambda row, box, rank, at: (
            f"waits for the tiles of {box} on rank {rank}, but no initial region says that "
            "tiles produce it; mark the region as produced or drop the dependency"
        ),
    )  # fmt: skip
    _check_produced(flow, order, reach, flow.src_row, flow.src, "reads", report)
    rows, places = flow.dst_row[writes], flow.dst[writes]
    _check_produced(flow, order, reach, rows, places, "overwrites", report)


def _check_there(
    flow: Flow,
    first: Array,
    order: Order,
    rows: Array,
    places: Array,
    report: Report,
    code: str,
    words: str,
) -> None:
    bad = ~flow.initial[places] & (first[places] >= order.position[rows])

    def text(row: int, box: str, rank: int, at: int) -> str:
        writers = np.unique(flow.dst_row[(flow.dst == at) & (flow.reduce == PLAIN)])
        writers = writers[writers != row]
        advice = "; deliver it first"
        if len(writers):
            advice = f"; wait for {report.name(int(writers[0]))}, which writes it"
        return words.format(box=box, rank=rank) + advice

    _group(flow, rows[bad], places[bad], report, code, text)


def _group(flow: Flow, rows: Array, places: Array, report: Report, code: str, text: Text) -> None:
    """One finding for each row and the rank whose locations it is about."""
    if not len(rows):
        return
    keys = np.stack([rows, flow.rank[places]], axis=1)
    rows_and_ranks, inverse = distinct_rows(keys)
    by_key = np.argsort(inverse, kind="stable")
    start = np.searchsorted(inverse[by_key], np.arange(len(rows_and_ranks) + 1))
    for i, (row, rank) in enumerate(rows_and_ranks[:SHOWN].tolist()):
        mine = places[by_key[start[i] : start[i + 1]]]
        box = report.box(*flow.grid.hull(flow.atom[mine]))
        report.add(code, *report.place(row), text(row, box, rank, int(mine[0])))
    report.more(code, len(rows_and_ranks), "operations")


def _check_produced(
    flow: Flow,
    order: Order,
    reach: Reach,
    rows: Array,
    places: Array,
    verb: str,
    report: Report,
) -> None:
    """Rows that touch what tiles produce must follow a compute dependency that covers it."""
    due = np.flatnonzero(flow.produced[places])
    if not len(due):
        return
    count = len(flow.initial)
    waits = distinct(flow.cdep_row * count + flow.cdep_at)
    due = due[~is_member(rows[due] * count + places[due], waits)]
    bad = due[~_covered(flow, order, reach, rows[due], places[due])]
    _group(
        flow, rows[bad], places[bad], report, "not-produced",
        lambda row, box, rank, at: (
            f"{verb} {box} of rank {rank}, which tiles produce, without waiting for them; "
            f"add a dependency on compute(r{rank} {box})"
        ),
    )  # fmt: skip


def _covered(flow: Flow, order: Order, reach: Reach, rows: Array, places: Array) -> Array:
    """[pairs] whether some row that waits for the tiles of the place happens before the row."""
    result = np.zeros(len(rows), bool)
    if not len(rows) or not len(flow.cdep_at):
        return result
    by_place = np.argsort(flow.cdep_at, kind="stable")
    waiting = order.entry[flow.cdep_row[by_place]]
    known = flow.cdep_at[by_place]
    start = np.searchsorted(known, places, side="left")
    stop = np.searchsorted(known, places, side="right")
    block = np.cumsum(stop - start) // BLOCK
    cuts = np.append(np.flatnonzero(np.diff(block, prepend=-1)), len(rows))
    for begin, end in itertools.pairwise(cuts.tolist()):
        pair = np.repeat(np.arange(begin, end), (stop - start)[begin:end])
        ahead = waiting[expand(start[begin:end], stop[begin:end])]
        result[pair[reach.before(ahead, rows[pair])]] = True
    return result
