"""Local kernels: what is read from grid and BlockSpecs, and what is refused."""

from __future__ import annotations

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

from syncopate_jax.errors import InputError
from syncopate_jax.kernel.access import Access, BoxAccess
from syncopate_jax.kernel.blocks import block_shape
from syncopate_jax.kernel.local import PallasKernel
from syncopate_jax.pallas_kernels import matmul_tpu
from tests.backends import own_kernels


def kernel(in_spec: pl.BlockSpec, *, grid: tuple[int, ...] = (2,), **changes: Any) -> PallasKernel:
    def body(x: jax.Ref, out: jax.Ref) -> None:
        out[...] = x[...]

    given: dict[str, Any] = {
        "body": body,
        "grid": grid,
        "operands": ("x",),
        "results": ("out",),
        "in_specs": (in_spec,),
        "out_specs": (pl.BlockSpec((2, 4), lambda i, *_: (i, 0)),),
        "out_shape": (jax.ShapeDtypeStruct((4, 4), jnp.float32),),
        "name": "kernel",
    }
    return PallasKernel(**(given | changes))


ROWS = pl.BlockSpec((2, 4), lambda i: (i, 0))
ROWS_OF_TWO = pl.BlockSpec((2, 1), lambda i, j: (i, 0))


def refused(text: str, error: type[Exception] = InputError) -> Any:
    return pytest.raises(error, match=re.escape(text))


def test_a_kernel_runs_alone() -> None:
    x, s = jnp.ones((5, 4)), jnp.arange(5.0)[:, None]
    (y,) = own_kernels.scale(5, 4)(x, s, interpret=True)
    np.testing.assert_array_equal(y, x * s)


def test_a_number_that_is_asked_for_inside_something() -> None:
    """Where Pallas's interpreter does not know it; jitted functions keep none of another call."""

    @jax.jit
    def raised(x: jax.Array) -> jax.Array:
        return x + pl.program_id(0) * pl.num_programs(0)

    def body(x: jax.Ref, y: jax.Ref) -> None:
        @pl.when(x[0, 0] >= 0)
        def _() -> None:
            y[...] = raised(x[...])

        def add(_: Any, total: jax.Array) -> jax.Array:
            return total + pl.program_id(0)

        y[...] += jax.lax.fori_loop(0, 3, add, jnp.int32(0)).astype(jnp.float32)

    block = pl.BlockSpec((2, 4), lambda i: (i, 0))
    given = jax.ShapeDtypeStruct((6, 4), jnp.float32)
    local = PallasKernel(body, (3,), ("x",), ("y",), block, block, given)
    for _ in range(2):
        (y,) = jax.jit(lambda x: local(x, interpret=True))(jnp.ones((6, 4)))
        np.testing.assert_array_equal(y[:, 0], [1, 1, 7, 7, 13, 13])


def test_attention_alone_has_a_reduction_axis() -> None:
    found = own_kernels.attention(4, 6, 4, 2, 2)
    assert found.reduction_axes == (1,)
    space, accesses = found.read({"k": (6, 4), "q": (4, 4)})
    assert (space.num_tiles, space.num_steps) == (2, 3)
    assert accesses["k"] == Access("k", (6, 4), ("g1", None))
    assert accesses["q"] == Access("q", (4, 4), ("g0", None))
    assert accesses["out"] == Access("out", (4, 4), ("g0", None), write=True)


def test_index_maps_that_follow_no_axis_give_boxes() -> None:
    flipped = kernel(pl.BlockSpec((2, 4), lambda i: (1 - i, 0)))
    space, accesses = flipped.read({"x": (4, 4)})
    assert isinstance(accesses["x"], BoxAccess)
    lo, hi = accesses["x"].boxes(space)
    assert lo[:, 0].tolist() == [[2, 0], [0, 0]] and hi[:, 0].tolist() == [[4, 4], [2, 4]]


