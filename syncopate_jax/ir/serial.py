"""Plans as versioned JSON files: the columns as lists of integers, everything checked on reading.

``load`` also reads the text form (``ir.text``).

Format, version 1 (every key needed but ``reduce``, which is "sum" if absent; no other allowed)::

    {"format": "syncopate-plan", "version": 1, "name": str, "num_ranks": int, "ndim": int,
     "tensors": [{"name": str, "shape": [int], "dtype": str, "per_rank": bool}],
     "initial": [{"rank": int, "tensor": str, "lo": [int], "hi": [int], "produced": bool}],
     "goals": [{"rank": int, "tensor": str, "lo": [int], "hi": [int],
                "source": str, "source_lo": [int], "ranks": [int], "reduce": str}],
     "channels": [str], "groups": [[int]], "origins": [str],
     "columns": {field of Columns: [int]}}         boxes row after row, ndim numbers each
"""

from __future__ import annotations

import json
import math
import operator
import os
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from syncopate_jax.errors import FormatError, InputError
from syncopate_jax.ir import comm
from syncopate_jax.ir import text as text_form
from syncopate_jax.ir.arguments import MAX_EXTENT
from syncopate_jax.ir.chunk import Box
from syncopate_jax.ir.columns import Array, Columns
from syncopate_jax.ir.plan import MAX_NDIM, MAX_PLAN_RANKS, Goal, Plan, Region, Tensor

FORMAT = "syncopate-plan"
VERSION = 1
_BOXES = ("src_lo", "src_hi", "dst_lo", "dst_hi", "cdep_lo", "cdep_hi")
_HEAD = ("format", "version", "name", "num_ranks", "ndim", "tensors", "initial", "goals",
         "channels", "groups", "origins", "columns")  # fmt: skip


def to_json(plan: Plan) -> str:
    """The JSON text of ``plan``, from which ``from_json`` makes an equal plan.

    Raises InputError when an index of the plan is out of range, so that no file is written that
    cannot be read.
    """
    fault = _fault(plan)
    if fault is not None:
        raise InputError(f"plan {plan.name} cannot be saved: {fault}")
    columns = {field.name: getattr(plan.columns, field.name) for field in fields(Columns)}
    tree = {
        "format": FORMAT,
        "version": VERSION,
        "name": plan.name,
        "num_ranks": plan.num_ranks,
        "ndim": plan.columns.ndim,
        "tensors": [
            {"name": t.name, "shape": list(t.shape), "dtype": t.dtype, "per_rank": t.per_rank}
            for t in plan.tensors
        ],
        "initial": [{**_place(region), "produced": region.produced} for region in plan.initial],
        "goals": [
            {
                **_place(goal),
                "source": goal.source,
                "source_lo": list(goal.source_lo),
                "ranks": list(goal.ranks),
                "reduce": goal.reduce,
            }
            for goal in plan.goals
        ],
        "channels": list(plan.channels),
        "groups": [list(group) for group in plan.groups],
        "origins": list(plan.origins),
        "columns": {name: column.ravel().tolist() for name, column in columns.items()},
    }
    # A plan made by hand may have NumPy's integers in its boxes.
    return json.dumps(tree, separators=(",", ":"), default=operator.index)


def from_json(text: str) -> Plan:
    """The plan in ``text``; raises FormatError that names the field at fault, found and needed."""
    try:
        tree = json.loads(text, parse_constant=_no_constant, object_pairs_hook=_object)
    except FormatError:
        raise
    except RecursionError:
        raise FormatError("plan file: nested too deep for a plan, which needs 4 levels") from None
    except ValueError as error:
        raise FormatError(f"plan file: is not JSON ({error})") from error
    try:
        plan = _read_plan(tree)
    except InputError as error:
        raise FormatError(f"plan file: {error}") from error
    fault = _fault(plan)
    if fault is not None:
        raise FormatError(f"plan file: {fault}")
    return plan


