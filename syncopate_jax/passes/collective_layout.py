"""Where a template's chunks lie in the buffers of a collective's members.

A template speaks of its own tensors and of ranks 0, 1, …; a collective of what each member
contributes and receives. A *layout* gives, for a member and a box of the template, the chunk to
read and the chunk to write, and the copies that must be made first.
"""

from __future__ import annotations

import abc
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from syncopate_jax.ir.chunk import Box, Chunk, split_points
from syncopate_jax.ir.comm import P2P, Collective


@dataclass(frozen=True, slots=True)
class Copy:
    """A copy within the member at ``place``; if ``first``, what touches its destination waits."""

    place: int
    src: Chunk
    dst: Chunk
    first: bool


def template_arguments(parts: Sequence[Collective]) -> dict[str, Any]:
    """The arguments of a template that does what ``parts``, one a member, do together."""
    head = parts[0]
    shape = head.src.box.shape
    size = len(parts)
    if head.kind == "all_gather":
        axis = head.concat_axis
        shards = tuple(part.src.box.shape[axis] for part in parts)
        return {
            "num_ranks": size, "shape": _with(shape, axis, sum(shards)), "axis": axis,
            "shards": shards,
        }  # fmt: skip
    if head.kind == "reduce_scatter":
        axis = head.split_axis
        shards = tuple(part.dst.box.shape[axis] for part in parts)
        return {
            "num_ranks": size, "shape": shape, "axis": axis, "shards": shards,
            "reduce": head.reduce, "produced": False,
        }  # fmt: skip
    if head.kind == "all_reduce":
        axis = max(range(len(shape)), key=lambda i: (shape[i] >= size, -i), default=0)
        return {
            "num_ranks": size, "shape": shape, "axis": axis, "reduce": head.reduce,
            "produced": False,
        }  # fmt: skip
    if head.kind == "broadcast":
        return {"num_ranks": size, "shape": shape}
    return _all_to_all_arguments(parts)


def _all_to_all_arguments(parts: Sequence[Collective]) -> dict[str, Any]:
    split, concat = parts[0].split_axis, parts[0].concat_axis
    shape, size = parts[0].src.box.shape, len(parts)
    sent = tuple(part.src.box.shape[concat] for part in parts)
    if split != concat:
        return {
            "num_ranks": size,
            "shape": _with(shape, concat, sum(sent)),
            "split_from": concat,
            "split_to": split,
            "shards": sent,
            "shards_to": tuple(part.dst.box.shape[split] for part in parts),
        }
    cuts = (split_points(extent, size) for extent in sent)
    counts = tuple(tuple(b - a for a, b in itertools.pairwise(cut)) for cut in cuts)
    return {"num_ranks": size, "shape": _with(shape, split, max(sent)), "axis": split,
            "counts": counts}  # fmt: skip


RELAYED = 2
"""Position of the tensor in which an all-to-all's blocks rest on their way, where it has one."""


def tensors_needed(part: Collective) -> int:
    """How many tensors a template for this collective has: the last is what members receive."""
    same_axis = part.kind == "all_to_all" and part.split_axis == part.concat_axis
    return 2 if part.kind == "all_reduce" or same_axis else 1


def make_layout(
    parts: Sequence[Collective], ops: Sequence[P2P], scratch: str, shapes: Sequence[tuple[int, ...]]
) -> Layout:
    """The layout of a collective for a template's operations ``ops``.

    ``scratch`` names a tensor for partial results that the template leaves where neither the
    contribution nor the result may be overwritten, and for blocks of an all-to-all that a member
    hands on to others. ``shapes`` are those of the template's tensors.
    """
    kind = parts[0].kind
    if kind in ("reduce_scatter", "all_reduce"):
        return ReducingLayout(tuple(parts), scratch, tuple(ops))
    return MovingLayout(tuple(parts), scratch, tuple(ops), tuple(shapes))