def test_index_maps_count_in_32_bits_as_pallas_does() -> None:
    hashed = kernel(
        pl.BlockSpec((2, 4), lambda i: ((i * 1103515245 + 12345) % 3, 0)),
        grid=(3,),
        out_specs=pl.BlockSpec((2, 4), lambda i: (i, 0)),
        out_shape=jax.ShapeDtypeStruct((6, 4), jnp.float32),
    )
    space, accesses = hashed.read({"x": (6, 4)})
    found = accesses["x"].boxes(space)[0][:, 0, 0] // 2
    wanted = [int(np.int32((i * 1103515245 + 12345 + 2**31) % 2**32 - 2**31)) % 3 for i in range(3)]
    assert found.tolist() == wanted == [0, 0, 2]


def test_operands_without_blocks_are_taken_whole() -> None:
    whole = kernel(pl.BlockSpec())
    space, accesses = whole.read({"x": (4, 4)})
    assert accesses["x"].boxes(space)[1][1, 0].tolist() == [4, 4]


def test_block_shapes() -> None:
    spec = pl.BlockSpec((None, pl.Squeezed(), pl.Blocked(3), 2), lambda i: (i, 0, 0, 0))
    assert block_shape(spec, (5, 5, 5, 5)) == (1, 1, 3, 2)
    assert block_shape(pl.BlockSpec(), (5, 0)) == (5, 1)


def test_blocks_without_a_grid() -> None:
    spec = pl.BlockSpec((pl.Element(2), 4), lambda i: (i, 0))
    with pytest.raises(InputError, match=r"block dimension Element\(.*has no fixed grid of blocks"):
        kernel(spec).read({"x": (4, 4)})


def test_index_maps_that_read_something_else() -> None:
    def traced(i: Any) -> Any:
        return jax.jit(lambda: 0)() + i, "first"

    with refused(
        "kernel: x: an index map must be a function of the grid indices alone that gives integers"
    ):
        kernel(pl.BlockSpec((2, 4), traced)).read({"x": (4, 4)})


@pytest.mark.parametrize(
    ("index_map", "raised"),
    [
        (lambda i: (pl.program_id(0), 0), "AssertionError"),
        (lambda i: (i + jax.lax.axis_index("t"), 0), "NameError"),
        (lambda i: (i if i < 2 else 0, 0), "ValueError: The truth value of an array"),
        (lambda i: {}["rows"], "KeyError: 'rows'"),
        (5, "TypeError: 'int' object is not callable"),
    ],
)
def test_index_maps_that_raise(index_map: Any, raised: str) -> None:
    spec = pl.BlockSpec((2, 4), index_map)
    said = "an index map must be a function of the grid indices alone that gives integers for"
    with refused(f"kernel: x: {said} arrays of them; this one raises {raised}"):
        kernel(spec).read({"x": (4, 4)})
    with refused(f"kernel: out: {said} arrays of them; this one raises {raised}"):
        kernel(ROWS, out_specs=(spec,)).read({})


@pytest.mark.parametrize("array", [np.asarray, jnp.asarray])
def test_index_maps_that_give_fractions(array: Any) -> None:
    with refused(f"for arrays of them; this one gives ({array([0, 1]) / 2!r}, 0)"):
        kernel(pl.BlockSpec((2, 4), lambda i: (array(i) / 2, 0))).read({"x": (4, 4)})


@pytest.mark.parametrize("what", ["in_specs", "out_specs", "out_shape"])
def test_numbers_of_specs(what: str) -> None:
    names, name = ("operands", "x") if what == "in_specs" else ("results", "out")
    with refused(f"kernel: {names} names 1 arrays ('{name}',), {what} has 0; each array needs"):
        kernel(ROWS, **{what: ()})


def copy_rows(x: jax.Ref, y: jax.Ref) -> None:
    y[...] = x[...]


BARE: dict[str, Any] = {
    "grid": 2,
    "operands": ["x"],
    "results": ["y"],
    "in_specs": ROWS,
    "out_specs": ROWS,
    "out_shape": jax.ShapeDtypeStruct((4, 4), jnp.float32),
}


