"""Parser of StableHLO and Shardy text, as ``jit(f).lower(…).as_text()`` gives it.

MLIR's own grammar is open-ended, so an operation is read by its outline: results, name, brackets
that match, and regions, which are the braces that end their line. Of collectives, contractions and
what may lie between them the attributes are read as well.
"""

from __future__ import annotations

import math
import re
import struct
from dataclasses import dataclass, field, replace

from syncopate_jax.importers.hlo_ops import DTYPES, ArrayType, HloGraph, HloOp
from syncopate_jax.importers.replica_groups import (
    MAX_RANKS,
    AxisRef,
    Groups,
    NamedMesh,
    make_mesh,
)
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
_TENSOR = re.compile(r"tensor<((?:(?:\d{1,18}|\?)x)*)([A-Za-z]\w*)(?:,[^<>]*(?:<[^<>]*>)?)?>")
_ARGUMENT = re.compile(r"(%[\w.]+): (tensor<[^<>]*>)( \{[^{}]*(?:\{[^{}]*\}[^{}]*)*\})?")
_INT = re.compile(r"(-?\d{1,18})(?: : i\d+)?", re.ASCII)
_DENSE = re.compile(
    r'dense<(\[.*\]|-?\d{1,18}|"0x[0-9A-Fa-f]*")?> : tensor<(\d{1,9})x(\d{1,9})xi64>', re.DOTALL
)
_MESH_AXIS = re.compile(r'"([^"]*)"=(\d{1,9})')
_MESH_AXIS_INLINE = re.compile(r'mesh_axis<name = "([^"]*)", size = (\d{1,9})[^<>]*>')
_PART = r"\((\d{1,9})\)(\d{1,9})"
_AXIS_REF = re.compile(
    rf'axis_ref(?:<name = "([^"]*)"(?:, sub_axis_info = {_PART})?|"([^"]*)"(?::{_PART})?)>'
)
OPCODES = {
    "dot_general": "dot",
    "custom_call": "custom-call",
    "collective_broadcast": "collective-broadcast",
}
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
    inner: list[str] = field(
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
        return HloGraph(name, *self.counts.values(), self.ops, self.entry, {}, self.meshes)

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

    def _region(self, computation: str, inner: list[str]) -> None:
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

    def _operation(self, computation: str, inner: list[str]) -> None:
        at = self.at
        results = self._results()
        if at.token.kind not in ("word", "string"):
            at.fail("an operation or '}'")
        token = at.take()
        op = _Op(results, token.text.strip('"'), at.line(token.at), token.at)
        inner.append(op.name)
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
            op.attributes |= _attributes(text)
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
        for found in _ARGUMENT.finditer(text):
            types = _array_types(found[2])
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
            types=_array_types(op.types.rpartition("->")[2]),
            operands=tuple(self._seen(operand) for operand in op.operands),
            computation=computation,
            line=op.line,
            operand_types=_array_types(op.types.rpartition("->")[0] or op.types),
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
                    ints[f"{'lr'[side - 1]}hs_{key}_dims"] = _numbers(text)
            if not made.types:
                self.at.fail_at(op.at, "dot_general needs the types of its operands and result")
        if made.opcode == "transpose":
            found = re.search(r"dims=\[([\d, ]*)\]", op.body)
            if found is None:
                self.at.fail_at(op.at, "transpose needs dims = [...]")
            ints["dimensions"] = _numbers(found[1])
        texts = {}
        if "sdy.sharding" in op.attributes:
            texts["sharding"] = op.attributes["sdy.sharding"]
        if made.opcode == "sdy.sharding-constraint":
            texts["sharding"] = "".join(re.findall(r"<@.*>(?=:)", op.body))
        made = replace(made, ints=ints, texts=texts)
        if made.opcode.removesuffix("-start") not in COLLECTIVES:
            return made
        inner = [name for name in op.inner if name.startswith("stablehlo.")]
        reducer = inner[-2].removeprefix("stablehlo.") if len(inner) > 1 else ""
        if len(inner) > 2:
            reducer = "+".join(name.removeprefix("stablehlo.") for name in inner[:-1])
        return replace(
            made,
            groups=self._groups(op),
            channel="handle = 0" not in op.attributes.get("channel_handle", "handle = 0"),
            global_ids="use_global_device_ids" in op.attributes,
            reducer=reducer,
        )

    def _integer(self, op: _Op, key: str) -> int:
        found = _INT.fullmatch(op.attributes[key])
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
                return self._mesh_groups(text)
            return _dense(text)
        except ValueError as error:
            self.at.fail_at(op.at, f"{op.name}: {key}: {error}")

    def _mesh_groups(self, text: str) -> Groups:
        head, _, tail = text.partition("axes = [#")
        inline = _MESH_AXIS_INLINE.findall(text)
        if inline:
            mesh = make_mesh([(name, int(size)) for name, size in inline])
            if "device_ids" in text:
                raise ValueError(f"{text[:80]!r}: devices in another order are not read")
            tail = text.rpartition("axes = [")[2]
        else:
            found = re.search(r"mesh = @([\w.$\-]+)", head)
            if found is None or found[1] not in self.meshes:
                raise ValueError(f"{head.strip()!r} names no mesh; known: {sorted(self.meshes)}")
            mesh = self.meshes[found[1]]
        refs = [
            AxisRef(a or b, int(c or e or 1), int(d or f or 0))
            for a, c, d, b, e, f in _AXIS_REF.findall(tail if inline else "#" + tail)
        ]
        if len(refs) != text.count("axis_ref"):
            raise ValueError(f"{text[:80]!r}: an axis reference is not understood")
        return mesh.groups(refs)

    def _mesh(self, op: _Op) -> None:
        body = op.body.partition("{")[0]
        devices = re.search(r"device_ids=\[([\d, ]*)\]", body)
        axes = [(name, int(size)) for name, size in _MESH_AXIS.findall(body)]
        try:
            ids = _numbers(devices[1]) if devices else None
            if not axes and ids is not None and len(ids) == 1:
                return  # one device: shards nothing
            self.meshes[op.symbol.removeprefix("@")] = make_mesh(axes, ids)
        except ValueError as error:
            self.at.fail_at(op.at, f"mesh {op.symbol}: {error}")


COLLECTIVES = (
    "all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute",
    "collective-broadcast",
)  # fmt: skip


def _attributes(text: str) -> dict[str, str]:
    """Entries of ``{key = value, …}`` or ``<{…}>``; a unit attribute has an empty value."""
    inner = text.strip("<>").strip()[1:-1]
    parts, depth, start, quoted = [], 0, 0, False
    for i, c in enumerate(inner):
        if c == '"' and inner[i - 1 : i] != "\\":
            quoted = not quoted
        if quoted:
            continue
        if c in "([{<":
            depth += 1
        elif c in ")]}" or (c == ">" and inner[i - 1 : i] != "-"):
            depth -= 1
        elif c == "," and not depth:
            parts.append(inner[start:i])
            start = i + 1
    parts.append(inner[start:])
    found = (part.partition("=") for part in parts if part.strip())
    return {key.strip().strip('"'): value.strip() for key, _, value in found}


def _array_types(text: str) -> tuple[ArrayType, ...]:
    """The types of the arrays in ``text``, those left out whose extents are not known."""
    found = _TENSOR.findall(text)
    return tuple(
        ArrayType(DTYPES.get(dtype, dtype), tuple(int(n) for n in dims.split("x") if n))
        for dims, dtype in found
        if "?" not in dims
    )


def _dense(text: str) -> Groups:
    """``dense<[[0, 1], [2, 3]]> : tensor<2x2xi64>``, one number for all, or bytes in hex."""
    found = _DENSE.fullmatch(text.strip())
    if found is None:
        raise ValueError(f"{text[:60]!r} is no dense table of two dimensions")
    body, rows, columns = found[1] or "", int(found[2]), int(found[3])
    if rows * columns > 2 * MAX_RANKS:
        raise ValueError(f"{rows}x{columns} numbers are more than {MAX_RANKS} ranks need")
    if body.startswith('"0x'):
        data = bytes.fromhex(body[3:-1]) if len(body) % 2 == 0 else b""
        if len(data) not in (8, 8 * rows * columns):
            raise ValueError(f"{len(data)} bytes are no {rows}x{columns} numbers of 64 bits")
        flat = list(struct.unpack(f"<{len(data) // 8}q", data))
    else:
        flat = [int(n) for n in re.findall(r"-?\d{1,18}", body)]
    if len(flat) == 1:
        flat *= rows * columns
    if len(flat) != rows * columns:
        raise ValueError(f"{len(flat)} numbers do not fill {rows}x{columns}")
    cut = [flat[i * columns : (i + 1) * columns] for i in range(rows)]
    # Groups of different sizes are filled up with -1.
    return tuple(tuple(rank for rank in row if rank != -1) for row in cut)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in re.findall(r"\d{1,18}", text))
