"""Small faults put into a plan: what a template's author, an importer or a pass may get wrong."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

from syncopate_jax.errors import SyncopateError
from syncopate_jax.ir.build import build_plan
from syncopate_jax.ir.chunk import Box, Chunk
from syncopate_jax.ir.comm import KINDS, P2P, REDUCTIONS, Collective, ComputeDep, OpDep, Operation
from syncopate_jax.ir.plan import Plan

Lists = list[list[Operation]]


def mutant(plan: Plan, seed: int) -> tuple[str, Plan] | None:
    """A plan with one random fault and the fault's name; None if none of this kind fits."""
    rng = random.Random(seed)
    name = rng.choice(sorted(FAULTS))
    lists = [list(plan.ops(rank)) for rank in range(plan.num_ranks)]
    try:
        changed = FAULTS[name](plan, lists, rng)
    except (SyncopateError, IndexError):
        return None
    return (name, changed) if changed is not None else None


def _rebuilt(plan: Plan, lists: Lists, **changes: object) -> Plan:
    head = {
        name: getattr(plan, name) for name in ("name", "num_ranks", "tensors", "initial", "goals")
    }
    return build_plan(ops=lists, **{**head, **changes})


def _pick(lists: Lists, rng: random.Random, wanted: Callable[[Operation], bool]) -> tuple[int, int]:
    places = [(r, i) for r, ops in enumerate(lists) for i, op in enumerate(ops) if wanted(op)]
    return rng.choice(places)


def _any(op: Operation) -> bool:
    return True


def _is_p2p(op: Operation) -> bool:
    return isinstance(op, P2P)


def _edit(plan: Plan, lists: Lists, rng: random.Random, wanted, change) -> Plan:
    rank, index = _pick(lists, rng, wanted)
    lists[rank][index] = change(lists[rank][index])
    return _rebuilt(plan, lists)


def _renumber(lists: Lists, rank: int, moved: dict[int, int | None]) -> Lists:
    """Follows operations of ``rank`` to their new indices; None drops the dependency."""
    result: Lists = []
    for ops in lists:
        result.append([])
        for op in ops:
            deps = []
            for dep in op.deps:
                if isinstance(dep, OpDep) and dep.rank == rank:
                    index = moved.get(dep.index, dep.index)
                    deps += [] if index is None else [OpDep(rank, index)]
                else:
                    deps.append(dep)
            result[-1].append(replace(op, deps=tuple(deps)))
    return result


def drop_op(plan: Plan, lists: Lists, rng: random.Random) -> Plan:
    rank, index = _pick(lists, rng, _any)
    moved: dict[int, int | None] = {i: i - 1 for i in range(index + 1, len(lists[rank]))}
    del lists[rank][index]
    return _rebuilt(plan, _renumber(lists, rank, {**moved, index: None}))


def repeat_op(plan: Plan, lists: Lists, rng: random.Random) -> Plan:
    rank, index = _pick(lists, rng, _any)
    lists[rank].append(lists[rank][index])
    return _rebuilt(plan, lists)


def swap_ops(plan: Plan, lists: Lists, rng: random.Random) -> Plan:
    rank, index = _pick(lists, rng, _any)
    other = rng.choice(range(len(lists[rank])))
    ops = lists[rank]
    ops[index], ops[other] = ops[other], ops[index]
    return _rebuilt(plan, _renumber(lists, rank, {index: other, other: index}))


def swap_places(plan: Plan, lists: Lists, rng: random.Random) -> Plan:
    """Swaps two operations without following them in dependencies."""
    rank, index = _pick(lists, rng, _any)
    other = rng.choice(range(len(lists[rank])))
    ops = lists[rank]
    ops[index], ops[other] = ops[other], ops[index]
    return _rebuilt(plan, lists)


def _without(kind: type) -> Callable[[Plan, Lists, random.Random], Plan]:
    def fault(plan: Plan, lists: Lists, rng: random.Random) -> Plan:
        def change(op: Operation) -> Operation:
            dep = rng.choice([dep for dep in op.deps if isinstance(dep, kind)])
            return replace(op, deps=tuple(d for d in op.deps if d != dep))

        return _edit(plan, lists, rng, lambda op: any(isinstance(d, kind) for d in op.deps), change)

    return fault


