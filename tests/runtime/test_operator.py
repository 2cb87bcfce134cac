"""Compiled operators: what they say of themselves, and calls that do not fit."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import chex
import jax
import jax.numpy as jnp
import pytest

from syncopate_jax.compiler import compile as fuse
from syncopate_jax.errors import InputError, MeshError
from syncopate_jax.options import Launch
from syncopate_jax.pallas_kernels.contraction_mosaic_gpu import contraction
from syncopate_jax.pallas_kernels.matmul_mosaic_gpu_config import MatmulConfig
from syncopate_jax.registry import templates
from syncopate_jax.runtime.folded import fold
from tests.backends import own_kernels
from tests.ops import cases

P = jax.P


def refused(text: str, error: type[Exception] = InputError) -> Any:
    return pytest.raises(error, match=re.escape(text))


class TestCalls:
    """Operators called wrongly."""

    @pytest.fixture
    def operator(self) -> Any:
        plan = own_kernels.gather_plan(2, t=(4, 4))
        return fuse(own_kernels.scale(4, 4), plan, {"t": "x"}, axis_name="t")

    def trace(self, operator: Any, *arrays: Any, ranks: int = 2) -> Any:
        fn = jax.shard_map(
            lambda: operator(*arrays)[0], mesh=cases.ranks_mesh(ranks), in_specs=(),
            out_specs=P("t"), check_vma=False,
        )  # fmt: skip
        return jax.eval_shape(fn)

    def test_right(self, operator: Any) -> None:
        assert operator.name == "syncopate_own_gather_scale"
        assert repr(operator) == (
            "Operator(syncopate_own_gather_scale: own_gather over 2 ranks of ('t',), "
            "backend remote_dma, target tpu)"
        )
        assert operator.operand_shapes() == {"x": (2, 4)}
        assert [t.shape for t in operator.result_types()] == [(4, 4)]
        assert self.trace(operator, jnp.ones((2, 4)), jnp.ones((4, 1))).shape == (8, 4)

    def test_outside_shard_map(self, operator: Any) -> None:
        with refused("syncopate_own_gather_scale communicates over mesh axis 't'", MeshError):
            operator(jnp.ones((2, 4)), jnp.ones((4, 1)))

    def test_folded_ranks_of_another_launch(self) -> None:
        sizes = {"G": 2, "m": 128, "k": 64, "n": 128}
        types = {"dtype": "bfloat16", "out_dtype": "bfloat16"}
        kernel = contraction("Gmk", "kn", "Gmn", sizes, config=MatmulConfig(tile_n=128), **types)
        plan = templates.get("all_gather_swizzle")(2, (2, 128, 64), axis=0)
        x, w = (jnp.zeros(shape, jnp.bfloat16) for shape in ((1, 128, 64), (64, 128)))

        def product(**launch: bool) -> Any:
            return fuse(
                kernel, plan, {"x": "lhs"}, axis_name="t", backend="tma_colocated",
                target="mosaic_gpu", launch=Launch(132, **launch),
            )  # fmt: skip

        apart, together = product(), product(folded=True)

        def over_rows(operator: Any) -> Any:
            run = fold(lambda x, w: operator(x, w)[0], "t", in_axes=(0, None))
            return jax.eval_shape(run, jnp.stack([x, x]), w)

        with refused("axis 't' is folded here, all its ranks share one device", MeshError):
            over_rows(apart)
        assert over_rows(together).shape == (2, 2, 128, 128)
        with refused("was compiled for folded ranks, and axis 't' is not folded here", MeshError):
            self.trace(together, x, w)

    def test_axes_left_to_the_compiler(self) -> None:
        """Those of a launch are refused: ``xla`` has one where a kernel has no reference."""
        mesh = jax.make_mesh((2, 2), ("d", "t"), (jax.sharding.AxisType.Auto,) * 2)
        plan = own_kernels.gather_plan(2, t=(4, 4))
        kernel = own_kernels.scale(4, 4)
        x, s = jnp.arange(16.0).reshape(4, 4), jnp.arange(4.0)[:, None]

        def run(kernel: Any, backend: str) -> jax.Array:
            operator = fuse(kernel, plan, {"t": "x"}, axis_name="t", backend=backend)
            return jax.jit(
                jax.shard_map(
                    lambda x, s: operator(x, s)[0], mesh=mesh, in_specs=(P("t"), P()),
                    out_specs=P("t"), axis_names={"t"},
                )
            )(x, s)  # fmt: skip

        plain = replace(kernel, reference=lambda x, s: x * s)
        found = run(plain, "xla")
        chex.assert_trees_all_equal(found, jnp.concatenate([x * s] * 2))
        bare = replace(kernel, reference=None)
        for one, backend in ((bare, "xla"), (plain, "remote_dma")):
            with refused("spans all devices, so axis 'd' must be manual too", MeshError):
                run(one, backend)

    def test_a_reference_that_is_no_form_of_the_kernel(self) -> None:
        """A transposed bound result was reshaped into wrong values, without a word."""
        own = own_kernels.gather_and_scatter_plan(2, (4, 4), (4, 8))
        kernel = own_kernels.product(4, 4, 8, 2, has_addend=True)
        wrong = replace(kernel, reference=lambda x, w: (x @ w).T)
        operator = fuse(wrong, own, {"x": "x", "y": "out"}, axis_name="t", backend="xla")
        run = jax.jit(
            jax.shard_map(
                lambda x, w: operator(x, w)[0], mesh=cases.ranks_mesh(2), in_specs=(P("t"), P()),
                out_specs=P("t"),
            )
        )  # fmt: skip
        with refused(
            "product: reference gives float32[8, 4] for result out, out_shape has float32[4, 8]"
        ):
            run.lower(jnp.ones((4, 4)), jnp.ones((4, 8)))

    def test_another_number_of_ranks(self, operator: Any) -> None:
        with refused("the plan is for 2 ranks, mesh axis t has 3; make the plan for 3"):
            self.trace(operator, jnp.ones((2, 4)), jnp.ones((4, 1)), ranks=3)

    def test_missing_operands(self, operator: Any) -> None:
        with refused("kernel scale has 2 operands ('x', 's'), found 1"):
            self.trace(operator, jnp.ones((2, 4)))

    def test_shapes(self, operator: Any) -> None:
        with refused("operand x is (4, 4) on each rank, the plan has (2, 4) there"):
            self.trace(operator, jnp.ones((4, 4)), jnp.ones((4, 1)))

    def test_dtypes(self, operator: Any) -> None:
        with refused("operand x is bfloat16, the plan's tensor is float32; make the plan with"):
            self.trace(operator, jnp.ones((2, 4), jnp.bfloat16), jnp.ones((4, 1)))

    def test_what_is_no_array(self, operator: Any) -> None:
        with refused("operand x must be an array, found list"):
            self.trace(operator, [1.0], jnp.ones((4, 1)))
