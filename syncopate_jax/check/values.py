"""Does every goal end up with the right value, each contribution once and nothing for nothing?

The plan is executed on fingerprints: every atom of every tensor (of every rank, if per rank) has
a pseudo-random 64-bit number; a plain write copies it, a reduction adds it modulo 2^64. A goal's
number is then the sum over its contributors, and a missing, doubled or foreign contribution
changes it (but for a chance of 2^-64). Maxima are added too, so that one counted twice is found;
which reductions went into a number is kept beside it, and must be the one that the goal names.
As nothing races, one legal order stands for all.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np

from syncopate_jax.check.collectives import PLAIN, Instances
from syncopate_jax.check.explain import explain, explain_reduction
from syncopate_jax.check.flow import Flow
from syncopate_jax.check.integers import distinct
from syncopate_jax.check.report import SHOWN, Report
from syncopate_jax.ir.plan import Plan

Array = np.ndarray

EXPLAINED = 20
"""Wrong goals for which what went into them is worked out; each costs a walk over all moves."""


@dataclass(frozen=True, slots=True, eq=False)
class Result:
    """What execution on fingerprints left behind.

    Attributes:
      value: [locations] fingerprints at the end.
      kinds: [locations] bits of the reductions that went into them, ``1 << reduce``.
      again: [moves] whether a write found the value it brought already there.
    """

    value: Array
    kinds: Array
    again: Array


def check_values(plan: Plan, instances: list[Instances], flow: Flow, report: Report) -> None:
    """Finds goals with wrong values or reductions, operations for nothing, repeated deliveries."""
    per_rank = np.array([tensor.per_rank for tensor in plan.tensors], bool)
    result = run_fingerprints(flow, per_rank)
    _check_goals(flow, per_rank, result, report)
    _check_kinds(flow, result, report)
    _check_dead(plan, instances, flow, report)
    _check_again(flow, result, report)


def run_fingerprints(flow: Flow, per_rank: Array) -> Result:
    """Executes the moves level by level; those of one level read before any of them writes."""
    value = np.where(flow.initial, _start(flow, per_rank, flow.atom, flow.rank), np.uint64(0))
    kinds = np.zeros(len(value), np.uint8)
    holds = flow.initial.copy()
    again = np.zeros(len(flow.dst), bool)
    plain = flow.reduce == PLAIN
    bit = np.where(plain, 0, 1 << flow.reduce).astype(np.uint8)
    reducing = not np.all(plain)
    for begin, end in itertools.pairwise(flow.batches.tolist()):
        src, dst = flow.src[begin:end], flow.dst[begin:end]
        brought, brought_kinds = value[src], kinds[src] | bit[begin:end]
        before, kinds_before, held = value[dst], kinds[dst], holds[dst]
        if not reducing or np.all(plain[begin:end]):
            value[dst], kinds[dst], holds[dst] = brought, brought_kinds, True
        else:
            set_, add = plain[begin:end], ~plain[begin:end]
            value[dst[set_]], kinds[dst[set_]] = brought[set_], brought_kinds[set_]
            holds[dst[set_]] = True
            np.add.at(value, dst[add], brought[add])
            np.bitwise_or.at(kinds, dst[add], brought_kinds[add])
        same = held & (before == value[dst]) & (kinds_before == kinds[dst])
        again[begin:end] = same & plain[begin:end]
    return Result(value, kinds, again)


def _start(flow: Flow, per_rank: Array, atom: Array, rank: Array) -> Array:
    """Fingerprints of atoms at the start, on the given ranks."""
    tensor = np.searchsorted(flow.grid.offset, atom, side="right") - 1
    return _mix(atom, np.where(per_rank[tensor], rank, -1))


def _mix(atom: Array, rank: Array) -> Array:
    """A 64-bit number for each atom and rank: the finaliser of the SplitMix64 generator."""
    seed = atom.astype(np.uint64) * np.uint64(0xD1342543DE82EF95)
    seed ^= (rank.astype(np.int64) + 2).astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        seed = (seed ^ (seed >> np.uint64(shift))) * np.uint64(factor)
    return seed ^ (seed >> np.uint64(31))


def _expected(flow: Flow) -> Array:
    """[goal atoms] fingerprint that each must have."""
    groups = flow.goals.ranks[flow.goal]
    keys = groups * max(flow.grid.count, 1) + flow.goal_atom
    known, inverse = np.unique(keys, return_inverse=True)
    group, atom = np.divmod(known, max(flow.grid.count, 1))
    value = np.empty(len(known), np.uint64)
    for g, ranks in enumerate(flow.goals.contributors):
        mine = np.flatnonzero(group == g)
        for rank in ranks or (-1,):
            term = _mix(atom[mine], np.full(len(mine), rank))
            value[mine] = term if rank == (ranks or (-1,))[0] else value[mine] + term
    return value[inverse]


def _check_goals(flow: Flow, per_rank: Array, result: Result, report: Report) -> None:
    wrong = result.value[flow.goal_at] != _expected(flow)
    goals = distinct(flow.goal[wrong])
    for i, goal in enumerate(goals[:SHOWN].tolist()):
        atoms = np.flatnonzero(wrong & (flow.goal == goal))
        hull = flow.grid.hull(flow.atom[flow.goal_at[atoms]])
        why = "has the wrong value, like the ones above"
        if i < EXPLAINED:
            why = explain(flow, per_rank, int(atoms[0]), report)
        rank = int(flow.goals.rank[goal])
        report.add("wrong-value", rank, -1, f"goal {report.box(*hull)} {why}")
    report.more("wrong-value", len(goals), "goals")


def _check_kinds(flow: Flow, result: Result, report: Report) -> None:
    """Goals over several ranks whose contributions were not combined by the goal's reduction."""
    several = np.array([len(ranks) > 1 for ranks in flow.goals.contributors], bool)
    kinds = result.kinds[flow.goal_at]
    wanted = 1 << flow.goals.reduce[flow.goal]
    wrong = several[flow.goals.ranks[flow.goal]] & (kinds != 0) & (kinds != wanted)
    goals = distinct(flow.goal[wrong])
    for i, goal in enumerate(goals[:SHOWN].tolist()):
        atoms = np.flatnonzero(wrong & (flow.goal == goal))
        hull = flow.grid.hull(flow.atom[flow.goal_at[atoms]])
        why = "is reduced in the wrong way, like the ones above"
        if i < EXPLAINED:
            why = explain_reduction(flow, int(atoms[0]), report)
        rank = int(flow.goals.rank[goal])
        report.add("wrong-reduction", rank, -1, f"goal {report.box(*hull)} {why}")
    report.more("wrong-reduction", len(goals), "goals")


