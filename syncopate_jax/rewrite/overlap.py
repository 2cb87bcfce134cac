"""``overlap``: an existing program, with its collectives and dots fused where that is possible."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax.extend import core as extend_core

from syncopate_jax.errors import InputError
from syncopate_jax.ops import fused
from syncopate_jax.ops.spec import Contraction
from syncopate_jax.options import Launch, Options
from syncopate_jax.rewrite.evaluate import Rewriter, surrounding_place
from syncopate_jax.rewrite.report import Report


class Overlapped[**P, R]:
    """A function that runs ``fn`` with fused operators; ``report`` says which.

    Attributes:
      fn: the function it was made from.
      options: how the operators are realised.
      auto_axes: whether the partitioner of auto mesh axes asks for dots.
    """

    def __init__(self, fn: Callable[P, R], options: Options, auto_axes: bool = False):
        functools.update_wrapper(self, fn)
        self.fn = fn
        self.options = options
        self.auto_axes = auto_axes
        self._traced: dict[Any, Any] = {}

    def __repr__(self) -> str:
        return f"overlap({self.fn!r}, backend={self.options.backend!r})"

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """What ``fn`` returns for these arguments."""
        closed, fill, leaves, tree = self._trace(args, kwargs)
        run = Rewriter(self.options, self.auto_axes, self._traced).rewrite(
            closed, surrounding_place()
        )
        if run is None:
            run = extend_core.jaxpr_as_fun(closed)
        result: R = jax.tree.unflatten(tree(), fill(run(*leaves)))
        return result

    def report(self, *args: P.args, **kwargs: P.kwargs) -> Report:
        """What is replaced and what is left, for arguments (or ``ShapeDtypeStruct``) like these."""
        closed, _, _, _ = self._trace(args, kwargs)
        rewriter = Rewriter(self.options, self.auto_axes, self._traced, asks_of_gradients=True)
        rewriter.rewrite(closed, surrounding_place())
        return rewriter.report()

    def _trace(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, Callable[[list[Any]], list[Any]], list[Any], Callable[[], Any]]:
        """The jaxpr of ``fn``, its array arguments, and how its results are put together.

        Arguments and results that are no arrays stay what they are: a module's activation
        function, or a Python number that a ``jax.jit`` inside may want to be static.
        """
        leaves, in_tree = jax.tree.flatten((args, kwargs))
        dynamic = [i for i, leaf in enumerate(leaves) if _is_array(leaf)]
        kept: dict[str, Any] = {}

        def flat(*arrays: Any) -> list[Any]:
            filled = list(leaves)
            for i, array in zip(dynamic, arrays, strict=True):
                filled[i] = array
            given, named = jax.tree.unflatten(in_tree, filled)
            outs, kept["tree"] = jax.tree.flatten(self.fn(*given, **named))
            kept["outs"] = [None if _is_array(out) else out for out in outs]
            kept["dynamic"] = [i for i, out in enumerate(outs) if _is_array(out)]
            return [outs[i] for i in kept["dynamic"]]

        closed = jax.make_jaxpr(flat)(*(leaves[i] for i in dynamic))

        def fill(arrays: list[Any]) -> list[Any]:
            outs = list(kept["outs"])
            for i, array in zip(kept["dynamic"], arrays, strict=True):
                outs[i] = array
            return outs

        return closed, fill, [leaves[i] for i in dynamic], lambda: kept["tree"]


def overlap[**P, R](
    fn: Callable[P, R],
    *,
    backend: str = "auto",
    target: str | None = None,
    split: int | None = None,
    tiles: Mapping[str, int] | None = None,
    launch: Launch | None = None,
    auto_axes: bool = False,
) -> Overlapped[P, R]:
    """``fn`` with each collective beside a dot replaced by one fused operator.

    Looked for inside the ``jax.shard_map`` bodies of the traced program, through nested ``jit``,
    ``scan``, ``while``, ``cond``, ``checkpoint`` and ``custom_vjp`` (the function and its forward
    rule): ``all_gather`` or ``all_to_all`` whose result one dot multiplies, dots whose result goes
    into ``psum``, ``psum_scatter`` or ``all_to_all``, and rings of ``ppermute`` around dots that do
    the same; casts, reshapes, transposes, activations and biases between the two are moved to the
    other side where they commute. Outside ``shard_map``, on explicit mesh axes, a dot is replaced
    whose sharded types imply a collective, together with a ``reshard`` of its operand. ``fn`` may
    also be the body of a ``shard_map`` itself. Everything else runs as it was traced; so do
    ``custom_jvp`` functions and the backward rules of ``custom_vjp``. Values and gradients are
    those of ``fn``. ``jax.grad`` of the overlapped function goes through the operators' own rules;
    in a ``fn`` that is a gradient, what JAX made of it is looked at.

    ::

        step = jax.jit(jax.value_and_grad(syncopate_jax.overlap(loss)))
        print(syncopate_jax.overlap(loss).report(params, batch))

    Args:
      fn: a function of pytrees that ``jax.jit`` would take.
      backend, target, split, tiles, launch: as in ``syncopate_jax.options.Options``, for every
        operator.
      auto_axes: outside ``shard_map`` on auto mesh axes, every dot becomes a product that the
        partitioner asks for when it has settled the shardings. Such products have no forward
        mode.

    Returns:
      A function with the signature of ``fn``, and ``report(*args)``, which lists what is replaced
      and what is left with the reason, each with its source line. It traces ``fn`` anew at every
      call, so put it inside ``jax.jit``; a ``jax.jit`` inside ``fn`` is compiled once all the same.
      Of a function that is overlapped already it makes one with the new options.

    Raises:
      InputError: ``fn`` is not callable, or an option is wrong.
    """
    if not callable(fn):
        raise InputError(f"overlap: fn must be a function, found {type(fn).__name__}")
    if not isinstance(auto_axes, bool):
        raise InputError(f"overlap: auto_axes must be True or False, found {auto_axes!r}")
    if isinstance(fn, Overlapped):
        fn = fn.fn
    options = Options(backend=backend, target=target, split=split, tiles=tiles, launch=launch)
    fused.choose_backend(Contraction("mk", "kn", "mn"), options)  # for its checks
    return Overlapped(fn, options, auto_axes)


def _is_array(leaf: Any) -> bool:
    if isinstance(leaf, bool | int | float | complex):
        return isinstance(leaf, np.generic)
    return isinstance(leaf, jax.ShapeDtypeStruct) or extend_core.valid_jaxtype(leaf)
