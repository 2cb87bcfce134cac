"""What the operators share: checking their arguments and folding leading dimensions into one."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from syncopate_jax.errors import InputError
from syncopate_jax.ops.contraction import contract
from syncopate_jax.ops.kept import contract_and_keep
from syncopate_jax.ops.spec import Contraction
from syncopate_jax.options import Options
from syncopate_jax.runtime import mesh
from syncopate_jax.runtime.given_arrays import as_jax

DTYPES = ("float32", "bfloat16", "float16", "float64")


def matmul_like(
    operator: str,
    x: jax.Array,
    w: jax.Array,
    spec: Contraction,
    axis_name: str | tuple[str, ...],
    preferred_element_type: jax.typing.DTypeLike | None,
    options: Options,
) -> jax.Array:
    """``spec`` applied to ``x`` [..., rows, columns] and ``w`` [rows, columns].

    ``spec`` is written for letters ``b`` (all leading dimensions of ``x`` as one), ``m``, ``k``
    and ``n``. Raises InputError naming ``operator`` when shapes, dtypes or options do not fit.
    """
    x, w = check_arrays(operator, x, w)
    names, out_dtype = _checked(operator, x, w, spec, axis_name, preferred_element_type, options)
    out = contract(spec, _folded(x), w, names, options, out_dtype)
    return out.reshape(*x.shape[:-2], *out.shape[1:])


def matmul_and_keep(
    operator: str,
    x: jax.Array,
    w: jax.Array,
    spec: Contraction,
    axis_name: str | tuple[str, ...],
    preferred_element_type: jax.typing.DTypeLike | None,
    options: Options,
) -> tuple[jax.Array, jax.Array]:
    """The same, and the operand that ``spec`` exchanges, as it is after that."""
    x, w = check_arrays(operator, x, w)
    names, out_dtype = _checked(operator, x, w, spec, axis_name, preferred_element_type, options)
    out, kept = contract_and_keep(spec, _folded(x), w, names, options, out_dtype)
    if spec.place == "lhs":
        kept = kept.reshape(*x.shape[:-2], *kept.shape[1:])
    return out.reshape(*x.shape[:-2], *out.shape[1:]), kept


def _folded(x: jax.Array) -> jax.Array:
    """All leading dimensions as one."""
    return x.reshape(math.prod(x.shape[:-2]), *x.shape[-2:])


def _checked(
    operator: str,
    x: jax.Array,
    w: jax.Array,
    spec: Contraction,
    axis_name: str | tuple[str, ...],
    preferred_element_type: jax.typing.DTypeLike | None,
    options: Options,
) -> tuple[tuple[str, ...], jnp.dtype]:
    """The mesh axes, and the dtype of the result."""
    out_dtype = result_dtype(operator, preferred_element_type, x, w)
    names = mesh.axis_tuple(axis_name, caller=operator)
    # Where axes are left to the compiler, ``auto`` takes ``xla``.
    launches = options.backend not in ("auto", "xla")
    mesh.require_bound(names, caller=operator, launches=launches)
    _check_sizes(operator, spec, x, w, mesh.ranks(names))
    return names, out_dtype


def check_arrays(operator: str, x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Both as JAX takes them, ``x`` [..., rows, columns] and ``w`` [rows, columns].

    Raises InputError where they are no such arrays.
    """
    x, w = as_jax(operator, "x", x), as_jax(operator, "w", w)
    for name, array, least in (("x", x, 2), ("w", w, 2)):
        if array.ndim < least or (name == "w" and array.ndim != 2):
            wanted = "[rows, columns]" if name == "w" else "[..., rows, columns]"
            raise InputError(f"{operator}: {name} must be {wanted}, found shape {array.shape}")
        if str(array.dtype) not in DTYPES:
            raise InputError(
                f"{operator}: {name} has dtype {array.dtype}; needs one of {', '.join(DTYPES)}"
            )
    return x, w


def result_dtype(
    operator: str, asked: jax.typing.DTypeLike | None, x: jax.Array, w: jax.Array
) -> jnp.dtype:
    """The dtype asked for, or that of the promoted operands; raises InputError on others."""
    if asked is None:
        return jnp.promote_types(x.dtype, w.dtype)
    try:
        name = jnp.dtype(asked).name
    except (TypeError, ValueError, SyntaxError):  # NumPy reads strings and lists as structures
        name = repr(asked)
    if name not in DTYPES:
        raise InputError(
            f"{operator}: preferred_element_type is {name}; needs one of {', '.join(DTYPES)}"
        )
    return jnp.dtype(name)


def _check_sizes(operator: str, spec: Contraction, x: jax.Array, w: jax.Array, ranks: int) -> None:
    """Contracted extents agree once the exchange has happened; scattered ones divide."""
    sizes = {"x": dict(zip(spec.lhs[-2:], x.shape[-2:], strict=True))}
    sizes["w"] = dict(zip(spec.rhs, w.shape, strict=True))
    of = {"lhs": "x", "rhs": "w"}.get(spec.place)
    if of is not None:
        if spec.scatter:
            _divide(operator, of, spec.scatter, sizes[of], ranks)
        if spec.gather:
            sizes[of][spec.gather] *= ranks
    for letter in set(sizes["x"]) & set(sizes["w"]):
        if sizes["x"][letter] != sizes["w"][letter]:
            gathered = f" (x and w as exchanged over {ranks} ranks)" if of else ""
            raise InputError(
                f"{operator}: contracted dimensions differ: x {x.shape} gives "
                f"{sizes['x'][letter]}, w {w.shape} gives {sizes['w'][letter]}{gathered}"
            )
    if of is None and spec.scatter:
        _divide(operator, "the result", spec.scatter, sizes["x"] | sizes["w"], ranks)


def _divide(operator: str, what: str, letter: str, sizes: dict[str, int], ranks: int) -> None:
    if sizes[letter] % ranks:
        raise InputError(
            f"{operator}: dimension {letter} of {what} is scattered over {ranks} ranks, "
            f"which does not divide its extent {sizes[letter]}; pad it to a multiple of {ranks}"
        )
    sizes[letter] //= ranks
