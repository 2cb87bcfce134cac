"""Realising a contraction with an exchange: choosing the backend, and building its operator."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from syncopate_jax import compiler
from syncopate_jax.errors import InputError, UnsupportedError
from syncopate_jax.ir.chunk import Box
from syncopate_jax.ir.plan import Goal, Plan, Region
from syncopate_jax.ops.blocked import Blocked, block
from syncopate_jax.options import Options
from syncopate_jax.pallas_kernels import matmul_tpu
from syncopate_jax.registry import backends, templates
from syncopate_jax.runtime import mesh
from syncopate_jax.runtime.operator import Operator

if TYPE_CHECKING:
    from syncopate_jax.ops.contraction import Contraction

TEMPLATES = {
    "all_gather": "all_gather_swizzle",
    "reduce_scatter": "reduce_scatter_direct",
    "all_reduce": "all_reduce_two_shot",
    "all_to_all": "all_to_all_waves",
}
LARGEST_TILE = {"tpu": {"m": 256, "n": 256, "k": 512}}


def choose_backend(spec: Contraction, options: Options) -> str:
    """The backend to use: as asked, or for ``auto`` what is known to be fastest, else ``xla``.

    Options are checked whichever backend it is, so that what runs on one runs on all.
    """
    _check_options(options)
    if spec.kind == "none":
        return "xla"
    if options.backend == "auto":
        return "xla"
    return options.backend


def _check_options(options: Options) -> None:
    """Raises InputError for names and letters that nothing is registered under."""
    if options.backend != "auto":
        backends.get(options.backend)
    if options.target is not None and options.target not in LARGEST_TILE:
        known = ", ".join(LARGEST_TILE)
        raise InputError(
            f"target: no local kernel is written for {options.target!r}; known: {known}"
        )
    if isinstance(options.plan, str):
        templates.get(options.plan)
    elif options.plan is not None and not isinstance(options.plan, Plan):
        raise InputError(
            f"plan: needs a Plan, the name of a plan template or None, found {options.plan!r}"
        )
    unknown = set(dict(options.tiles)) - set(matmul_tpu.MATRIX_LETTERS)
    if unknown:
        known = ", ".join(sorted(matmul_tpu.MATRIX_LETTERS))
        raise InputError(f"tiles: {sorted(unknown)} are no letters; known: {known}")


def contract(
    spec: Contraction,
    axis_names: tuple[str, ...],
    options: Options,
    out_dtype: jnp.dtype,
    lhs: jax.Array,
    rhs: jax.Array,
) -> jax.Array:
    """``spec`` as one fused call; arguments as in ``contraction.contract``."""
    ranks = mesh.ranks(axis_names)
    if 0 in (*lhs.shape, *rhs.shape):
        raise UnsupportedError(
            f"a fused {spec.kind} of empty operands {lhs.shape} and {rhs.shape} has nothing to "
            f"compute; use backend 'xla'"
        )
    if lhs.dtype == jnp.float64 or out_dtype == jnp.float64:
        raise UnsupportedError(
            f"a fused {spec.kind} adds in float32, which would lose half of float64's digits; use "
            f"backend 'xla'"
        )
    layout = block(spec, lhs.shape, rhs.shape, ranks)
    operator, layout = build(spec.kind, layout, str(lhs.dtype), str(out_dtype), axis_names, options)
    operands = (x.reshape(layout.operand_shape(p)) for p, x in (("lhs", lhs), ("rhs", rhs)))
    (out,) = operator(*operands)
    return out.reshape(layout.result)


@functools.lru_cache(maxsize=512)
def build(
    kind: str,
    layout: Blocked,
    dtype: str,
    out_dtype: str,
    axis_names: tuple[str, ...],
    options: Options,
) -> tuple[Operator, Blocked]:
    """The operator of a blocked contraction, and the layout of its operands; memoised."""
    target = options.target or "tpu"
    tiles = choose_tiles(layout, LARGEST_TILE[target], dict(options.tiles))
    if layout.split in tiles and layout.extents[layout.split] % tiles[layout.split]:
        layout = layout.ungrouped()
    plan = _plan(kind, layout, dtype if layout.place != "out" else out_dtype, tiles, options)
    kernel = matmul_tpu.matmul(
        layout.lhs,
        layout.rhs,
        layout.out,
        layout.extents,
        tiles=tiles,
        dtype=dtype,
        out_dtype=out_dtype,
    )
    tensor = plan.tensors[0].name
    operator = compiler.compile(
        kernel,
        plan,
        {tensor: layout.place},
        axis_name=axis_names,
        backend=options.backend,
        target=target,
        order=options.order,
    )
    return operator, layout


def choose_tiles(
    layout: Blocked, largest: Mapping[str, int], asked: Mapping[str, int]
) -> dict[str, int]:
    """Tile size of each matrix letter: as asked, else the largest divisor up to ``largest``.

    A letter that is not reduced and has no divisor near ``largest`` is cut raggedly instead.
    """
    tiles = {}
    for letter, most in largest.items():
        extent = layout.extents[letter]
        size = min(asked.get(letter, most), extent)
        divisor = next(d for d in range(size, 0, -1) if extent % d == 0)
        reduced = letter not in layout.out
        keep = letter in asked or (not reduced and divisor < size // 2)
        tiles[letter] = size if keep and not (reduced and extent % size) else divisor
    return tiles


def _plan(
    kind: str,
    layout: Blocked,
    dtype: str,
    tiles: Mapping[str, int],
    options: Options,
) -> Plan:
    usual = _from_template(TEMPLATES[kind], kind, layout, dtype, tiles, options)
    if isinstance(options.plan, Plan):
        plan = options.plan
    elif options.plan in (None, TEMPLATES[kind]):
        return usual
    else:
        plan = _from_template(options.plan, kind, layout, dtype, tiles, options)
    _check_same_exchange(plan, usual, kind)
    return plan


def _from_template(
    name: str,
    kind: str,
    layout: Blocked,
    dtype: str,
    tiles: Mapping[str, int],
    options: Options,
) -> Plan:
    axis, pieces = _split(kind, layout, tiles, options.split or 1)
    common = {"dtype": dtype, "split": pieces, "split_axis": axis}
    if kind == "all_gather":
        common |= {"axis": layout.gather, "tensor": "x"}
    elif kind == "all_to_all":
        common |= {"split_from": layout.gather, "split_to": layout.scatter, "tensor": "x"}
        common |= {"produced": layout.place == "out"}
    else:
        common |= {"axis": max(layout.scatter, 0), "tensor": "y"}
    template = templates.get(name)
    unknown = set(common) - set(inspect.signature(template).parameters)
    if unknown:
        raise InputError(
            f"plan: template {name!r} makes no {kind}, it takes no {', '.join(sorted(unknown))}; "
            f"the usual one is {TEMPLATES[kind]!r}"
        )
    return template(layout.ranks, layout.plan_shape, **common)


def _check_same_exchange(plan: Plan, usual: Plan, kind: str) -> None:
    """Raises InputError unless ``plan`` moves the operator's array as the usual plan does."""
    found, wanted = _summary(plan), _summary(usual)
    for what, value in wanted.items():
        if found[what] != value:
            raise InputError(
                f"plan {plan.name}: its {what} is {found[what]}, this {kind} needs {value}; start "
                f"from template {TEMPLATES[kind]!r}"
            )


