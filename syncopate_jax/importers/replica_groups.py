"""Which ranks perform a collective together: every form in which XLA prints that.

Ranks are global device numbers, ``replica * partitions + partition``.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from syncopate_jax.importers.scanner import Cursor

Groups = tuple[tuple[int, ...], ...]
MAX_PROGRAM_RANKS = 2**16  # of what is imported; keeps a damaged file from filling memory


@dataclass(frozen=True, slots=True)
class AxisRef:
    """A mesh axis, or the part of it of ``size`` that lies ``before`` ranks (the slower part)."""

    name: str
    before: int = 1
    size: int = 0


@dataclass(frozen=True, slots=True)
class NamedMesh:
    """Extents of mesh axes by name, the slowest first, and the device at each place, row-major."""

    axes: tuple[tuple[str, int], ...]
    devices: tuple[int, ...]

    def groups(self, refs: Sequence[AxisRef]) -> Groups:
        """The groups over ``refs``, the first slowest; raises ValueError when one does not fit."""
        shape: list[int] = []
        places: dict[tuple[str, int], int] = {}
        for name, extent in self.axes:
            cuts = sorted({c for r in refs if r.name == name for c in _ends(r, extent)} | {1})
            for low, high in itertools.pairwise([*cuts, extent] if cuts[-1] != extent else cuts):
                if high % low:
                    raise ValueError(f"parts of mesh axis {name!r} do not fit its extent {extent}")
                places[name, low] = len(shape)
                shape.append(high // low)
        extents = dict(self.axes)
        chosen: list[int] = []
        for ref in refs:
            if ref.name not in extents:
                raise ValueError(f"no mesh axis {ref.name!r}; known: {', '.join(extents)}")
            low, high = _ends(ref, extents[ref.name])
            inside = [i for (n, at), i in places.items() if n == ref.name and low <= at < high]
            if set(inside) & set(chosen):
                raise ValueError(f"mesh axis {ref.name!r} is named twice")
            chosen += sorted(inside)
        rest = [i for i in range(len(shape)) if i not in chosen]
        members = math.prod(shape[i] for i in chosen)
        table = np.array(self.devices).reshape(shape).transpose([*rest, *chosen])
        return tuple(map(tuple, table.reshape(-1, members).tolist()))


def _ends(ref: AxisRef, extent: int) -> tuple[int, int]:
    """How many ranks lie before, and up to the end of, the part of an axis."""
    end = ref.before * ref.size if ref.size else extent
    if ref.before < 1 or end > extent or extent % end:
        raise ValueError(f"part ({ref.before}){ref.size} of mesh axis {ref.name!r} of {extent}")
    return ref.before, end


def make_mesh(axes: Sequence[tuple[str, int]], devices: Sequence[int] | None = None) -> NamedMesh:
    """A mesh, over the devices in order if None; raises ValueError when they do not fit."""
    count = math.prod(size for _, size in axes)
    if not all(size > 0 for _, size in axes) or count > MAX_PROGRAM_RANKS:
        raise ValueError(
            f"mesh axes {list(axes)} need extents above 0, at most {MAX_PROGRAM_RANKS} in all"
        )
    if len({name for name, _ in axes}) != len(axes):
        raise ValueError(f"mesh axes {list(axes)} have a name twice")
    found = tuple(range(count)) if devices is None else tuple(devices)
    if len(found) != count or len(set(found)) != count:
        raise ValueError(f"mesh axes {list(axes)} need {count} different devices")
    return NamedMesh(tuple(axes), found)


def read_groups(cursor: Cursor) -> Groups:
    """Groups as HLO prints them; no groups at all, ``{}``, stand for one of all.

    The forms are ``{{0,1},{2,3}}``; iota, the numbers from 0 on, laid out as the shape after
    ``<=``, transposed, and cut into groups, ``[4,2]<=[2,4]T(1,0)``; and axes of a mesh,
    ``mesh['d'=2,'t'=4] {'t'}``.
    """
    if cursor.has("mesh"):
        return _mesh_groups(cursor)
    if cursor.has("["):
        shape = cursor.integers("[", "]")
        cursor.expect("<=")
        flat = read_iota(cursor)
        if len(shape) != 2 or math.prod(shape) != len(flat):
            cursor.fail_at(
                cursor.token.at, f"replica groups {list(shape)} of {len(flat)} numbers: needs "
                "[groups,members] with as many members"
            )  # fmt: skip
        return tuple(itertools.batched(flat, shape[1])) if flat else ()
    cursor.expect("{")
    groups: list[tuple[int, ...]] = []
    while not cursor.skip("}"):
        if groups:
            cursor.expect(",")
        groups.append(cursor.integers("{", "}"))
    return tuple(groups)


def read_iota(cursor: Cursor) -> tuple[int, ...]:
    """``[2,4]T(1,0)``: the numbers from 0 on, laid out as a shape, transposed, in a row."""
    at = cursor.token.at
    source = cursor.integers("[", "]")
    order = tuple(range(len(source)))
    if cursor.skip("T"):
        order = cursor.integers("(", ")")
    if sorted(order) != list(range(len(source))):
        cursor.fail_at(at, f"T{order} is no order of {len(source)} dimensions")
    if min(source, default=0) < 1 or math.prod(source) > MAX_PROGRAM_RANKS:
        cursor.fail_at(
            at, f"{list(source)} needs extents above 0, at most {MAX_PROGRAM_RANKS} in all"
        )
    table = np.arange(math.prod(source)).reshape(source).transpose(order)
    return tuple(table.ravel().tolist())


def _mesh_groups(cursor: Cursor) -> Groups:
    at = cursor.token.at
    cursor.expect("mesh")
    cursor.expect("[")
    axes: list[tuple[str, int]] = []
    while not cursor.skip("]"):
        if axes:
            cursor.expect(",")
        name = read_name(cursor)
        cursor.expect("=")
        axes.append((name, cursor.integer("the extent of a mesh axis")))
    devices: tuple[int, ...] | None = None
    if cursor.has(",") and cursor.ahead(1).text == "device_ids":
        cursor.expect(",")
        cursor.take()
        cursor.expect("=")
        if cursor.ahead(1).text == "[":
            cursor.expect("(")
            devices = read_iota(cursor)
            cursor.expect(")")
        else:
            devices = cursor.integers("(", ")")
    cursor.expect("{")
    refs: list[AxisRef] = []
    while not cursor.skip("}"):
        if refs:
            cursor.expect(",")
        refs.append(read_axis_ref(cursor))
    try:
        return make_mesh(axes, devices).groups(refs)
    except ValueError as error:
        cursor.fail_at(at, f"replica groups: {error}")


def read_axis_ref(cursor: Cursor) -> AxisRef:
    """``'t'``, or the part ``'t':(2)4`` of 4 with 2 before it."""
    name = read_name(cursor)
    if not cursor.skip(":"):
        return AxisRef(name)
    (before,) = cursor.integers("(", ")")[:1] or (0,)
    return AxisRef(name, before, cursor.integer("the size of a part of a mesh axis"))


def read_name(cursor: Cursor) -> str:
    """A mesh axis's name, in quotes of either kind or in none."""
    if cursor.token.kind not in ("string", "quoted", "word"):
        cursor.fail("the name of a mesh axis")
    text = cursor.take().text
    return text[1:-1] if text[0] in "'\"" else text


