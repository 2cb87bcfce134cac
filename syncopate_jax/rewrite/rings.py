"""Collective matrix products that were written by hand as rings of ``ppermute`` around dots.

A ring is known by what it computes, not by how it is written: the parts of arrays that each rank
has multiplied in the end must be those of a gathered operand or of a scattered sum.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
from jax import lax

from syncopate_jax.rewrite import graph as graphs
from syncopate_jax.rewrite import swaps
from syncopate_jax.rewrite.graph import Graph, Node, Value
from syncopate_jax.rewrite.layout import Layout
from syncopate_jax.rewrite.letters import letters
from syncopate_jax.rewrite.ring_choice import Chooser, Ring, Rings, ring_axes
from syncopate_jax.rewrite.ring_values import (
    ADDED,
    Blocks,
    Known,
    Part,
    Reader,
    Sum,
    Term,
    is_number,
    own,
)
from syncopate_jax.rewrite.steps import Step
from syncopate_jax.rewrite.swaps import Exchange, Operand, Place, Swap

NO_RING = "it is no part of a ring that gathers or sums one product"


def find(
    program: Graph,
    place: Place,
    refuses: Callable[[Swap], str | None],
    numbers: Mapping[Value, Mapping[str, Known]],
) -> Rings:
    """The rings of a body along each of its mesh axes that no backend ``refuses``.

    ``numbers``: arguments of the body that are known integers, as in ``Rings``.
    """
    rings = Rings()
    for axis in sorted({name for node in program.nodes for name in ring_axes(node)}):
        ranks = place.sizes.get(axis, 1)
        if ranks > 1:
            given = {value: known[axis] for value, known in numbers.items() if axis in known}
            _find_along(program, axis, ranks, rings, refuses, given)
    return rings


def _find_along(
    program: Graph,
    axis: str,
    ranks: int,
    rings: Rings,
    refuses: Callable[[Swap], str | None],
    numbers: Mapping[Value, Known],
) -> None:
    reader = Reader(axis, ranks)
    env: dict[Value, Known] = {value: own(value, ranks) for value in program.inputs}
    env |= numbers
    candidates: list[Ring] = []
    for node in program.nodes:
        args = reader.look(node.inputs, env)
        args = [own(v, ranks) if a is None else a for a, v in zip(args, node.inputs, strict=True)]
        for value, known in zip(node.outputs, reader.results(node, args), strict=True):
            env[value] = _as_value(known, value, ranks)
            ring = _ring_of(known, value, axis, ranks)
            if ring is not None:
                env[value] = own(value, ranks)
                candidates.append(ring)
    Chooser(program, axis, ranks, env, reader.rows, refuses).choose(candidates, rings)
    for value in program.outputs:
        if is_number(known := env.get(value)):
            rings.numbers.setdefault(value, {})[axis] = known
    if reader.spoilt is not None:
        rings.why.setdefault(
            axis,
            f"{NO_RING}: what went around {axis} goes into {reader.spoilt.name}, at "
            f"{reader.spoilt.source}",
        )


def _as_value(known: Known, value: Value, ranks: int) -> Known:
    """What is known of a result, which is also a value of the program as any other."""
    if isinstance(known, Sum | Blocks):
        return known if known.part else replace(known, part=own(value, ranks))
    return own(value, ranks) if known is None else known


# --- what a ring has computed --------------------------------------------------------------------


def _ring_of(known: Known, value: Value, axis: str, ranks: int) -> Ring | None:
    """The operator whose result ``known`` is, if it is one."""
    if isinstance(known, Blocks):
        return _gathered_free(known, value, axis, ranks)
    if isinstance(known, Sum) and len(known.terms) > 1 and _alike([*known.terms]):
        if ADDED in known.terms[0].order:
            return None
        return _gathered_contracted(known.terms, value, axis, ranks) or _scattered(
            known.terms, value, axis, ranks
        )
    return None


def _alike(terms: list[Term]) -> bool:
    """Whether all are products of the same two arrays, in the same way."""
    first = terms[0]
    return all(
        t.lhs.source is first.lhs.source
        and t.rhs.source is first.rhs.source
        and t.dot.params["dimension_numbers"] == first.dot.params["dimension_numbers"]
        and t.dot.outputs[0].aval.dtype == first.dot.outputs[0].aval.dtype
        and t.order == first.order
        and not swaps.unfit(t.dot)
        for t in terms
    )


def _gathered_free(known: Blocks, value: Value, axis: str, ranks: int) -> Ring | None:
    """``all_gather`` of one operand along a dimension of its own: a block of the result a rank.

    Blocks lie behind each other, or are stacked along a dimension of theirs.
    """
    terms = [write.term for write in known.writes]
    shape = value.aval.shape
    if len(terms) < ranks or not _alike(terms):
        return None
    order = terms[0].order
    if order.count(ADDED) > 1:
        return None
    for side, dim, free in _free_dims(terms[0].dot):
        at = order.index(free)
        stacked = [order.index(ADDED)] if ADDED in order else []
        moving = [_sides(term)[side] for term in terms]
        fixed = [_sides(term)[1 - side] for term in terms]
        boxes = _boxes(moving, dim)
        if boxes is None or not all(part.whole() and part.at_home() for part in fixed):
            continue
        size = moving[0].source.aval.shape[dim]
        wanted = [part.ranks * size + part.starts[:, dim] for part in moving]
        block = dict.fromkeys(stacked, 1)
        right = all(
            np.array_equal(write.starts @ _strides(len(order), at, stacked, size), start)
            and not np.delete(write.starts, [at, *stacked], 1).any()
            and write.shape
            == tuple(n if d == at else block.get(d, shape[d]) for d, n in enumerate(write.shape))
            for write, start in zip(known.writes, wanted, strict=True)
        )
        right &= [shape[d] for d in (*stacked, at)] == (
            [ranks, size] if stacked else [size * ranks]
        )
        if right and _cover(wanted, boxes, size * ranks):
            # Stacked, the gathered dimension is two: that of blocks, and that in a block.
            split = (free if d == ADDED else d + (d >= free and bool(stacked)) for d in order)
            term, whole = replace(terms[0], order=tuple(split)), _whole(moving[0], dim, ranks)
            return _gather(term, side, whole, dim, moving, fixed, value, axis)
    return None


def _strides(dims: int, at: int, stacked: list[int], size: int) -> np.ndarray:
    """How far an element is along what is gathered, a step along each dimension of the result."""
    found = np.zeros(dims, np.int64)
    found[stacked], found[at] = size, 1
    return found


def _gathered_contracted(
    terms: tuple[Term, ...], value: Value, axis: str, ranks: int
) -> Ring | None:
    """``all_gather`` of one operand along a contracted dimension: a term of the sum a rank."""
    dot = terms[0].dot
    for side, dim, other in _contracted_dims(dot):
        moving = [_sides(term)[side] for term in terms]
        fixed = [_sides(term)[1 - side] for term in terms]
        boxes = _boxes(moving, dim)
        if boxes is None or _boxes(fixed, other) is None or not all(p.at_home() for p in fixed):
            continue
        size, extent = (
            parts[0].source.aval.shape[d] for parts, d in ((moving, dim), (fixed, other))
        )
        wanted = [part.ranks * size + part.starts[:, dim] for part in moving]
        right = all(
            np.array_equal(part.starts[:, other], start)
            for part, start in zip(fixed, wanted, strict=True)
        )
        if right and extent == size * ranks and _cover(wanted, boxes, extent):
            whole = _whole(moving[0], dim, ranks)
            return _gather(terms[0], side, whole, dim, moving, fixed, value, axis)
    return None


def _scattered(terms: tuple[Term, ...], value: Value, axis: str, ranks: int) -> Ring | None:
    """``psum_scatter``: each rank has the sum of all ranks' terms of its own block."""
    dot = terms[0].dot
    everyone = np.stack([term.lhs.ranks for term in terms])
    if len(terms) != ranks or any(set(column) != set(range(ranks)) for column in everyone.T):
        return None
    if any(not np.array_equal(term.lhs.ranks, term.rhs.ranks) for term in terms):
        return None
    for side, dim, at in _free_dims(dot):
        cut = [_sides(term)[side] for term in terms]
        full = [_sides(term)[1 - side] for term in terms]
        boxes = _boxes(cut, dim)
        if boxes is None or not all(part.whole() for part in full):
            continue
        extent, size = cut[0].source.aval.shape[dim], boxes[0]
        mine = np.arange(ranks) * size
        if extent != size * ranks or any(not np.array_equal(p.starts[:, dim], mine) for p in cut):
            continue
        local = _before_transposing(value.aval.shape, terms[0].order)
        inside = tuple(extent if d == at else n for d, n in enumerate(local))
        layout = Layout.of(inside, {at: (size, "scatter")})
        sides = (cut[0], full[0]) if side == 0 else (full[0], cut[0])
        swap = _make(terms[0], 2, layout, "reduce_scatter", sides, value, axis)
        return Ring(swap, None, -1, terms[0].order)
    return None


