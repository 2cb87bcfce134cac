"""Is everything that touches one location ordered?

At one location, reads commute with reads, and reductions with reductions of the same kind;
everything else must be ordered. Sorted by one legal order, the touches of a location fall into
runs that commute. A plan is free of races if and only if all of each run happens before all of
the next: the rest follows, since happens-before is transitive and no run is empty.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np

from syncopate_jax.check.collectives import PLAIN
from syncopate_jax.check.flow import Flow
from syncopate_jax.check.integers import distinct_rows, expand
from syncopate_jax.check.order import Order
from syncopate_jax.check.reach import Reach
from syncopate_jax.check.report import SHOWN, Report
from syncopate_jax.ir import comm

Array = np.ndarray

READ = -1
VERBS = {READ: "reads", PLAIN: "writes"}
BLOCK = 1 << 20
"""Pairs that are asked for at a time."""


@dataclass(frozen=True, slots=True, eq=False)
class Touches:
    """Rows that touch locations, sorted by location and legal order.

    ``how`` is READ or an index into ``comm.REDUCTIONS``. A collective both reads and overwrites
    what it does in place, and reads what it sends to several members once.
    """

    row: Array
    at: Array
    how: Array


@dataclass(frozen=True, slots=True, eq=False)
class Runs:
    """Pairs of neighbouring runs of touches at one location; bounds into the touches, [n] each."""

    first: Array
    first_stop: Array
    second: Array
    second_stop: Array


def check_races(flow: Flow, order: Order, reach: Reach, collective: Array, report: Report) -> None:
    """Finds rows that touch one location without an order between them.

    ``collective`` [rows] says which rows are parts of collectives.
    """
    touches = _find_touches(flow, order, collective)
    runs = _neighbours(touches)
    size = runs.first_stop - runs.first
    other = runs.second_stop - runs.second
    few = size * other <= 4 * (size + other)
    unsure = np.flatnonzero(~few)
    unsure = unsure[~_bridged(touches, reach, _pick(runs, unsure), first=False)]
    unsure = unsure[~_bridged(touches, reach, _pick(runs, unsure), first=True)]
    found = _unordered(touches, reach, _pick(runs, np.flatnonzero(few)))
    found += _unordered(touches, reach, _pick(runs, unsure))
    if found:
        _report(flow, touches, np.concatenate(found, axis=1), report)


def _find_touches(flow: Flow, order: Order, collective: Array) -> Touches:
    row = np.concatenate([flow.src_row, flow.dst_row])
    at = np.concatenate([flow.src, flow.dst])
    how = np.concatenate([np.full(len(flow.src), READ), flow.reduce])
    how = np.where(collective[row], np.minimum(how, PLAIN), how)
    key = at * max(len(order.position), 1) + order.position[row]
    by_key = np.argsort(key)
    row, at, how, key = row[by_key], at[by_key], how[by_key], key[by_key]
    if not np.any(collective):
        return Touches(row, at, how)
    first = np.flatnonzero(np.diff(key, prepend=-1))
    how = np.maximum.reduceat(how, first) if len(first) else how
    return Touches(row[first], at[first], how)


def _neighbours(touches: Touches) -> Runs:
    at, how = touches.at, touches.how
    begins = np.ones(len(at), bool)
    begins[1:] = (at[1:] != at[:-1]) | (how[1:] != how[:-1]) | (how[1:] == PLAIN)
    start = np.flatnonzero(begins)
    stop = np.append(start[1:], len(at))
    pair = np.flatnonzero(at[start[:-1]] == at[start[1:]])
    return Runs(start[pair], stop[pair], start[pair + 1], stop[pair + 1])


def _pick(runs: Runs, which: Array) -> Runs:
    columns = (runs.first, runs.first_stop, runs.second, runs.second_stop)
    return Runs(*(column[which] for column in columns))


def _bridged(touches: Touches, reach: Reach, runs: Runs, first: bool) -> Array:
    """[runs] whether all of one run precede one touch, and that touch all of the next run.

    The touch is the second run's first, or the ``first`` run's last: a quick proof for runs of
    many rows; where it fails, the pairs must be looked at.
    """
    bridge = runs.first_stop - 1 if first else runs.second
    result = np.ones(len(bridge), bool)
    for start, stop, ahead in (
        (runs.first, runs.first_stop, True),
        (runs.second, runs.second_stop, False),
    ):
        run = np.repeat(np.arange(len(bridge)), stop - start)
        each = expand(start, stop)
        other = each != bridge[run]
        run, each = run[other], each[other]
        rows, bridges = touches.row[each], touches.row[bridge[run]]
        ordered = reach.before(rows, bridges) if ahead else reach.before(bridges, rows)
        result[run[~ordered]] = False
    return result


def _unordered(touches: Touches, reach: Reach, runs: Runs) -> list[Array]:
    """Pairs of touches [2, pairs] of neighbouring runs without an order, in blocks."""
    found: list[Array] = []
    # One entry for each touch of the first runs, to be paired with all of the second run.
    run = np.repeat(np.arange(len(runs.first)), runs.first_stop - runs.first)
    left = expand(runs.first, runs.first_stop)
    count = (runs.second_stop - runs.second)[run]
    block = np.cumsum(count) // BLOCK
    cuts = np.append(np.flatnonzero(np.diff(block, prepend=-1)), len(block))
    for begin, end in itertools.pairwise(cuts.tolist()):
        mine = slice(begin, end)
        ones = np.repeat(left[mine], count[mine])
        others = expand(runs.second[run[mine]], runs.second_stop[run[mine]])
        bad = ~reach.before(touches.row[ones], touches.row[others])
        if np.any(bad):
            found.append(np.stack([ones[bad], others[bad]]))
    return found


def _report(flow: Flow, touches: Touches, pairs: Array, report: Report) -> None:
    """One finding for each two rows and the rank on which they meet."""
    first, second = touches.row[pairs[0]], touches.row[pairs[1]]
    keys = np.stack([second, first, flow.rank[touches.at[pairs[0]]]], axis=1)
    meetings, inverse = distinct_rows(keys)
    by_key = np.argsort(inverse, kind="stable")
    start = np.searchsorted(inverse[by_key], np.arange(len(meetings) + 1))
    for i, (late, early, rank) in enumerate(meetings[:SHOWN].tolist()):
        one, other = pairs[:, by_key[start[i] : start[i + 1]]]
        box = report.box(*flow.grid.hull(flow.atom[touches.at[one]]))
        report.add(
            "race", *report.place(late),
            f"{_verb(int(touches.how[other[0]]))} {box} of rank {rank}, which {report.name(early)} "
            f"{_verb(int(touches.how[one[0]]))}, and neither waits for the other; add a dependency",
        )  # fmt: skip
    report.more("race", len(meetings), "pairs of operations")


def _verb(how: int) -> str:
    return VERBS.get(how) or f"reduces ({comm.REDUCTIONS[how]}) into"