def global_groups(groups: Groups, mode: str, replicas: int, partitions: int) -> Groups:
    """Groups of global device numbers.

    Args:
      groups: as printed; empty for one of all.
      mode: what the printed numbers are: ``global`` devices, ``replica`` (the same partition of
        each), ``partition`` (of the same replica), or ``both`` (replicas with all partitions).
    """
    ids = {"global": replicas * partitions, "partition": partitions}.get(mode, replicas)
    groups = groups or (tuple(range(ids)),)
    if mode == "global":
        return groups
    if mode == "partition":
        return tuple(
            tuple(r * partitions + p for p in group) for r in range(replicas) for group in groups
        )
    if mode == "both":
        return tuple(
            tuple(r * partitions + p for r in group for p in range(partitions)) for group in groups
        )
    return tuple(
        tuple(r * partitions + p for r in group) for group in groups for p in range(partitions)
    )


def fault(
    groups: Sequence[Sequence[int]], ranks: int, *, equal: bool = False, every: bool = True
) -> str:
    """What is wrong with groups of ``ranks`` ranks; empty if nothing is.

    ``equal``: all must be of one size. ``every``: each rank must be in one.
    """
    flat = [rank for group in groups for rank in group]
    if any(not group for group in groups):
        return "a group is empty"
    if outside := [rank for rank in flat if not 0 <= rank < ranks]:
        return f"rank {outside[0]} is none of the {ranks} ranks"
    if len(set(flat)) != len(flat):
        return f"rank {Counter(flat).most_common(1)[0][0]} is in two places"
    if every and len(flat) != ranks:
        missing = sorted(set(range(ranks)) - set(flat))
        return f"rank {missing[0]} is in no group"
    if equal and len({len(group) for group in groups}) > 1:
        return f"groups differ in size: {sorted({len(group) for group in groups})}"
    return ""