def test_one_spec_may_stand_bare() -> None:
    found = PallasKernel(copy_rows, **BARE)
    assert (found.operands, found.results, found.in_specs) == (("x",), ("y",), (ROWS,))
    np.testing.assert_array_equal(found(jnp.ones((4, 4)), interpret=True)[0], np.ones((4, 4)))
    assert found.read({"x": (4, 4)})[0].num_tiles == 2


def test_the_name_is_that_of_the_body() -> None:
    assert PallasKernel(copy_rows, **BARE).name == "copy_rows"
    assert PallasKernel(functools.partial(copy_rows), **BARE).name == "copy_rows"
    assert PallasKernel(lambda x, y: copy_rows(x, y), **BARE).name == "kernel"
    assert PallasKernel(copy_rows, **BARE, name="rows").name == "rows"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"grid_spec": pl.GridSpec(grid=(2,))}, "grid_spec is not taken; give its grid, in_specs"),
        ({"operands": "x"}, "operands must be a tuple of names, found 'x'"),
        ({"results": ("y", 1)}, "results must be a tuple of names, found ('y', 1)"),
        ({"operands": 3}, "operands must be a tuple of names, found 3"),
        ({"operands": ()}, "operands names 0 arrays (), in_specs has 1; each array needs a name"),
        ({"in_specs": pl.BlockSpec(8, lambda i: i)}, "x needs a tuple as block shape, found 8"),
        ({"in_specs": pl.BlockSpec((8.0, 4))}, "x: block dimension 8.0 has no fixed grid of"),
        ({"out_specs": pl.BlockSpec((2, pl.Element(4)))}, "y: block dimension Element("),
        ({"in_specs": (5, 6)}, "operands names 1 arrays ('x',), in_specs has 2; each array needs a "
         "name in operands and one of in_specs, found (5, 6)"),
        ({"loop": 5}, "loop needs a LoopBody, found 5"),
        ({"triton": 5}, "triton needs what triton_kernel makes of an annotated kernel, found 5"),
        ({"in_specs": 3}, "x needs a pl.BlockSpec, found 3"),
        ({"out_shape": 3}, "y needs a jax.ShapeDtypeStruct in out_shape, found 3"),
    ],
)  # fmt: skip
def test_arguments_that_are_something_else(changes: dict[str, Any], message: str) -> None:
    with refused(f"copy_rows: {message}"):
        PallasKernel(copy_rows, **(BARE | changes))


@pytest.mark.parametrize(
    ("left_out", "message"),
    [
        ("operands", "operands names 0 arrays (), in_specs has 1; each array needs a name in op"),
        ("in_specs", "operands names 1 arrays ('x',), in_specs has 0; each array needs a name"),
        ("out_specs", "results names 1 arrays ('y',), out_specs has 0; each array needs a name"),
        ("grid", "x has an index map that does not take the 0 indices of grid ()"),
    ],
)
def test_arguments_that_are_left_out(left_out: str, message: str) -> None:
    given = {name: value for name, value in BARE.items() if name != left_out}
    with refused(f"copy_rows: {message}"):
        PallasKernel(copy_rows, **given)


def test_names_that_repeat() -> None:
    with refused("kernel: operand and result names repeat: ['x', 'x']"):
        kernel(ROWS, results=("x",))


def test_shapes_of_another_number_of_dimensions() -> None:
    with refused("kernel: blocks of x have 2 dimensions, its shape is (1, 4, 4)"):
        kernel(ROWS).read({"x": (1, 4, 4)})


@pytest.mark.parametrize("grid", [(-2,), (2.0,), (True,)])
def test_grids_that_count_nothing(grid: Any) -> None:
    with refused(f"kernel: grid must be integers of at least 0, found {grid!r}"):
        kernel(ROWS, grid=grid)


