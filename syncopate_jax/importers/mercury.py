"""Importer of Mercury's programs: loop nests over a device mesh with communication points.

Two forms are read: the text that Mercury prints of its own program (``str(program)``, see
``mercury_text``), whose communication is rings and reductions, and JSON that has the same parts
and names any communication at any loop level (``docs/importers.md`` has the schema).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from syncopate_jax.errors import FormatError, InputError, UnsupportedError
from syncopate_jax.importers import mercury_text
from syncopate_jax.importers.exchange import MAX_LISTED
from syncopate_jax.importers.json_fields import Field, read_json
from syncopate_jax.importers.mercury_nest import Buffer, LoopAxis, Nest, Point
from syncopate_jax.importers.program import ImportedCollective, ImportedProgram, Reader
from syncopate_jax.importers.replica_groups import (
    MAX_PROGRAM_RANKS,
    AxisRef,
    Groups,
    NamedMesh,
    make_mesh,
)
from syncopate_jax.ir.plan import ITEM_SIZES
from syncopate_jax.registry import importers

KINDS = ("ring", "double_ring", "all_gather", "all_to_all", "reduce_scatter", "all_reduce")
REDUCTIONS = {"torch.add": "sum", "torch.maximum": "max", "sum": "sum", "max": "max"}


def import_mercury(text: str) -> ImportedProgram:
    """The communication of a loop nest.

    A ring is an all-gather in which every rank hands on the block that it got last, ring inside
    ring for a double ring; one at loop level n is cut into the blocks of the n outer loops that
    index its buffer. A ring of a reduction is a reduce-scatter; a reduction over mesh dimensions
    without a ring is an all-reduce.

    Raises:
      FormatError: the text is malformed, or its parts contradict each other; names line or field.
    """
    stripped = text.lstrip()
    if not stripped:
        raise FormatError("mercury: the file is empty")
    nest = _from_json(text) if stripped.startswith(("{", "[")) else mercury_text.parse(text)
    return _Importer(nest).program()


importers.register("mercury")(Reader(import_mercury, "a Mercury loop nest, as printed or as JSON"))


@dataclass(frozen=True, slots=True)
class _Importer:
    nest: Nest

    def program(self) -> ImportedProgram:
        skipped: list[tuple[str, str]] = []
        found = []
        for i, point in enumerate(self.nest.points):
            try:
                found.append(self._collective(f"{point.buffer}:{point.kind}.{i}", point))
            except UnsupportedError as error:
                skipped.append((f"{point.buffer}:{point.kind}.{i}", str(error)))
            except (InputError, ValueError) as error:
                raise FormatError(f"mercury: {point.where}: {error}") from error
        return ImportedProgram(
            name=self.nest.name,
            source="mercury",
            num_ranks=math.prod(self.nest.mesh),
            collectives=tuple(found),
            skipped=tuple(skipped),
            notes=(("mesh", str(self.nest.mesh)), ("loops", self.nest.loops)),
        )

    def _collective(self, name: str, point: Point) -> ImportedCollective:
        buffer = self.nest.buffers[point.buffer]
        kind = "all_gather" if point.kind in ("ring", "double_ring") else point.kind
        axis = self._dimension(buffer, point.axis) if kind != "all_reduce" else -1
        to = self._dimension(buffer, point.to_axis) if kind == "all_to_all" else -1
        groups = self._groups(buffer, point, axis)
        members = len(groups[0])
        shape = list(buffer.shape)
        if kind == "reduce_scatter":
            shape[axis] *= members  # the buffer is what a rank ends with
        gathers = kind in ("all_gather", "all_to_all")
        steps = self._hops(point) if point.kind in ("ring", "double_ring") else ()
        joined = {axis, to} - {-1}
        cuts, repeats = self._cuts(buffer, point, set() if steps else joined)
        ring = kind == "reduce_scatter" and point.ring and len(point.mesh_dims) == 1
        notes = [("level", str(len(point.enclosing))), ("loops", " ".join(point.enclosing))]
        if repeats > 1:
            notes.append(("repeats", str(repeats)))
        return ImportedCollective(
            name=name,
            kind=kind,
            num_ranks=math.prod(self.nest.mesh),
            groups=groups,
            shape=tuple(shape),
            dtype=buffer.dtype,
            split_axis=to if kind == "all_to_all" else axis if kind == "reduce_scatter" else -1,
            concat_axis=axis if gathers else -1,
            reduce=REDUCTIONS.get(point.op, point.op) if point.op else "none",
            cuts=cuts,
            steps=steps,
            produced=bool(point.op),
            template="reduce_scatter_ring" if ring else "",
            notes=tuple(notes),
        )

    def _dimension(self, buffer: Buffer, axis: str) -> int:
        found = [d for d, names in enumerate(buffer.axes) if axis in names]
        if len(found) != 1:
            raise InputError(f"axis {axis!r} is bound to no dimension of buffer {buffer.name}")
        return found[0]

    def _groups(self, buffer: Buffer, point: Point, axis: int) -> Groups:
        """The ranks along the mesh dimensions, in the order in which the buffer's blocks lie."""
        dims = tuple(point.mesh_dims)
        if point.kind != "all_reduce":
            held = buffer.specs[axis]
            if sorted(held) != sorted(dims):
                raise UnsupportedError(
                    f"dimension {axis} of {buffer.name} is sharded over mesh dimensions "
                    f"{list(held)}, it communicates over {list(dims)}"
                )
            dims = held
        elif any(d in held for held in buffer.specs for d in dims):
            raise InputError(f"{buffer.name} is sharded over what it is reduced over, {list(dims)}")
        return self._mesh().groups([AxisRef(str(d)) for d in dims])

    def _mesh(self) -> NamedMesh:
        return make_mesh([(str(d), n) for d, n in enumerate(self.nest.mesh)], self.nest.devices)

    def _hops(self, point: Point) -> tuple[Groups, ...]:
        """One step along the innermost ring whose turn is not complete, as often as it takes."""
        sizes = [self.nest.mesh[d] for d in point.mesh_dims]
        hops = math.prod(self.nest.mesh) * (math.prod(sizes) - 1)
        if hops > MAX_LISTED:
            raise UnsupportedError(
                f"a ring of {math.prod(sizes)} ranks on a mesh of {math.prod(self.nest.mesh)} is "
                f"{hops} transfers, at most {MAX_LISTED} fit"
            )
        steps = []
        for step in range(1, math.prod(sizes)):
            ring, left = 0, step
            while left % sizes[ring] == 0:
                left //= sizes[ring]
                ring += 1
            steps.append(self._shift(point.mesh_dims[ring]))
        return tuple(steps)

    def _shift(self, dim: int) -> Groups:
        """Every rank sends to the next one along a mesh dimension."""
        rings = self._mesh().groups([AxisRef(str(dim))])
        return tuple(
            (rank, ring[(i + 1) % len(ring)]) for ring in rings for i, rank in enumerate(ring)
        )

    def _cuts(
        self, buffer: Buffer, point: Point, whole: set[int]
    ) -> tuple[tuple[tuple[int, int], ...], int]:
        """(dimension, parts) of the blocks that the loops around make, and how often each moves."""
        parts = [1] * len(buffer.shape)
        repeats = 1
        for name in point.enclosing:
            blocks = self.nest.axes[name].blocks
            at = [d for d, names in enumerate(buffer.axes) if name in names]
            if not at:
                repeats *= blocks
            elif at[0] in whole and blocks > 1:
                raise InputError(
                    f"loop {name} runs over blocks of dimension {at[0]} of {buffer.name}, which "
                    f"is communicated whole inside it; use a lower level"
                )
            else:
                parts[at[0]] *= blocks
        return tuple((d, n) for d, n in enumerate(parts) if n > 1), repeats


