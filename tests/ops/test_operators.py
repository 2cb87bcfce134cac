"""Every operator and its gradients against float64, on both backends."""

from __future__ import annotations

import dataclasses
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from syncopate_jax.ir.comm import P2P
from syncopate_jax.ops.blocked import block
from syncopate_jax.ops.contraction import contract
from syncopate_jax.ops.fused import prepare
from syncopate_jax.ops.spec import Contraction
from syncopate_jax.options import Options
from syncopate_jax.registry import templates
from tests.ops import cases
from tests.ops.cases import BY_NAME, CASES, Case

EPS = {"float32": 2.0**-23, "bfloat16": 2.0**-7, "float16": 2.0**-10}
RANKS = (1, 3, 8, *(pytest.param(ranks, marks=pytest.mark.slow) for ranks in (2, 4, 6)))
RAGGED = {"m": 2, "n": 2}
"""Tiles that do not divide the 3 rows and columns a rank has in ``small``."""

each_case = pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)

TWINS = ("gather_x_k", "gather_w_k", "gather_w_n", "scatter_n")
"""Variants that differ from another, or from one of its gradients, in little but the letters."""


def small(ranks: int, dtype: str = "float32") -> Any:
    return cases.operands(1, 3 * ranks, 2 * ranks, 3 * ranks, dtype)


def assert_as_exact_as_unfused(
    case: Case, ranks: int, arrays: Any, *, gradients: bool = True, **options: Any
) -> None:
    """Errors of the fused operator are at most twice the unfused one's, and a few roundings."""
    x, w, ct = arrays
    mesh = cases.ranks_mesh(ranks)
    few = 4 * EPS[str(ct.dtype)]
    exact = cases.exact(x, w, ct)
    both = [
        cases.sharded(case, mesh, backend="xla"),
        cases.sharded(case, mesh, backend="remote_dma", **options),
    ]
    if gradients:
        unfused, fused = (cases.value_and_gradients(fn, x, w, ct) for fn in both)
    else:
        unfused, fused = ((np.asarray(jax.jit(fn)(x, w), np.float64),) for fn in both)
        exact = exact[:1]
    errors = [cases.error(a, wanted) for a, wanted in zip(unfused, exact, strict=True)]
    cases.assert_near(fused, exact, [2 * error + few for error in errors])


@pytest.mark.parametrize("ranks", RANKS)
@each_case
def test_unfused_equals_float64(case: Case, ranks: int) -> None:
    x, w, ct = cases.operands(2, 24, 48, 72)
    fn = cases.sharded(case, cases.ranks_mesh(ranks), backend="xla")
    found = cases.value_and_gradients(fn, x, w, ct)
    cases.assert_near(found, cases.exact(x, w, ct), 16 * EPS["float32"])


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.slow)])
@each_case
def test_unfused_in_narrow_types(case: Case, dtype: str) -> None:
    x, w, ct = cases.operands(1, 129, 96, 576, dtype)
    fn = cases.sharded(case, cases.ranks_mesh(3), backend="xla")
    found = cases.value_and_gradients(fn, x, w, ct)
    cases.assert_near(found, cases.exact(x, w, ct), 2 * EPS[dtype])


@pytest.mark.parametrize(
    "case",
    [pytest.param(c, marks=[pytest.mark.slow] if c.name in TWINS else []) for c in CASES],
    ids=lambda c: c.name,
)
def test_fused_with_gradients(case: Case) -> None:
    assert_as_exact_as_unfused(case, 2, small(2), tiles=RAGGED)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 3, 4])
@each_case
def test_fused_with_gradients_over_more_ranks(case: Case, ranks: int) -> None:
    assert_as_exact_as_unfused(case, ranks, small(ranks), tiles=RAGGED)


