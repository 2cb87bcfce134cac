"""Parser of StableHLO and Shardy text, as ``jit(f).lower(…).as_text()`` gives it.

MLIR's own grammar is open-ended, so an operation is read by its outline: results, name, brackets
that match, and regions, which are the braces that end their line. Of collectives, contractions and
what may lie between them the attributes are read as well.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field, replace

from syncopate_jax.importers import stablehlo_attributes as attributes
from syncopate_jax.importers.hlo_ops import HloGraph, HloOp
from syncopate_jax.importers.replica_groups import MAX_RANKS, Groups, NamedMesh
from syncopate_jax.importers.scanner import Cursor, Language

LANGUAGE = Language(
    "stablehlo",
    re.compile(
        r"(?P<space>\s+)|(?P<comment>//[^\n]*)|(?P<string>\"(?:[^\"\\]|\\.)*\")"
        r"|(?P<value>%[\w.$\-]+(?:#\d+)?)|(?P<symbol>@(?:[\w.$\-]+|\"[^\"\n]*\"))"
        r"|(?P<word>[#!^]?[A-Za-z_][\w.$]*)"
        r"|(?P<number>-?\d+(?:\.\d*)?(?:[eE][-+]?\d+)?)"
        r"|(?P<mark>->|::|[^\s\"])",
        re.ASCII,
    ),
    brackets="()[]{}<>",
)
OPCODES = {
    "dot_general": "dot",
    "custom_call": "custom-call",
    "collective_broadcast": "collective-broadcast",
}
COLLECTIVES = (
    "all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute",
    "collective-broadcast",
)  # fmt: skip
DIMENSIONS = (
    "all_gather_dim",
    "scatter_dimension",
    "split_dimension",
    "concat_dimension",
    "split_count",
)


@dataclass(slots=True)
class _Op:
    """An operation as its outline has it."""

    results: list[tuple[str, int]]
    name: str
    line: int
    at: int
    operands: list[str] = field(default_factory=list)
    attributes: dict[str, str] = field(default_factory=dict)
    body: str = ""
    types: str = ""
    inner: list[_Op] = field(
        default_factory=list
    )  # opcodes of its regions, the last one's return aside
    symbol: str = ""


def parse(text: str) -> HloGraph:
    """The program in ``text``; raises FormatError with line and column."""
    return _Parser(text).module()


class _Parser:
    def __init__(self, text: str):
        self.at = Cursor(LANGUAGE, text)
        self.ops: dict[str, dict[str, HloOp]] = {}
        self.meshes: dict[str, NamedMesh] = {}
        self.counts = {"mhlo.num_replicas": 1, "mhlo.num_partitions": 1}
        self.entry = ""
        self.count = 0
        self.scopes: list[dict[str, str]] = []  # what values in sight are called in ``ops``

    def module(self) -> HloGraph:
        at = self.at
        while at.has("#loc") or (at.token.kind == "word" and at.token.text.startswith("#")):
            self._alias()
        at.expect("module")
        name = at.take().text.removeprefix("@") if at.token.kind == "symbol" else "module"
        if at.skip("attributes"):
            start = at.token.at
            self._properties(at.balanced(), start)
        if not at.has("{"):
            at.fail("'{' of the module")
        at.take()
        self._region("", [])
        while at.token.kind != "end":
            if not (at.token.kind == "word" and at.token.text.startswith("#")):
                at.fail("the end of the file")
            self._alias()
        if not self.entry:
            at.fail("a function @main")
        replicas, partitions = self.counts.values()
        return HloGraph(name, replicas, partitions, self.ops, self.entry, {}, self.meshes)

    def _alias(self) -> None:
        """``#name = …`` on a line of its own."""
        at = self.at
        at.take()
        at.expect("=")
        line = at.line()
        while at.token.kind != "end" and at.line() == line:
            at.balanced() if at.has("(", "[", "{", "<") else at.take()

    def _properties(self, text: str, start: int) -> None:
        for key in self.counts:
            if found := re.search(rf"{re.escape(key)} = (\d{{1,9}})\b", text):
                self.counts[key] = int(found[1])
        if not 1 <= math.prod(self.counts.values()) <= MAX_RANKS:
            self.at.fail_at(start, f"needs 1 to {MAX_RANKS} replicas times partitions")

    def _region(self, computation: str, inner: list[_Op]) -> None:
        """Operations up to the brace that closes the region."""
        at = self.at
        at.enter()
        self.scopes.append({})
        while not at.skip("}"):
            if at.token.kind == "word" and at.token.text.startswith("^"):
                at.take()
                if at.has("("):
                    at.balanced()
                at.expect(":")
                continue
            self._operation(computation, inner)
        self.scopes.pop()
        at.leave()

    def _operation(self, computation: str, inner: list[_Op]) -> None:
        at = self.at
        results = self._results()
        if at.token.kind not in ("word", "string"):
            at.fail("an operation or '}'")
        token = at.take()
        op = _Op(results, token.text.strip('"'), at.line(token.at), token.at)
        inner.append(op)
        own = computation
        end = self._end()
        if op.name == "func.func":
            op.symbol = own = self._function()
        elif op.name in ("stablehlo.while", "stablehlo.case", "stablehlo.if"):
            self.count += 1
            own = f"{computation}/{op.name.removeprefix('stablehlo.')}.{self.count}"
            self.ops.setdefault(own, {})
        while self._goes_on(end):
            if at.has("{") and self._opens_region():
                at.take()
                self._region(own, op.inner)
            elif at.has("(") and at.ahead(1).text == "{":
                at.take()
                while not at.skip(")"):
                    at.skip(",")
                    if not at.has("{"):
                        at.fail("a region or ')'")
                    at.take()
                    self._region(own, op.inner)
            elif at.has("{", "(", "[", "<"):
                self._bracket(op)
            else:
                self._word(op)
            end = self._end()
        self._add(op, computation)

    def _end(self) -> int:
        """The line on which the token before this one ends."""
        token = self.at.tokens[self.at.place - 1]
        return self.at.line(token.at + len(token.text) - 1)

    def _goes_on(self, line: int) -> bool:
        """Whether the next token still belongs to the operation."""
        at = self.at
        if at.token.kind == "end" or at.has("}", ")"):
            return False
        return at.line() == line or (at.has("cond", "do") and at.ahead(1).text == "{")

    def _opens_region(self) -> bool:
        after = self.at.ahead(1)
        return after.text.startswith("^") or self.at.line(after.at) > self.at.line()

    def _results(self) -> list[tuple[str, int]]:
        at = self.at
        found: list[tuple[str, int]] = []
        while at.token.kind == "value":
            name = at.take().text
            count = at.integer("a number of results") if at.skip(":") else 1
            found.append((name, count))
            if not at.skip(","):
                at.expect("=")
                break
        return found

    def _function(self) -> str:
        """The head of a function up to its name."""
        at = self.at
        while at.token.kind == "word":
            at.take()
        name = at.of("symbol", "the function's name").removeprefix("@")
        if name in self.ops:
            at.fail(f"another name than @{name}, which a function before has")
        self.ops[name] = {}
        if name == "main" or not self.entry:
            self.entry = name
        return name

    def _bracket(self, op: _Op) -> None:
        at = self.at
        start = at.place
        text = at.balanced()
        tokens = at.tokens[start : at.place]
        if text.startswith(("{", "<{")):
            op.attributes |= attributes.entries(text)
        elif op.name == "func.func" and not op.types and text.startswith("("):
            self._arguments(op, text)
            op.types = "("
        elif not op.operands and text.startswith("("):
            op.operands = [token.text for token in tokens if token.kind == "value"]
        op.types += text if ":" in op.types else ""
        op.body += text

    def _arguments(self, op: _Op, text: str) -> None:
        """A function's arguments, each with its sharding if it has one."""
        ops = self.ops[op.symbol]
        for found in attributes.ARGUMENT.finditer(text):
            types = attributes.array_types(found[2])
            sharding = re.search(r"sdy\.sharding = #sdy\.sharding(<@.*?\]>)", found[3] or "")
            ops[found[1]] = HloOp(
                found[1], "parameter", types, (), op.symbol, op.line,
                texts={"sharding": sharding[1]} if sharding else {},
            )  # fmt: skip

    def _word(self, op: _Op) -> None:
        at = self.at
        token = at.take()
        if token.kind == "value" and not op.types:
            op.operands.append(token.text)
        if token.kind == "symbol" and not op.symbol:
            op.symbol = token.text
        if token.text == ":" or op.types:
            op.types += token.text
        op.body += token.text

    def _add(self, op: _Op, computation: str) -> None:
        """Files what may matter: results of values, collectives, contractions, layouts."""
        if op.name == "sdy.mesh":
            self._mesh(op)
            return
        if not op.results or not computation:
            return
        opcode = op.name.removeprefix("stablehlo.")
        opcode = OPCODES.get(opcode, opcode.replace("_", "-"))
        if opcode == "dot" and "contracting_dims" not in op.body:
            opcode = "dot-general"  # in generic form, which is not read
        ops = self.ops[computation]
        name = op.results[0][0]
        while name in ops:  # regions of one computation name their values anew
            name += "'"
        made = HloOp(
            name=name,
            opcode=opcode,
            types=attributes.array_types(op.types.rpartition("->")[2]),
            operands=tuple(self._seen(operand) for operand in op.operands),
            computation=computation,
            line=op.line,
            operand_types=attributes.array_types(op.types.rpartition("->")[0] or op.types),
        )
        ops[name] = self._detail(made, op)
        for result, _ in op.results:
            self.scopes[-1][result] = name

    def _seen(self, value: str) -> str:
        """What a value in sight is called in ``ops``; ``%0#1`` keeps its place."""
        base, mark, place = value.partition("#")
        for scope in reversed(self.scopes):
            if base in scope:
                return scope[base] + mark + place
        return value

    def _detail(self, made: HloOp, op: _Op) -> HloOp:
        ints: dict[str, tuple[int, ...]] = {}
        for key in DIMENSIONS:
            if key in op.attributes:
                ints[key] = (self._integer(op, key),)
        if made.opcode == "dot":
            for key, word in (("batch", "batching_dims"), ("contracting", "contracting_dims")):
                found = re.search(rf"{word}=\[([\d, ]*)\]x\[([\d, ]*)\]", op.body)
                for side in (1, 2):
                    text = found[side] if found else ""
                    ints[f"{'lr'[side - 1]}hs_{key}_dims"] = attributes.numbers(text)
            if not made.types:
                self.at.fail_at(op.at, "dot_general needs the types of its operands and result")
        if made.opcode == "transpose":
            found = re.search(r"dims=\[([\d, ]*)\]", op.body)
            if found is None:
                self.at.fail_at(op.at, "transpose needs dims = [...]")
            ints["dimensions"] = attributes.numbers(found[1])
        texts = {}
        if "sdy.sharding" in op.attributes:
            texts["sharding"] = op.attributes["sdy.sharding"]
        if made.opcode == "sdy.sharding-constraint":
            texts["sharding"] = "".join(re.findall(r"<@.*>(?=:)", op.body))
        made = replace(made, ints=ints, texts=texts)
        if made.opcode.removesuffix("-start") not in COLLECTIVES:
            return made
        return replace(
            made,
            groups=self._groups(op),
            channel="handle = 0" not in op.attributes.get("channel_handle", "handle = 0"),
            global_ids="use_global_device_ids" in op.attributes,
            reducer=_reducer(op.inner),
        )

    def _integer(self, op: _Op, key: str) -> int:
        found = attributes.INT.fullmatch(op.attributes[key])
        if found is None:
            self.at.fail_at(
                op.at, f"{op.name}: {key} needs an integer, found {op.attributes[key]!r}"
            )
        return int(found[1])

    def _groups(self, op: _Op) -> Groups:
        key = "source_target_pairs" if "permute" in op.name else "replica_groups"
        text = op.attributes.get(key)
        if text is None:
            self.at.fail_at(op.at, f"{op.name} needs {key}")
        try:
            if "replica_group_mesh_axes" in text:
                return attributes.mesh_groups(text, self.meshes)
            return attributes.dense_groups(text)
        except ValueError as error:
            self.at.fail_at(op.at, f"{op.name}: {key}: {error}")

    def _mesh(self, op: _Op) -> None:
        try:
            mesh = attributes.named_mesh(op.body.partition("{")[0])
        except ValueError as error:
            self.at.fail_at(op.at, f"mesh {op.symbol}: {error}")
        if mesh is not None:
            self.meshes[op.symbol.removeprefix("@")] = mesh


def _reducer(inner: list[_Op]) -> str:
    """The one operation of a reducing region, on the region's two arguments; else all of them."""
    names = [op.name.removeprefix("stablehlo.") for op in inner]
    if len(inner) == 2 and names[1] == "return":
        one, end = inner
        results = [result for result, _ in one.results]
        if len(set(one.operands)) == 2 == len(one.operands) and end.operands == results:
            return names[0]
    return " then ".join(names)
