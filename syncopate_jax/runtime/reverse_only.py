"""What has gradients in reverse mode alone says so where forward mode is asked for.

JAX's own message about a ``jax.custom_vjp`` function names neither the function nor what to do, and
inside ``shard_map`` outside ``jit`` it is another error altogether. So operands pass through an
identity whose tangents pass through a second one. Reverse mode transposes that one away; only
forward mode ever runs or lowers it, and then it raises.
"""

from __future__ import annotations

from typing import Any

import jax
from jax.extend import core as extend_core
from jax.interpreters import ad, batching, mlir

from syncopate_jax.errors import UnsupportedError


def reverse_only(x: jax.Array, name: str) -> jax.Array:
    """``x``, of which ``name`` gives gradients in reverse mode only.

    An empty array is left as it is: XLA's partitioner takes none that something is done with.

    Raises:
      UnsupportedError: when a forward-mode derivative through it runs or is lowered.
    """
    if not x.size:
        return x
    same: jax.Array = _value_p.bind(x, name=name)
    return same


_value_p = extend_core.Primitive("reverse_only")
_tangent_p = extend_core.Primitive("reverse_only_tangent")


def _refuse(*_: Any, name: str) -> Any:
    raise UnsupportedError(
        f"{name}: a forward-mode derivative was asked for (jax.jvp, jax.jacfwd, jax.hessian or the "
        f"function that jax.linearize returns), and operators have none, with any backend; reverse "
        f"mode works (jax.grad, jax.vjp, jax.jacrev); for forward mode write the collective of "
        f"jax.lax beside the dot, and do not overlap it"
    )


def _jvp(primals: Any, tangents: Any, *, name: str) -> Any:
    (x,), (dx,) = primals, tangents
    same = isinstance(dx, ad.Zero)
    return _value_p.bind(x, name=name), dx if same else _tangent_p.bind(dx, name=name)


_value_p.def_impl(lambda x, name: x)
_value_p.def_abstract_eval(lambda x, name: x)
mlir.register_lowering(_value_p, lambda ctx, x, name: [x])
batching.primitive_batchers[_value_p] = lambda x, dims, name: (_value_p.bind(*x, name=name), *dims)
ad.primitive_jvps[_value_p] = _jvp
_tangent_p.def_impl(_refuse)
_tangent_p.def_abstract_eval(lambda x, name: x)
mlir.register_lowering(_tangent_p, lambda ctx, x, name: _refuse(name=name))
batching.primitive_batchers[_tangent_p] = _refuse
ad.deflinear2(_tangent_p, lambda ct, _, name: [ct])