def _from_json(text: str) -> Nest:
    fields = read_json("mercury", text).fields(
        ("name", "mesh", "axes", "buffers", "loops", "communication")
    )
    mesh = fields["mesh"].fields(("shape",), ("devices",))
    shape = mesh["shape"].integers(1, MAX_PROGRAM_RANKS)
    if not shape or math.prod(shape) > MAX_PROGRAM_RANKS:
        mesh["shape"].fail(f"1 to {MAX_PROGRAM_RANKS} devices in all")
    devices = mesh["devices"].integers(0, MAX_PROGRAM_RANKS) if "devices" in mesh else None
    count = math.prod(shape)
    if devices is not None and sorted(devices) != list(range(count)):
        mesh["devices"].fail(f"the {count} device numbers from 0 on, each once")
    axes = {name: _axis(item) for name, item in fields["axes"].members().items()}
    loops = fields["loops"].each(lambda item: _loop(item, axes))
    buffers = {
        name: _buffer(name, item, axes, len(shape))
        for name, item in fields["buffers"].members().items()
    }
    return Nest(
        name=fields["name"].text(),
        mesh=shape,
        devices=devices or tuple(range(count)),
        axes=axes,
        buffers=buffers,
        points=tuple(
            _point(item, buffers, axes, loops, len(shape))
            for item in fields["communication"].items()
        ),
        loops=" / ".join(f"{','.join(names)}:{types}" for names, types in loops),
    )


