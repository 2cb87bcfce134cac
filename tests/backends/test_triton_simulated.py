"""Rewritten Triton kernels of folded ranks, in Triton's interpreter, against NumPy.

Programs run in an order drawn at random; a wait hands over until its counter is there, so that a
signal that is missing shows as a deadlock, and one that comes early as a wrong value: what no
program has written is NaN.
"""

from __future__ import annotations

import functools
import inspect
import re
import runpy
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from syncopate_jax import compiler
from syncopate_jax.backends import triton_call
from syncopate_jax.backends.interface import interpret_settings
from syncopate_jax.backends.triton_ordered import OrderedTriton
from syncopate_jax.ir.build import build_plan
from syncopate_jax.ir.chunk import Box, Chunk
from syncopate_jax.ir.comm import P2P, ComputeDep, Operation
from syncopate_jax.ir.plan import Goal, Plan, Region, Tensor
from syncopate_jax.kernel.local import PallasKernel
from syncopate_jax.kernel.triton_kernel import triton_kernel
from syncopate_jax.options import Launch
from syncopate_jax.registry import templates
from syncopate_jax.runtime.folded import fold
from syncopate_jax.triton_source import module
from tests.ops.cases import BY_NAME, CASES, Case, error

pytest.importorskip("triton")

from syncopate_jax.pallas_kernels import attention_triton, matmul_triton
from tests.triton_interpret import Interpreter
from tests.triton_source import foreign

AXIS = "ranks"
TILES = {"m": 16, "n": 16, "k": 16}
BACKENDS = ("ldst_dedicated", "ldst_colocated")


@pytest.fixture(autouse=True)
def simulator(monkeypatch: pytest.MonkeyPatch) -> Iterator[Interpreter]:
    """Launches are simulated; jax-triton is not needed for that."""
    monkeypatch.setattr(triton_call, "NEEDED", ("triton",))
    made = Interpreter(seed=0)
    token = interpret_settings.set(made)
    yield made
    interpret_settings.reset(token)


def launch(backend: str, ranks: int, workers: int = 2) -> Launch:
    communicating = 1 if backend == "ldst_dedicated" else 0
    return Launch(sms=(workers + communicating) * ranks, communicating=communicating)


def operator_error(case: Case, backend: str, ranks: int, m: int, k: int, n: int) -> float:
    """The operator on random rows of every rank, against float64."""

    def run(x: jax.Array, w: jax.Array, **given: Any) -> jax.Array:
        return case.operator(x, w, axis_name=AXIS, **case.options, **given)

    def over(**given: Any) -> Any:
        return jax.jit(fold(lambda x, w: run(x, w, **given), AXIS))

    rng = np.random.default_rng(m)
    x, w = (
        jnp.asarray(rng.standard_normal((ranks, *_part(whole, dim, ranks))), jnp.float32)
        for whole, dim in (((1, m, k), case.x), ((k, n), case.w))
    )
    with jax.default_matmul_precision("highest"):
        wanted = over(backend="xla")(x, w)
    fused = over(backend=backend, target="triton", tiles=TILES, launch=launch(backend, ranks))
    return error(np.asarray(fused(x, w), np.float64), np.asarray(wanted, np.float64))


def _part(whole: Sequence[int], dimension: int | None, ranks: int) -> tuple[int, ...]:
    return tuple(n // ranks if d == dimension else n for d, n in enumerate(whole))


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        ("gather_x_m", "ldst_dedicated"),
        ("to_rows", "ldst_colocated"),
        ("all_reduce", "ldst_colocated"),
    ],
)
def test_operators(name: str, backend: str) -> None:
    case = BY_NAME[name]
    assert operator_error(case, backend, 2, 40, 24, 20) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_all_operators(case: Case, backend: str, ranks: int) -> None:
    assert operator_error(case, backend, ranks, 20 * ranks, 12 * ranks, 20 * ranks) < 1e-6


@pytest.mark.parametrize(
    ("name", "backend", "ranks"),
    [
        ("gather_x_m", "ldst_dedicated", 1),
        ("gather_x_k", "ldst_colocated", 3),
        ("scatter_m", "ldst_dedicated", 4),
        ("to_columns", "ldst_colocated", 8),
    ],
)
def test_operators_over_other_numbers_of_ranks(name: str, backend: str, ranks: int) -> None:
    assert operator_error(BY_NAME[name], backend, ranks, 6 * ranks, 4 * ranks, 2 * ranks) < 1e-6


# --- a kernel and a plan of one's own ----------------------------------------------------------