def _sides(term: Term) -> tuple[Part, Part]:
    return term.lhs, term.rhs


def _free_dims(dot: Node) -> list[tuple[int, int, int]]:
    """(operand, dimension, dimension of the result) of what a dot neither sums nor batches."""
    contracted, batch = dot.params["dimension_numbers"]
    found, at = [], len(batch[0])
    for side, value in enumerate(dot.inputs):
        for d in range(value.aval.ndim):
            if d not in (*contracted[side], *batch[side]):
                found.append((side, d, at))
                at += 1
    return found


def _contracted_dims(dot: Node) -> list[tuple[int, int, int]]:
    """(operand, dimension, dimension of the other operand) of what a dot sums."""
    contracted, _ = dot.params["dimension_numbers"]
    pairs = list(zip(*contracted, strict=True))
    return [(0, a, b) for a, b in pairs] + [(1, b, a) for a, b in pairs]


def _boxes(parts: list[Part], dim: int) -> list[int] | None:
    """Extents of the boxes along ``dim``; None if they are cut along another dimension too."""
    for part in parts:
        shape = part.source.aval.shape
        elsewhere = [d for d in range(len(shape)) if d != dim]
        if any(part.shape[d] != shape[d] or part.starts[:, d].any() for d in elsewhere):
            return None
    return [part.shape[dim] for part in parts]