def _axis(item: Field) -> LoopAxis:
    fields = item.fields(("size",), ("block",))
    size = fields["size"].integer(1)
    block = fields["block"].integer(1, size) if "block" in fields else size
    return LoopAxis(size, block)


def _loop(item: Field, axes: dict[str, LoopAxis]) -> tuple[tuple[str, ...], str]:
    fields = item.fields(("axes", "types"))
    names = fields["axes"].each(lambda axis: axis.one_of(tuple(axes)))
    types = fields["types"].text()
    if len(types) != len(names) or set(types) - set("srm"):
        fields["types"].fail(f"a letter of s, r, m for each of the {len(names)} axes")
    return names, types


def _buffer(name: str, item: Field, axes: dict[str, LoopAxis], ndim_mesh: int) -> Buffer:
    fields = item.fields(("shape", "axes", "specs", "dtype"))
    shape = fields["shape"].integers(1)
    bound = fields["axes"].each(lambda dim: dim.each(lambda axis: axis.one_of(tuple(axes))))
    specs = fields["specs"].each(
        lambda dim: () if dim.value == "R" else dim.integers(0, ndim_mesh - 1)
    )
    if not len(shape) == len(bound) == len(specs) or not shape:
        item.fail("shape, axes and specs of one length, at least 1")
    used = [d for dims in specs for d in dims]
    if len(set(used)) != len(used):
        fields["specs"].fail("each mesh dimension at most once")
    return Buffer(name, shape, bound, specs, fields["dtype"].one_of(sorted(ITEM_SIZES)))


def _point(
    item: Field,
    buffers: dict[str, Buffer],
    axes: dict[str, LoopAxis],
    loops: Sequence[tuple[tuple[str, ...], str]],
    ndim_mesh: int,
) -> Point:
    kind = item.members()["kind"].one_of(KINDS) if "kind" in item.members() else ""
    more = {
        "all_to_all": ("axis", "to_axis"), "reduce_scatter": ("axis", "op"), "all_reduce": ("op",),
    }.get(kind, ("axis",))  # fmt: skip
    optional = ("ring",) if kind == "reduce_scatter" else ()
    fields = item.fields(("kind", "buffer", "mesh_dims", "level", *more), optional)
    dims = fields["mesh_dims"].integers(0, ndim_mesh - 1)
    wanted = {"ring": 1, "double_ring": 2}.get(kind, len(dims) or 1)
    if len(set(dims)) != len(dims) or len(dims) != wanted:
        fields["mesh_dims"].fail(f"{wanted} different mesh dimensions, the innermost ring's first")
    level = fields["level"].integer(0, len(loops))
    return Point(
        kind=kind,
        buffer=fields["buffer"].one_of(tuple(buffers)),
        axis=fields["axis"].one_of(tuple(axes)) if "axis" in fields else "",
        to_axis=fields["to_axis"].one_of(tuple(axes)) if "to_axis" in fields else "",
        mesh_dims=dims,
        enclosing=tuple(_flat(names for names, _ in loops[:level])),
        op=fields["op"].one_of(("sum", "max")) if "op" in fields else "",
        ring="ring" in fields and fields["ring"].flag(),
        where=item.path,
    )


def _flat(rows: Iterator[tuple[str, ...]]) -> Iterator[str]:
    for row in rows:
        yield from row
