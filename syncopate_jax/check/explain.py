"""What went into one location: the contributions a goal misses or has too many of, and how they
were reduced."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np

from syncopate_jax.check.collectives import PLAIN
from syncopate_jax.check.flow import Flow
from syncopate_jax.check.report import Report
from syncopate_jax.ir.comm import REDUCTIONS

Array = np.ndarray

NAMED = 4
"""Contributions named in one message."""

Contribution = tuple[int, int]
"""Atom and rank (-1 for a shared tensor's atom)."""


def explain(flow: Flow, per_rank: Array, atom: int, report: Report) -> str:
    """Which contributions one atom of a goal misses, or has too many of."""
    goal = int(flow.goal[atom])
    ranks = flow.goals.contributors[flow.goals.ranks[goal]] or (-1,)
    wanted = Counter({(int(flow.goal_atom[atom]), rank): 1 for rank in ranks})
    found = contributions(flow, per_rank, int(flow.goal_at[atom]))
    missing = sorted((wanted - found).elements())
    foreign = sorted(key for key in found if key not in wanted)
    doubled = sorted(key for key in found if key in wanted and found[key] > 1)
    parts = []
    if missing:
        parts.append(f"misses {_names(flow, missing, report)}")
    if doubled:
        times = ", ".join(f"{_names(flow, [key], report)} {found[key]} times" for key in doubled)
        parts.append(f"holds {times}")
    if foreign:
        parts.append(f"holds {_names(flow, foreign, report)}, which it must not")
    return "; ".join(parts)


def explain_reduction(flow: Flow, atom: int, report: Report) -> str:
    """Which operations reduce one atom of a goal in another way than the goal says."""
    goal = int(flow.goal[atom])
    kind = int(flow.goals.reduce[goal])
    rows = reductions(flow, int(flow.goal_at[atom]))
    others = sorted(row for row, found in rows.items() if found != kind)
    ranks = flow.goals.contributors[flow.goals.ranks[goal]]
    return (
        f"is the {REDUCTIONS[kind]} of {len(ranks)} ranks, but {len(others)} of the {len(rows)} "
        f"operations that reduce into it do so by {REDUCTIONS[rows[others[0]]]}, the first is "
        f"{report.name(others[0])}; reduce by what the goal says, or change the goal"
    )


def reductions(flow: Flow, at: int) -> dict[int, int]:
    """The rows that reduced what one location holds at the end, and how: a walk as below."""
    held, found = {at}, dict[int, int]()
    for end, begin in itertools.pairwise(flow.batches[::-1].tolist()):
        mine = begin + np.flatnonzero(np.isin(flow.dst[begin:end], list(held)))
        plain = flow.reduce[mine] == PLAIN
        held -= set(flow.dst[mine[plain]].tolist())
        held |= set(flow.src[mine].tolist())
        reducing = mine[~plain]
        kinds = flow.reduce[reducing].tolist()
        found |= dict(zip(flow.dst_row[reducing].tolist(), kinds, strict=True))
    return found


def contributions(flow: Flow, per_rank: Array, at: int) -> Counter[Contribution]:
    """What one location holds at the end, by walking back over the moves that led there."""
    held: Counter[int] = Counter({at: 1})
    for end, begin in itertools.pairwise(flow.batches[::-1].tolist()):
        mine = begin + np.flatnonzero(np.isin(flow.dst[begin:end], list(held)))
        if not len(mine):
            continue
        after = held.copy()
        plain = {int(flow.dst[i]): i for i in mine.tolist() if flow.reduce[i] == PLAIN}
        for place in plain:
            held.pop(place, None)
        for i in mine.tolist():
            place = int(flow.dst[i])
            if flow.reduce[i] != PLAIN or plain[place] == i:
                held[int(flow.src[i])] += after[place]
    found: Counter[Contribution] = Counter()
    for place, count in held.items():
        if flow.initial[place]:
            atom = int(flow.atom[place])
            tensor = int(np.searchsorted(flow.grid.offset, atom, side="right")) - 1
            found[atom, int(flow.rank[place]) if per_rank[tensor] else -1] += count
    return found


def _names(flow: Flow, keys: list[Contribution], report: Report) -> str:
    names = []
    for atom, rank in keys[:NAMED]:
        box = report.box(*flow.grid.hull(np.array([atom])))
        names.append(box if rank < 0 else f"{box} of rank {rank}")
    rest = len(keys) - NAMED
    return ", ".join(names) + (f" and {rest} more" if rest > 0 else "")