def save(plan: Plan, path: str | os.PathLike[str]) -> None:
    """Writes ``plan`` to ``path`` as JSON; raises InputError as ``to_json``, or OSError."""
    Path(path).write_text(to_json(plan), encoding="utf-8")


def load(path: str | os.PathLike[str]) -> Plan:
    """The plan in the file ``path``, JSON or text; raises as ``from_bytes``, or OSError."""
    return from_bytes(Path(path).read_bytes(), os.fspath(path))


def from_bytes(raw: bytes, source: str) -> Plan:
    """The plan in the bytes of a file; what begins as JSON does is JSON, else it is ``ir.text``'s.

    Raises FormatError that names ``source`` and the place in it.
    """
    try:
        found = raw.decode("utf-8-sig")
        if not found.strip():
            raise FormatError("plan file: is empty")
        return from_json(found) if found.lstrip()[0] in "{[" else text_form.from_text(found)
    except UnicodeDecodeError as error:
        raise FormatError(f"{source}: plan file: is not UTF-8 ({error})") from error
    except FormatError as error:
        raise FormatError(f"{source}: {error}") from error


def _place(item: Region | Goal) -> dict[str, Any]:
    return {
        "rank": item.rank,
        "tensor": item.tensor,
        "lo": list(item.box.lo),
        "hi": list(item.box.hi),
    }


def _read_plan(tree: Any) -> Plan:
    head = _keys(tree, "the file", _HEAD)
    if head["format"] != FORMAT:
        _fail("format", _short(head["format"]), repr(FORMAT))
    if type(head["version"]) is not int or head["version"] != VERSION:
        _fail("version", _short(head["version"]), f"{VERSION}, the only one this release reads")
    num_ranks = _integer(head["num_ranks"], "num_ranks", 1, MAX_PLAN_RANKS)
    ndim = _integer(head["ndim"], "ndim", 0, MAX_NDIM)
    return Plan(
        name=_string(head["name"], "name"),
        num_ranks=num_ranks,
        tensors=_each(head["tensors"], "tensors", _read_tensor),
        initial=_each(head["initial"], "initial", _read_region),
        goals=_each(head["goals"], "goals", _read_goal),
        columns=_read_columns(head["columns"], ndim),
        channels=_each(head["channels"], "channels", _string),
        groups=_each(head["groups"], "groups", _ints),
        origins=_each(head["origins"], "origins", _string),
    )


def _read_tensor(tree: Any, where: str) -> Tensor:
    item = _keys(tree, where, ("name", "shape", "dtype", "per_rank"))
    return Tensor(
        _string(item["name"], f"{where}.name"),
        _ints(item["shape"], f"{where}.shape"),
        _string(item["dtype"], f"{where}.dtype"),
        _flag(item["per_rank"], f"{where}.per_rank"),
    )


def _read_region(tree: Any, where: str) -> Region:
    item = _keys(tree, where, ("rank", "tensor", "lo", "hi", "produced"))
    return Region(*_read_place(item, where), _flag(item["produced"], f"{where}.produced"))


def _read_goal(tree: Any, where: str) -> Goal:
    wanted = ("rank", "tensor", "lo", "hi", "source", "source_lo", "ranks")
    item = _keys(tree, where, wanted, ("reduce",))
    return Goal(
        *_read_place(item, where),
        _string(item["source"], f"{where}.source"),
        _ints(item["source_lo"], f"{where}.source_lo"),
        _ints(item["ranks"], f"{where}.ranks"),
        _string(item.get("reduce", "sum"), f"{where}.reduce"),
    )


def _read_place(item: dict[str, Any], where: str) -> tuple[int, str, Box]:
    lo, hi = (_ints(item[side], f"{where}.{side}") for side in ("lo", "hi"))
    try:
        box = Box(lo, hi)
    except InputError as error:
        raise FormatError(f"plan file: {where}: {error}") from error
    rank = _integer(item["rank"], f"{where}.rank", 0, MAX_PLAN_RANKS)
    return rank, _string(item["tensor"], f"{where}.tensor"), box