def gather(ranks: int, axis: int, dtype: str = "float32", **shapes: tuple[int, ...]) -> Plan:
    """Every rank pushes its part of each tensor along ``axis`` to all others, nearest first."""

    def part(name: str, shape: tuple[int, ...], rank: int) -> Chunk:
        size = shape[axis] // ranks
        return Chunk(name, Box.full(shape).with_axis(axis, rank * size, (rank + 1) * size))

    lists: list[list[Operation]] = [[] for _ in range(ranks)]
    for step in range(1, ranks):
        for rank, ops in enumerate(lists):
            for name, shape in shapes.items():
                own = part(name, shape, rank)
                ops.append(P2P(rank, rank, (rank + step) % ranks, own, own))
    everyone = range(ranks)
    starts = [
        Region(r, name, part(name, shape, r).box)
        for r in everyone
        for name, shape in shapes.items()
    ]
    goals = [Goal(r, name, Box.full(shape)) for r in everyone for name, shape in shapes.items()]
    tensors = [Tensor(name, shape, dtype) for name, shape in shapes.items()]
    return build_plan("gather", ranks, tensors, starts, goals, lists)


def run(
    kernel: PallasKernel,
    plan: Plan,
    axis_map: Mapping[str, str],
    backend: str,
    operands: Sequence[np.ndarray],
    workers: int = 2,
) -> list[np.ndarray]:
    """Results of all ranks; operands have a leading rank axis."""
    made = compiler.compile(
        kernel,
        plan,
        axis_map,
        axis_name=AXIS,
        backend=backend,
        target="triton",
        launch=launch(backend, plan.num_ranks, workers).using(folded=True),
    )
    outs = jax.jit(fold(lambda *rows: made(*rows), AXIS))(*map(jnp.asarray, operands))
    return [np.asarray(out) for out in outs]


def random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def split(whole: np.ndarray, ranks: int, axis: int) -> np.ndarray:
    return np.stack(np.split(whole, ranks, axis))


def repeated(whole: np.ndarray, ranks: int) -> np.ndarray:
    return np.stack([whole] * ranks)


