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

from dataclasses import replace

import numpy as np

from syncopate_jax.errors import InputError
from syncopate_jax.ir.plan import Plan
from syncopate_jax.ir.text_parser import Parser
from syncopate_jax.ir.text_words import op_text


def to_text(plan: Plan) -> str:
    """The text of ``plan``, from which ``from_text`` makes an equal plan.

    Raises InputError when a table of the plan lists one name twice: text cannot tell them apart.
    """
    for what, names in plan.tables():
        if len(set(names)) != len(names):
            raise InputError(
                f"plan {plan.name}: {what} {names} repeat; text cannot tell them apart"
            )
    return "\n".join(plan.lines()) + "\n"


def from_text(text: str) -> Plan:
    """The plan that ``text`` describes.

    Raises FormatError with the line number, what was found and what was needed.
    """
    return Parser(text).parse()


def row_text(plan: Plan, row: int) -> str:
    """The operation of a row of ``plan.columns``, and its place, for messages."""
    op = plan.row(row)
    index = row - int(np.searchsorted(plan.columns.rank, op.rank))
    return f"rank {op.rank} op {index} ({op_text(replace(op, origin=''))})"
