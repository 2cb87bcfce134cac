"""One fused kernel as one operation of the user's program.

``fused_call`` is to a kernel what ``lax.all_gather`` is to a collective: it may stand anywhere
inside ``jax.shard_map``, under ``jit``, ``scan``, ``checkpoint`` and ``vmap``; its results carry
the manual axes they vary over; calls whose results nobody reads are removed, and identical calls
may be merged, alike on every device, because every device runs the same program.

On the CPU, where kernels are interpreted, calls are also put in order. The interpreter of Pallas
TPU kernels is one global machine that all devices must enter for the same kernel, and XLA's CPU
runtime starts independent operations in any order, on each device its own. JAX's own
ordered effects would do, were they not refused under ``jax.checkpoint`` and ``vmap`` and never
removed when unused; so the order has an effect of its own here, that counts as a collective does.
On a GPU or TPU the compiled program fixes the order, the same on every device, and no effect is
used: it would cost JAX's fast dispatch path.

Private parts of JAX in use, read at 0.11.2 and 0.12.0.1, all of them in this file:
``config._check_vma`` (is vma tracked, and tracing a kernel without it), ``core.NamedAxisEffect``
and the effect sets (see above), ``callback._OrderedIOEffect`` (the token the interpreter threads),
and ``source_info_util._source_info_context`` (source lines of kernels).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import jax
from jax import lax
from jax import numpy as jnp
from jax._src import callback as jax_callback
from jax._src import config as jax_config
from jax._src import core as jax_core
from jax._src import effects as jax_effects
from jax._src import source_info_util as jax_source
from jax.extend import core as extend_core
from jax.interpreters import ad, batching, mlir

from syncopate_jax.backends import interface
from syncopate_jax.errors import InputError, UnsupportedError
from syncopate_jax.runtime import mesh


class ArrayType(Protocol):
    """Shape and dtype of a result, such as ``jax.ShapeDtypeStruct``."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> Any: ...


BatchRule = Callable[..., Sequence[jax.Array]]
"""``rule(size, batched, *args)``: results with the batch in front, as ``custom_vmap`` has it."""


@dataclass(frozen=True, slots=True)
class _Call:
    """Static part of a fused call; compared by ``key``, never by the functions it holds."""

    name: str
    key: Hashable
    out_types: tuple[tuple[tuple[int, ...], Any], ...]
    axis_names: tuple[str, ...]
    invariant_over: tuple[str, ...]
    ordered: bool
    narrow: bool
    impl: Callable[..., Sequence[jax.Array]] = field(compare=False)
    batch: BatchRule | None = field(compare=False)
    fold: BatchRule | None = field(compare=False)

    def __repr__(self) -> str:
        return f"{self.name}[{','.join(self.axis_names)}]"


def fused_call(
    impl: Callable[..., Sequence[jax.Array]],
    *args: jax.Array,
    out_types: Sequence[ArrayType],
    axis_names: tuple[str, ...],
    name: str,
    invariant_over: tuple[str, ...] = (),
    key: Hashable = None,
    batch: BatchRule | None = None,
    fold: BatchRule | None = None,
    ordered: bool | None = None,
    narrow: bool = False,
    launches: bool = True,
) -> tuple[jax.Array, ...]:
    """Run a kernel that communicates over mesh axes as one operation.

    Args:
      impl: ``impl(*args, platform=...) -> results``, traced when the program is lowered, with
        ``platform`` one of ``cpu``, ``cuda``, ``rocm`` and ``tpu`` (on ``cpu`` it must ask Pallas
        for interpretation). Called without the checks on varying axes.
      *args: this device's shards.
      out_types: shape and dtype of each result on this device.
      axis_names: mesh axes communicated over; empty for a local kernel, which takes its place in
        the order of calls on the CPU.
      name: what the call is named in jaxprs, HLO and profiles.
      invariant_over: those of ``axis_names`` along which all devices get the same results. Results
        vary over the axes that any argument varies over and over the other ``axis_names``.
      key: hashable that is equal for two calls only if they do the same; default ``impl`` itself.
      batch: how to do a whole batch in one call; without it ``vmap`` runs one call after another.
      fold: how to do all ranks in one call, where they are rows of a ``vmap`` over ``axis_names``.
      ordered: keep calls in program order; default: if the surrounding mesh is of CPU devices.
      narrow: trace and lower ``impl`` with numbers of at most 32 bits, whatever ``jax_enable_x64``
        says, as Pallas has them in kernels; ignored where an argument or result has more.
      launches: whether ``impl`` launches a kernel at all, see ``mesh.require_bound``.

    Returns:
      The results, in the order of ``out_types``.

    Raises:
      MeshError: an axis is not bound by ``jax.shard_map``, or some axis was left automatic and the
        call launches a kernel.
      InputError: ``invariant_over`` names an axis that is not communicated over, or ``impl``
        returned other shapes or dtypes than ``out_types`` (raised when the program is lowered).
    """
    mesh.require_bound(axis_names, caller=name, launches=launches)
    for axis in invariant_over:
        if axis not in axis_names:
            raise InputError(
                f"{name}: invariant_over names {axis!r}, but the call communicates over "
                f"{', '.join(map(repr, axis_names)) or 'no axis'}; only those can become invariant"
            )
    call = _Call(
        name=name,
        key=impl if key is None else key,
        out_types=tuple((tuple(t.shape), jnp.dtype(t.dtype)) for t in out_types),
        axis_names=tuple(axis_names),
        invariant_over=tuple(invariant_over),
        ordered=mesh.platform() == "cpu" if ordered is None else ordered,
        narrow=narrow and not any(interface.is_wide(x.dtype) for x in (*args, *out_types)),
        impl=impl,
        batch=batch,
        fold=fold,
    )
    return tuple(_fused_call_p.bind(*args, call=call))


