"""Replaces collectives by a template's P2P operations, which kernels can wait for one by one."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from syncopate_jax.check.bounds import check_groups
from syncopate_jax.check.collectives import check_collectives, find_instances
from syncopate_jax.check.report import Report
from syncopate_jax.errors import InputError, PlanError, UnsupportedError
from syncopate_jax.ir.arguments import one_of
from syncopate_jax.ir.build import build_plan
from syncopate_jax.ir.chunk import Chunk
from syncopate_jax.ir.comm import P2P, Collective, ComputeDep, Dependency, OpDep, Operation
from syncopate_jax.ir.plan import Plan, Tensor
from syncopate_jax.ir.topology import Topology
from syncopate_jax.passes.collective_choice import (
    Choose,
    call_maker,
    check_choose,
    check_same_ends,
    default_template,
    from_template,
    named_choice,
)
from syncopate_jax.passes.collective_layout import (
    Copy,
    Layout,
    make_layout,
    template_arguments,
    tensors_needed,
)
from syncopate_jax.synthesis.result import RELAY
from syncopate_jax.synthesis.subset import subset
from syncopate_jax.synthesis.synthesize import synthesize

DIRECT, SYNTHESIS = "direct", "synthesis"
HOW = ("template", DIRECT, SYNTHESIS)
# What templates and ``synthesize`` call the same thing.
_SYNTHESIS_ARGUMENTS = {
    "axis": "dimension", "shards": "sizes", "counts": "sizes", "split_from": "dimension",
    "split_to": "to_dimension", "shards_to": "sizes_to",
}  # fmt: skip


def expand_collectives(
    plan: Plan,
    how: str = "template",
    choose: Choose | None = None,
    topology: Topology | None = None,
) -> Plan:
    """Every collective as P2P operations of a template over its group (paper section 5.2)::

        r0.0 all_gather x[0:2] -> x[0:4] over 0:2 concat 0 after compute(r0 x[0:2])
        r1.0 all_gather x[2:4] -> x[0:4] over 0:2 concat 0 after compute(r1 x[2:4])
      becomes, with all_gather_swizzle,
        r0.0 push x[0:2] -> r1 x[0:2] after compute(r0 x[0:2])
        r1.0 push x[2:4] -> r0 x[2:4] after compute(r1 x[2:4])

    The operations stand where their rank listed the collective, on its channel. Each waits for
    what the members at both its ends waited for; of compute tiles only for those that produce what
    it reads or overwrites. What waited for a member's part waits for all operations that touch
    that member. Contributions are never overwritten, unless the result lies there: sums that a
    ring leaves on the way go to a new tensor ``scratch0``, ``scratch1``, …

    Args:
      how: ``template`` expands; ``direct`` leaves collectives to backends that run them whole;
        ``synthesis`` makes plans for the links of ``topology`` between a collective's ranks.
      choose: template by kind of collective, or a function of kind, number of ranks and bytes that
        a member contributes; a template is a name or a name and further arguments, such as
        ``{"all_reduce": ("all_reduce_two_shot", {"algorithm": "ring"})}``, or ``direct``, or
        ``synthesis`` (with further arguments of ``synthesize``). Kinds that are left out get
        ``registry.USUAL_TEMPLATES``, or what ``how`` says.
      topology: of the plan's ranks; synthesis needs it.

    Raises:
      PlanError: members of a collective disagree, or one lists none.
      InputError: ``how`` or a template's name is unknown, synthesis has no topology or one that
        does not fit, an operation waits for one that does not
        exist, or a template refuses its arguments.
      UnsupportedError: a template does not fit the collective it is chosen for.
    """
    where = f"expand_collectives of plan {plan.name}"
    one_of(where, "how", how, HOW)
    check_choose(where, choose)
    if how == DIRECT or not plan.has_collectives():
        return plan
    if topology is not None and topology.num_ranks != plan.num_ranks:
        raise InputError(
            f"{where}: topology {topology.name} has {topology.num_ranks} ranks, the plan has "
            f"{plan.num_ranks}"
        )
    report = Report(plan)
    check_groups(plan, report)  # collectives are looked up by them
    if report.findings:
        raise PlanError(plan.name, report.findings)
    instances = find_instances(plan, report)
    check_collectives(plan, instances, report)
    if report.findings:
        raise PlanError(plan.name, report.findings)
    expansion = _Expansion(plan, choose or {}, topology, synthesise=how == SYNTHESIS)
    for instance in instances:
        for rows in instance.rows.tolist():
            expansion.expand(rows)
    return expansion.result()


@dataclass(slots=True, eq=False)
class _New:
    """An operation to be: it waits for ``after``, new ones too, and for old ``rows``."""

    op: Operation
    after: list[_New] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    tiles: list[ComputeDep] = field(default_factory=list)
    index: int = -1


class _Expansion:
    """The plan's operations with collectives replaced one after the other."""

    def __init__(self, plan: Plan, choose: Choose, topology: Topology | None, synthesise: bool):
        self.plan = plan
        self.choose = choose
        self.topology = topology
        self.synthesise = synthesise
        self.tensors = list(plan.tensors)
        self.known: dict[str, Plan] = {}
        self.old = [plan.row(i) for i in range(plan.num_ops)]
        target = plan.columns.dep_row(plan.num_ranks).tolist()
        start = plan.columns.dep_start.tolist()
        self.waits = [target[a:b] for a, b in itertools.pairwise(start)]
        self.listed: list[list[_New]] = [[] for _ in self.old]
        self.touching: list[list[_New]] = [[] for _ in self.old]
        for row, op in enumerate(self.old):
            if -1 in self.waits[row]:
                dep = op.deps[self.waits[row].index(-1)]
                raise InputError(
                    f"plan {plan.name}: {op.origin or 'an operation'} of rank {op.rank} waits for "
                    f"{dep}, which does not exist; verify the plan first"
                )
            if isinstance(op, P2P):
                self._keep(row)

    def _keep(self, row: int) -> None:
        """What stands in ``row`` stays."""
        op = self.old[row]
        tiles = [dep for dep in op.deps if isinstance(dep, ComputeDep)]
        self.listed[row] = self.touching[row] = [_New(op, rows=self.waits[row], tiles=tiles)]

    def expand(self, rows: Sequence[int]) -> None:
        """Replaces the collective whose parts are ``rows``, in group order."""
        parts = [op for op in (self.old[row] for row in rows) if isinstance(op, Collective)]
        name, extra = self._choice(parts)
        if name == DIRECT:
            for row in rows:
                self._keep(row)
            return
        template = self._template(parts, name, extra)
        ops = [
            [op for op in template.ops(place) if isinstance(op, P2P)] for place in range(len(parts))
        ]
        scratch = self._scratch_name()
        flat = [op for listed in ops for op in listed]
        layout = make_layout(parts, flat, scratch, [tensor.shape for tensor in template.tensors])
        shape = layout.scratch_shape
        if shape is not None:
            src = self.plan.tensor(parts[0].src.tensor)
            self.tensors.append(Tensor(scratch, shape, src.dtype, per_rank=True))
        origin = template.origins[0] + (f" for {parts[0].origin}" if parts[0].origin else "")
        _Group(self, rows, parts, template, layout, origin, name == SYNTHESIS).add(ops)

    def result(self) -> Plan:
        """The plan with all that was replaced."""
        plan = self.plan
        lists: list[list[_New]] = [[] for _ in range(plan.num_ranks)]
        for row, op in enumerate(self.old):
            lists[op.rank] += self.listed[row]
        for listed in lists:
            for index, new in enumerate(listed):
                new.index = index
        ops = [[replace(new.op, deps=self._deps(new)) for new in listed] for listed in lists]
        return build_plan(
            plan.name, plan.num_ranks, self.tensors, plan.initial, plan.goals, ops,
            channels=plan.channels,
        )  # fmt: skip

    def _deps(self, new: _New) -> tuple[Dependency, ...]:
        found: dict[Dependency, None] = {OpDep(o.op.rank, o.index): None for o in new.after}
        tiles: dict[Dependency, None] = dict.fromkeys(new.tiles)
        pending, seen = list(reversed(new.rows)), set()
        while pending:
            row = pending.pop()
            if row in seen:
                continue
            seen.add(row)
            found |= {OpDep(o.op.rank, o.index): None for o in self.touching[row]}
            old = self.old[row]
            if isinstance(old, Collective):
                # Reductions do not wait for their destination's tiles, the collective's part did.
                tiles |= {dep: None for dep in old.deps if isinstance(dep, ComputeDep)}
                if not self.touching[row]:
                    pending += self.waits[row]
        return (*found, *tiles)

    def _choice(self, parts: Sequence[Collective]) -> tuple[str, Mapping[str, Any]]:
        """What is to become of a collective: a name and further arguments."""
        head = parts[0]
        default = SYNTHESIS if self.synthesise else default_template(head)
        choice: Any
        if callable(self.choose):
            bytes_sent = head.src.box.size * self.plan.tensor(head.src.tensor).itemsize
            choice = self.choose(head.kind, len(parts), bytes_sent)
        else:
            choice = self.choose.get(head.kind, default)
        return named_choice(f"plan {self.plan.name}", head.kind, choice)

    def _template(self, parts: Sequence[Collective], name: str, extra: Mapping[str, Any]) -> Plan:
        """The plan of a template or synthesis that does what ``parts`` do."""
        head = parts[0]
        arguments = template_arguments(parts)
        key = f"{name} {sorted(arguments.items())} {sorted(extra.items())}"
        if name == SYNTHESIS:
            key += f" {head.kind} {head.ranks} {head.src.tensor}"
        if key not in self.known:
            if name == SYNTHESIS:
                plan = self._synthesised(head, arguments, extra)
            else:
                plan = from_template(head, name, arguments | dict(extra))
            needed = tensors_needed(head)
            if sum(tensor.name != RELAY for tensor in plan.tensors) != needed:
                raise UnsupportedError(
                    f"template {name} has {len(plan.tensors)} tensors, "
                    f"{head.kind} over {head.ranks} needs {needed}"
                )
            if plan.has_collectives():
                raise UnsupportedError(
                    f"template {name} is made of collectives, expansion of {head.kind} over "
                    f"{head.ranks} needs P2P operations"
                )
            if extra or name != default_template(head):
                check_same_ends(head, name, plan, arguments, extra)
            self.known[key] = plan
        return self.known[key]

    def _synthesised(
        self, head: Collective, arguments: Mapping[str, Any], extra: Mapping[str, Any]
    ) -> Plan:
        if self.topology is None:
            raise InputError(
                f"plan {self.plan.name}: synthesis of {head.kind} over {head.ranks} needs a "
                f"topology; pass topology="
            )
        renamed = {
            _SYNTHESIS_ARGUMENTS.get(key, key): value
            for key, value in arguments.items()
            if key != "num_ranks"
        }
        renamed["dtype"] = self.plan.tensor(head.src.tensor).dtype
        renamed["one_shot"] = not head.src.meets(head.dst)
        links = subset(self.topology, head.ranks)
        return call_maker(head, SYNTHESIS, synthesize, head.kind, links, **renamed | dict(extra))

    def _scratch_name(self) -> str:
        names = {tensor.name for tensor in self.tensors}
        number = 0
        while f"scratch{number}" in names:
            number += 1
        return f"scratch{number}"


