"""What a body asks of ``pl.program_id`` along a reduction that is walked in another order.

Two things, which fall apart once chunks arrive in another order than the grid's: which block this
is (``k * 16 + iota``), and whether the tile is at its first or last step (``pl.when(k == 0)``). A
comparison that tells the first or the last number from all others, and does nothing but decide
whether something is stored, asks the latter; every other use asks the former. What is seen to come
out differently in another order is refused: what starts or finishes under another condition, what
keeps only the last block. What is done with a block at the first or last step alone is a doubt.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jax.extend import core

from syncopate_jax.errors import UnsupportedError

COMPARISONS = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}
LOGIC = ("and", "or", "not", "convert_element_type", "broadcast_in_dim", "reshape", "squeeze")
CALLS = ("jit", "pjit", "closed_call")
Use = tuple[int, int]
"""An equation of the body, and the axis whose number it takes."""


@dataclass(frozen=True, slots=True)
class _Number:
    """The number along an axis; ``use`` is where the body handed it on."""

    axis: int
    use: Use = (-1, -1)


@dataclass(frozen=True, slots=True)
class _Asks:
    """A truth value made of nothing of the axes but whether a tile is at its first or last step."""

    uses: frozenset[Use]


@dataclass(frozen=True, slots=True)
class _Ref:
    """A reference: what reading it gives, which one of the body's it is, and if it is a result."""

    gives: str | None
    number: int
    result: bool


BLOCK, STATE = "block", "state"
Value = _Number | _Asks | _Ref | str | None
"""BLOCK: made of the step's blocks alone; STATE: of what earlier steps left too; None: neither."""


@dataclass(slots=True)
class _Under:
    """What a branch does that a block's number decides: the references it reads and overwrites."""

    axes: set[int]
    reads: set[int]
    starts: set[int]


def asking_visits(
    name: str,
    jaxpr: Any,
    counts: Mapping[int, int],
    *,
    blocks: Sequence[bool],
    state: Sequence[bool],
    results: Sequence[bool],
) -> tuple[Any, str | None]:
    """``jaxpr``, in which what asks for first or last steps takes visits in place of indices.

    Then, in words, why it may give something else in another order: what is done at the first or
    last step depends on which block that is, as far as is seen. None where nothing is seen.

    Its first inputs are indices, as many visits follow. ``counts`` has the axes that are walked in
    another order; ``blocks``, ``state`` and ``results`` say of each constant whether it is a
    reference to blocks of the step, to what steps leave behind, and to a result among that.

    Raises UnsupportedError where one number is asked both, and where the result is seen to depend
    on the order.
    """
    if not counts:
        return jaxpr, None
    reader = _Reader(name, counts)
    given: list[Value] = [
        _Ref(BLOCK if of_block else STATE if kept else None, number, result)
        for number, (of_block, kept, result) in enumerate(zip(blocks, state, results, strict=True))
    ]
    half = len(jaxpr.invars) // 2
    numbers: list[Value] = [_Number(a) if a in counts else None for a in range(2 * half)]
    reader.walk(jaxpr, given, numbers, top=True)
    visits = dict(zip(jaxpr.invars[:half], jaxpr.invars[half:], strict=True))
    eqns = list(jaxpr.eqns)
    for (at, axis), asked in reader.asked.items():
        if len(asked) > 1:
            raise UnsupportedError(
                f"kernel {name}: one value that the body makes of pl.program_id({axis}) both "
                f"decides what is done at the first or last step and is used as the block's "
                f"number, but this plan walks that reduction in the order of arrival, so the first "
                f"step is not block 0: compare pl.program_id({axis}) anew for each use; or use "
                f"backend 'xla'"
            )
        if "visit" in asked:
            index = jaxpr.invars[axis]
            invars = [visits[index] if v is index else v for v in eqns[at].invars]
            eqns[at] = eqns[at].replace(invars=invars)
    return jaxpr.replace(eqns=eqns), reader.doubt


