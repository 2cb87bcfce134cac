"""Results that JAX may take to be the same on every rank are so in every bit, by every backend."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from syncopate_jax.check.same_bits import ends_alike
from syncopate_jax.compiler import compile as fuse
from syncopate_jax.errors import UnsupportedError
from syncopate_jax.ir.plan import Plan
from syncopate_jax.ops import matmul_all_reduce
from syncopate_jax.passes.expand_collectives import expand_collectives
from syncopate_jax.registry import templates
from syncopate_jax.runtime.operator import Operator
from tests.backends import own_kernels
from tests.conformance.template import VARIANTS
from tests.ops import cases

RANKS, SHAPE, INNER = 4, (8, 16), 3
ALIKE = ("all_reduce_two_shot", "hierarchical_all_reduce", "collective")
"""Templates by which one rank adds and the others have copies, which must be noticed."""
FUSED = ("all_reduce_two_shot", "hierarchical_all_reduce")
"""Those that add to what tiles write, as kernels do."""


def sums() -> Iterator[Any]:
    """Every template, with its variants, that can leave one reduction on all ranks."""
    for name in templates.names():
        known = inspect.signature(templates.get(name)).parameters
        for options in VARIANTS.get(name, [{}]):
            kind = options.get("kind", name)
            if "all_reduce" in kind and ("reduce" in known or name == "collective"):
                words = "-".join([name, *map(str, options.values())])
                yield pytest.param(name, options, id=words)


SUMS = list(sums())


def plan_of(name: str, options: Any, dtype: str = "float32") -> Plan:
    known = inspect.signature(templates.get(name)).parameters
    produced = {"produced": True} if "produced" in known else {}
    return expand_collectives(templates.get(name)(RANKS, SHAPE, dtype=dtype, **produced, **options))


def results(operator: Operator) -> np.ndarray:
    """[ranks, …] bits of what each rank gets of a product of random partial operands."""
    rows, columns = SHAPE
    rng = np.random.default_rng(5)
    x = jnp.asarray(rng.standard_normal((RANKS * rows, INNER)), "float32")
    w = jnp.asarray(rng.standard_normal((RANKS * INNER, columns)), "float32")
    fn = jax.shard_map(
        lambda x, w: operator(x, w)[0], mesh=cases.ranks_mesh(RANKS),
        in_specs=(jax.P("t"), jax.P("t")), out_specs=jax.P("t"), check_vma=False,
    )  # fmt: skip
    found = np.asarray(jax.jit(fn)(x, w))
    return found.view(f"u{found.itemsize}").reshape(RANKS, rows, columns)


def test_every_template_that_reduces_is_here() -> None:
    known = {name: inspect.signature(templates.get(name)).parameters for name in templates.names()}
    reducing = {name for name in known if "reduce" in known[name]}
    scattering = {name for name in reducing if "scatter" in name}
    assert len(scattering) >= 3
    assert {param.values[0] for param in SUMS} == reducing - scattering | {"collective"}


@pytest.mark.parametrize("backend", ["xla", pytest.param("remote_dma", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name,options", SUMS)
def test_bits(name: str, options: Any, backend: str) -> None:
    plan = plan_of(name, options)
    kernel = own_kernels.product(*SHAPE[:1], INNER, SHAPE[1], 2, has_addend=True)
    try:
        operator = fuse(
            kernel, plan, {plan.initial[0].tensor: "out"}, axis_name="t", backend=backend
        )
    except UnsupportedError as error:
        assert backend != "xla"
        assert name not in FUSED or "max" in options.values(), error
        return
    assert operator.same_on_every_rank() or name not in ALIKE
    bits = results(operator)
    differ = int((bits != bits[0]).sum())
    if operator.same_on_every_rank():
        assert differ == 0
    elif "max" not in options.values():
        assert differ > 0  # what is not claimed is not so


@pytest.mark.parametrize("reduce", ["reduce_scatter_direct", "reduce_scatter_ring"])
def test_a_share_for_each_rank_is_not_the_same(reduce: str) -> None:
    plan = templates.get(reduce)(RANKS, SHAPE)
    assert not ends_alike(plan, {"y"})


def test_copies_are_the_same() -> None:
    for name, alike in (("all_gather_ring", True), ("all_to_all_blocks", False)):
        plan = templates.get(name)(RANKS, SHAPE)
        assert ends_alike(plan, {plan.goals[0].tensor}) == alike


def test_goals() -> None:
    plan = templates.get("all_reduce_two_shot")(2, SHAPE)
    first, second = plan.goals
    turned = replace(first, ranks=first.ranks[::-1])
    assert ends_alike(replace(plan, goals=(turned, second)), {"out"})
    assert not ends_alike(replace(plan, goals=(first,)), {"out"})


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["all_reduce_two_shot", "hierarchical_all_reduce"])
def test_sums_that_are_rounded(plan: str) -> None:
    """The rank that adds has float32 sums, the others what it sends of them."""
    x, w, _ = cases.operands(1, 16, 4 * RANKS, 16, "bfloat16")
    fn = jax.shard_map(
        lambda x, w: matmul_all_reduce(x, w, axis_name="t", backend="remote_dma", plan=plan),
        mesh=cases.ranks_mesh(RANKS), in_specs=(jax.P(None, None, "t"), jax.P("t")),
        out_specs=jax.P("t"), check_vma=False,
    )  # fmt: skip
    bits = np.asarray(jax.jit(fn)(x, w)).view("u2").reshape(RANKS, -1)
    assert (bits == bits[0]).all() and len(np.unique(bits[0])) > 1


def test_types() -> None:
    """A sum that may differ is refused where one value is asked for, before it runs."""
    kernel = own_kernels.product(SHAPE[0], INNER, SHAPE[1], 2, has_addend=True)
    x, w = jnp.zeros((SHAPE[0], INNER)), jnp.zeros((INNER, SHAPE[1]))

    def types(name: str) -> Any:
        operator = fuse(kernel, plan_of(name, {}), {"y": "out"}, axis_name="t", backend="xla")
        fn = jax.shard_map(
            lambda: operator(x, w)[0], mesh=cases.ranks_mesh(RANKS), in_specs=(),
            out_specs=jax.P(),
        )  # fmt: skip
        return jax.eval_shape(fn)

    assert types("all_reduce_two_shot").shape == SHAPE
    with pytest.raises(ValueError, match="out_specs"):
        types("all_reduce_one_shot")
