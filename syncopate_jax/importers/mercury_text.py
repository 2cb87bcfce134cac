"""Parser of the text that Mercury prints of its program, ``str(program)``.

What is read, line by line; a line's indentation says in which loops it stands::

    program := Program(NAME)  Inputs: …  Defaults: …  Outputs: …  Body: {line}
    line    := Axis(name=NAME, size=N, min_block_size=N, …, ring_comm=[…], ring_comm_cards=N)
             | NAME: Buffer(name = NAME, shape=[…], axes=[…], shard_spec=ShardingSpec(…), …)
             | Grid(NAME, …, types=LETTERS)  Body:
             | TARGET = NAME[…] rings                              a load
             | NAME[…] = VALUE rings                               a store
             | OP(NAME[…], …) (collective_op=…) rings with shard_dim=[…]
             | PyNode(…)                                           passed over
    rings   := [ {RingComm(axis=Axis(…), num_cards=N, name=NAME, shard_dim=N, write_back=BOOL)} ]
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any, NoReturn

from syncopate_jax.errors import FormatError
from syncopate_jax.importers.mercury_nest import Buffer, LoopAxis, Nest, Point
from syncopate_jax.importers.mercury_values import Call, read_value
from syncopate_jax.importers.replica_groups import MAX_PROGRAM_RANKS
from syncopate_jax.importers.scanner import Cursor, Language
from syncopate_jax.ir.plan import ITEM_SIZES

LANGUAGE = Language(
    "mercury",
    re.compile(
        r"(?P<space>\s+)|(?P<string>'(?:[^'\\\n]|\\.)*'|\"(?:[^\"\\\n]|\\.)*\")"
        r"|(?P<word>[A-Za-z_][\w.]*)|(?P<number>-?\d+(?:\.\d*)?(?:[eE][-+]?\d+)?)"
        r"|(?P<mark>[^\s\w'\"])",
        re.ASCII,
    ),
)
_HEADS = ("Inputs", "Defaults", "Outputs")


@dataclass(slots=True)
class _Ring:
    axis: str
    cards: int
    name: str
    mesh_dim: int


def parse(text: str) -> Nest:
    """The loop nest in ``text``; raises FormatError with the line."""
    return _Parser(text).program()


class _Parser:
    def __init__(self, text: str):
        self.at = Cursor(LANGUAGE, text)
        self.axes: dict[str, LoopAxis] = {}
        self.promised: set[str] = set()  # rings that axes name
        self.rings: set[str] = set()
        self.buffers: dict[str, Buffer] = {}
        self.stored: set[str] = set()
        self.outputs: dict[str, int] = {}  # buffers that must be stored, and their lines
        self.meshes: set[tuple[tuple[int, ...], tuple[int, ...]]] = set()
        self.grids: list[tuple[int, tuple[str, ...], str]] = []
        self.every_loop: list[str] = []
        self.points: list[Point] = []
        self.line = 1

    def program(self) -> Nest:
        at = self.at
        at.expect("Program")
        at.expect("(")
        name = at.of("word", "the program's name")
        at.expect(")")
        for head in _HEADS:
            at.expect(head)
            at.expect(":")
            self._rest()
        at.expect("Body")
        at.expect(":")
        while at.token.kind != "end":
            self._statement()
        self._finish()
        ((shape, devices),) = self.meshes
        return Nest(
            name, shape, devices, self.axes, self.buffers, tuple(self.points),
            " / ".join(self.every_loop),
        )  # fmt: skip

    def _rest(self) -> None:
        """Past the rest of the line."""
        at = self.at
        line = at.line(at.tokens[at.place - 1].at)
        while at.token.kind != "end" and at.line() == line:
            at.balanced() if at.has("(", "[", "{") else at.take()

    def _statement(self) -> None:
        at = self.at
        self.line = at.line()
        column = at.token.at - at.text.rfind("\n", 0, at.token.at)
        while self.grids and column <= self.grids[-1][0]:
            self.grids.pop()
        after = at.ahead(1).text
        if at.has("Axis") and after == "(":
            self._axis(read_value(self.at))
        elif at.has("Grid") and after == "(":
            self._grid(column)
        elif at.has("PyNode") and after == "(":
            at.take()
            at.balanced()
            if at.skip("="):
                self._load()
        elif after == ":":
            self._buffer()
        elif after == "=":
            at.take()
            at.take()
            self._load()
        elif after == "[":
            self._store()
        elif after == "(":
            self._reduce()
        else:
            at.fail("an axis, a buffer, a grid, a load, a store, a reduction or PyNode(…)")
        if at.token.kind != "end" and at.line() == at.line(at.tokens[at.place - 1].at):
            at.fail("the end of the line")

    def _axis(self, call: Any) -> None:
        name, cards = _word(self, call, "name"), _count(self, call, "ring_comm_cards")
        size, block = _count(self, call, "size"), _count(self, call, "min_block_size")
        if size % cards or block > size // cards:
            self.fail(f"axis {name} of {size}, {cards} cards and blocks of {block} does not fit")
        if name in self.axes:
            self.fail(f"axis {name} is defined twice")
        self.axes[name] = LoopAxis(size // cards, block)
        rings = call.named.get("ring_comm")
        if not isinstance(rings, list):
            self.fail(f"axis {name} needs ring_comm=[…]")
        self.promised |= {str(ring) for ring in rings}

    def _grid(self, column: int) -> None:
        call = read_value(self.at)
        types = call.named.get("types")
        names = tuple(map(str, call.positional))
        if not isinstance(types, str) or len(types) != len(names) or set(types) - set("srm"):
            self.fail(f"grid over {', '.join(names)} needs a letter of s, r, m for each axis")
        if unknown := [name for name in names if name not in self.axes]:
            self.fail(f"grid over {unknown[0]}, which is no axis")
        self.at.expect("Body")
        self.at.expect(":")
        self.grids.append((column, names, types))
        self.every_loop.append(f"{','.join(names)}:{types}")

    def _buffer(self) -> None:
        at = self.at
        outer = at.take().text
        at.expect(":")
        call = read_value(self.at)
        if not isinstance(call, Call) or call.name != "Buffer":
            self.fail("needs Buffer(…)")
        name = _word(self, call, "name")
        extents, bound = call.named.get("shape"), call.named.get("axes")
        spec = call.named.get("shard_spec")
        if not isinstance(extents, list) or not isinstance(bound, list):
            self.fail(f"buffer {name} needs shape=[…] and axes=[…]")
        if not isinstance(spec, Call) or "specs" not in spec.named:
            self.fail(f"buffer {name} needs shard_spec=ShardingSpec(mesh=…, specs=…)")
        specs = tuple(self._spec(name, one) for one in [spec.named["specs"], *spec.positional])
        self._mesh(spec.named.get("mesh"))
        shape = tuple(self._extent(name, one) for one in extents)
        axes = tuple(tuple(map(str, one)) if isinstance(one, list) else () for one in bound)
        if not len(shape) == len(axes) == len(specs) or not shape:
            self.fail(f"buffer {name} needs shape, axes and specs of one length")
        if unknown := [axis for dim in axes for axis in dim if axis not in self.axes]:
            self.fail(f"buffer {name} is bound to {unknown[0]}, which is no axis")
        dtype = str(call.named.get("dtype", "")).removeprefix("torch.")
        dtype = {"float": "float32", "half": "float16"}.get(dtype, dtype)
        if dtype not in ITEM_SIZES or name in self.buffers:
            self.fail(f"buffer {name} needs a known dtype and a name of its own, found {dtype!r}")
        self.buffers[name] = Buffer(name, shape, axes, specs, dtype)
        if outer != "None" and call.named.get("write") == "True":
            self.outputs[name] = self.line

    def _extent(self, name: str, value: Any) -> int:
        """An extent, or that of an axis on one rank."""
        if isinstance(value, Call) and value.name == "Axis":
            axis = _word(self, value, "name")
            if axis in self.axes:
                return self.axes[axis].size
        elif type(value) is int and value > 0:
            return value
        self.fail(f"buffer {name} needs extents above 0, or axes that are defined")

    def _spec(self, name: str, value: Any) -> tuple[int, ...]:
        if value == "R":
            return ()
        if isinstance(value, tuple) and len(value) == 2 and value[0] == "S":
            dims = value[1]
            if isinstance(dims, list) and dims and all(type(d) is int and d >= 0 for d in dims):
                return tuple(dims)
        self.fail(f"buffer {name} needs R or (S, [mesh dimensions]) for each dimension")

    def _mesh(self, value: Any) -> None:
        named = value.named if isinstance(value, Call) else {}
        devices: Any = named.get("devices")
        shape: Any = named.get("shape")
        flat = [*(devices or ()), *(shape or ())] if isinstance(shape, tuple) else [None]
        if not isinstance(devices, list) or not all(type(n) is int for n in flat):
            self.fail("needs DeviceMesh(devices=[…], shape=(…))")
        count = math.prod(shape) if min(shape, default=0) > 0 else 0
        if not 0 < count <= MAX_PROGRAM_RANKS or sorted(devices) != list(range(count)):
            self.fail(f"mesh {shape} needs the devices from 0 on, each once")
        self.meshes.add((shape, tuple(devices)))
        if len(self.meshes) > 1:
            self.fail("buffers lie on different meshes")

    def _load(self) -> None:
        name = self._indexed()
        rings = self._rings()
        if any(write_back for _, write_back in rings):
            self.fail(f"a load of {name} cannot write back")
        if rings:
            kind = {1: "ring", 2: "double_ring"}.get(len(rings))
            if kind is None:
                self.fail(f"{len(rings)} rings inside each other; at most two are read")
            self._point(kind, name, [ring for ring, _ in rings], "", ring=True)

    def _store(self) -> None:
        at = self.at
        name = self._indexed()
        at.expect("=")
        while at.token.kind != "end" and not at.has("["):
            at.balanced() if at.has("(", "{") else at.take()
        if self._rings():
            self.fail(f"a ring of what is stored to {name} is not read")
        self.outputs.pop(name, None)
        self.stored.add(name)

    def _reduce(self) -> None:
        at = self.at
        op = at.of("word", "a reduction")
        name = at.ahead(1).text
        self._known(name)
        at.balanced()
        at.balanced()
        rings = [ring for ring, _ in self._rings()]
        at.expect("with")
        at.expect("shard_dim")
        at.expect("=")
        dims = at.integers("[", "]")
        if rings:
            self._point("reduce_scatter", name, rings, op, ring=True)
        left = [d for d in dims if d not in [ring.mesh_dim for ring in rings]]
        if left:
            self._add("all_reduce", name, "", tuple(left), op, ring=False)

    def _indexed(self) -> str:
        name = self.at.of("word", "a buffer's name")
        self._known(name)
        if not self.at.has("["):
            self.at.fail("'[' and what is indexed")
        self.at.balanced()
        return name

    def _known(self, name: str) -> None:
        if name not in self.buffers:
            self.fail(f"{name!r} is no buffer; known: {', '.join(self.buffers)}")

    def _rings(self) -> list[tuple[_Ring, bool]]:
        at = self.at
        if not at.has("["):
            at.fail("the rings in '[' and ']', last on the line")
        found: list[tuple[_Ring, bool]] = []
        for call in read_value(self.at):
            if not isinstance(call, Call) or call.name != "RingComm":
                self.fail("needs RingComm(…)")
            axis = call.named.get("axis")
            name = axis.named.get("name") if isinstance(axis, Call) else None
            dim = call.named.get("shard_dim")
            if name not in self.axes or type(dim) is not int or dim < 0:
                self.fail("a ring needs axis=Axis(…) that is defined, and shard_dim")
            back = call.named.get("write_back")
            if back not in ("True", "False"):
                self.fail("a ring needs write_back")
            cards = _count(self, call, "num_cards")
            found.append((_Ring(str(name), cards, _word(self, call, "name"), dim), back == "True"))
        self.rings |= {ring.name for ring, _ in found}
        return found

    def _point(self, kind: str, buffer: str, rings: list[_Ring], op: str, *, ring: bool) -> None:
        shape = next(iter(self.meshes))[0]
        for one in rings:
            if one.mesh_dim >= len(shape) or shape[one.mesh_dim] != one.cards:
                self.fail(
                    f"ring {one.name} of {one.cards} cards along dimension {one.mesh_dim} of mesh "
                    f"{shape}"
                )
        dims = {
            d for one in rings for d, names in enumerate(self.buffers[buffer].axes)
            if one.axis in names
        }  # fmt: skip
        if len(dims) != 1:
            self.fail(f"rings of {buffer} along {len(dims)} of its dimensions; one is read")
        mesh_dims = tuple(one.mesh_dim for one in rings)
        self._add(kind, buffer, rings[0].axis, mesh_dims, op, ring=ring)

    def _add(
        self, kind: str, buffer: str, axis: str, dims: tuple[int, ...], op: str, *, ring: bool
    ) -> None:
        shape = next(iter(self.meshes))[0]
        if len(set(dims)) != len(dims) or max(dims) >= len(shape):
            self.fail(f"mesh {shape} has no different dimensions {list(dims)}")
        # The loop over the reduced axis ends before a result leaves it.
        grids = self.grids if not op else [grid for grid in self.grids if "m" not in grid[2]]
        enclosing = tuple(name for _, names, _ in grids for name in names)
        bound = {name for names in self.buffers[buffer].axes for name in names}
        if kind == "reduce_scatter":
            enclosing = tuple(name for name in enclosing if name != axis)
        if op:
            enclosing = tuple(name for name in enclosing if name in bound)
        self.points.append(
            Point(kind, buffer, axis, "", dims, enclosing, op, ring, f"line {self.line}")
        )

    def _finish(self) -> None:
        if not self.meshes:
            self.fail("the program has no buffer on a mesh")
        if not self.stored and not self.outputs:
            self.fail("the program stores nothing; was the file cut?")
        if missing := sorted(self.promised - self.rings):
            self.fail(f"axes name ring {missing[0]}, which no line has; was the file cut?")
        if extra := sorted(self.rings - self.promised):
            self.fail(f"ring {extra[0]} is named by no axis")
        for name, line in self.outputs.items():
            self.line = line
            self.fail(f"buffer {name} is written, but no line stores it; was the file cut?")

    def fail(self, message: str) -> NoReturn:
        raise FormatError(f"mercury: line {self.line}: {message}")


def _word(parser: _Parser, call: Any, key: str) -> str:
    value = call.named.get(key) if isinstance(call, Call) else None
    if not isinstance(value, str) or not value:
        parser.fail(f"needs {key}=NAME")
    return value


def _count(parser: _Parser, call: Any, key: str) -> int:
    value = call.named.get(key) if isinstance(call, Call) else None
    if type(value) is not int or value < 1:
        parser.fail(f"needs {key}=N, an integer of at least 1")
    return value