@dataclass(slots=True)
class _Group:
    """One collective on its way to P2P operations; members go by their place in the group."""

    to: _Expansion
    rows: Sequence[int]
    parts: Sequence[Collective]
    template: Plan
    layout: Layout
    origin: str
    own_channels: bool

    def add(self, ops: Sequence[Sequence[P2P]]) -> None:
        """Files the template's operations ``ops``, by place and index, and the copies they need."""
        copies = [c for c in self.layout.copies() if c.src != c.dst and c.dst.box.size]
        seeds: list[list[_New]] = [[] for _ in self.parts]
        for copy in copies:
            if copy.first:
                seeds[copy.place].append(self._copy(copy))
        made: dict[tuple[int, int], _New] = {}
        for place, listed in enumerate(ops):
            for index, op in enumerate(listed):
                placed = self._place(place, op)
                if placed.direction != "copy" or placed.src != placed.dst:
                    made[place, index] = _New(placed)
        for (place, index), new in made.items():
            op = ops[place][index]
            ends = ((op.src_rank, new.op.src, False), (op.dst_rank, new.op.dst, True))
            new.after += self._after(op, ops, made)
            for end, chunk, _ in ends:
                new.after += [seed for seed in seeds[end] if seed.op.dst.meets(chunk)]
            self._wait(new, ends)
            self._file(new, place, (op.src_rank, op.dst_rank))
        for copy in copies:
            if not copy.first:
                rank = self.parts[copy.place].rank
                before = [
                    one
                    for one in (*made.values(), *seeds[copy.place])
                    if isinstance(one.op, P2P)
                    and (
                        (one.op.dst_rank == rank and one.op.dst.meets(copy.src))
                        or (one.op.src_rank == rank and one.op.src.meets(copy.dst))
                    )
                ]
                self._copy(copy, before)

    def _copy(self, copy: Copy, after: Sequence[_New] = ()) -> _New:
        rank, channel = self.parts[copy.place].rank, self.parts[0].channel
        op = P2P(rank, rank, rank, copy.src, copy.dst, channel=channel, origin=self.origin)
        new = _New(op)
        new.after += after
        self._wait(new, ((copy.place, copy.src, False), (copy.place, copy.dst, True)))
        self._file(new, copy.place, (copy.place,))
        return new

    def _place(self, place: int, op: P2P) -> P2P:
        """``op`` of the template between the members' own buffers."""
        ranks, layout, head = self.parts[0].ranks, self.layout, self.parts[0]
        tensors = [tensor.name for tensor in self.template.tensors]
        return P2P(
            rank=ranks[place],
            src_rank=ranks[op.src_rank],
            dst_rank=ranks[op.dst_rank],
            src=layout.read(op.src_rank, tensors.index(op.src.tensor), op.src.box),
            dst=layout.write(op.dst_rank, tensors.index(op.dst.tensor), op.dst.box),
            reduce=op.reduce,
            channel=op.channel if self.own_channels else head.channel,
            origin=self.origin,
        )

    def _after(
        self, op: P2P, ops: Sequence[Sequence[P2P]], made: Mapping[tuple[int, int], _New]
    ) -> list[_New]:
        """What ``op`` waits for; an operation that moves nothing stands for what it waits for."""
        found: dict[int, _New] = {}
        for dep in op.deps:
            if isinstance(dep, OpDep):
                new = made.get((dep.rank, dep.index))
                behind = self._after(ops[dep.rank][dep.index], ops, made) if new is None else [new]
                found |= {id(one): one for one in behind}
        return list(found.values())

    def _wait(self, new: _New, ends: Iterable[tuple[int, Chunk, bool]]) -> None:
        """Makes ``new`` wait for what the members at its ends waited for."""
        before = [one.op for one in new.after if isinstance(one.op, P2P)]
        waited = {rank for op in before for rank in (op.src_rank, op.dst_rank)}
        for place, chunk, writes in ends:
            part = self.parts[place]
            if part.rank not in waited:
                new.rows += self.to.waits[self.rows[place]]
            for dep in part.deps:
                if isinstance(dep, ComputeDep):
                    new.tiles += _narrow(dep, part, chunk, writes and new.op.reduce != "none")

    def _file(self, new: _New, place: int, ends: Iterable[int]) -> None:
        self.to.listed[self.rows[place]].append(new)
        for end in set(ends):
            self.to.touching[self.rows[end]].append(new)


def _narrow(dep: ComputeDep, part: Collective, chunk: Chunk, reduces: bool) -> list[ComputeDep]:
    """What remains of ``dep`` for an operation that touches only ``chunk`` of a member's data."""
    if dep.rank != part.rank or not (dep.chunk.meets(part.src) or dep.chunk.meets(part.dst)):
        return [dep]  # it orders the collective after something else
    if reduces or not dep.chunk.meets(chunk):
        return []  # reductions commute with the production of what they add to
    box = dep.chunk.box.intersect(chunk.box)
    return [] if box is None else [ComputeDep(dep.rank, Chunk(chunk.tensor, box))]
