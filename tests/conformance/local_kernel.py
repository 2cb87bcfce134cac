"""What every local kernel must do: right alone, right for its reference, and readable as tiles.

Every public function in ``pallas_kernels`` that returns a PallasKernel is found by its annotation;
the test module of its file has ``EXAMPLES`` of it. Kernels of a user's own are tried beside them.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from syncopate_jax import pallas_kernels
from syncopate_jax.kernel.local import PallasKernel
from tests.backends import own_kernels
from tests.pallas_kernels.examples import Example

OWN = (
    Example(
        "scale", own_kernels.scale, lambda: own_kernels.scale(5, 4), {"x": (5, 4), "s": (5, 1)}
    ),
    Example(
        "attention",
        own_kernels.attention,
        lambda: own_kernels.attention(4, 6, 4, 2, 2),
        {"q": (4, 4), "k": (6, 4), "v": (6, 4)},
    ),
)


def makers() -> dict[str, str]:
    """Names of the functions that make local kernels, and the file each is in."""
    found = {}
    for entry in pkgutil.iter_modules(pallas_kernels.__path__):
        try:
            module = importlib.import_module(f"{pallas_kernels.__name__}.{entry.name}")
        except ModuleNotFoundError as error:
            if error.name != "triton":
                raise
            continue  # the extra of that name is not installed
        for name, fn in inspect.getmembers(module, inspect.isfunction):
            made_here = fn.__module__ == module.__name__ and not name.startswith("_")
            returns = inspect.signature(fn).return_annotation
            if made_here and returns in ("PallasKernel", PallasKernel):
                found[f"{entry.name}.{name}"] = entry.name
    return found


def examples_of(file: str) -> tuple[Example, ...]:
    """The examples in the test module of a file in ``pallas_kernels``."""
    tests = importlib.import_module(f"tests.pallas_kernels.test_{file}")
    found: tuple[Example, ...] = tests.EXAMPLES
    return found


EXAMPLES = (*OWN, *(one for file in sorted(set(makers().values())) for one in examples_of(file)))


class LocalKernelConformance:
    """Subclass it in a test module to run it."""

    @pytest.fixture(params=EXAMPLES, ids=lambda e: f"{e.maker.__name__}-{e.name}")
    def given(self, request: pytest.FixtureRequest) -> tuple[PallasKernel, Example]:
        return request.param.make(), request.param

    def test_every_maker_has_an_example(self) -> None:
        found = makers()
        assert {"matmul_tpu.matmul", "contraction_triton.contraction"} <= set(found)
        made = {(e.maker.__module__, e.maker.__name__) for e in EXAMPLES}
        assert set(found) <= {f"{m.split('.')[-1]}.{n}" for m, n in made}

    def test_names_every_operand(self, given: tuple[PallasKernel, Example]) -> None:
        kernel, example = given
        assert kernel.operands == tuple(example.shapes)
        assert kernel.name.isidentifier()

    def test_every_element_of_a_result_is_written_once(
        self, given: tuple[PallasKernel, Example]
    ) -> None:
        kernel, example = given
        space, accesses = kernel.read(example.shapes)
        for name, out in zip(kernel.results, kernel.out_shape, strict=True):
            lo, hi = (side[:, 0] for side in accesses[name].boxes(space))
            assert accesses[name].write and lo.shape == (space.num_tiles, len(out.shape))
            count = np.zeros(out.shape, int)
            for a, b in zip(lo, hi, strict=True):
                count[tuple(map(slice, a, b))] += 1
            assert (count == 1).all()

    def test_every_element_of_an_operand_is_read(self, given: tuple[PallasKernel, Example]) -> None:
        kernel, example = given
        space, accesses = kernel.read(example.shapes)
        for name, shape in example.shapes.items():
            lo, hi = (side.reshape(-1, len(shape)) for side in accesses[name].boxes(space))
            seen = np.zeros(shape, bool)
            for a, b in zip(lo, hi, strict=True):
                seen[tuple(map(slice, a, b))] = True
            assert seen.all() and not accesses[name].write

    def test_results_alone_and_of_the_reference(self, given: tuple[PallasKernel, Example]) -> None:
        """A kernel that is handed its loop has no way to run alone; it must have a reference."""
        kernel, example = given
        rng = np.random.default_rng(0)
        shapes = example.shapes.values()
        arrays = [jnp.asarray(rng.standard_normal(s), example.dtype) for s in shapes]
        has_grid = kernel.loop is None and kernel.triton is None
        assert has_grid or kernel.reference is not None
        found = []
        if has_grid:
            found.append(list(kernel(*arrays, interpret=True)))
        if kernel.reference is not None:
            found.append(jax.tree.leaves(kernel.reference(*arrays)))
        for results in found:
            chex.assert_tree_all_finite(results)
            chex.assert_trees_all_equal_shapes_and_dtypes(results, list(kernel.out_shape))
            chex.assert_trees_all_close(
                results, found[0], rtol=example.tolerance, atol=example.tolerance
            )