class _Reader:
    def __init__(self, name: str, counts: Mapping[int, int]):
        self.name, self.counts = name, counts
        self.asked: dict[Use, set[str]] = {}
        self.under: list[_Under] = []
        self.doubt: str | None = None

    def walk(
        self,
        jaxpr: Any,
        constants: Sequence[Value],
        inputs: Sequence[Value],
        *,
        deciding: frozenset[Use] = frozenset(),
        top: bool = False,
    ) -> list[Value]:
        """Reads the uses of numbers; returns what the outputs are.

        ``deciding``: the numbers that decide whether this is run at all, at a first or last step.
        """
        known = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*constants, *inputs], strict=True))

        def value(v: Any) -> Value:
            return None if isinstance(v, core.Literal) else known.get(v)

        for at, eqn in enumerate(jaxpr.eqns):
            ins = [value(v) for v in eqn.invars]
            if top:
                ins = [replace(v, use=(at, v.axis)) if isinstance(v, _Number) else v for v in ins]
            known.update(zip(eqn.outvars, self._equation(eqn, ins, deciding), strict=True))
        return [value(v) for v in jaxpr.outvars]

    def _equation(self, eqn: Any, ins: list[Value], deciding: frozenset[Use]) -> list[Value]:
        name = eqn.primitive.name
        if name in COMPARISONS and (use := self._asks_for_an_end(eqn, ins)):
            return [_Asks(frozenset([use]))]
        asks = frozenset(use for v in ins if isinstance(v, _Asks) for use in v.uses)
        if name in LOGIC and asks and not any(isinstance(v, _Number) for v in ins):
            if BLOCK in ins or STATE in ins:
                self._depends(asks)
            return [_Asks(asks)]
        if name == "cond":
            return self._cond(eqn, ins, deciding)
        if inner := _bodies(eqn, ins):
            outs = [
                self.walk(jaxpr, constants, inputs, deciding=deciding)
                for jaxpr, constants, inputs in inner
            ]
            if name in CALLS:
                return outs[0]
            numbers = [v for v in ins if isinstance(v, _Number | _Asks)]  # their uses are inside
            made = self._used([*(v for v in ins if v not in numbers), *outs[-1]], deciding)
            return [BLOCK if made is None and numbers else made] * len(eqn.outvars)
        if deciding and any(isinstance(v, _Ref) and v.gives == BLOCK for v in ins):
            self._depends(deciding)
        if name in ("get", "addupdate"):
            self._reads(ins[0])
        if name in ("swap", "addupdate"):
            self._stores(ins, deciding)
        return [self._used(ins, deciding)] * len(eqn.outvars)

    def _reads(self, ref: Value) -> None:
        for under in self.under:
            if isinstance(ref, _Ref):
                under.reads.add(ref.number)

    def _stores(self, ins: list[Value], deciding: frozenset[Use]) -> None:
        """Notes what a store overwrites; ``ins`` are the reference, the value and where it goes."""
        ref, stored = ins[:2]
        if not isinstance(ref, _Ref) or ref.gives != STATE:
            return
        axes = {axis for _, axis in deciding}
        if axes and axes != set(self.counts):
            raise UnsupportedError(
                f"kernel {self.name}: the body starts or finishes something where "
                f"{_numbers(axes)} is first or last whatever {_numbers(set(self.counts) - axes)} "
                f"is, but this plan walks both in the order of arrival, mixed: start and finish "
                f"where all of them are first or last, or use backend 'xla'"
            )
        if any(v is not None for v in ins[2:]):  # to a place of the step's own
            return
        if ref.result and stored == BLOCK and not deciding:
            raise UnsupportedError(
                f"kernel {self.name}: the body stores what it makes of the step's block over what "
                f"earlier steps stored, so the last block is what counts, but this plan walks that "
                f"reduction in the order of arrival: add to what is there, or use backend 'xla'"
            )
        for under in self.under:
            if ref.result or stored is None:
                under.starts.add(ref.number)

    def _asks_for_an_end(self, eqn: Any, ins: list[Value]) -> Use | None:
        """The use of a number that a comparison sorts into one end and the rest."""
        for number, other in ((0, 1), (1, 0)):
            value, literal = ins[number], eqn.invars[other]
            if isinstance(value, _Number) and isinstance(literal, core.Literal):
                sides: list[Any] = [np.arange(self.counts[value.axis])] * 2
                sides[other] = literal.val
                true = COMPARISONS[eqn.primitive.name](*sides)
                few = np.flatnonzero(true if true.sum() == 1 else ~true).tolist()
                if few in ([0], [len(true) - 1]):
                    return value.use
        return None

    def _cond(self, eqn: Any, ins: list[Value], deciding: frozenset[Use]) -> list[Value]:
        chosen, operands = ins[0], ins[1:]
        if isinstance(chosen, _Asks) and eqn.outvars:  # a value: which block it is matters
            chosen = self._used([chosen], deciding)
        if isinstance(chosen, _Asks):
            self._ask("visit", chosen.uses)
            deciding |= chosen.uses
            if BLOCK in operands or self.under:
                self._depends(deciding)
            return self._branches(eqn, operands, deciding)
        axes = {axis for axis in self._axes([chosen])} or ({-1} if chosen == BLOCK else set())
        self._used([chosen], deciding)
        if not axes:
            return self._branches(eqn, operands, deciding)
        if deciding:
            self._depends(deciding)
        self.under.append(_Under(axes, set(), set()))
        outs = self._branches(eqn, operands, deciding)
        under = self.under.pop()
        if under.starts - under.reads:
            raise UnsupportedError(
                f"kernel {self.name}: under a condition on the number of a step or block the body "
                f"stores a start or a result that does not go on from what was there, but this "
                f"plan walks that reduction in the order of arrival: start under "
                f"pl.when(pl.program_id(k) == 0) and finish under "
                f"pl.when(pl.program_id(k) == pl.num_programs(k) - 1), or use backend 'xla'"
            )
        return outs

    def _branches(self, eqn: Any, operands: list[Value], deciding: frozenset[Use]) -> list[Value]:
        outs = [
            self.walk(
                branch.jaxpr, [None] * len(branch.jaxpr.constvars), operands, deciding=deciding
            )
            for branch in eqn.params["branches"]
        ]
        return [self._used(list(out), deciding) for out in zip(*outs, strict=True)]

    def _used(self, values: Sequence[Value], deciding: frozenset[Use]) -> Value:
        """What is made of ``values``; numbers among them are asked for the block's index."""
        found: set[str | None] = set()
        for value in values:
            if isinstance(value, _Number | _Asks):
                if deciding:
                    self._depends(deciding)
                self._ask("index", [value.use] if isinstance(value, _Number) else value.uses)
                found.add(BLOCK)
            else:
                found.add(value.gives if isinstance(value, _Ref) else value)
        if STATE in found and any(isinstance(value, _Asks) for value in values):
            axes = self._axes(values)
            raise UnsupportedError(
                f"kernel {self.name}: what the body keeps from step to step is chosen or scaled by "
                f"whether {_numbers(axes)} is first or last, but this plan walks that reduction in "
                f"the order of arrival: start and finish under pl.when, or use backend 'xla'"
            )
        return STATE if STATE in found else BLOCK if BLOCK in found else None

    def _axes(self, values: Sequence[Value]) -> set[int]:
        """The axes whose numbers are among ``values``."""
        found = {v.axis for v in values if isinstance(v, _Number)}
        return found | {axis for v in values if isinstance(v, _Asks) for _, axis in v.uses}

    def _ask(self, what: str, uses: Sequence[Use] | frozenset[Use]) -> None:
        for use in uses:
            self.asked.setdefault(use, set()).add(what)

    def _depends(self, deciding: frozenset[Use]) -> None:
        axes = _numbers({axis for _, axis in deciding})
        self.doubt = self.doubt or (
            f"kernel {self.name}: what the body does where {axes} is first or last depends on the "
            f"block of that step, but this plan walks that reduction in the order of arrival, so "
            f"the first step is not block 0: only start and finish under this condition, and use "
            f"the step's block at every step alike; or use backend 'xla'"
        )


def _numbers(axes: Iterable[int]) -> str:
    return " and ".join(f"pl.program_id({axis})" for axis in sorted(axes))


def _bodies(eqn: Any, ins: list[Value]) -> list[tuple[Any, list[Value], list[Value]]]:
    """The programs inside an equation, with what their constants and inputs are.

    Of a loop that carries something, the first turn stands for all.
    """
    if eqn.primitive.name == "while":
        first, second = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        carried = ins[first + second :]
        return [
            (eqn.params["cond_jaxpr"].jaxpr, [], ins[:first] + carried),
            (eqn.params["body_jaxpr"].jaxpr, [], ins[first : first + second] + carried),
        ]
    found = []
    for jaxpr in core.jaxprs_in_params(eqn.params):
        unknown: list[Value] = [None] * len(jaxpr.constvars)
        if len(jaxpr.invars) == len(ins):
            found.append((jaxpr, unknown, ins))
        elif len(jaxpr.constvars) == len(ins):  # pl.run_scoped: its inputs are its references
            found.append((jaxpr, ins, [None] * len(jaxpr.invars)))
    return found