def in_place(x: jax.Array) -> jax.Array:
    """An array in host memory, for a kernel of ``fused_call`` that reads it by its address there.

    Nothing is moved; ``jax.device_put`` would copy it to the device first.
    """
    found: jax.Array = _in_place_p.bind(x)
    return found


def tracks_varying_axes() -> bool:
    """Whether the surrounding ``shard_map`` checks varying axes (``check_vma=True``).

    The gradient of a sum over an axis depends on it: where axes are tracked, the cotangent of an
    invariant result is complete on each device; where they are not, JAX hands each device a share,
    and the shares must be summed over the axis.
    """
    return jax_config._check_vma.value


def vary_alike(args: Sequence[jax.Array], axis_names: Sequence[str] = ()) -> tuple[jax.Array, ...]:
    """Make arguments vary over the same axes: those of any of them, and ``axis_names``.

    To be called outside an operator's ``custom_vjp``: inside, all arguments, results and
    cotangents then have one type, and the sum that a broadcast argument's gradient needs is added
    by JAX where the cast is transposed. Without tracking, arguments are returned as they are.
    """
    if not tracks_varying_axes():
        return tuple(args)
    wanted = _varying(map(jax.typeof, args)) | frozenset(axis_names)
    return tuple(
        lax.pcast(arg, missing, to="varying") if missing else arg
        for arg, missing in ((a, tuple(sorted(wanted - _varying([jax.typeof(a)])))) for a in args)
    )


def vary_as(x: jax.Array, args: Sequence[jax.Array], *, but: Sequence[str] = ()) -> jax.Array:
    """``x``, which varies over no axis, made to vary over those of any of ``args`` except ``but``.

    Without tracking it is returned as it is.
    """
    if not tracks_varying_axes():
        return x
    axes = tuple(sorted(_varying(map(jax.typeof, args)) - frozenset(but)))
    varied: jax.Array = lax.pcast(x, axes, to="varying") if axes else x
    return varied


def _varying(types: Any) -> frozenset[str]:
    return frozenset[str]().union(*(t.manual_axis_type.varying for t in types))


class _LaunchOrder(jax_core.NamedAxisEffect):
    """Orders fused calls; otherwise treated as a collective's effect is: may be removed, redone."""

    __slots__ = ()


_launch_order = _LaunchOrder("fused_call_order")
jax_effects.ordered_effects.add_type(_LaunchOrder)
jax_effects.shardable_ordered_effects.add_type(_LaunchOrder)

_fused_call_p = extend_core.Primitive("fused_call")
_fused_call_p.multiple_results = True


@_fused_call_p.def_effectful_abstract_eval
def _abstract_eval(*avals: Any, call: _Call) -> tuple[list[Any], set[jax_effects.Effect]]:
    manual_axis_type = jax.sharding.ManualAxisType()
    if tracks_varying_axes():
        varying = (_varying(avals) | set(call.axis_names)) - set(call.invariant_over)
        manual_axis_type = jax.sharding.ManualAxisType(varying=varying)
    spec = jax.sharding.NamedSharding(jax.sharding.get_abstract_mesh(), jax.P())
    outs = [
        jax_core.ShapedArray(shape, dtype, sharding=spec, manual_axis_type=manual_axis_type)
        for shape, dtype in call.out_types
    ]
    named = {jax_core.NamedAxisEffect(name) for name in call.axis_names}
    return outs, named | ({_launch_order} if call.ordered else set())


@_fused_call_p.def_impl
def _run_eagerly(*args: jax.Array, call: _Call) -> Sequence[jax.Array]:
    return jax.jit(functools.partial(_fused_call_p.bind, call=call))(*args)


