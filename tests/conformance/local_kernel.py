"""What every local kernel must do: right alone, right for its reference, and readable as tiles."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from syncopate_jax.kernel.local import PallasKernel
from syncopate_jax.pallas_kernels import matmul_tpu
from tests.backends import own_kernels

SIZES = {"m": 6, "n": 4, "k": 4, "b": 2}


def _matmul() -> PallasKernel:
    return matmul_tpu.matmul(
        "bmk", "kn", "bmn", SIZES, tiles={"m": 4, "n": 4, "k": 2},
        dtype="float32", out_dtype="float32",
    )  # fmt: skip


KERNELS: dict[str, tuple[Callable[[], PallasKernel], dict[str, tuple[int, ...]]]] = {
    "matmul": (_matmul, {"lhs": (2, 6, 4), "rhs": (4, 4)}),
    "scale": (lambda: own_kernels.scale(5, 4), {"x": (5, 4), "s": (5, 1)}),
    "attention": (
        lambda: own_kernels.attention(4, 6, 4, 2, 2),
        {"q": (4, 4), "k": (6, 4), "v": (6, 4)},
    ),
}


class LocalKernelConformance:
    """Subclass it in a test module to run it."""

    @pytest.fixture(params=KERNELS)
    def given(self, request: pytest.FixtureRequest) -> tuple[PallasKernel, dict]:
        make, shapes = KERNELS[request.param]
        return make(), shapes

    def test_names_every_operand(self, given: tuple[PallasKernel, dict]) -> None:
        kernel, shapes = given
        assert kernel.operands == tuple(shapes)
        assert kernel.name.isidentifier()

    def test_every_element_of_a_result_is_written_once(
        self, given: tuple[PallasKernel, dict]
    ) -> None:
        kernel, shapes = given
        space, accesses = kernel.read(shapes)
        for name, out in zip(kernel.results, kernel.out_shape, strict=True):
            lo, hi = (side[:, 0] for side in accesses[name].boxes(space))
            assert accesses[name].write and lo.shape == (space.num_tiles, len(out.shape))
            count = np.zeros(out.shape, int)
            for a, b in zip(lo, hi, strict=True):
                count[tuple(map(slice, a, b))] += 1
            assert (count == 1).all()

    def test_every_element_of_an_operand_is_read(self, given: tuple[PallasKernel, dict]) -> None:
        kernel, shapes = given
        space, accesses = kernel.read(shapes)
        for name, shape in shapes.items():
            lo, hi = (side.reshape(-1, len(shape)) for side in accesses[name].boxes(space))
            seen = np.zeros(shape, bool)
            for a, b in zip(lo, hi, strict=True):
                seen[tuple(map(slice, a, b))] = True
            assert seen.all() and not accesses[name].write

    def test_results_alone_and_of_the_reference(self, given: tuple[PallasKernel, dict]) -> None:
        kernel, shapes = given
        rng = np.random.default_rng(0)
        arrays = [jnp.asarray(rng.standard_normal(s), jnp.float32) for s in shapes.values()]
        alone = kernel(*arrays, interpret=True)
        types = [(y.shape, y.dtype) for y in alone]
        assert types == [(o.shape, o.dtype) for o in kernel.out_shape]
        assert all(bool(jnp.isfinite(y).all()) for y in alone)
        if kernel.reference is not None:
            wanted = jax.tree.leaves(kernel.reference(*arrays))
            for y, w in zip(alone, wanted, strict=True):
                np.testing.assert_allclose(y, w, rtol=1e-5, atol=1e-5)
