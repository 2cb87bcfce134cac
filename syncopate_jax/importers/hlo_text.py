"""Parser of HLO text, as ``jit(f).lower(…).compile().as_text()`` gives it.

Grammar of what is read (``…`` stands for brackets that match and are passed over)::

    module      := HloModule NAME {, KEY = VALUE} {TABLE} {computation}
    computation := [ENTRY] NAME [… -> type] { {instruction} } {, KEY = VALUE}
    instruction := [ROOT] NAME = type OPCODE ( operands ) {, KEY = VALUE}
    type        := DTYPE [ extents ] [layout] | ( types )
    operands    := {[type] NAME}, or a literal
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from syncopate_jax.importers.hlo_ops import DTYPES, ArrayType, HloGraph, HloOp
from syncopate_jax.importers.replica_groups import MAX_PROGRAM_RANKS, read_groups
from syncopate_jax.importers.scanner import Cursor, Language

LANGUAGE = Language(
    "hlo",
    re.compile(
        r"(?P<space>\s+)|(?P<comment>/\*.*?\*/|//[^\n]*)"
        r'|(?P<string>"(?:[^"\\]|\\.)*")|(?P<quoted>\'[^\'\n]*\')'
        r"|(?P<word>%?[A-Za-z_][\w.\-]*|%[\w.\-]+)"
        r"|(?P<number>-?\d+(?:\.\d*)?(?:[eE][-+]?\d+)?)"
        r"|(?P<mark><=|->|[^\s\"'])",
        re.DOTALL | re.ASCII,
    ),
)
TABLES = ("FileNames", "FunctionNames", "FileLocations", "StackFrames")
LITERALS = ("constant", "iota")
INT_LISTS = (
    "dimensions", "lhs_contracting_dims", "rhs_contracting_dims", "lhs_batch_dims",
    "rhs_batch_dims",
)  # fmt: skip
KEPT = ("slice", "sharding", "metadata", "frontend_attributes", "backend_config")
CALLS = ("to_apply", "calls", "body", "condition", "branch_computations", "true_computation",
         "false_computation", "called_computations")  # fmt: skip


def parse(text: str) -> HloGraph:
    """The program in ``text``; raises FormatError with line and column."""
    return _Parser(text).module()


class _Parser:
    def __init__(self, text: str):
        self.at = Cursor(LANGUAGE, text)
        self.computation = ""
        self.ops: dict[str, dict[str, HloOp]] = {}
        self.roots: dict[str, str] = {}
        self.readers: dict[str, Callable[[dict[str, Any]], None]] = {
            "replica_groups": self._groups,
            "source_target_pairs": self._groups,
            "channel_id": self._channel,
            "use_global_device_ids": self._global_ids,
        }

    def module(self) -> HloGraph:
        at = self.at
        at.expect("HloModule")
        name = at.of("word", "the module's name")
        counts = {"replica_count": 1, "num_partitions": 1}
        while at.skip(","):
            key = at.of("word", "a property of the module")
            if at.skip("="):
                if key in counts:
                    counts[key] = at.integer()
                else:
                    self._value()
        if min(counts.values()) < 1 or counts["replica_count"] * counts["num_partitions"] > (
            MAX_PROGRAM_RANKS
        ):
            at.fail(f"1 to {MAX_PROGRAM_RANKS} replicas times partitions in the module's line")
        while at.has(*TABLES):
            self._table()
        entry = ""
        while at.token.kind != "end":
            is_entry = at.skip("ENTRY")
            found = self._computation()
            if is_entry and entry:
                at.fail("one ENTRY computation, found a second one before this")
            entry = found if is_entry else entry
        if not entry:
            at.fail("an ENTRY computation; was the file cut?")
        self._resolve()
        return HloGraph(
            name, counts["replica_count"], counts["num_partitions"], self.ops, entry, self.roots
        )

    def _table(self) -> None:
        """A table of source places: numbered rows."""
        at = self.at
        at.take()
        while at.token.kind == "number":
            at.take()
            if at.token.kind == "string":
                at.take()
            else:
                at.balanced()

    def _computation(self) -> str:
        at = self.at
        name = self._name("a computation")
        if name in self.ops:
            at.fail(f"another name than {name!r}, which a computation before has")
        if at.has("("):
            at.balanced()
            at.expect("->")
            self._type()
        at.expect("{")
        self.computation = name
        self.ops[name] = {}
        while not at.skip("}"):
            self._instruction()
        if name not in self.roots:
            if not self.ops[name]:
                at.fail(f"instructions in computation {name}")
            self.roots[name] = next(reversed(self.ops[name]))
        while at.skip(","):
            at.of("word", "a property of the computation")
            at.expect("=")
            self._value()
        return name

    def _instruction(self) -> None:
        at = self.at
        line = at.line()
        is_root = at.skip("ROOT")
        name = self._name("an instruction, ROOT or '}'")
        ops = self.ops[self.computation]
        if name in ops:
            at.fail(f"another name than {name!r}, which line {ops[name].line} has")
        at.expect("=")
        types = tuple(self._type())
        opcode = at.of("word", "an opcode")
        if not at.has("("):
            at.fail("the operands in '(' and ')'")
        given: dict[str, Any] = {"ints": {}, "texts": {}, "calls": ()}
        operands: tuple[str, ...] = ()
        if opcode == "parameter":
            given["ints"]["index"] = at.integers("(", ")")
            if len(given["ints"]["index"]) != 1:
                at.fail("the number of the parameter before this")
        elif opcode in LITERALS:
            at.balanced()
        else:
            operands = self._operands()
            if opcode == "dot" and len(operands) != 2:
                at.fail(f"two operands of the dot before this, found {len(operands)}")
        while at.skip(","):
            self._attribute(given)
        if is_root and self.computation in self.roots:
            at.fail(f"one ROOT in computation {self.computation}")
        if is_root:
            self.roots[self.computation] = name
        ops[name] = HloOp(name, opcode, types, operands, self.computation, line, **given)

    def _attribute(self, given: dict[str, Any]) -> None:
        at = self.at
        key = at.of("word", "the name of an attribute")
        at.expect("=")
        if key in self.readers:
            self.readers[key](given)
        elif key in INT_LISTS:
            given["ints"][key] = at.integers("{", "}")
        elif key == "index":
            given["ints"][key] = (at.integer(),)
        elif key in CALLS:
            given["calls"] += self._names()
            if key == "to_apply":
                given["texts"][key] = given["calls"][-1] if given["calls"] else ""
        else:
            value = self._value()
            if key in KEPT:
                given["texts"][key] = value

    def _groups(self, given: dict[str, Any]) -> None:
        given["groups"] = read_groups(self.at)

    def _channel(self, given: dict[str, Any]) -> None:
        given["channel"] = self.at.integer() > 0

    def _global_ids(self, given: dict[str, Any]) -> None:
        word = self.at.of("word", "true or false")
        if word not in ("true", "false"):
            self.at.fail(f"true or false before this, found {word!r}")
        given["global_ids"] = word == "true"

    def _names(self) -> tuple[str, ...]:
        """One computation, or several in braces."""
        at = self.at
        if not at.skip("{"):
            return (self._name("a computation"),)
        found: list[str] = []
        while not at.skip("}"):
            if found:
                at.expect(",")
            found.append(self._name("a computation"))
        return tuple(found)

    def _operands(self) -> tuple[str, ...]:
        at = self.at
        at.expect("(")
        found: list[str] = []
        while not at.skip(")"):
            if found:
                at.expect(",")
            if at.has("(") or at.ahead(1).text in ("[", "("):
                self._type()
            found.append(self._name("an operand or ')'"))
        return tuple(found)

    def _type(self) -> list[ArrayType]:
        """An array's type, or the types of all arrays of a tuple."""
        at = self.at
        if at.skip("("):
            at.enter()
            found: list[ArrayType] = []
            while not at.skip(")"):
                if found:
                    at.expect(",")
                found += self._type()
            at.leave()
            return found
        dtype = at.of("word", "a type such as f32[8,16]")
        if at.has("("):  # a buffer: b(f32[8])
            return self._type()
        at.expect("[")
        shape: list[int] = []
        while not at.skip("]"):
            if shape:
                at.expect(",")
            at.skip("<=")  # an extent that may be less
            shape.append(at.integer("an extent or ']'"))
        # The layout; a brace on a line of its own opens a computation.
        layout: tuple[int, ...] = ()
        if at.has("{") and at.text[at.token.at - 1] == "]":
            order = re.match(r"\{(\d{1,3}(?:,\d{1,3})*)", at.balanced())
            layout = tuple(int(d) for d in order[1].split(",")) if order else ()
        if any(extent < 0 for extent in shape):
            at.fail(f"extents of 0 and more before this, found {shape}")
        return [ArrayType(DTYPES.get(dtype, dtype), tuple(shape), layout)]

    def _name(self, what: str) -> str:
        if self.at.token.kind != "word":
            self.at.fail(f"the name of {what}")
        return self.at.take().text.removeprefix("%")

    def _value(self) -> str:
        """The text of a value: up to a comma outside brackets, or to the end of the line."""
        at = self.at
        start, line = at.token.at, at.line()
        end = start
        while at.token.kind != "end" and not at.has(",", "}", ")", "]") and at.line() == line:
            if at.has("{", "[", "("):
                at.balanced()
                end = at.tokens[at.place - 1].at + 1
                line = at.line(end)
            else:
                token = at.take()
                end = token.at + len(token.text)
        if end == start:
            at.fail("a value")
        return at.text[start:end]

    def _resolve(self) -> None:
        """Checks that what is named exists, and fills in what collectives reduce by."""
        for ops in self.ops.values():
            for name, op in ops.items():
                for operand in op.operands:
                    if operand not in ops:
                        self._missing(op, f"operand {operand}")
                for called in op.calls:
                    if called not in self.ops:
                        self._missing(op, f"computation {called}")
                if (reducer := op.texts.get("to_apply")) is not None:
                    ops[name] = replace(op, reducer=self._reducer(reducer))

    def _reducer(self, name: str) -> str:
        """The one operation of a computation on its two parameters; else all that it does."""
        root = self.ops[name][self.roots[name]]
        given = {op.name for op in self.ops[name].values() if op.opcode == "parameter"}
        if len(set(root.operands)) == 2 and set(root.operands) == given:
            return root.opcode
        return " then ".join(op.opcode for op in self.ops[name].values())

    def _missing(self, op: HloOp, what: str) -> None:
        self.at.fail_at(
            self.at.start(op.line), f"{op.opcode} {op.name} names {what}, which is none"
        )
