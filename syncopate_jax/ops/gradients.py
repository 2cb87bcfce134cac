"""How the products that gradients are get realised: a cotangent is not rounded for a kernel."""

from __future__ import annotations

import jax.numpy as jnp

from syncopate_jax.errors import SyncopateError
from syncopate_jax.ops import fused
from syncopate_jax.ops.blocked import block
from syncopate_jax.ops.spec import Contraction
from syncopate_jax.options import Options
from syncopate_jax.pallas_kernels import contraction_mosaic_gpu, contraction_triton

MULTIPLIED = {"mosaic_gpu": contraction_mosaic_gpu.DTYPES, "triton": contraction_triton.DTYPES}
"""What a target's kernels multiply, where that is not every dtype that operators take."""

Shape = tuple[int, ...]


def product_options(options: Options, lhs: jnp.dtype, rhs: jnp.dtype) -> Options:
    """Those of an operator's gradient, a product of arrays of these dtypes, one the cotangent.

    As JAX does, they are multiplied in the dtype that both promote to. Where the target's kernels
    do not multiply it, ``xla`` does.
    """
    options = options.using(plan=None)  # made for the forward exchange, not for its mirror
    return options.using(backend="xla") if unfused(options, lhs, rhs) else options


def unfused(options: Options, lhs: jnp.dtype, rhs: jnp.dtype) -> str | None:
    """Why ``xla`` computes a gradient that multiplies these dtypes; None if it need not."""
    if options.backend in ("auto", "xla"):
        return None
    target = options.target or fused.usual_target(options.backend)
    dtype, taken = jnp.promote_types(lhs, rhs), MULTIPLIED.get(target)
    if taken is None or str(dtype) in taken:
        return None
    return (
        f"xla computes them, as they multiply {lhs} by {rhs} in {dtype}, and the kernels of target "
        f"{target} multiply {' or '.join(taken)}"
    )


def remark(
    spec: Contraction,
    shapes: tuple[Shape, Shape],
    ranks: int,
    dtypes: tuple[jnp.dtype, jnp.dtype],
    axis_names: tuple[str, ...],
    options: Options,
) -> str:
    """What there is to say of the gradients of an operator that a fused backend takes.

    Nothing where they are fused, or have no exchange to fuse. ``shapes`` are of the local operands,
    ``dtypes`` of operands and result. What is built to find out is kept for the program.
    """
    if options.backend in ("auto", "xla") or spec.kind in ("none", "all_reduce"):
        return ""
    if reason := unfused(options, *dtypes):
        return reason
    (lhs, rhs), ct = shapes, block(spec, *shapes, ranks).result
    options, multiplied = product_options(options, *dtypes), jnp.promote_types(*dtypes)
    duals = ((spec.lhs_gradient(), ct, rhs), (spec.rhs_gradient(), lhs, ct))
    for dual, one, other in duals:
        layout = block(dual, one, other, ranks)
        try:
            fused.build(dual.kind, layout, str(multiplied), str(dtypes[0]), axis_names, options)
        except SyncopateError as error:
            return f"one is refused: {error}"
    return ""
