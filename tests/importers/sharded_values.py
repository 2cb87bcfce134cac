"""A NumPy simulation of derived moves: every rank's array, from and to a whole one."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from syncopate_jax.importers.resharding import Move
from syncopate_jax.importers.shardings import Derived

Entry = tuple[str, ...]
Spec = tuple[Entry, ...]
Arrays = dict[tuple[int, ...], np.ndarray]


def coordinates(mesh: Mapping[str, int]) -> list[tuple[int, ...]]:
    return list(itertools.product(*(range(n) for n in mesh.values())))


def cut(x: np.ndarray, spec: Spec, mesh: Mapping[str, int]) -> Arrays:
    """Each rank's block of ``x``."""
    parts = {}
    names = list(mesh)
    for at in coordinates(mesh):
        index = []
        for size, axes in zip(x.shape, (*spec, *((),) * x.ndim), strict=False):
            block, ranks = 0, 1
            for axis in axes:
                block = block * mesh[axis] + at[names.index(axis)]
                ranks *= mesh[axis]
            index.append(slice(block * (size // ranks), (block + 1) * (size // ranks)))
        parts[at] = x[tuple(index)]
    return parts


def move(arrays: Arrays, what: Move, letters: str, mesh: Mapping[str, int]) -> Arrays:
    """What the move does, group of ranks by group."""
    names = list(mesh)
    over = [names.index(axis) for axis in what.axis_names]
    groups: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
    for at in sorted(arrays, key=lambda at: [at[i] for i in over]):
        rest = tuple(x for i, x in enumerate(at) if i not in over)
        groups.setdefault(rest, []).append(at)
    gather = letters.index(what.gather) if what.gather else -1
    scatter = letters.index(what.scatter) if what.scatter else -1
    out = {}
    for members in groups.values():
        for me, at in enumerate(members):
            assert arrays[at].shape == what.shape
            parts = [arrays[peer] for peer in members]
            if what.kind in ("reduce_scatter", "all_reduce"):
                parts = [np.sum(parts, axis=0)]
            elif what.kind == "slice":
                parts = [arrays[at]]
            if scatter >= 0:
                parts = [np.split(part, len(members), scatter)[me] for part in parts]
            out[at] = np.concatenate(parts, gather) if gather >= 0 else parts[0]
    return out


def simulate(derived: Derived, x: np.ndarray, w: np.ndarray, lhs: Spec, rhs: Spec) -> Arrays:
    """Every rank's result."""
    mesh = dict(derived.mesh)
    arrays = {"lhs": cut(x, lhs, mesh), "rhs": cut(w, rhs, mesh)}
    for step in derived.before:
        arrays[step.place] = move(arrays[step.place], step, derived.letters(step.place), mesh)
    formula = f"{derived.lhs},{derived.rhs}->{derived.out}"
    out = {at: np.einsum(formula, arrays["lhs"][at], arrays["rhs"][at]) for at in arrays["lhs"]}
    for step in derived.after:
        out = move(out, step, derived.out, mesh)
    return out


def every_spec(ndim: int, axes: Sequence[str]) -> Iterator[Spec]:
    """Each way to shard at most two dimensions, each axis at most once, in either order."""
    for places in itertools.product(range(-1, ndim), repeat=len(axes)):
        entries = [
            tuple(a for a, place in zip(axes, places, strict=True) if place == d)
            for d in range(ndim)
        ]
        for orders in itertools.product(*(itertools.permutations(e) for e in entries)):
            yield tuple(orders)