def _read_columns(tree: Any, ndim: int) -> Columns:
    names = tuple(field.name for field in fields(Columns))
    item = _keys(tree, "columns", names)
    columns = {name: _int_array(item[name], f"columns.{name}", -1) for name in names}
    rows, cdeps = len(columns["rank"]), len(columns["cdep_rank"])
    for name in _BOXES:
        count = cdeps if name.startswith("cdep") else rows
        if len(columns[name]) != count * ndim:
            _fail(
                f"columns.{name}",
                f"{len(columns[name])} numbers",
                f"{count} boxes of {ndim}, so {count * ndim}",
            )
        columns[name] = columns[name].reshape(count, ndim)
    for name in ("dep_start", "cdep_start"):
        if not len(columns[name]):
            _fail(f"columns.{name}", "an empty list", f"{rows + 1} numbers")
    return Columns(**columns)


def _fault(plan: Plan) -> str | None:
    """The first index or box of ``plan`` that is out of range, in words; None if all are sound."""
    c = plan.columns
    ranks, tensors = plan.num_ranks, len(plan.tensors)
    if np.any(np.diff(c.rank) < 0):
        return "columns.rank: rows are not sorted by rank"
    limits: tuple[tuple[str, int, int], ...] = (
        ("rank", 0, ranks), ("src_rank", 0, ranks), ("dst_rank", 0, ranks),
        ("dep_rank", 0, ranks), ("cdep_rank", 0, ranks),
        ("kind", 0, len(comm.KINDS)), ("reduce", 0, len(comm.REDUCTIONS)),
        ("src_tensor", 0, tensors), ("dst_tensor", 0, tensors), ("cdep_tensor", 0, tensors),
        ("channel", 0, len(plan.channels)), ("origin", 0, len(plan.origins)),
        ("group", -1, len(plan.groups)), ("dep_index", 0, MAX_EXTENT),
        ("split_axis", -1, max(c.ndim, 1)), ("concat_axis", -1, max(c.ndim, 1)),
    )  # fmt: skip
    for name, least, end in limits:
        column = getattr(c, name)
        wrong = np.flatnonzero((column < least) | (column >= end))
        if len(wrong):
            return f"columns.{name}[{wrong[0]}]: found {column[wrong[0]]}, needs {least}..{end - 1}"
    wrong = np.flatnonzero((c.kind != 0) & (c.group < 0))
    if len(wrong):
        return f"columns.group[{wrong[0]}]: found -1, needs the group of the collective"
    for name in ("src_rank", "dst_rank"):
        column = getattr(c, name)
        wrong = np.flatnonzero((c.kind != 0) & (column != c.rank))
        if len(wrong):
            return (
                f"columns.{name}[{wrong[0]}]: found {column[wrong[0]]}, needs "
                f"{c.rank[wrong[0]]}, the rank that lists the collective"
            )
    for name in ("group", "split_axis", "concat_axis"):
        column = getattr(c, name)
        wrong = np.flatnonzero((c.kind == 0) & (column != -1))
        if len(wrong):
            return (
                f"columns.{name}[{wrong[0]}]: found {column[wrong[0]]}, needs -1, as the operation "
                f"is no collective"
            )
    return _head_fault(plan) or next(filter(None, map(lambda s: _box_fault(c, s), _SIDES)), None)


_SIDES = ("src", "dst", "cdep")


def _box_fault(c: Columns, side: str) -> str | None:
    lo: Array = getattr(c, f"{side}_lo")
    hi: Array = getattr(c, f"{side}_hi")
    wrong = np.flatnonzero(np.any((lo < 0) | (hi < lo), axis=1))
    if not len(wrong):
        return None
    row = wrong[0]
    return (
        f"columns.{side}_lo, {side}_hi: box {row} is {lo[row].tolist()} to {hi[row].tolist()}, "
        "needs 0 <= lo <= hi"
    )


