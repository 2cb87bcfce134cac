"""The plan of an operator's exchange: from a template, or the user's own once it is seen to fit."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Mapping
from typing import Any

from syncopate_jax.check.ends import difference
from syncopate_jax.errors import InputError
from syncopate_jax.ir.chunk import split_points
from syncopate_jax.ir.hops import in_float32, rounds_at_hops
from syncopate_jax.ir.plan import ITEM_SIZES, Plan
from syncopate_jax.kernel.blocks import SUBLANES
from syncopate_jax.ops.blocked import Blocked
from syncopate_jax.options import Options
from syncopate_jax.pallas_kernels import matmul_tpu
from syncopate_jax.registry import USUAL_TEMPLATES, templates


def plan_for(
    kind: str,
    layout: Blocked,
    dtype: str,
    tiles: Mapping[str, int],
    options: Options,
) -> Plan:
    """The plan that ``options`` ask for, of the array that ``layout`` exchanges.

    Raises:
      InputError: it moves another array than the operator's, or moves it elsewhere.
    """
    usual = _from_template(USUAL_TEMPLATES[kind], kind, layout, dtype, tiles, options)
    if isinstance(options.plan, Plan):
        plan = options.plan
    elif options.plan in (None, USUAL_TEMPLATES[kind]):
        return usual
    else:
        plan = _from_template(options.plan, kind, layout, dtype, tiles, options)
    _check_same_exchange(plan, usual, kind)
    return plan


def float32_options(plan: Plan, options: Options) -> Options | None:
    """Options that give ``plan`` again in float32, if it would round a sum at every hop.

    What travels and what the kernel writes is then float32, and the caller rounds the result.
    """
    if not rounds_at_hops(plan):
        return None
    return options.using(plan=in_float32(plan)) if options.plan is plan else options


def _from_template(
    name: str,
    kind: str,
    layout: Blocked,
    dtype: str,
    tiles: Mapping[str, int],
    options: Options,
) -> Plan:
    axis, pieces = _split(kind, layout, tiles, options.split or 1)
    common: dict[str, Any] = {"dtype": dtype, "split": pieces, "split_axis": axis}
    if kind == "all_gather":
        common |= {"axis": layout.gather, "tensor": "x"}
    elif kind == "all_to_all":
        common |= {"split_from": layout.gather, "split_to": layout.scatter, "tensor": "x"}
        common |= {"produced": layout.place == "out"}
    elif layout.scatter >= 0:
        common |= {"axis": layout.scatter, "tensor": "y"}
    else:
        common |= _uneven_shards(layout, dtype, tiles) | {"tensor": "y"}
    template = templates.get(name)
    unknown = set(common) - set(inspect.signature(template).parameters)
    if unknown:
        raise InputError(
            f"plan: template {name!r} makes no {kind}, it takes no {', '.join(sorted(unknown))}; "
            f"the usual one is {USUAL_TEMPLATES[kind]!r}"
        )
    return template(layout.ranks, layout.plan_shape, **common)


def _uneven_shards(layout: Blocked, dtype: str, tiles: Mapping[str, int]) -> dict[str, Any]:
    """Axis, shards and pieces of an all-reduce in which no letter divides by the ranks.

    Ranks share the rows by whole tiles where these are enough for all of them and lie on whole
    registers; else they share ``b``, of which the first ranks own more than the last, or all.
    """
    letters, extents = layout.exchanged, layout.extents
    rows = sublanes(dtype)
    b, m, tile = (extents.get("b", 1), extents["m"], tiles["m"])
    count = -(-m // tile)
    aligned = m % rows == 0 and (tile % rows == 0 or count == 1)
    if not aligned or -(-count // layout.ranks) * b >= -(-b // layout.ranks) * count:
        return {"axis": max(letters.find("b"), 0)}
    ends = [min(end * tile, m) for end in split_points(count, layout.ranks)]
    shards = tuple(hi - lo for lo, hi in itertools.pairwise(ends))
    return {"axis": letters.index("m"), "shards": shards, "split": 1}


def _check_same_exchange(plan: Plan, usual: Plan, kind: str) -> None:
    """Raises InputError unless ``plan`` moves the operator's array as the usual plan does."""
    needs = f"this {kind} needs"
    apart = _other_array(plan, usual, needs) or difference(plan, usual, needs)
    if apart:
        raise InputError(
            f"plan {plan.name}: {apart}; start from template {USUAL_TEMPLATES[kind]!r}"
        )


def _other_array(plan: Plan, usual: Plan, needs: str) -> str:
    """What the first tensor of ``plan`` has that the operator's array has not, in words."""
    if not plan.tensors:
        return f"it has no tensor, {needs} one"
    found, wanted = plan.tensors[0], usual.tensors[0]
    for what in ("shape", "dtype") if plan.num_ranks == usual.num_ranks else ():
        if getattr(found, what) != getattr(wanted, what):
            return f"its {what} is {getattr(found, what)}, {needs} {getattr(wanted, what)}"
    return ""


def sublanes(dtype: str) -> int:
    """Rows of ``dtype`` in one register of a TPU core, on which copies of part of an array must
    begin and end."""
    return SUBLANES * 4 // min(ITEM_SIZES[dtype], 4)


def split_axis(layout: Blocked) -> int:
    """The dimension along which chunks are cut into pieces."""
    letters = layout.exchanged
    return next(d for d, letter in enumerate(letters) if letter in matmul_tpu.MATRIX_LETTERS)


def _split(kind: str, layout: Blocked, tiles: Mapping[str, int], wanted: int) -> tuple[int, int]:
    """The dimension to cut chunks along, and into how many pieces.

    Pieces that land beside a tile, to be added to it, must hold whole tiles.
    """
    axis = split_axis(layout)
    letter = layout.exchanged[axis]
    if kind in ("all_gather", "all_to_all"):
        return axis, wanted
    extent, tile = layout.extents[letter], tiles[letter]
    most = min(wanted, extent)
    whole = [p for p in range(1, most + 1) if extent % p == 0 and (extent // p) % tile == 0]
    return axis, max(whole, default=1)