def retarget_dep(plan: Plan, lists: Lists, rng: random.Random) -> Plan:
    def change(op: Operation) -> Operation:
        deps = list(op.deps)
        deps[rng.randrange(len(deps))] = OpDep(*_pick(lists, rng, _any))
        return replace(op, deps=tuple(deps))

    return _edit(plan, lists, rng, lambda op: bool(op.deps), change)


def add_dep(plan: Plan, lists: Lists, rng: random.Random) -> Plan:
    extra = OpDep(*_pick(lists, rng, _any))
    return _edit(plan, lists, rng, _any, lambda op: replace(op, deps=(*op.deps, extra)))


def shrink_compute_dep(plan: Plan, lists: Lists, rng: random.Random) -> Plan:
    def change(op: Operation) -> Operation:
        deps = [
            replace(d, chunk=_changed(d.chunk, rng)) if isinstance(d, ComputeDep) else d
            for d in op.deps
        ]
        return replace(op, deps=tuple(deps))

    return _edit(
        plan, lists, rng, lambda op: any(isinstance(d, ComputeDep) for d in op.deps), change
    )


def _changed(chunk: Chunk, rng: random.Random) -> Chunk:
    """A chunk shifted, shrunk or grown by one element along one axis."""
    axis = rng.randrange(chunk.box.ndim)
    a, b = chunk.box.lo[axis], chunk.box.hi[axis]
    lo, hi = rng.choice(((a + 1, b + 1), (a - 1, b - 1), (a + 1, b), (a, b - 1), (a, b + 1)))
    return Chunk(chunk.tensor, chunk.box.with_axis(axis, lo, hi))


def change_src(plan: Plan, lists: Lists, rng: random.Random) -> Plan:
    return _edit(plan, lists, rng, _any, lambda op: replace(op, src=_changed(op.src, rng)))


def change_dst(plan: Plan, lists: Lists, rng: random.Random) -> Plan:
    return _edit(plan, lists, rng, _any, lambda op: replace(op, dst=_changed(op.dst, rng)))


def change_both(plan: Plan, lists: Lists, rng: random.Random) -> Plan:
    def change(op: Operation) -> Operation:
        state = rng.getstate()
        src = _changed(op.src, rng)
        rng.setstate(state)
        return replace(op, src=src, dst=_changed(op.dst, rng))

    return _edit(plan, lists, rng, _any, change)


def change_reduce(plan: Plan, lists: Lists, rng: random.Random) -> Plan:
    return _edit(
        plan, lists, rng, _any,
        lambda op: replace(op, reduce=rng.choice([r for r in REDUCTIONS if r != op.reduce])),
    )  # fmt: skip


def change_every_reduce(plan: Plan, lists: Lists, rng: random.Random) -> Plan | None:
    """Every sum becomes a maximum and the other way round: one wrong word in a template."""
    other = {"none": "none", "sum": "max", "max": "sum"}
    if all(op.reduce == "none" for ops in lists for op in ops):
        return None
    return _rebuilt(plan, [[replace(op, reduce=other[op.reduce]) for op in ops] for ops in lists])


def swap_ends(plan: Plan, lists: Lists, rng: random.Random) -> Plan:
    return _edit(
        plan,
        lists,
        rng,
        _is_p2p,
        lambda op: replace(op, src_rank=op.dst_rank, dst_rank=op.src_rank),
    )


def swap_boxes(plan: Plan, lists: Lists, rng: random.Random) -> Plan:
    return _edit(plan, lists, rng, _any, lambda op: replace(op, src=op.dst, dst=op.src))


def change_end(plan: Plan, lists: Lists, rng: random.Random) -> Plan:
    end = rng.choice(("src_rank", "dst_rank"))
    return _edit(
        plan, lists, rng, _is_p2p, lambda op: replace(op, **{end: rng.randrange(plan.num_ranks)})
    )


def other_direction(plan: Plan, lists: Lists, rng: random.Random) -> Plan:
    """Lists a transfer at the end of its other rank's list, with nothing following it."""
    rank, index = _pick(lists, rng, _is_p2p)
    op = lists[rank].pop(index)
    assert isinstance(op, P2P)
    other = op.dst_rank if rank == op.src_rank else op.src_rank
    moved: dict[int, int | None] = {i: i - 1 for i in range(index + 1, len(lists[rank]) + 1)}
    lists = _renumber(lists, rank, {**moved, index: None})
    lists[other].append(replace(op, rank=other))
    return _rebuilt(plan, lists)