def test_fused_on_one_rank() -> None:
    for name in ("gather_x_m", "all_reduce"):
        assert_as_exact_as_unfused(BY_NAME[name], 1, small(1))


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("backend", ["xla", "remote_dma"])
@each_case
def test_types_on_one_rank(case: Case, backend: str, check_vma: bool) -> None:
    """Arguments that are, and are not, known to vary over an axis of one rank."""
    x, w, ct = small(1)
    mesh = cases.ranks_mesh(1)
    options = {"backend": backend, "check_vma": check_vma}
    for one in (case, dataclasses.replace(case, x=None, w=None)):
        fn = cases.sharded(one, mesh, **options)
        found = jax.eval_shape(lambda x, w, fn=fn: (fn(x, w), *jax.vjp(fn, x, w)[1](ct)), x, w)
        chex.assert_trees_all_equal_shapes_and_dtypes(found, (ct, x, w))


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [6, 8])
@each_case
def test_fused_with_gradients_over_many_ranks(case: Case, ranks: int) -> None:
    """On 6 a tile ends within a rank's rows or columns, on 8 there is one of them."""
    n = 3 if ranks == 6 else 1
    scattered = "n" if case.name == "to_columns" else "m"
    letter = case.options.get("dimension", case.options.get("scatter", scattered))
    if letter == "k":  # of which no tile may be cut
        letter, n = "m", 1
    sizes = {"m": ranks, "k": ranks, "n": ranks} | {letter: n * ranks}
    tiles = None if ranks == 8 else {letter: 2 if n == 3 else 4}
    assert_as_exact_as_unfused(case, ranks, cases.operands(1, **sizes), tiles=tiles)


@pytest.mark.slow
@each_case
def test_fused_with_ragged_sizes(case: Case) -> None:
    arrays = cases.operands(1, 129, 96, 576)
    assert_as_exact_as_unfused(case, 3, arrays, gradients=False, tiles={"m": 32, "n": 128})


@pytest.mark.parametrize("name", ["scatter_m", pytest.param("gather_x_m", marks=pytest.mark.slow)])
def test_fused_in_bfloat16(name: str) -> None:
    assert_as_exact_as_unfused(BY_NAME[name], 2, small(2, "bfloat16"), gradients=False)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@each_case
def test_fused_in_narrow_types_with_gradients(case: Case, dtype: str) -> None:
    assert_as_exact_as_unfused(case, 2, small(2, dtype))


@pytest.mark.slow
def test_sums_of_many_ranks_stay_in_float32() -> None:
    """Partial results in bfloat16 are rounded once when sent, and once after they are added."""
    x, w, ct = small(8, "bfloat16")
    mesh = cases.ranks_mesh(8)
    fn = jax.jit(cases.sharded(BY_NAME["scatter_m"], mesh, backend="remote_dma"))
    cases.assert_near(np.asarray(fn(x, w), np.float64), cases.exact(x, w, ct)[0], 2.0**-8)


@pytest.mark.parametrize(
    "ranks,given",
    [
        pytest.param(2, False, marks=pytest.mark.slow),
        (3, True),
        pytest.param(8, False, marks=pytest.mark.slow),
    ],
)
def test_a_ring_rounds_its_sums_no_more_often_than_direct_sums(ranks: int, given: bool) -> None:
    """The ring by its name, and as a plan of the user's in the dtype of the result."""
    x, w, ct = cases.operands(1, 16 * ranks, 4 * ranks, 32, "bfloat16")
    mesh, exact = cases.ranks_mesh(ranks), cases.exact(x, w, ct)[0]
    ring: Any = "reduce_scatter_ring"
    if given:
        ring = templates.get(ring)(ranks, (ranks, 1, 16, 32), split_axis=2)
    errors = {}
    for name, plan in (("direct", None), ("ring", ring)):
        fn = jax.jit(cases.sharded(BY_NAME["scatter_m"], mesh, backend="remote_dma", plan=plan))
        found = fn(x, w)
        assert found.dtype == jnp.bfloat16
        errors[name] = cases.error(np.asarray(found, np.float64), exact)
    assert errors["ring"] <= 1.1 * errors["direct"] < 2.0**-8


def test_an_all_reduce_whose_copies_wait_for_their_owners() -> None:
    plan = templates.get("all_reduce_two_shot")(
        3, (1, 3, 6, 12), axis=1, dtype="float32", most_listed=1
    )
    fn = cases.sharded(BY_NAME["all_reduce"], cases.ranks_mesh(3), backend="remote_dma", plan=plan)
    x, w, ct = cases.operands(1, 18, 12, 12)
    found = np.asarray(jax.jit(fn)(x, w), np.float64)
    cases.assert_near(found, cases.exact(x, w, ct)[0], 4 * EPS["float32"])


