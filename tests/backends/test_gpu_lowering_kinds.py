"""GPU kernels lower for every number of ranks, both types of the tensor cores, and both gradients.

Without a GPU; ``test_gpu_lowering.py`` looks at what the kernels of one such program are.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from syncopate_jax.errors import UnsupportedError
from tests.backends.test_gpu_lowering import BACKENDS, arrays, brings, lowered, options
from tests.ops import cases
from tests.ops.cases import BY_NAME, CASES, Case

PAIRS = [(c, b) for c in CASES for b in BACKENDS if b != "ldst_colocated" or not brings(c)]
each_pair = pytest.mark.parametrize("case,backend", PAIRS, ids=lambda x: getattr(x, "name", x))
COUNTS = (1, 2, 4, 8)


def check(case: Case, backend: str, ranks: int, dtype: Any) -> None:
    """The operator is one kernel, and so is each of its two gradients."""
    fn = cases.sharded(case, cases.ranks_mesh(ranks), **options(backend))
    x, w, ct = (jax.ShapeDtypeStruct(a.shape, dtype) for a in arrays(ranks))
    text, found = lowered(fn, x, w)
    assert found["kernel"] == 1
    if ranks == 1:
        assert "nvshmem" not in text  # what Pallas asks for where it has no table of peers

    def gradients(x: jax.Array, w: jax.Array, ct: jax.Array) -> Any:
        return jax.vjp(fn, x, w)[1](ct)

    if backend != "ldst_colocated":  # which leaves what brings data to tiles to others
        assert lowered(gradients, x, w, ct)[1]["kernel"] == 2


def test_one_rank_of_float16() -> None:
    check(BY_NAME["gather_x_m"], "tma_dedicated", 1, jnp.float16)


@pytest.mark.parametrize(
    "tiles,text",
    [
        ({"m": 96}, "a warpgroup's part of the 96x128 tile is 48x128; its rows must be a multiple"),
        ({"n": 48}, "the 128x48 tile has 48 columns, and 64 are .* are a multiple of 64"),
        (
            {"k": 512},
            r"x512 with 2 stages takes \d+ bytes of shared memory, and a block has 232448",
        ),
        ({"n": 512}, "a warpgroup's part has 512 columns; wgmma has at most 256"),
    ],
)
def test_tiles_that_no_warpgroup_can_compute(tiles: dict[str, int], text: str) -> None:
    given = options("tma_dedicated") | {"tiles": tiles}
    fn = cases.sharded(BY_NAME["gather_x_m"], cases.ranks_mesh(2), **given)
    with pytest.raises(UnsupportedError, match=text):
        jax.eval_shape(fn, *arrays(2)[:2])


@pytest.mark.parametrize("name", ["scatter_m", "all_reduce"])
def test_a_tile_larger_than_what_it_is_stored_in(name: str) -> None:
    """One tile a rank, of which 24 rows would be stored past the rank's block."""
    fn = cases.sharded(BY_NAME[name], cases.ranks_mesh(2), **options("ldst_colocated"))
    text = r"tiles of 128 do not divide 104, and a store from registers is not clipped"
    with pytest.raises(UnsupportedError, match=text):
        jax.eval_shape(fn, *arrays(2, m=104)[:2])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("ranks", COUNTS)
@each_pair
def test_every_kind(case: Case, backend: str, ranks: int, dtype: Any) -> None:
    check(case, backend, ranks, dtype)
