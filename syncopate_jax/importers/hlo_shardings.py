"""Contractions of a program not yet partitioned: what the shardings around them imply."""

from __future__ import annotations

import re

from jax.sharding import PartitionSpec

from syncopate_jax.errors import InputError
from syncopate_jax.importers.dot_formula import dot_formula
from syncopate_jax.importers.hlo_ops import HloGraph, HloOp
from syncopate_jax.importers.program import ImportedCollective, from_move
from syncopate_jax.importers.replica_groups import AxisRef, NamedMesh
from syncopate_jax.importers.shardings import Derived, derive

_SHARDING = re.compile(r"<@([\w.$\-]+), \[(.*?)\](?:, replicated=\{[^{}]*\})?>")
_DIM = re.compile(r"\{([^{}]*)\}")

Found = tuple[
    tuple[tuple[str, Derived], ...], tuple[ImportedCollective, ...], tuple[tuple[str, str], ...]
]


def sharded_dots(graph: HloGraph) -> Found:
    """The contractions whose operands and result have shardings, their moves as collectives, and
    those left alone with the reason."""
    contractions: list[tuple[str, Derived]] = []
    moved: list[ImportedCollective] = []
    left: list[tuple[str, str]] = []
    for op in graph.every():
        if op.opcode != "dot" or not graph.meshes:
            continue
        texts = _texts(graph, op)
        if texts is None:
            continue
        try:
            name = f"{op.computation}:{op.name}"
            derived, mesh = _derive(graph, op, texts)
            contractions.append((name, derived))
            moved += _collectives(name, op, derived, mesh)
        except InputError as error:
            left.append((op.name, str(error)))
    return tuple(contractions), tuple(moved), tuple(left)


def _texts(graph: HloGraph, dot: HloOp) -> list[str] | None:
    """The shardings of both operands and the result as printed, None if one has none."""
    ops = graph.ops[dot.computation]
    sources = [ops.get(name) for name in dot.operands]
    users = [
        op
        for op in ops.values()
        if op.opcode == "sdy.sharding-constraint" and op.operands[:1] == (dot.name,)
    ]
    results = [op for op in (dot, *users[:1]) if "sharding" in op.texts]
    if len(sources) != 2 or not results or any(s is None for s in sources):
        return None
    found = [source.texts.get("sharding", "") for source in sources if source is not None]
    found.append(results[-1].texts["sharding"])
    return found if all(found) else None


def _derive(graph: HloGraph, dot: HloOp, texts: list[str]) -> tuple[Derived, NamedMesh]:
    shapes = [array.shape for array in dot.operand_types]
    names, specs = zip(*(_spec(text) for text in texts), strict=True)
    if len(set(names)) != 1 or names[0] not in graph.meshes:
        raise InputError(f"its shardings are over meshes {', '.join(names)}; one is needed")
    mesh = graph.meshes[names[0]]
    formula = dot_formula(dot, shapes)
    derived = derive(formula, *specs, shapes=(shapes[0], shapes[1]), mesh=dict(mesh.axes))
    return derived, mesh


def _spec(text: str) -> tuple[str, PartitionSpec]:
    """Mesh and partition of ``<@mesh, [{"x"}, {}]>``."""
    found = _SHARDING.search(text)
    if found is None:
        raise InputError(f"sharding {text[:80]!r} is not understood")
    entries = []
    for dim in _DIM.findall(found[2]):
        axes = [axis.strip() for axis in dim.split(",") if axis.strip()]
        if any(not re.fullmatch(r'"[^"]*"', axis) for axis in axes):
            raise InputError(f"sharding {text[:80]!r} leaves a dimension open or cuts an axis")
        entries.append(tuple(axis[1:-1] for axis in axes))
    return found[1], PartitionSpec(*entries)


def _collectives(
    name: str, dot: HloOp, derived: Derived, mesh: NamedMesh
) -> list[ImportedCollective]:
    moves = [move for move in derived.moves if move.kind != "slice"]
    dtype = dot.operand_types[0].dtype
    made = []
    for place, move in enumerate(moves):
        groups = mesh.groups([AxisRef(axis) for axis in move.axis_names])
        notes = (("line", str(dot.line)), ("move", str(move)))
        label = f"{name}:{move.kind}.{place}"
        made.append(
            from_move(label, derived, move, len(mesh.devices), groups, dtype=dtype, notes=notes)
        )
    return made