def _check_dead(plan: Plan, instances: list[Instances], flow: Flow, report: Report) -> None:
    """Operations whose data reaches no goal, found by walking back from the goals.

    All of a collective's members must take part if any of them is of use.
    """
    live = np.zeros(len(flow.initial), bool)
    live[flow.goal_at] = True
    useful = np.zeros(plan.columns.n, bool)
    plain = flow.reduce == PLAIN
    for end, begin in itertools.pairwise(flow.batches[::-1].tolist()):
        src, dst = flow.src[begin:end], flow.dst[begin:end]
        used = live[dst]
        live[dst[plain[begin:end]]] = False
        live[src[used]] = True
        useful[flow.src_row[begin:end][used]] = True
        useful[flow.dst_row[begin:end][used]] = True
    for block in instances:
        useful[block.rows] = np.any(useful[block.rows], axis=1, keepdims=True)
    report.rows(
        "dead",
        np.flatnonzero(~useful),
        lambda row: (
            f"brings {report.side(row, 'dst')} to rank {plan.columns.dst_rank[row]}, which reaches "
            "no goal; drop it or add the goal it serves"
        ),
    )


def _check_again(flow: Flow, result: Result, report: Report) -> None:
    moves = np.flatnonzero(result.again)
    rows = distinct(flow.dst_row[moves])

    def text(row: int) -> str:
        places = flow.dst[moves[flow.dst_row[moves] == row]]
        box = report.box(*flow.grid.hull(flow.atom[places]))
        return (
            f"brings {box} to rank {flow.rank[places[0]]}, which holds that value already; "
            "deliver each element once"
        )

    report.rows("delivered-twice", rows, text)