def test_a_ring_carries_float32_and_a_direct_exchange_does_not() -> None:
    layout = block(Contraction("bmk", "kn", "bmn", "all_reduce", "out"), (1, 96, 6), (6, 8), 3)
    ring = templates.get("all_reduce_two_shot")(3, layout.plan_shape, axis=1, algorithm="ring")
    for options, dtype in ((Options("remote_dma"), "bfloat16"), (Options(plan=ring), "float32")):
        for target in ("tpu", "mosaic_gpu"):
            args = ("all_reduce", layout, "bfloat16", "bfloat16", options)
            _, kernel, plan = prepare(*args, target=target)
            assert {tensor.dtype for tensor in plan.tensors} == {dtype}
            assert str(kernel.out_shape[0].dtype) == dtype


TEMPLATES = [
    ("gather_x_m", 3, "all_gather_swizzle", 2),
    ("gather_x_m", 3, "all_gather_ring", 2),
    ("gather_x_m", 4, "all_gather_double_ring", 1),
    ("gather_w_k", 4, "all_gather_mesh", 1),
    ("scatter_m", 3, "reduce_scatter_direct", 3),
    ("scatter_m", 3, "reduce_scatter_ring", 3),
    ("all_reduce", 3, "all_reduce_two_shot", 3),
    ("to_rows", 3, "all_to_all_waves", 3),
    ("to_columns", 3, "all_to_all_waves", 2),
]


# One that hops; the slow suite has them all.
QUICK = ("all_gather_ring",)


@pytest.mark.parametrize(
    "name,ranks,plan,split",
    [pytest.param(*t, marks=[] if t[2] in QUICK else pytest.mark.slow) for t in TEMPLATES],
)
def test_every_plan_template(name: str, ranks: int, plan: str, split: int) -> None:
    options = {"plan": plan, "split": split, "tiles": {"m": 1}}
    assert_as_exact_as_unfused(BY_NAME[name], ranks, small(ranks), gradients=False, **options)


@pytest.mark.slow
@pytest.mark.parametrize("split", [2, 3])
@pytest.mark.parametrize("ranks", [2, 4])
@each_case
def test_every_split(case: Case, ranks: int, split: int) -> None:
    arrays = cases.operands(1, 5 * ranks, 4 * ranks, 5 * ranks)
    assert_as_exact_as_unfused(case, ranks, arrays, gradients=False, split=split)


@pytest.mark.parametrize(
    "ranks,m,n,shards",
    [
        (2, 129, 35, (1, 0)),  # rows of no whole register: the first rank adds all
        (3, 129, 35, (1, 1, 1)),  # 43 rows are a block for each
        (3, 40, 35, (16, 16, 8)),
        (5, 24, 7, (8, 8, 8, 0, 0)),
    ],
)
@pytest.mark.slow
def test_how_ranks_share_an_all_reduce(ranks: int, m: int, n: int, shards: tuple[int, ...]) -> None:
    arrays = cases.operands(1, m, 6 * ranks, n)
    case = BY_NAME["all_reduce"]
    fn = cases.sharded(case, cases.ranks_mesh(ranks), backend="remote_dma")
    found = np.asarray(jax.jit(fn)(*arrays[:2]), np.float64)
    cases.assert_near(found, cases.exact(*arrays)[0], 4 * EPS["float32"])
    layout = block(Contraction("bmk", "kn", "bmn", "all_reduce", "out"), (1, m, 6), (6, n), ranks)
    plan = prepare("all_reduce", layout, "float32", "float32", Options("remote_dma"))[2]
    adds = [op for rank in range(ranks) for op in plan.ops(rank) if op.reduce == "sum"]
    axis = 0 if shards[0] == 1 else 1
    sizes = {op.dst_rank: op.dst.box.shape[axis] for op in adds if isinstance(op, P2P)}
    assert tuple(sizes.get(rank, 0) for rank in range(ranks)) == shards


def test_pieces_of_unequal_size() -> None:
    """Five rows a rank in three pieces, under tiles of four."""
    arrays = cases.operands(1, 10, 4, 6)
    options = {"split": 3, "tiles": {"m": 4}}
    assert_as_exact_as_unfused(BY_NAME["gather_x_m"], 2, arrays, gradients=False, **options)