def _cover(starts: list[np.ndarray], sizes: list[int], extent: int) -> bool:
    """Whether the boxes are all of ``0:extent`` on every rank, none of it twice."""
    if sum(sizes) != extent:
        return False
    for own_starts in np.stack(starts, -1):
        ends = 0
        for start, size in sorted(zip(own_starts.tolist(), sizes, strict=True)):
            if start != ends:
                return False
            ends += size
    return True


# --- the operator --------------------------------------------------------------------------------


def _whole(part: Part, dim: int, ranks: int) -> Layout:
    shape = part.source.aval.shape
    inside = tuple(n * ranks if d == dim else n for d, n in enumerate(shape))
    return Layout.of(inside, {dim: (shape[dim], "gather")})


def _gather(
    term: Term,
    side: int,
    layout: Layout,
    dim: int,
    moving: list[Part],
    fixed: list[Part],
    value: Value,
    axis: str,
) -> Ring:
    sides = (moving[0], fixed[0]) if side == 0 else (fixed[0], moving[0])
    swap = _make(term, side, layout, "all_gather", sides, value, axis)
    return Ring(swap, moving[0].source, dim, term.order)


def _make(
    term: Term,
    known: int,
    layout: Layout,
    kind: str,
    sides: tuple[Part, Part],
    value: Value,
    axis: str,
) -> Swap:
    """The operator; ``layout`` is of the dot's lhs (``known`` 0), rhs (1) or result (2)."""
    dot, order = term.dot, term.order
    spelt = letters(dot, known, layout)
    operands = [
        Operand(
            part.source,
            (),
            tuple(f.outside if i == known else f.inside for f in factors),
        )
        for i, (part, factors) in enumerate(zip(sides, (spelt.lhs, spelt.rhs), strict=True))
    ]
    assert value.node is not None
    swap = swaps.make(
        value.node,
        dot,
        (value.node,),
        Exchange(kind, (axis,), layout),
        spelt,
        ("lhs", "rhs", "out")[known],
        operands,
    )
    return replace(
        swap,
        collective=_permutation(value.node),
        result=value,
        shape=_before_transposing(value.aval.shape, order),
        steps=(Step(lambda x: lax.transpose(x, order)),),
        out_dtype=value.aval.dtype,
    )


def _before_transposing(shape: tuple[int, ...], order: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(shape[order.index(d)] for d in range(len(shape)))


def _permutation(node: Node) -> Node:
    """The ``ppermute`` nearest to a ring's result, for what is said of it."""
    queue, seen = [node], {node}
    for at in queue:
        if at.name == "ppermute":
            return at
        if at.name == "scan":
            body = graphs.read(at.params["jaxpr"], inline=True)
            inner = next((x for x in body.nodes if x.name == "ppermute"), None)
            if inner is not None:
                return inner
        before = [v.node for v in at.inputs if v.node is not None and v.node not in seen]
        seen.update(before)
        queue += before
    raise AssertionError(f"a ring without a ppermute ends in {node.name}")


def reason(node: Node, why: Mapping[str, str]) -> str:
    """Why a ``ppermute`` is left."""
    return next((why[axis] for axis in sorted(ring_axes(node)) if axis in why), NO_RING)