@dataclass(frozen=True, slots=True)
class Layout(abc.ABC):
    """Places of a template's chunks for the members ``parts`` of one collective."""

    parts: tuple[Collective, ...]

    @abc.abstractmethod
    def read(self, place: int, tensor: int, box: Box) -> Chunk:
        """Where the member at ``place`` holds ``box`` of the template's tensor to be read."""

    @abc.abstractmethod
    def write(self, place: int, tensor: int, box: Box) -> Chunk:
        """Where it receives ``box``."""

    @property
    @abc.abstractmethod
    def scratch_shape(self) -> tuple[int, ...] | None:
        """Extents of the scratch tensor, None where none is needed."""

    @abc.abstractmethod
    def copies(self) -> list[Copy]:
        """Copies within members, for what stays on its rank or is added to."""


@dataclass(frozen=True, slots=True)
class MovingLayout(Layout):
    """Contributions are read where they are; all that arrives lies in the results.

    What a member only hands on lies in scratch, which has the template's own coordinates.
    """

    scratch: str
    ops: tuple[P2P, ...]
    shapes: tuple[tuple[int, ...], ...]

    @property
    def scratch_shape(self) -> tuple[int, ...] | None:
        if len(self.shapes) > 2:
            return self.shapes[RELAYED]
        relayed = any(self._relayed(op.dst_rank, 0, op.dst.box) for op in self.ops)
        return self.shapes[0] if relayed else None

    def _relayed(self, place: int, tensor: int, box: Box) -> bool:
        """Whether the member at ``place`` receives ``box`` only to hand it on."""
        part = self.parts[place]
        if part.kind != "all_to_all" or part.split_axis == part.concat_axis:
            return tensor == RELAYED
        axis = part.split_axis
        low = _before(self.parts, "dst", axis, place)
        high = low + part.dst.box.shape[axis]
        return not low <= box.lo[axis] <= box.hi[axis] <= high

    def read(self, place: int, tensor: int, box: Box) -> Chunk:
        own = self._own(place)
        if tensor == RELAYED:
            return Chunk(self.scratch, box)
        if own is not None and own.contains(box):
            return _at(self.parts[place].src, box, own.lo)
        return self.write(place, tensor, box)

    def write(self, place: int, tensor: int, box: Box) -> Chunk:
        part = self.parts[place]
        if self._relayed(place, tensor, box):
            return Chunk(self.scratch, box)
        base = [0] * box.ndim
        if part.kind == "all_to_all" and part.split_axis != part.concat_axis:
            base[part.split_axis] = _before(self.parts, "dst", part.split_axis, place)
        return _at(part.dst, box, tuple(base))

    def copies(self) -> list[Copy]:
        part = self.parts[0]
        if part.kind == "broadcast":
            return [Copy(0, part.src, part.dst, False)]
        if part.kind == "all_to_all" and part.split_axis == part.concat_axis:
            return []  # the template copies what stays
        copies = []
        for place in range(len(self.parts)):
            box = self._own(place)
            assert box is not None  # only a broadcast has members that contribute nothing
            if part.kind == "all_to_all":
                low = _before(self.parts, "dst", part.split_axis, place)
                extent = self.parts[place].dst.box.shape[part.split_axis]
                box = box.with_axis(part.split_axis, low, low + extent)
            copies.append(Copy(place, self.read(place, 0, box), self.write(place, 0, box), False))
        return copies

    def _own(self, place: int) -> Box | None:
        """The box of the template's tensor that the member contributes."""
        part = self.parts[place]
        box = Box.full(part.src.box.shape)
        if part.kind == "broadcast":
            return box if place == 0 else None
        if part.kind == "all_to_all" and part.split_axis == part.concat_axis:
            return box
        low = _before(self.parts, "src", part.concat_axis, place)
        return box.with_axis(part.concat_axis, low, low + box.shape[part.concat_axis])


