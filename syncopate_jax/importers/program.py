"""What every importer of another system's plans gives: its collectives, and each one's Plan.

An ``ImportedCollective`` says what is exchanged among which ranks; its ``plan()`` is that as one
``Collective`` a rank (``P2P`` for a permutation), which ``passes.expand_collectives`` lowers as any
other: left whole (``direct``), by a template, or by whatever else that pass offers.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from syncopate_jax.errors import FormatError, InputError
from syncopate_jax.importers.exchange import PERMUTE, REDUCING, Exchange, identifier
from syncopate_jax.importers.replica_groups import AxisRef, Groups, NamedMesh, fault
from syncopate_jax.importers.shardings import Derived
from syncopate_jax.ir.comm import COLLECTIVES
from syncopate_jax.ir.plan import Plan, shape_fault

MAX_PARTS = 4096  # of one collective
_SUFFIXES = (".hlo", ".mlir", ".txt", ".json")  # that files with what importers read usually have


@dataclass(frozen=True, slots=True)
class ImportedCollective(Exchange):
    """One collective of an imported program.

    Attributes:
      template, arguments: the plan template by which its source performs it, and further arguments
        of that; or empty.
      pair: the contraction it is next to, with it as the move that is fused; or None.
      alone: why there is none, where one was looked for.
    """

    template: str = ""
    arguments: tuple[tuple[str, Any], ...] = ()
    pair: Derived | None = None
    alone: str = ""

    def __post_init__(self) -> None:
        if message := self._fault():
            raise InputError(f"{self.kind} {self.name}: {message}")

    @property
    def choose(self) -> dict[str, tuple[str, Mapping[str, Any]]]:
        """What ``expand_collectives`` takes as ``choose`` to do it as the source does."""
        return {self.kind: (self.template, dict(self.arguments))} if self.template else {}

    @property
    def operator(self) -> str:
        """The ready operator (of ``ops``) that does it together with its contraction, or empty."""
        if self.pair is None or self.pair.fused is None:
            return ""
        move = self.pair.fused
        if move.place == "out":
            return {
                "reduce_scatter": "matmul_reduce_scatter",
                "all_reduce": "matmul_all_reduce",
                "all_to_all": "matmul_all_to_all",
            }.get(move.kind, "")
        names = {"all_gather": "all_gather_matmul", "all_to_all": "all_to_all_matmul"}
        return names.get(move.kind, "")

    def __str__(self) -> str:
        axes = [
            f"{word} {axis}"
            for word, axis in (("split", self.split_axis), ("concat", self.concat_axis))
            if axis >= 0
        ]
        over = f"{len(self.groups)} pairs" if self.kind == PERMUTE else f"groups of {self.members}"
        parts = [self.name, self.kind, f"{self.dtype}{list(self.shape)}", *axes, over]
        if self.reduce != "none":
            parts.append(self.reduce)
        parts += [f"in {count} along {axis}" for axis, count in self.cuts]
        if self.steps:
            parts.append(f"by {len(self.steps)} hops")
        if self.pair and self.operator:
            parts.append(f"[{self.operator} in {self.pair.formula}: {self.pair}]")
        if self.alone:
            parts.append(f"[no operator: {self.alone}]")
        return " ".join(parts)

    def _fault(self) -> str:
        if self.kind not in (*COLLECTIVES, PERMUTE):
            return f"is none of {', '.join((*COLLECTIVES, PERMUTE))}"
        if not self.shape:
            return "a scalar's shape must be given as (1,)"
        if message := shape_fault(self.shape):
            return message
        if self.kind == PERMUTE:
            return _permutation_fault(self.groups, self.num_ranks)
        cuts = self.split_axis >= 0 or self.concat_axis >= 0
        every = self.kind != "broadcast"
        if message := fault(self.groups, self.num_ranks, equal=cuts, every=every):
            return f"its groups: {message}"
        wanted = {
            "all_gather": (False, True),
            "reduce_scatter": (True, False),
            "all_to_all": (True, True),
        }.get(self.kind, (False, False))
        for what, axis, needed in zip(
            ("split", "concat"), (self.split_axis, self.concat_axis), wanted, strict=True
        ):
            if needed != (axis >= 0) or axis >= len(self.shape):
                return f"{what} dimension {axis} does not fit shape {self.shape}"
        if self.split_axis >= 0 and self.shape[self.split_axis] % self.members:
            return (
                f"dimension {self.split_axis} has extent {self.shape[self.split_axis]}, which "
                f"{self.members} ranks do not divide"
            )
        if message := shape_fault(self.result):
            return f"of its result, {message}"
        if (self.reduce != "none") != (self.kind in REDUCING):
            return f"reduction {self.reduce!r} does not fit"
        return self._cut_fault() or self._step_fault()

    def _cut_fault(self) -> str:
        axes = [axis for axis, _ in self.cuts]
        if len(set(axes)) != len(axes):
            return f"a dimension is cut twice in {self.cuts}"
        for axis, parts in self.cuts:
            if not 0 <= axis < len(self.shape):
                return f"dimension {axis} to cut is none of shape {self.shape}"
            if axis in (self.split_axis, self.concat_axis) and not self.steps:
                return f"dimension {axis} is scattered or joined, so it cannot be cut as well"
            if not 1 <= parts <= max(1, self.shape[axis]):
                return f"shape {self.shape} cannot be cut into {parts} parts along {axis}"
        if math.prod(parts for _, parts in self.cuts) > MAX_PARTS:
            return f"is cut into more than {MAX_PARTS} parts"
        return ""

    def _step_fault(self) -> str:
        if not self.steps:
            return ""
        if self.kind != "all_gather":
            return "only an all_gather can be done in steps"
        for pairs in self.steps:
            if message := _permutation_fault(pairs, self.num_ranks):
                return message
            if len(pairs) != self.num_ranks:
                return "at each step every rank must send"
        seen = [{rank} for rank in range(self.num_ranks)]
        for owners in self.held():
            for rank, owner in enumerate(owners):
                seen[rank].add(owner)
        for group in self.groups:
            for rank in group:
                if seen[rank] != set(group) or len(self.steps) != len(group) - 1:
                    return f"its steps do not bring every block of its group to rank {rank} once"
        return ""


@dataclass(frozen=True, slots=True)
class ImportedProgram:
    """What an importer found in one file.

    Attributes:
      name: of the program, from the file.
      source: the importer's name.
      num_ranks: ranks of the program.
      collectives: in the order of the file.
      contractions: what each sharded contraction of the file implies, by name.
      skipped: what the file has and no plan can express, as (name, reason).
      notes: whatever else the file says, as (key, value).
    """

    name: str
    source: str
    num_ranks: int
    collectives: tuple[ImportedCollective, ...]
    contractions: tuple[tuple[str, Derived], ...] = ()
    skipped: tuple[tuple[str, str], ...] = ()
    notes: tuple[tuple[str, str], ...] = field(default=(), repr=False)

    def plans(self) -> tuple[Plan, ...]:
        """The plan of each collective, whose names differ.

        Raises UnsupportedError when one has a dtype or a reduction that no plan has.
        """
        made: dict[str, Plan] = {}
        for collective in self.collectives:
            base = name = identifier(collective.name)
            number = 0
            while name in made:
                number += 1
                name = f"{base}_{number}"
            made[name] = collective.plan(name)
        return tuple(made.values())

    def note(self, key: str) -> str:
        """The value of a note, empty if there is none."""
        return dict(self.notes).get(key, "")

    def __str__(self) -> str:
        lines = [f"{self.source} {self.name}: {self.num_ranks} ranks"]
        lines += [f"  {collective}" for collective in self.collectives]
        lines += [f"  {name} in {one.formula}: {one}" for name, one in self.contractions]
        lines += [f"  {name}: left alone, {reason}" for name, reason in self.skipped]
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class Reader:
    """An importer that reads a file; call it with the file's text.

    Attributes:
      read: the text to an ImportedProgram; raises FormatError, or UnsupportedError, or InputError
        of what it makes of the text, which becomes a FormatError here.
      reads: what files, in a few words.

    Raises:
      InputError: something else than text is given.
      FormatError: the text is malformed, or the name of a file in the place of its text.
    """

    read: Callable[[str], ImportedProgram]
    reads: str

    def __call__(self, text: str) -> ImportedProgram:
        if not isinstance(text, str):
            raise InputError(
                f"importer of {self.reads}: needs text, found {type(text).__name__}; give what "
                f"the .as_text() of a lowered or compiled program returns, or pathlib.Path(name)"
                f".read_text()"
            )
        try:
            return self.read(text)
        except (FormatError, InputError) as error:
            if _names_a_file(text):
                raise FormatError(
                    f"importer of {self.reads}: needs a file's text, found its name {text!r}; "
                    f"give pathlib.Path(name).read_text()"
                ) from error
            if isinstance(error, InputError):  # sizes that no plan has are the file's fault
                raise FormatError(str(error)) from error
            raise


def _names_a_file(text: str) -> bool:
    """Whether it is one line that is no program, but the name of a file, or looks like one."""
    return "\n" not in text and (text.endswith(_SUFFIXES) or os.path.isfile(text))


def from_moves(
    name: str,
    derived: Derived,
    devices: NamedMesh,
    dtypes: Mapping[str, str],
    notes: tuple[tuple[str, str], ...] = (),
) -> list[ImportedCollective]:
    """The collectives that derived moves are, among ``devices``; slices need none.

    ``dtypes``: of ``lhs``, ``rhs`` and ``out``, those of them that are moved.
    """
    made: list[ImportedCollective] = []
    for move in derived.moves:
        if move.kind == "slice":
            continue
        letters = derived.letters(move.place)
        one = ImportedCollective(
            name=f"{name}:{move.kind}.{len(made)}",
            kind=move.kind,
            num_ranks=len(devices.devices),
            groups=devices.groups([AxisRef(axis) for axis in move.axis_names]),
            shape=move.shape,
            dtype=dtypes[move.place],
            split_axis=letters.index(move.scatter) if move.scatter else -1,
            concat_axis=letters.index(move.gather) if move.gather else -1,
            reduce="sum" if move.kind in REDUCING else "none",
            produced=move.place == "out",
            pair=derived if move is derived.fused else None,
            notes=(("move", str(move)), *notes),
        )
        made.append(one)
    return made


def _permutation_fault(pairs: Groups, ranks: int) -> str:
    if any(len(pair) != 2 for pair in pairs):
        return "each pair needs a source and a target"
    for what, side in (("source", 0), ("target", 1)):
        seen = [pair[side] for pair in pairs]
        if outside := [rank for rank in seen if not 0 <= rank < ranks]:
            return f"{what} {outside[0]} is none of the {ranks} ranks"
        if len(set(seen)) != len(seen):
            return f"a rank is {what} twice in {pairs}"
    return ""