@pytest.mark.parametrize("grid", [2, (np.int64(2),), [2], np.int32(2)])
def test_grids_as_pallas_takes_them(grid: Any) -> None:
    found = kernel(ROWS, grid=grid)
    assert found.grid == (2,)
    np.testing.assert_array_equal(found(jnp.ones((4, 4)), interpret=True)[0], np.ones((4, 4)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"in_specs": (None,)},
            "kernel: x needs a pl.BlockSpec, found None; pl.BlockSpec() takes all of an array",
        ),
        (
            {"in_specs": (pl.BlockSpec((0, 4), lambda i: (i, 0)),)},
            "kernel: x needs blocks of at least 1 element, found (0, 4)",
        ),
        (
            {"out_specs": (pl.BlockSpec((2, 4), lambda i, j: (i, j)),)},
            "kernel: out has an index map that does not take the 1 indices of grid (2,)",
        ),
        (
            {"body": None},
            "kernel: body must be a function of 2 references, one for each of x, out, found None",
        ),
        (
            {"body": lambda x: None, "has_addend": True},
            "body must be a function of 2 references, one for each of x, out and addend by name",
        ),
        (
            {"body": lambda x, y, z: None, "scratch_shapes": (3,)},
            "kernel: scratch_shapes needs references such as pltpu.VMEM(shape, dtype), found 3",
        ),
        (
            {"body": lambda x, y: None, "scratch_shapes": (jax.ShapeDtypeStruct((1,), "int8"),)},
            "body must be a function of 3 references, one for each of x, out, ShapeDtypeStruct(",
        ),
        (
            {"reference": lambda: 0},
            "kernel: reference must be a function of 1 arrays, one for each of x, found <function",
        ),
        ({"reference": 3}, "kernel: reference must be a function of 1 arrays, one for each of x"),
    ],
)
def test_kernels_that_no_call_takes(changes: dict[str, Any], message: str) -> None:
    with refused(message):
        kernel(ROWS, **changes)


@pytest.mark.parametrize(
    "reference,message",
    [
        (
            lambda x: (x, x),
            "kernel: reference gives 2 arrays, the kernel has 1 results ('out',); give one for "
            "each, in this order",
        ),
        (lambda x: None, "kernel: reference gives None for result out, needs an array"),
        (
            lambda x: x[:2],
            "kernel: reference gives float32[2, 4] for result out, out_shape has float32[4, 4]; "
            "make the two agree",
        ),
        (lambda x: x.astype("int32"), "gives int32[4, 4] for result out, out_shape has float32[4"),
    ],
)
def test_references_that_give_something_else(reference: Any, message: str) -> None:
    made = kernel(ROWS, reference=reference)
    with refused(message):
        jax.eval_shape(
            lambda x: made.unfused(x, runner="f"), jax.ShapeDtypeStruct((4, 4), jnp.float32)
        )


def test_a_reference_may_give_one_array_bare_or_several() -> None:
    x = jnp.ones((4, 4))
    for reference in (lambda x: x, lambda x: (x,), lambda x: [np.asarray(x)]):
        (found,) = kernel(ROWS, reference=reference).unfused(x, runner="f")
        np.testing.assert_array_equal(found, x)


def test_without_a_reference_the_body_is_run() -> None:
    x = jnp.arange(16.0).reshape(4, 4)
    (found,) = kernel(ROWS).unfused(x, runner="f", interpret=True)
    np.testing.assert_array_equal(found, x)


def test_blocks_that_begin_outside() -> None:
    before = pl.BlockSpec((2, 4), lambda i: (i - 1, 0))
    numbered = "blocks (2, 4) of shape (4, 4) are numbered from 0 to (1, 0)"
    with refused(
        f"kernel: at grid point (0,) the index map of x gives block (-1, 0), but {numbered}; 1 of "
        "2 grid points are outside"
    ):
        kernel(before).read({"x": (4, 4)})
    with refused(f"the index map of out gives block (-1, 0), but {numbered}"):
        kernel(ROWS, out_specs=(before,)).read({"x": (4, 4)})
    with refused("at grid point (2,) the index map of x gives block (2, 0)"):
        kernel(ROWS, grid=(4,)).read({"x": (3, 4)})


def out(*blocks: int, index: Any = lambda i: (i, 0)) -> dict[str, Any]:
    return {"out_specs": (pl.BlockSpec(blocks, index),)}