def _batch(
    axis_data: Any, args: Sequence[jax.Array], dims: Sequence[int | None], *, call: _Call
) -> tuple[Sequence[jax.Array], Sequence[int | None]]:
    batched = tuple(dim is not None for dim in dims)
    args = [a if d is None else jnp.moveaxis(a, d, 0) for a, d in zip(args, dims, strict=True)]
    size = axis_data.size
    if axis_data.name in call.axis_names:
        if call.fold is None or call.axis_names != (axis_data.name,):
            raise UnsupportedError(
                f"{call.name}: its ranks along {', '.join(map(repr, call.axis_names))} are rows of "
                f"a vmap over {axis_data.name!r}; this backend needs a device a rank: use "
                "jax.shard_map, or a backend that folds ranks, such as 'tma_colocated'; operators "
                "of this package also fold with 'xla'"
            )
        outs = tuple(call.fold(axis_data.size, batched, *args))
        return outs, (0,) * len(outs)
    if not any(batched):  # JAX asks all the same, of whatever a vmapped function calls
        outs = tuple(_fused_call_p.bind(*args, call=call))
        return outs, (None,) * len(outs)
    if call.batch is not None:
        outs = tuple(call.batch(size, batched, *args))
        return outs, (0,) * len(outs)

    def one(rows: list[jax.Array]) -> tuple[jax.Array, ...]:
        left = iter(rows)
        row = [next(left) if b else a for a, b in zip(args, batched, strict=True)]
        return tuple(_fused_call_p.bind(*row, call=call))

    outs = lax.map(one, [a for a, is_batched in zip(args, batched, strict=True) if is_batched])
    return outs, (0,) * len(outs)


def _lower(ctx: mlir.LoweringRuleContext, *operands: Any, call: _Call, platform: str) -> Any:
    def kernel(*args: jax.Array) -> tuple[jax.Array, ...]:
        return tuple(call.impl(*args, platform=platform))

    kernel.__name__ = kernel.__qualname__ = call.name

    def checked(*args: jax.Array) -> tuple[jax.Array, ...]:
        outs = jax.jit(kernel)(*args)
        found = tuple((out.shape, out.dtype) for out in outs)
        if found != call.out_types:
            raise InputError(
                f"{call.name}: the kernel returned {_show(found)}, but out_types says "
                f"{_show(call.out_types)}; make the two agree"
            )
        return outs

    plain = [aval.update(manual_axis_type=jax.sharding.ManualAxisType()) for aval in ctx.avals_in]
    io = jax_callback._OrderedIOEffect
    tokens: dict[jax_effects.Effect, Any] = (
        {io: ctx.tokens_in.get(_launch_order)} if call.ordered else {}
    )
    inner = ctx.replace(avals_in=plain, avals_out=None, tokens_in=mlir.TokenSet(tokens))
    x64 = jax.enable_x64(False) if call.narrow else contextlib.nullcontext()
    with jax_config._check_vma(False), _source_lines_of_kernel(), x64:
        try:
            outs = mlir.lower_fun(checked)(inner, *operands)
        except KeyError as error:
            if call.ordered or error.args != (io,):
                raise
            raise UnsupportedError(
                f"{call.name}: the kernel is interpreted on {platform}, but the call was traced "
                "without order, for devices of another kind; pass ordered=True to fused_call"
            ) from error
    if call.ordered:
        after: dict[jax_effects.Effect, Any] = {_launch_order: inner.tokens_out.get(io)}
        ctx.set_tokens_out(ctx.tokens_in.update_tokens(mlir.TokenSet(after)))
    return outs


@contextlib.contextmanager
def _source_lines_of_kernel() -> Iterator[None]:
    """Give what is traced here its own source lines; while lowering, JAX gives it the caller's."""
    context = jax_source._source_info_context
    before = context.context
    context.context = jax_source.new_source_info().replace(name_stack=before.name_stack)
    try:
        yield
    finally:
        context.context = before


def _show(types: Sequence[tuple[tuple[int, ...], Any]]) -> str:
    return ", ".join(f"{dtype.name}{list(shape)}" for shape, dtype in types) or "nothing"


def _refuse_jvp(primals: Any, tangents: Any, *, call: _Call) -> Any:
    raise UnsupportedError(
        f"{call.name} has no derivative of its own: wrap the call in jax.custom_vjp and give its "
        "gradient there, as the operators of syncopate_jax.ops do (forward mode is not available)"
    )


_in_place_p = extend_core.Primitive("in_place")
_in_place_p.def_abstract_eval(lambda x: x.update(memory_space=jax.memory.Space.Device))
mlir.register_lowering(_in_place_p, lambda ctx, x: [x])

batching.fancy_primitive_batchers[_fused_call_p] = _batch
ad.primitive_jvps[_fused_call_p] = _refuse_jvp
for _platform in ("cpu", "tpu", "cuda", "rocm"):
    mlir.register_lowering(
        _fused_call_p, functools.partial(_lower, platform=_platform), platform=_platform
    )
