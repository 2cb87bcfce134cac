"""Attributes of StableHLO and Shardy operations, each from its printed text."""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping

from syncopate_jax.importers.hlo_ops import DTYPES, ArrayType
from syncopate_jax.importers.replica_groups import (
    MAX_PROGRAM_RANKS,
    AxisRef,
    Groups,
    NamedMesh,
    make_mesh,
)

_TENSOR = re.compile(r"tensor<((?:(?:\d{1,18}|\?)x)*)([A-Za-z]\w*)(?:,[^<>]*(?:<[^<>]*>)?)?>")
_SHARDING = re.compile(r"sdy\.sharding = #sdy\.sharding(<@.*?\]>)")
MANUAL = {
    "in_shardings": re.compile(r"in_shardings=(\[.*?\])out_shardings="),
    "manual_axes": re.compile(r"manual_axes=\{([^{}]*)\}"),
}
"""Of a ``sdy.manual_computation``: shardings of what goes in, and its manual axes."""
INT = re.compile(r"(-?\d{1,18})(?: : i\d+)?", re.ASCII)
_DENSE = re.compile(
    r'dense<(\[.*\]|-?\d{1,18}|"0x[0-9A-Fa-f]*")?> : tensor<(\d{1,9})x(\d{1,9})xi64>', re.DOTALL
)
_MESH_AXIS = re.compile(r'"([^"]*)"=(\d{1,9})')
_MESH_AXIS_INLINE = re.compile(r'mesh_axis<name = "([^"]*)", size = (\d{1,9})[^<>]*>')
_PART = r"\((\d{1,9})\)(\d{1,9})"
_AXIS_REF = re.compile(
    rf'axis_ref(?:<name = "([^"]*)"(?:, sub_axis_info = {_PART})?|"([^"]*)"(?::{_PART})?)>'
)


def entries(text: str) -> dict[str, str]:
    """Entries of ``{key = value, …}`` or ``<{…}>``; a unit attribute has an empty value."""
    found = (part.partition("=") for part in _parts(text.strip("<>").strip()[1:-1]))
    return {key.strip().strip('"'): value.strip() for key, _, value in found}


def signature(text: str) -> list[tuple[str, tuple[ArrayType, ...], str]]:
    """Name, type and sharding of each argument or result in ``(%a: tensor<…> {…}, tensor<…>)``.

    The name of a result is empty, and so is a sharding that is not said.
    """
    found = []
    for part in _parts(text.strip()[1:-1]):
        head, _, rest = part.partition("tensor<")
        name = head.strip().rstrip(":") if head.strip().startswith("%") else ""
        types = array_types("tensor<" + rest.partition("{")[0]) if rest else ()
        sharding = _SHARDING.search(part)
        found.append((name, types, sharding[1] if sharding else ""))
    return found


def _parts(inner: str) -> list[str]:
    """What stands between the commas that are in no bracket and in no string."""
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
    return [part for part in parts if part.strip()]


def array_types(text: str) -> tuple[ArrayType, ...]:
    """The types of the arrays in ``text``, those left out whose extents are not known."""
    found = _TENSOR.findall(text)
    return tuple(
        ArrayType(DTYPES.get(dtype, dtype), tuple(int(n) for n in dims.split("x") if n))
        for dims, dtype in found
        if "?" not in dims
    )


def dense_groups(text: str) -> Groups:
    """``dense<[[0, 1], [2, 3]]> : tensor<2x2xi64>``, one number for all, or bytes in hex."""
    found = _DENSE.fullmatch(text.strip())
    if found is None:
        raise ValueError(f"{text[:60]!r} is no dense table of two dimensions")
    body, rows, columns = found[1] or "", int(found[2]), int(found[3])
    if rows * columns > 2 * MAX_PROGRAM_RANKS:
        raise ValueError(f"{rows}x{columns} numbers are more than {MAX_PROGRAM_RANKS} ranks need")
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


def numbers(text: str) -> tuple[int, ...]:
    """Every number in ``text``."""
    return tuple(int(n) for n in re.findall(r"\d{1,18}", text))


def named_mesh(text: str) -> NamedMesh | None:
    """The mesh of ``<["d"=2, "t"=4], device_ids=[…]>``, None for one of a single device.

    Raises ValueError when its axes and devices do not fit.
    """
    devices = re.search(r"device_ids=\[([\d, ]*)\]", text)
    axes = [(name, int(size)) for name, size in _MESH_AXIS.findall(text)]
    ids = numbers(devices[1]) if devices else None
    return None if not axes and ids is not None and len(ids) == 1 else make_mesh(axes, ids)


def mesh_groups(text: str, meshes: Mapping[str, NamedMesh]) -> Groups:
    """The groups of ``#stablehlo.replica_group_mesh_axes<mesh = @mesh, axes = […]>``.

    Raises ValueError when the mesh or an axis is unknown.
    """
    inline = _MESH_AXIS_INLINE.findall(text)
    if inline:
        if "device_ids" in text:
            raise ValueError(f"{text[:80]!r}: devices in another order are not read")
        mesh = make_mesh([(name, int(size)) for name, size in inline])
    else:
        found = re.search(r"mesh = @([\w.$\-]+)", text)
        if found is None or found[1] not in meshes:
            raise ValueError(f"{text[:80]!r} names no mesh; known: {sorted(meshes)}")
        mesh = meshes[found[1]]
    refs = [
        AxisRef(a or b, int(c or e or 1), int(d or f or 0))
        for a, c, d, b, e, f in _AXIS_REF.findall(text)
    ]
    if len(refs) != text.count("axis_ref"):
        raise ValueError(f"{text[:80]!r}: an axis reference is not understood")
    return mesh.groups(refs)