def change_channel(plan: Plan, lists: Lists, rng: random.Random) -> Plan:
    return _edit(
        plan, lists, rng, _any, lambda op: replace(op, channel=rng.choice(("nvlink", "nic", "x")))
    )


def change_collective(plan: Plan, lists: Lists, rng: random.Random) -> Plan:
    def change(op: Operation) -> Operation:
        what = rng.randrange(3)
        if what == 0:
            return replace(op, kind=rng.choice(KINDS[1:]))
        if what == 1:
            return replace(op, ranks=tuple(rng.sample(op.ranks, len(op.ranks))))
        return replace(op, **{rng.choice(("split_axis", "concat_axis")): rng.randint(-1, 3)})

    return _edit(plan, lists, rng, lambda op: isinstance(op, Collective), change)


def reorder_group(plan: Plan, lists: Lists, rng: random.Random) -> Plan:
    """Permutes the group of a collective on all members."""
    rank, index = _pick(lists, rng, lambda op: isinstance(op, Collective))
    old = lists[rank][index].ranks
    new = tuple(rng.sample(old, len(old)))
    lists = [
        [
            replace(op, ranks=new) if isinstance(op, Collective) and op.ranks == old else op
            for op in ops
        ]
        for ops in lists
    ]
    return _rebuilt(plan, lists)


def _replaced(items: tuple, rng: random.Random, change) -> tuple:
    at = rng.choice(range(len(items)))
    new = change(items[at])
    return (*items[:at], *new, *items[at + 1 :])


def change_initial(plan: Plan, lists: Lists, rng: random.Random) -> Plan:
    def change(region):
        what = rng.randrange(4)
        if what == 0:
            return ()
        if what == 1:
            return (replace(region, produced=not region.produced),)
        if what == 2:
            return (replace(region, rank=rng.randrange(plan.num_ranks)),)
        return (replace(region, box=_changed(Chunk("x", region.box), rng).box),)

    return _rebuilt(plan, lists, initial=_replaced(plan.initial, rng, change))


def change_goal(plan: Plan, lists: Lists, rng: random.Random) -> Plan:
    def change(goal):
        what = rng.randrange(5)
        if what == 0:
            return ()
        if what == 4 and goal.ranks:
            return (replace(goal, reduce="max" if goal.reduce == "sum" else "sum"),)
        if what == 1 and goal.ranks:
            return (replace(goal, ranks=goal.ranks[1:]),)
        if what == 2:
            return (replace(goal, rank=rng.randrange(plan.num_ranks)),)
        return (replace(goal, source_lo=tuple(rng.randint(0, 1) for _ in goal.box.lo)),)

    return _rebuilt(plan, lists, goals=_replaced(plan.goals, rng, change))


def add_op(plan: Plan, lists: Lists, rng: random.Random) -> Plan:
    """A stray transfer of a random box between random ranks."""
    tensor = rng.choice(plan.tensors)
    box = Box.full(tensor.shape)
    for axis in range(box.ndim):
        a, b = sorted(rng.sample(range(tensor.shape[axis] + 1), 2))
        box = box.with_axis(axis, a, b)
    chunk = Chunk(tensor.name, box)
    src, dst = rng.randrange(plan.num_ranks), rng.randrange(plan.num_ranks)
    deps = (OpDep(*_pick(lists, rng, _any)),) if rng.random() < 0.5 else ()
    op = P2P(src, src, dst, chunk, chunk, deps, rng.choice(REDUCTIONS))
    index = rng.randint(0, len(lists[src]))
    moved: dict[int, int | None] = {i: i + 1 for i in range(index, len(lists[src]))}
    lists = _renumber(lists, src, moved)
    lists[src].insert(index, op)
    return _rebuilt(plan, lists)


FAULTS: dict[str, Callable[[Plan, Lists, random.Random], Plan | None]] = {
    "drop_dep": _without(OpDep),
    "drop_compute_dep": _without(ComputeDep),
    **{
        fault.__name__: fault
        for fault in (
            drop_op, repeat_op, swap_ops, swap_places, retarget_dep, add_dep, shrink_compute_dep,
            change_src, change_dst, change_both, change_reduce, change_every_reduce, swap_ends,
            swap_boxes, change_end, other_direction, change_channel, change_collective,
            reorder_group, change_initial, change_goal, add_op,
        )
    },
}  # fmt: skip