def test_the_kernel_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What docs/triton.md makes is right, folded as it says."""
    page = (Path(__file__).parents[2] / "docs/triton.md").read_text()
    code = "".join(re.findall(r"^```python\n(.*?)^```$", page, re.M | re.S))
    code = code.replace("sms=132, folded", "sms=8, folded").replace(
        "jax.config.update", "(lambda *_: 0)"
    )
    (tmp_path / "page.py").write_text(code)
    made = runpy.run_path(str(tmp_path / "page.py"))
    x, s = random(64, 128), random(64, seed=1)
    found = made["on_one"](split(x, 4, 0), s)
    np.testing.assert_allclose(found, repeated(x * s[:, None], 4), rtol=1e-6)
    np.testing.assert_array_equal(made["y"], np.tile(np.arange(64.0), 4)[:, None] * np.ones(128))


MATMULS = {
    "plain": matmul_triton.MatmulConfig(16, 16, 16, group=2, persistent=False),
    "persistent": matmul_triton.MatmulConfig(16, 16, 16, group=2),
}


@pytest.mark.parametrize(
    ("config", "backend"),
    [("plain", "ldst_colocated"), ("plain", "ldst_dedicated"), ("persistent", "ldst_dedicated")],
)
def test_matmul_behind_a_gather_of_rows(config: str, backend: str) -> None:
    ranks, m, k, n = 2, 32, 40, 24
    kernel = matmul_triton.matmul(m, k, n, "float32", MATMULS[config], 3)
    x, w = random(m, k), random(k, n, seed=1)
    plan = gather(ranks, 0, x=(m, k))
    (y,) = run(kernel, plan, {"x": "x"}, backend, [split(x, ranks, 0), repeated(w, ranks)])
    np.testing.assert_allclose(y, repeated(x @ w, ranks), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("config", MATMULS.values(), ids=MATMULS.keys())
def test_matmul_that_reduces_and_scatters(config: Any) -> None:
    ranks, m, k, n = 2, 32, 20, 24
    kernel = matmul_triton.matmul(m, k, n, "float32", config, 3)
    plan = templates.get("reduce_scatter_direct")(
        ranks, (m, n), axis=0, tensor="y", dtype="float32"
    )
    x, w = random(ranks, m, k), random(ranks, k, n, seed=1)
    (y,) = run(kernel, plan, {"y": "y"}, "ldst_dedicated", [x, w])
    wanted = split(np.einsum("rmk,rkn->mn", x, w), ranks, 0)
    np.testing.assert_allclose(y, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("ranks", "backend"), [(2, "ldst_colocated"), (3, "ldst_dedicated")])
def test_attention_takes_keys_as_they_arrive(ranks: int, backend: str) -> None:
    heads, queries, width = 2, 24, 16
    keys = 16 * ranks
    kernel = attention_triton.attention(
        heads, queries, keys, width, "float32", block_q=16, block_k=16
    )
    q, k, v = (random(heads, n, width, seed=i) for i, n in enumerate((queries, keys, keys)))
    plan = gather(ranks, 1, k=k.shape, v=v.shape)
    rows = [repeated(q, ranks), split(k, ranks, 1), split(v, ranks, 1)]
    (out,) = run(kernel, plan, {"k": "k", "v": "v"}, backend, rows)
    np.testing.assert_allclose(out, repeated(attended(q, k, v), ranks), rtol=1e-4, atol=1e-5)


def attended(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    scores = np.einsum("bmd,bnd->bmn", q, k, dtype=np.float64) / np.sqrt(q.shape[-1])
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("bmn,bnd->bmd", weights / weights.sum(-1, keepdims=True), v)


# --- kernels that were not written here --------------------------------------------------------


def strided(m: int, k: int, n: int, **more: Any) -> dict[str, Any]:
    blocks = {f"BLOCK_SIZE_{x}": 16 for x in "MNK"}
    return {"M": m, "N": n, "K": k, **blocks, "GROUP_SIZE_M": 2, **more}


def test_a_tile_that_is_stored_at_several_ranks() -> None:
    """Its epilogue runs once a place, and what it changes starts anew each time."""
    ranks, m, k, n = 3, 16, 16, 24
    strides = {"stride_am": k, "stride_ak": 1, "stride_bk": n, "stride_bn": 1}
    strides |= {"stride_cm": n, "stride_cn": 1}
    arguments = strided(m, k, n, ACTIVATION="leaky_relu", **strides)
    kernel = triton_kernel(foreign.tutorial_matmul, arguments, out_dtypes={"c_ptr": "float32"})
    whole, everyone = Box.full((ranks * m, n)), range(ranks)
    own = [Chunk("c", whole.with_axis(0, r * m, (r + 1) * m)) for r in everyone]
    plan = build_plan(
        "gather_results",
        ranks,
        [Tensor("c", whole.shape, "float32")],
        [Region(r, "c", own[r].box, produced=True) for r in everyone],
        [Goal(r, "c", whole) for r in everyone],
        [
            [P2P(r, r, to, own[r], own[r], (ComputeDep(r, own[r]),)) for to in everyone if to != r]
            for r in everyone
        ],
    )
    a, b = random(ranks, m, k), random(k, n, seed=1)
    (c,) = run(kernel, plan, {"c": "c_ptr"}, "ldst_colocated", [a, repeated(b, ranks)])
    wanted = np.where(a @ b >= 0, a @ b, 0.01 * (a @ b)).reshape(-1, n)
    np.testing.assert_allclose(c, repeated(wanted, ranks), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("axis", [0, 1])
def test_a_tutorial_matmul_behind_a_gather(axis: int) -> None:
    ranks, m, k, n = 2, 32, 32, 24
    strides = {"stride_am": k, "stride_ak": 1, "stride_bk": n, "stride_bn": 1}
    strides |= {"stride_cm": n, "stride_cn": 1}
    arguments = strided(m, k, n, ACTIVATION="leaky_relu", **strides)
    kernel = triton_kernel(foreign.tutorial_matmul, arguments, out_dtypes={"c_ptr": "float32"})
    a, b = random(m, k), random(k, n, seed=1)
    if axis == 0:  # rows of a
        plan, bound = gather(ranks, 0, a=(m, k)), {"a": "a_ptr"}
        rows = [split(a, ranks, 0), repeated(b, ranks)]
    else:  # rows of b: the contraction
        plan, bound = gather(ranks, 0, b=(k, n)), {"b": "b_ptr"}
        rows = [repeated(a, ranks), split(b, ranks, 0)]
    (c,) = run(kernel, plan, bound, "ldst_dedicated", rows)
    wanted = np.where(a @ b >= 0, a @ b, 0.01 * (a @ b))
    np.testing.assert_allclose(c, repeated(wanted, ranks), rtol=1e-4, atol=1e-4)


def test_a_persistent_tutorial_matmul_behind_a_gather() -> None:
    ranks, m, k, n = 2, 32, 24, 40
    kernel = triton_kernel(
        foreign.tutorial_persistent_matmul,
        strided(m, k, n, NUM_SMS=4),
        out_dtypes={"c_ptr": "float32"},
    )
    a, b = random(m, k), random(k, n, seed=1)
    plan = gather(ranks, 0, a=(m, k))
    (c,) = run(
        kernel, plan, {"a": "a_ptr"}, "ldst_colocated", [split(a, ranks, 0), repeated(b, ranks)]
    )
    np.testing.assert_allclose(c, repeated(a @ b, ranks), rtol=1e-4, atol=1e-4)


def test_a_tutorial_attention_behind_a_gather_of_heads() -> None:
    ranks, heads, length, width = 2, 4, 32, 16
    shape = (heads, length, width)
    kernel = triton_kernel(
        foreign.tutorial_attention,
        {"sm_scale": width**-0.5, "H": heads, "N_CTX": length, "D": width}
        | {"BLOCK_M": 16, "BLOCK_N": 16},
        out_dtypes={"Out": "float32"},
        shapes=dict.fromkeys(("Q", "K", "V", "Out"), shape),
    )
    q, k, v = (random(*shape, seed=i) for i in range(3))
    plan = gather(ranks, 0, k=shape)
    rows = [repeated(q, ranks), split(k, ranks, 0), repeated(v, ranks)]
    (out,) = run(kernel, plan, {"k": "K"}, "ldst_dedicated", rows)
    np.testing.assert_allclose(out, repeated(attended(q, k, v), ranks), rtol=1e-4, atol=1e-5)


def test_an_example_of_one_dimension_behind_a_gather() -> None:
    ranks, length = 3, 48
    kernel = triton_kernel(
        foreign.example_add,
        {"length": length, "BLOCK_SIZE": 16},
        out_dtypes={"output_ptr": "float32"},
    )
    x, y = random(length), random(length, seed=1)
    plan = gather(ranks, 0, x=(length,))
    rows = [split(x, ranks, 0), repeated(y, ranks)]
    (out,) = run(kernel, plan, {"x": "x_ptr"}, "ldst_dedicated", rows)
    np.testing.assert_allclose(out, repeated(x + y, ranks), rtol=1e-6)


def test_a_kernel_may_have_the_names_of_a_rewritten_ones_constants(tmp_path: Path) -> None:
    """A value of the kernel's own, where the launch's is meant, would show."""
    ranks, m, k, n = 2, 32, 24, 40
    path = tmp_path / "renamed.py"
    taken = ("TILES", "WORKERS", "COMMUNICATING", "SLOTS", "RANKS", "FOLDED", "PIECE", "READ_A")
    text = inspect.getsource(foreign)
    head = "    # Rows and columns past the edge"
    assert text.count(head) == 1
    path.write_text(text.replace(head, f"{''.join(f'    {x} = 77\n' for x in taken)}{head}"))
    made = module.made(path, {})
    strides = {"stride_am": k, "stride_ak": 1, "stride_bk": n, "stride_bn": 1}
    arguments = strided(m, k, n, ACTIVATION="", stride_cm=n, stride_cn=1, **strides)
    kernel = triton_kernel(made.tutorial_matmul, arguments, out_dtypes={"c_ptr": "float32"})
    a, b = random(m, k), random(k, n, seed=1)
    rows = [split(a, ranks, 0), repeated(b, ranks)]
    (c,) = run(kernel, gather(ranks, 0, a=(m, k)), {"a": "a_ptr"}, "ldst_dedicated", rows)
    np.testing.assert_allclose(c, repeated(a @ b, ranks), rtol=1e-4, atol=1e-4)


PRODUCTS = {
    "one tile a program": {"persistent": False},
    "persistent": {"flat": False},
    "flat": {},
    "descriptors, flat": {"described": True},
    "late": {"described": True, "late": 1},
}


@pytest.mark.parametrize("chosen", PRODUCTS.values(), ids=PRODUCTS.keys())
def test_tiles_in_a_given_order_behind_flags(
    chosen: dict[str, bool], monkeypatch: pytest.MonkeyPatch, simulator: Interpreter
) -> None:
    """Each program waits once for a chunk; tiles that the order names twice or not would show."""
    run = functools.partial(triton_call.simulate, simulator)
    monkeypatch.setattr(triton_call, "launch", run)
    config = matmul_triton.MatmulConfig(16, 16, 16, group=2, **chosen)
    kernel = matmul_triton.matmul(40, 80, 24, "float32", config, 4)
    order = np.random.default_rng(1).permutation([(m, n) for m in range(3) for n in range(2)])
    ordered = OrderedTriton(kernel, order.astype(np.int32), order[:, 0] % 2, 2)
    keys = jax.random.split(jax.random.key(2))
    x, w = jax.random.normal(keys[0], (40, 80)), jax.random.normal(keys[1], (80, 24))
    (y,) = ordered(x, w, flags=jnp.ones(2, jnp.int32))
    np.testing.assert_allclose(y, x @ w, rtol=1e-4, atol=1e-4)
    taken = {(i % 2, int(chunk), 1) for i, chunk in enumerate(order[:, 0] % 2)}
    assert sorted(simulator.waited) == sorted(taken)
    with pytest.raises(Exception, match=r"waits for counter 1 to reach 1, it is 0"):
        jax.block_until_ready(ordered(x, w, flags=jnp.array([1, 0], jnp.int32)))
