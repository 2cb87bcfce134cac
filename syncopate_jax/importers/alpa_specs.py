"""Alpa's ``ShardingSpec`` in words: which logical mesh dimensions cut each dimension of a tensor.

A spec is what ``repr`` prints, ``ShardingSpec((Chunked(2), NoSharding()), (ShardedAxis(axis=0),
Replicated(replicas=4)))``, or what constructs one, ``ShardingSpec([Chunked([2]), NoSharding()],
[ShardedAxis(0), Replicated(4)])``. The chunks of all dimensions are numbered in order; the mesh
mapping says for each factor of the devices, the slowest first, which chunk it is, or that it holds
replicas.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence

from syncopate_jax.errors import FormatError
from syncopate_jax.importers.scanner import Cursor, Language

LANGUAGE = Language(
    "alpa sharding spec",
    re.compile(
        r"(?P<space>\s+)|(?P<word>[A-Za-z_]\w*)|(?P<number>\d+)|(?P<mark>[^\s\w])", re.ASCII
    ),
)
Spec = tuple[tuple[int, ...], ...]
"""For each dimension of a tensor the logical mesh dimensions that cut it, the slowest first."""


def read_spec(text: str, shape: Sequence[int], mesh: Sequence[int]) -> Spec:
    """The spec in ``text`` of a tensor of ``shape`` on a logical mesh.

    Raises FormatError when it is malformed, or does not fit the shape or the mesh.
    """
    at = Cursor(LANGUAGE, text)
    at.expect("ShardingSpec")
    at.expect("(")
    _keyword(at, "sharding")
    chunks = _sequence(at, _dimension)
    at.expect(",")
    _keyword(at, "mesh_mapping")
    mapping = _sequence(at, _factor)
    at.skip(",")
    at.expect(")")
    if at.token.kind != "end":
        at.fail("the end of the spec")
    return _resolve(text, chunks, mapping, shape, mesh)


def _keyword(at: Cursor, name: str) -> None:
    if at.skip(name):
        at.expect("=")


def _sequence[T](at: Cursor, read: Callable[[Cursor], T]) -> list[T]:
    """Items in parentheses or brackets; a trailing comma is allowed."""
    closing = ")" if at.has("(") else "]"
    if not at.skip("(", "["):
        at.fail("'(' or '['")
    found: list[T] = []
    while not at.skip(closing):
        if found:
            at.expect(",")
            if at.skip(closing):
                break
        found.append(read(at))
    return found


def _dimension(at: Cursor) -> tuple[int, ...]:
    """Chunks of one dimension; none if it is whole."""
    if at.skip("NoSharding"):
        at.expect("(")
        at.expect(")")
        return ()
    at.expect("Chunked")
    at.expect("(")
    _keyword(at, "chunks")
    if at.has("(", "["):
        found = _sequence(at, Cursor.integer)
        at.expect(")")
    else:
        found = [at.integer("the number of chunks")]
        while not at.skip(")"):
            at.expect(",")
            found.append(at.integer("the number of chunks"))
    if not found or min(found) < 1:
        at.fail("at least one chunk before this")
    return tuple(found)


def _factor(at: Cursor) -> tuple[str, int]:
    """``ShardedAxis`` or ``Replicated``, and its number."""
    kind = at.of("word", "ShardedAxis(…) or Replicated(…)")
    words = {"ShardedAxis": "axis", "Replicated": "replicas"}
    if kind not in words:
        at.place -= 1
        at.fail("ShardedAxis(…) or Replicated(…)")
    at.expect("(")
    _keyword(at, words[kind])
    number = at.integer()
    at.expect(")")
    return kind, number


def _resolve(
    text: str,
    chunks: Sequence[tuple[int, ...]],
    mapping: Sequence[tuple[str, int]],
    shape: Sequence[int],
    mesh: Sequence[int],
) -> Spec:
    if len(chunks) != len(shape):
        raise FormatError(f"{text}: shards {len(chunks)} dimensions, the tensor has {len(shape)}")
    flat = [count for own in chunks for count in own]
    named = [number for kind, number in mapping if kind == "ShardedAxis"]
    if sorted(named) != list(range(len(flat))):
        raise FormatError(f"{text}: has {len(flat)} chunked axes, its mesh mapping names {named}")
    sizes = [flat[number] if kind == "ShardedAxis" else number for kind, number in mapping]
    spans = _spans(text, sizes, mesh)
    of_chunk = {
        number: span
        for (kind, number), span in zip(mapping, spans, strict=True)
        if kind == "ShardedAxis"
    }
    found, place = [], 0
    for own, extent in zip(chunks, shape, strict=True):
        if extent % math.prod(own):
            raise FormatError(f"{text}: extent {extent} is not divided by {math.prod(own)} chunks")
        found.append(tuple(d for k in range(place, place + len(own)) for d in of_chunk[k]))
        place += len(own)
    return tuple(found)


def _spans(text: str, sizes: Sequence[int], mesh: Sequence[int]) -> list[tuple[int, ...]]:
    """Which mesh dimensions each factor is, in order; those of one rank are in none."""
    left = [d for d, extent in enumerate(mesh) if extent > 1]
    spans = []
    for size in sizes:
        taken: list[int] = []
        while left and math.prod(mesh[d] for d in taken) < size:
            taken.append(left.pop(0))
        if math.prod(mesh[d] for d in taken) != size:
            raise FormatError(
                f"{text}: a factor of {size} devices is no run of dimensions of the logical mesh "
                f"{tuple(mesh)}"
            )
        spans.append(tuple(taken))
    if left:
        raise FormatError(
            f"{text}: is over {math.prod(sizes)} devices, the logical mesh {tuple(mesh)} has "
            f"{math.prod(mesh)}"
        )
    return spans