def _summary(plan: Plan) -> dict[str, object]:
    """What two plans of one exchange have in common, in words."""
    first = plan.tensors[0] if plan.tensors else None
    return {
        "number of ranks": plan.num_ranks,
        "shape": first and first.shape,
        "dtype": first and first.dtype,
        "initial data": _corners(plan, plan.initial),
        "final data": _corners(plan, plan.goals),
        "set of ranks summed": sorted({goal.ranks for goal in plan.goals}),
    }


def _corners(plan: Plan, items: Iterable[Region | Goal]) -> list[str]:
    """Per rank the smallest box around what ``items`` say of it."""
    boxes: list[list[Box]] = [[] for _ in range(plan.num_ranks)]
    for item in items:
        if item.box.size:
            boxes[item.rank].append(item.box)
    return [
        str(Box(tuple(map(min, *(b.lo for b in own))), tuple(map(max, *(b.hi for b in own)))))
        if len(own) > 1
        else "".join(map(str, own)) or "none"
        for own in boxes
    ]


def _split(kind: str, layout: Blocked, tiles: Mapping[str, int], wanted: int) -> tuple[int, int]:
    """The dimension to cut chunks along, and into how many pieces.

    Pieces that land beside a tile, to be added to it, must hold whole tiles.
    """
    letters = layout.exchanged
    axis = next(d for d, letter in enumerate(letters) if letter in matmul_tpu.MATRIX_LETTERS)
    letter = letters[axis]
    if kind in ("all_gather", "all_to_all"):
        return axis, wanted
    extent, tile = layout.extents[letter], tiles[letter]
    whole = [p for p in range(1, wanted + 1) if extent % p == 0 and (extent // p) % tile == 0]
    return axis, max(whole, default=1)