@dataclass(frozen=True, slots=True)
class ReducingLayout(Layout):
    """Partial results are added up in the results, or else in scratch; other data is only read.

    A contribution is never overwritten, except where it is the result as well. Where some of a
    member's result is added up together with what is not, all of it is in scratch, and is copied at
    the end.
    """

    scratch: str
    ops: tuple[P2P, ...]
    sums: tuple[dict[Box, None], ...] = field(init=False, repr=False)
    apart: tuple[bool, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        sums: tuple[dict[Box, None], ...] = tuple({} for _ in self.parts)
        for op in self.ops:
            if op.reduce != "none" and op.dst.tensor == op.src.tensor:
                sums[op.dst_rank][op.dst.box] = None  # else added to in the result itself
        for place, part in enumerate(self.parts):
            own = self._own(place)
            if part.kind == "reduce_scatter" and own.size and not sums[place]:
                sums[place][own] = None  # a group of one: the result is the contribution
        object.__setattr__(self, "sums", sums)
        apart = tuple(
            any(own.intersect(box) and not own.contains(box) for box in boxes)
            for own, boxes in zip(map(self._own, range(len(self.parts))), sums, strict=True)
        )
        object.__setattr__(self, "apart", apart)

    @property
    def scratch_shape(self) -> tuple[int, ...] | None:
        used = any(
            self._sum(place, box).tensor == self.scratch
            for place, boxes in enumerate(self.sums)
            for box in boxes
        )
        return self.parts[0].src.box.shape if used else None

    def read(self, place: int, tensor: int, box: Box) -> Chunk:
        if tensor:
            return _at(self.parts[place].dst, box, (0,) * box.ndim)
        sums = self.sums[place]
        if box in sums or any(box.intersect(other) for other in sums):
            return self._sum(place, box)
        return _at(self.parts[place].src, box, (0,) * box.ndim)

    def write(self, place: int, tensor: int, box: Box) -> Chunk:
        if tensor:
            return _at(self.parts[place].dst, box, (0,) * box.ndim)
        return self._sum(place, box)

    def copies(self) -> list[Copy]:
        found = []
        for place, boxes in enumerate(self.sums):
            part = self.parts[place]
            for box in boxes:
                if not any(other != box and other.contains(box) for other in boxes):
                    source = _at(part.src, box, (0,) * box.ndim)
                    found.append(Copy(place, source, self._sum(place, box), True))
            if self.apart[place]:
                own = self._own(place)
                found.append(Copy(place, self._sum(place, own), _at(part.dst, own, own.lo), False))
        return found

    def _sum(self, place: int, box: Box) -> Chunk:
        """Where the member adds up ``box``."""
        part = self.parts[place]
        if part.kind == "all_reduce":
            return _at(part.dst, box, (0,) * box.ndim)
        own = self._own(place)
        if own.contains(box) and not self.apart[place]:
            return _at(part.dst, box, own.lo)
        return Chunk(self.scratch, box)

    def _own(self, place: int) -> Box:
        part = self.parts[place]
        box = Box.full(part.src.box.shape)
        if part.kind == "all_reduce":
            return box
        low = _before(self.parts, "dst", part.split_axis, place)
        return box.with_axis(part.split_axis, low, low + part.dst.box.shape[part.split_axis])


def _at(chunk: Chunk, box: Box, base: tuple[int, ...]) -> Chunk:
    """``box``, counted from ``base``, as part of ``chunk``."""
    offset = tuple(lo - b for lo, b in zip(chunk.box.lo, base, strict=True))
    return Chunk(chunk.tensor, box.shift(offset))


def _before(parts: Sequence[Collective], side: str, axis: int, place: int) -> int:
    """Extents along ``axis`` of the members before ``place``, added up."""
    return sum(getattr(part, side).box.shape[axis] for part in parts[:place])


def _with(shape: tuple[int, ...], axis: int, extent: int) -> tuple[int, ...]:
    return (*shape[:axis], extent, *shape[axis + 1 :])
