"""The text form of a plan: a line an operation, to read, to compare and to write by hand.

Grammar; lines may come in any order, except that the plan's line is first, a tensor's line comes
before its use and a rank's operations are in order. ``#`` begins a comment, or after an operation
its origin::

    plan NAME ranks N [dims D]
    tensor NAME [4,8] DTYPE [per_rank]
    channel NAME | group RANKS | origin TEXT       only where not in order of first use
    initial rR CHUNK [produced]
    goal rR CHUNK [from TENSOR] [at [4,0]] [over RANKS [sum | max]]
    rR.I push CHUNK -> rD CHUNK  TAIL              rank R sends to rank D
    rR.I pull rS CHUNK -> CHUNK  TAIL              rank R fetches from rank S
    rR.I copy CHUNK -> CHUNK  TAIL                 within rank R
    rR.I move rS CHUNK -> rD CHUNK  TAIL           driven by a rank that is neither end
    rR.I KIND CHUNK -> CHUNK over RANKS [split A] [concat A]  TAIL

    TAIL   := [sum | max] [after DEP …] on CHANNEL [# origin]
    DEP    := rR.I | compute(rR CHUNK)
    CHUNK  := TENSOR[lo:hi,…]
    RANKS  := a list such as 0:4,7 of half-open ranges and single ranks

A goal that says neither sum nor max is a sum. Names that are not plain words are written as JSON
strings.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from syncopate_jax.errors import InputError
from syncopate_jax.ir import comm
from syncopate_jax.ir.comm import P2P, Operation
from syncopate_jax.ir.plan import Goal, Plan, Region
from syncopate_jax.ir.text_parser import Parser

_WORD = re.compile(r"[^\W\d][\w.+-]*")


def to_text(plan: Plan) -> str:
    """The text of ``plan``, from which ``from_text`` makes an equal plan.

    Raises InputError when a table of the plan lists one name twice: text cannot tell them apart.
    """
    for what, names in _tables(plan):
        if len(set(names)) != len(names):
            raise InputError(
                f"plan {plan.name}: {what} {names} repeat; text cannot tell them apart"
            )
    return "\n".join(_lines(plan)) + "\n"


def from_text(text: str) -> Plan:
    """The plan that ``text`` describes.

    Raises FormatError with the line number, what was found and what was needed.
    """
    return Parser(text).parse()


def _lines(plan: Plan) -> Iterator[str]:
    widest = max((len(tensor.shape) for tensor in plan.tensors), default=0)
    dims = "" if plan.columns.ndim == widest else f" dims {plan.columns.ndim}"
    yield f"plan {_word(plan.name)} ranks {plan.num_ranks}{dims}"
    for tensor in plan.tensors:
        shape = ",".join(map(str, tensor.shape))
        yield f"tensor {tensor.name} [{shape}] {tensor.dtype}{' per_rank' * tensor.per_rank}"
    yield from _table_lines(plan)
    yield from map(_region_line, plan.initial)
    yield from map(_goal_line, plan.goals)
    for rank in range(plan.num_ranks):
        for index, op in enumerate(plan.ops(rank)):
            yield f"r{rank}.{index} {op_text(op)}"


def _tables(plan: Plan) -> tuple[tuple[str, Sequence[object]], ...]:
    return ("channels", plan.channels), ("groups", plan.groups), ("origins", plan.origins)


def _table_lines(plan: Plan) -> Iterator[str]:
    """Tables whose order is not that of first use."""
    c = plan.columns
    columns = (c.channel, c.group[c.group >= 0], c.origin)
    defaults: tuple[list[object], ...] = ([comm.DEFAULT_CHANNEL], [], [""])
    for (what, names), column, default in zip(_tables(plan), columns, defaults, strict=True):
        used = [names[i] for i in dict.fromkeys(column.tolist())] or default
        if list(names) != used:
            for name in names:
                shown = _ranks(name) if isinstance(name, tuple) else _word(str(name))
                yield f"{what[:-1]} {shown}"


def _region_line(region: Region) -> str:
    produced = " produced" if region.produced else ""
    return f"initial r{region.rank} {region.tensor}{region.box}{produced}"


def _goal_line(goal: Goal) -> str:
    source = f" from {goal.source}" if goal.source else ""
    at = f" at [{','.join(map(str, goal.source_lo))}]" if goal.source_lo else ""
    over = f" over {_ranks(goal.ranks)}" if goal.ranks else ""
    reduce = f" {goal.reduce}" if goal.reduce != "sum" else ""
    return f"goal r{goal.rank} {goal.tensor}{goal.box}{source}{at}{over}{reduce}"


def op_text(op: Operation) -> str:
    """An operation as its line has it, without its place."""
    if isinstance(op, P2P):
        known = op.rank in (op.src_rank, op.dst_rank)
        verb = op.direction if known else "move"
        src_rank = f"r{op.src_rank} " if verb in ("pull", "move") else ""
        dst_rank = f"r{op.dst_rank} " if verb in ("push", "move") else ""
        body = f"{verb} {src_rank}{op.src} -> {dst_rank}{op.dst}"
    else:
        body = f"{op.kind} {op.src} -> {op.dst} over {_ranks(op.ranks)}"
        body += f" split {op.split_axis}" if op.split_axis != -1 else ""
        body += f" concat {op.concat_axis}" if op.concat_axis != -1 else ""
    parts = [body]
    if op.reduce != "none":
        parts.append(op.reduce)
    if op.deps:
        parts.append("after " + " ".join(map(str, op.deps)))
    parts.append(f"on {_word(op.channel)}")
    if op.origin:
        parts.append(f"# {_free(op.origin)}")
    return " ".join(parts)


def row_text(plan: Plan, row: int) -> str:
    """The operation of a row of ``plan.columns``, and its place, for messages."""
    op = plan.row(row)
    index = row - int(np.searchsorted(plan.columns.rank, op.rank))
    return f"rank {op.rank} op {index} ({op_text(replace(op, origin=''))})"


def _ranks(ranks: Iterable[int]) -> str:
    """``0:4,7`` for 0, 1, 2, 3, 7: runs of rising ranks as half-open ranges."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1]:
            runs[-1][1] = rank + 1
        else:
            runs.append([rank, rank + 1])
    return ",".join(str(lo) if hi == lo + 1 else f"{lo}:{hi}" for lo, hi in runs) or "none"


def _word(name: str) -> str:
    return name if _WORD.fullmatch(name) else json.dumps(name)


def _free(text: str) -> str:
    """Text up to the end of a line; as a JSON string where that would not read back the same."""
    plain = text.isprintable() and text == text.strip() and not text.startswith('"')
    return text if plain else json.dumps(text)
