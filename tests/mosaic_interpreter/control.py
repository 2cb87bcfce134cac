"""Branches, loops and calls in a kernel's text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax import lax
from jax._src.pallas import primitives
from jax.extend.core import primitives as public

from tests.mosaic_interpreter.evaluate import Evaluator, handles


@handles(lax.axis_index_p)
def axis_index(ev: Evaluator, eqn: Any, given: list[Any]) -> Sequence[Any]:
    del given
    name, wg = eqn.params["axis_name"], ev.warpgroup
    grid = wg.machine.grid
    if name == grid.warpgroup_name:
        return [wg.number]
    if name in grid.ones:
        return [0]
    if name in grid.cta_names:
        return [int(np.unravel_index(wg.cta.number, grid.ctas)[grid.cta_names.index(name)])]
    return [grid.coordinates(wg.device.number)[name]]


@handles(public.cond_p)
def cond(ev: Evaluator, eqn: Any, given: list[Any]) -> Sequence[Any]:
    index, *rest = given
    branches = eqn.params["branches"]
    return ev.run(branches[min(max(int(index), 0), len(branches) - 1)], rest)


@handles(public.while_p)
def while_loop(ev: Evaluator, eqn: Any, given: list[Any]) -> Sequence[Any]:
    params = eqn.params
    first, second = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
    test, body, state = given[:first], given[first:second], given[second:]
    while ev.run(params["cond_jaxpr"], [*test, *state])[0]:
        state = ev.run(params["body_jaxpr"], [*body, *state])
    return state


@handles(public.scan_p)
def scan(ev: Evaluator, eqn: Any, given: list[Any]) -> Sequence[Any]:
    params = eqn.params
    consts, carry, xs = map(list, params["ft_in"].update(given).unpack())
    if xs:
        raise NotImplementedError("a scan over arrays in a kernel")
    for _ in range(params["length"]):
        found = ev.run(params["jaxpr"], [*consts, *carry])
        carry, ys = map(list, params["ft_out"].update(found).unpack())
        if ys:
            raise NotImplementedError("a scan that stacks arrays in a kernel")
    return carry


@handles(public.jit_p)
def call(ev: Evaluator, eqn: Any, given: list[Any]) -> Sequence[Any]:
    return ev.run(eqn.params["jaxpr"], given)


@handles(primitives.multiple_of_p)
def multiple_of(ev: Evaluator, eqn: Any, given: list[Any]) -> Sequence[Any]:
    """What the compiler was told is checked."""
    for divisor in eqn.params["values"]:
        if given[0] % divisor:
            raise AssertionError(ev.words(eqn, f"{given[0]} said to be a multiple of {divisor}"))
    return given