def test_results_that_are_not_written_whole() -> None:
    with refused(
        "kernel kernel: out[2:4,0:4] is written by no tile; grid (1,) writes 1 of the 2 blocks "
        "(2, 4) of shape (4, 4), and results must be written whole"
    ):
        kernel(ROWS, grid=(1,)).read({"x": (2, 4)})
    with refused("kernel kernel: out[0:4,2:4] is written by no tile; grid (2,) writes 2 of the 4"):
        kernel(ROWS, **out(2, 2)).read({"x": (4, 4)})
    with refused("kernel kernel: out[1:2,0:4] is written by no tile; grid (3,) writes 3 of the 4"):
        kernel(pl.BlockSpec(), grid=(3,), **out(1, 4, index=lambda i: (i + (i > 0), 0))).read({})
    with refused("kernel kernel: out[] is written by no tile; grid (0,) writes 0 of the 1 blocks"):
        scalar = (jax.ShapeDtypeStruct((), jnp.float32),)
        kernel(ROWS, grid=(0,), **out(index=lambda i: ()), out_shape=scalar).read({})


def test_blocks_that_two_tiles_write() -> None:
    with refused(
        "kernel kernel: the tiles at grid points (1,) and (2,) both write out[2:4,0:4], and tiles "
        "run in any order; each block of a result needs one tile"
    ):
        whole = pl.BlockSpec((4, 4), lambda *_: (0, 0))
        kernel(whole, grid=(3,), **out(2, 4, index=lambda i: (np.minimum(i, 1), 0))).read({})
    both: dict[str, Any] = {
        "results": ("out", "rows"),
        "out_specs": (pl.BlockSpec((2, 2), lambda i, j: (i, j)), ROWS_OF_TWO),
        "out_shape": [jax.ShapeDtypeStruct((4, n), jnp.float32) for n in (4, 1)],
    }
    with refused("the tiles at grid points (0, 0) and (0, 1) both write rows[0:2,0:1], and tiles"):
        kernel(pl.BlockSpec(), grid=(2, 2), body=lambda *_: None, **both).read({})
    # An axis on which no result depends is walked by one tile, which comes again and again.
    assert kernel(ROWS_OF_TWO, grid=(2, 3)).read({"x": (4, 1)})[0].num_steps == 3


def test_index_maps_of_another_number_of_dimensions() -> None:
    with refused("kernel: the index map of x gives 1 indices, its blocks (2, 4) have 2 dimensions"):
        kernel(pl.BlockSpec((2, 4), lambda i: (i,))).read({"x": (4, 4)})


MATMUL = {"sizes": {"m": 6, "n": 4, "k": 4, "b": 2}, "dtype": "float32", "out_dtype": "float32"}


@pytest.mark.parametrize(
    "lhs,rhs,out",
    [("bmk", "kn", "bmn"), ("bmk", "bmn", "kn"), ("bmn", "kn", "bmk"), ("mk", "kn", "nm")],
)
def test_products_of_any_letters(lhs: str, rhs: str, out: str) -> None:
    made = matmul_tpu.matmul(lhs, rhs, out, tiles={"m": 3, "n": 2, "k": 2}, **MATMUL)
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal([MATMUL["sizes"][x] for x in s]).astype("f") for s in (lhs, rhs))
    (y,) = made(a, b, interpret=True)
    np.testing.assert_allclose(y, np.einsum(f"{lhs},{rhs}->{out}", a, b), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(made.reference(a, b), y, rtol=1e-5, atol=1e-5)


def test_products_that_are_refused() -> None:
    tiles = {"m": 3, "n": 2, "k": 3}
    with refused(
        "matmul: letter k, which is reduced or in brackets, has extent 4, which its tile 3"
    ):
        matmul_tpu.matmul("mk", "kn", "mn", tiles=tiles, **MATMUL)
    with refused("matmul: operand 'bm' needs two of the letters m, n, k"):
        matmul_tpu.matmul("bm", "kn", "mn", tiles=tiles, **MATMUL)
    with refused(
        "matmul: letter m, which is reduced or in brackets, has extent 6, which its tile 4"
    ):
        matmul_tpu.matmul("(bm)k", "kn", "(bm)n", tiles={"m": 4, "n": 2, "k": 2}, **MATMUL)
