"""Parser of StableHLO and Shardy text, as ``jit(f).lower(…).as_text()`` gives it.

MLIR's own grammar is open-ended, so an operation is read by its outline: results, name, brackets
that match, and regions, which are the braces that end their line. Of collectives, contractions and
what may lie between them the attributes are read as well.

Functions, and the regions of loops, branches and ``sdy.manual_computation``, are computations of
their own. Operations there read values of a computation around them as ``computation:%name``, and
the operation that has the region reads these too. Other regions belong to what is around them.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field, replace

from syncopate_jax.importers import stablehlo_attributes as attributes
from syncopate_jax.importers.hlo_ops import ArrayType, HloGraph, HloOp
from syncopate_jax.importers.replica_groups import MAX_PROGRAM_RANKS, Groups, NamedMesh
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
    "func.call": "call",
    "func.return": "return",
    "sdy.return": "return",
}
SCOPED = ("stablehlo.while", "stablehlo.case", "stablehlo.if", "sdy.manual_computation")
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
    inner: list[_Op] = field(default_factory=list)  # the operations of its regions
    symbol: str = ""
    own: str = ""  # what its regions are called, if they are computations of their own
    regions: list[str] = field(default_factory=list)
    arguments: list[tuple[str, tuple[ArrayType, ...], str]] = field(default_factory=list)


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
        self.roots: dict[str, str] = {}
        self.results: dict[str, list[str]] = {}  # shardings of what functions return
        # The computation of each value in sight, and what it is called in ``ops``.
        self.scopes: list[dict[str, tuple[str, str]]] = []
        self.captured: dict[str, list[tuple[str, str]]] = {}  # from around a computation

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
        self._region("", [], {})
        if at.skip("loc"):
            at.balanced()
        while at.token.kind != "end":
            if not (at.token.kind == "word" and at.token.text.startswith("#")):
                at.fail("the end of the file")
            self._alias()
        if not self.entry:
            at.fail("a function @main")
        for op in (op for ops in self.ops.values() for op in ops.values()):
            if missing := set(op.calls) - set(self.ops):
                at.fail_at(
                    at.start(op.line), f"call {op.name} names @{missing.pop()}, which is none"
                )
        replicas, partitions = self.counts.values()
        return HloGraph(name, replicas, partitions, self.ops, self.entry, self.roots, self.meshes)

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
        if not 1 <= math.prod(self.counts.values()) <= MAX_PROGRAM_RANKS:
            self.at.fail_at(start, f"needs 1 to {MAX_PROGRAM_RANKS} replicas times partitions")

    def _region(
        self, computation: str, inner: list[_Op], scope: dict[str, tuple[str, str]]
    ) -> None:
        """Operations up to the brace that closes the region, whose arguments are in ``scope``."""
        at = self.at
        at.enter()
        self.scopes.append(scope)
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
        end = self._end()
        if op.name == "func.func":
            op.symbol = op.own = self._function()
        elif op.name in SCOPED:
            self.count += 1
            op.own = f"{computation}/{op.name.partition('.')[2]}.{self.count}"
        while self._goes_on(end):
            if at.has("{") and self._opens_region():
                self._own_region(op, computation)
            elif at.has("(") and at.ahead(1).text == "{":
                at.take()
                while not at.skip(")"):
                    at.skip(",")
                    if not at.has("{"):
                        at.fail("a region or ')'")
                    self._own_region(op, computation)
            elif at.has("{", "(", "[", "<"):
                self._bracket(op)
            else:
                self._word(op)
            end = self._end()
        self._add(op, computation)

    def _own_region(self, op: _Op, computation: str) -> None:
        """The next region of an operation."""
        self.at.take()
        if not op.own:
            self._region(computation, op.inner, {})
            return
        name = op.own
        if op.name == "stablehlo.while":
            name += "" if op.regions else ".condition"
        elif op.name in ("stablehlo.case", "stablehlo.if"):
            name += f".{len(op.regions)}"
        op.regions.append(name)
        ops = self.ops.setdefault(name, {})
        types = attributes.array_types(op.types) if op.name == "stablehlo.while" else ()
        for place, (value, own, sharding) in enumerate(op.arguments):
            if len(types) == len(op.arguments):
                own = types[place : place + 1]
            ops[value] = HloOp(
                value, "parameter", own, (), name, op.line, ints={"index": (place,)},
                texts={"sharding": sharding} if sharding else {},
            )  # fmt: skip
        self._region(name, op.inner, {value: (name, value) for value, _, _ in op.arguments})

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
        elif op.name == "func.func" and text.startswith("("):
            self._signature(op, text)
        elif op.name == "sdy.manual_computation" and op.operands and not op.types:
            op.arguments += attributes.signature(text) if text.startswith("(") else []
        elif op.name == "stablehlo.while" and text.startswith("("):
            named = [one.text == "=" for one in tokens[1:]]
            pairs = [one for one in zip(tokens, named, strict=False) if one[0].kind == "value"]
            op.arguments = [(token.text, (), "") for token, is_name in pairs if is_name]
            op.operands = [token.text for token, is_name in pairs if not is_name]
        elif not op.operands and text.startswith("("):
            op.operands = [token.text for token in tokens if token.kind == "value"]
        op.types += text if ":" in op.types else ""
        op.body += text

    def _signature(self, op: _Op, text: str) -> None:
        """A function's arguments, then its results, each with its sharding if it has one."""
        if op.types:
            self.results[op.own] = [sharding for _, _, sharding in attributes.signature(text)]
            return
        op.types = "("
        op.arguments = attributes.signature(text)

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
        """Files an operation, with what its regions read from around them."""
        if op.name == "sdy.mesh":
            self._mesh(op)
        if not computation:
            return
        opcode = op.name.removeprefix("stablehlo.")
        opcode = OPCODES.get(opcode, opcode.replace("_", "-"))
        if opcode == "dot" and "contracting_dims" not in op.body:
            opcode = "dot-general"  # in generic form, which is not read
        operands = [self._seen(operand, computation) for operand in op.operands]
        for region in op.regions:
            for around, name in self.captured.pop(region, ()):
                operands.append(self._reached(around, name, computation))
        made = HloOp(
            name=self._unused(op.results[0][0] if op.results else opcode, computation),
            opcode=opcode,
            types=attributes.array_types(op.types.rpartition("->")[2]),
            operands=tuple(operands),
            computation=computation,
            line=op.line,
            operand_types=attributes.array_types(op.types.rpartition("->")[0] or op.types),
        )
        if opcode == "return":
            made = self._returned(made)
        self.ops[computation][made.name] = self._detail(made, op)
        for result, _ in op.results:
            self.scopes[-1][result] = (computation, made.name)

    def _unused(self, name: str, computation: str) -> str:
        """A name: regions of one computation name their values anew."""
        while name in self.ops[computation]:
            name += "'"
        return name

    def _returned(self, made: HloOp) -> HloOp:
        """A return, of values that are constrained to the shardings of the function's results."""
        self.roots[made.computation] = made.name
        operands = list(made.operands)
        for place, sharding in enumerate(self.results.get(made.computation, ())):
            if sharding and place < len(operands):
                name = self._unused(f"result{place}", made.computation)
                constraint = HloOp(
                    name, "sdy.sharding-constraint", made.operand_types[place : place + 1],
                    (operands[place],), made.computation, made.line, texts={"sharding": sharding},
                )  # fmt: skip
                self.ops[made.computation][name] = constraint
                operands[place] = name
        return replace(made, operands=tuple(operands))

    def _seen(self, value: str, computation: str) -> str:
        """What a value in sight is called in ``ops``; ``%0#1`` keeps its place."""
        base, mark, place = value.partition("#")
        for scope in reversed(self.scopes):
            if base in scope:
                return self._reached(*scope[base], computation) + mark + place
        return value

    def _reached(self, around: str, name: str, computation: str) -> str:
        """What a value of the computation ``around`` is called in ``computation``."""
        if around == computation:
            return name
        self.captured.setdefault(computation, []).append((around, name))
        return f"{around}:{name}"

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
            if not made.types or not len(made.operands) == len(made.operand_types) == 2:
                self.at.fail_at(op.at, "dot_general needs two operands, their types and its own")
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
        if made.opcode == "sdy.manual-computation":
            for key, pattern in attributes.MANUAL.items():
                found = pattern.search(op.body)
                texts[key] = found[1] if found else ""
        calls = tuple(reversed(op.regions)) if op.regions else ()
        if made.opcode == "call" and op.symbol:
            calls = (op.symbol.removeprefix("@"),)
        made = replace(made, ints=ints, texts=texts, calls=calls)
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
    same = {op.results[0][0]: op.operands[0] for op in inner if _constrains(op)}
    inner = [op for op in inner if not _constrains(op)]
    names = [op.name.removeprefix("stablehlo.") for op in inner]
    if len(inner) == 2 and names[1] == "return":
        one, end = inner
        results = [result for result, _ in one.results]
        returned = [same.get(value, value) for value in end.operands]
        if len(set(one.operands)) == 2 == len(one.operands) and returned == results:
            return names[0]
    return " then ".join(names)


def _constrains(op: _Op) -> bool:
    """Whether it only says how a value is sharded."""
    return op.name == "sdy.sharding_constraint" and len(op.results) == len(op.operands) == 1