def _head_fault(plan: Plan) -> str | None:
    shapes = {tensor.name: tensor.shape for tensor in plan.tensors}
    placed: dict[str, tuple[Region | Goal, ...]] = {"initial": plan.initial, "goals": plan.goals}
    for what, items in placed.items():
        for i, item in enumerate(items):
            dims = len(shapes[item.tensor])
            if not 0 <= item.rank < plan.num_ranks:
                return f"{what}[{i}].rank: found {item.rank}, needs 0..{plan.num_ranks - 1}"
            if item.box.ndim != dims:
                return f"{what}[{i}]: box {item.box} needs {dims} dimensions, as {item.tensor}"
    for i, goal in enumerate(plan.goals):
        if goal.source and goal.source not in shapes:
            return f"goals[{i}].source: found {goal.source!r}, needs one of {sorted(shapes)}"
        if goal.source_lo and len(goal.source_lo) != goal.box.ndim:
            return f"goals[{i}].source_lo: found {goal.source_lo}, needs {goal.box.ndim} numbers"
    members = [(f"goals[{i}].ranks", goal.ranks) for i, goal in enumerate(plan.goals)]
    members += [(f"groups[{i}]", group) for i, group in enumerate(plan.groups)]
    for where, group in members:
        for rank in group:
            if not 0 <= rank < plan.num_ranks:
                return f"{where}: found rank {rank}, needs 0..{plan.num_ranks - 1}"
    return None


# Values of the tree; each names its field when it is wrong.


def _keys(
    tree: Any, where: str, wanted: tuple[str, ...], optional: tuple[str, ...] = ()
) -> dict[str, Any]:
    if type(tree) is not dict:
        _fail(where, _short(tree), "an object")
    for key in wanted:
        if key not in tree:
            _fail(where, f"no {key!r}", f"the keys {', '.join(wanted)}")
    for key in tree:
        if key not in wanted + optional:
            _fail(where, f"the key {_short(key)}", f"only {', '.join(wanted + optional)}")
    return tree


def _each[T](tree: Any, where: str, read: Callable[[Any, str], T]) -> tuple[T, ...]:
    if type(tree) is not list:
        _fail(where, _short(tree), "a list")
    return tuple(read(item, f"{where}[{i}]") for i, item in enumerate(tree))


def _string(tree: Any, where: str) -> str:
    if type(tree) is not str:
        _fail(where, _short(tree), "a string")
    return tree


def _flag(tree: Any, where: str) -> bool:
    if type(tree) is not bool:
        _fail(where, _short(tree), "true or false")
    return tree


def _integer(tree: Any, where: str, least: int, most: int) -> int:
    if type(tree) is not int or not least <= tree <= most:
        _fail(where, _short(tree), f"an integer in {least}..{most}")
    return tree


def _ints(tree: Any, where: str) -> tuple[int, ...]:
    return tuple(_int_array(tree, where, 0).tolist())


def _int_array(tree: Any, where: str, least: int) -> Array:
    if type(tree) is not list:
        _fail(where, _short(tree), "a list of integers")
    # Whole-list tests first: a loop over each entry is left for the report of a fault.
    if any(type(value) is not int for value in tree) or (
        tree and not least <= min(tree) <= max(tree) <= MAX_EXTENT
    ):
        for i, value in enumerate(tree):
            _integer(value, f"{where}[{i}]", least, MAX_EXTENT)
    return np.array(tree, np.int64)


def _short(tree: Any) -> str:
    """What was found, cut short: a damaged file may hold anything of any size."""
    if type(tree) is int and abs(tree) > 10**18:
        digits = int(math.log10(2) * tree.bit_length()) + 1
        return f"an integer of about {digits} digits"
    if type(tree) in (list, dict):
        return f"{'a list' if type(tree) is list else 'an object'} of {len(tree)}"
    shown = json.dumps(tree)
    return shown if len(shown) <= 60 else shown[:57] + "…"


def _no_constant(name: str) -> NoReturn:
    raise FormatError(f"plan file: found {name}, needs integers only")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise FormatError(f"plan file: key {_short(twice)} appears twice in one object")
    return found


def _fail(where: str, found: str, needed: str) -> NoReturn:
    raise FormatError(f"plan file: {where}: found {found}, needs {needed}")