@pytest.mark.parametrize(
    "leading", [(2, 3), *(pytest.param(leading, marks=pytest.mark.slow) for leading in ((), (2,)))]
)
def test_leading_dimensions(leading: tuple[int, ...]) -> None:
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((*leading, 6, 4)), jnp.float32)
    w = jnp.asarray(rng.standard_normal((4, 6)), jnp.float32)
    spec = jax.P(*(None for _ in leading), "t", None)
    out_spec = jax.P(*(None for _ in leading), None, "t")

    def run(backend: str) -> jax.Array:
        fn = jax.shard_map(
            lambda x, w: BY_NAME["gather_x_m"].operator(x, w, axis_name="t", backend=backend),
            mesh=cases.ranks_mesh(2),
            in_specs=(spec, jax.P(None, "t")),
            out_specs=out_spec,
        )
        return jax.jit(fn)(x, w)

    for backend in ("xla", "remote_dma"):
        y = run(backend)
        chex.assert_shape(y, (*leading, 6, 6))
        chex.assert_trees_all_close(y, np.asarray(x) @ np.asarray(w), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", ["xla", "remote_dma"])
@pytest.mark.parametrize("name", ["gather_x_m", "scatter_m"])
def test_types_of_results_and_gradients(name: str, backend: str) -> None:
    """The result has the type that was asked for; gradients have their arguments' types."""
    x, w, _ = small(2, "bfloat16")
    w = w.astype(jnp.float32)
    for asked, wanted in ((None, jnp.float32), (jnp.bfloat16, jnp.bfloat16)):
        fn = cases.sharded(
            BY_NAME[name], cases.ranks_mesh(2), backend=backend, preferred_element_type=asked
        )
        y, dx, dw = jax.eval_shape(
            lambda x, w, fn=fn: (y := fn(x, w), *jax.vjp(fn, x, w)[1](jnp.zeros_like(y))), x, w
        )
        chex.assert_type([y, dx, dw], [wanted, x.dtype, w.dtype])


def test_a_wider_result_is_not_rounded() -> None:
    x, w, ct = small(2, "bfloat16")
    for backend in ("xla", "remote_dma"):
        fn = cases.sharded(
            BY_NAME["scatter_m"], cases.ranks_mesh(2), backend=backend,
            preferred_element_type="float32",
        )  # fmt: skip
        y = np.asarray(jax.jit(fn)(x, w), np.float64)
        cases.assert_near(y, cases.exact(x, w, ct)[0], 16 * EPS["float32"])


@pytest.mark.parametrize(
    "order",
    ["snake", *(pytest.param(order, marks=pytest.mark.slow) for order in ("natural", "grouped"))],
)
def test_every_order_of_tiles(order: str) -> None:
    x, w, ct = cases.operands(1, 8, 4, 6)
    spec = Contraction("bmk", "kn", "bmn", "all_gather", "lhs", gather="m")
    options = Options("remote_dma", tiles={"m": 2, "n": 1}, order=order)
    fn = jax.shard_map(
        lambda x, w: contract(spec, x, w, ("t",), options, "float32"),
        mesh=cases.ranks_mesh(2),
        in_specs=(cases.spec(1, 3, "t"), cases.spec(1, 2, "t")),
        out_specs=cases.spec(2, 3, "t"),
    )
    cases.assert_near(np.asarray(jax.jit(fn)(x, w)), cases.exact(x, w, ct)[0], 1e-6)


@pytest.mark.parametrize("empty", ["b", "m", "k", "n"])
@each_case
def test_empty_operands(case: Case, empty: str) -> None:
    """What there is of the result is zeros; the gradients are there, and zeros too."""
    sizes = {"b": 1, "m": 4, "k": 4, "n": 4} | {empty: 0}
    arrays = cases.operands(*sizes.values())
    fn = cases.sharded(case, cases.ranks_mesh(2))
    for found, wanted in zip(
        cases.value_and_gradients(fn, *arrays), cases.exact(*arrays), strict=True
    ):
        chex.assert_trees_all_equal(found, np.zeros_like(wanted))


@pytest.mark.parametrize("check_vma", [True, False])
def test_an_empty_sum_is_zeros_on_every_rank(check_vma: bool) -> None:
    fn = cases.sharded(BY_NAME["all_reduce"], cases.ranks_mesh(3), check_vma=check_vma)
    y = jax.jit(fn)(jnp.ones((1, 2, 0)), jnp.ones((0, 5)))
    chex.assert_trees_all_equal(y, jnp.zeros((1, 2, 5)))
