"""Backend copy_engine: the protocol's values on simulated devices, its reasons, its lowering."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import Mesh

from syncopate_jax import ops
from syncopate_jax.backends.copy_engine import CopyEngine
from syncopate_jax.errors import UnsupportedError
from syncopate_jax.native import build
from syncopate_jax.ops import all_gather, fused
from syncopate_jax.ops.blocked import block
from syncopate_jax.options import Launch, Options
from tests.mosaic_interpreter import inline
from tests.mosaic_interpreter.run import run_checked
from tests.mosaic_interpreter.versions import needs_known_jax

P = jax.P
M, K, N = 1024, 64, 128
TILES = {"m": 128, "n": 64, "k": 64}
needs_compiler = pytest.mark.skipif(build.missing() is not None, reason=str(build.missing()))

CASES: dict[str, tuple[Any, dict[str, Any], Any, Any, Any]] = {
    "gather m": (ops.all_gather_matmul, {}, P("x"), P(None, "x"), P(None, "x")),
    "gather m, split": (ops.all_gather_matmul, {"split": 2}, P("x"), P(), P()),
    "gather k": (ops.all_gather_matmul, {"dimension": "k"}, P(None, "x"), P(), P()),
    "gather w, k": (
        ops.all_gather_matmul,
        {"gathered": "w", "dimension": "k"},
        P(),
        P("x"),
        P(),
    ),
    "all to all": (ops.all_to_all_matmul, {}, P(None, "x"), P(), P("x")),
}


def build_case(
    name: str, ranks: int = 4, groups: int = 1, platform: str = "cpu", **changes: Any
) -> tuple[Callable[..., jax.Array], jax.Array, jax.Array]:
    op, options, x_spec, w_spec, out_spec = CASES[name]
    options = {
        "target": "mosaic_gpu",
        "tiles": TILES,
        "launch": Launch(sms=8),
        **options,
        **changes,
    }
    found = jax.devices(platform)[: ranks * groups]
    devices = np.array(found).reshape(groups, ranks)
    mesh = Mesh(devices, ("g", "x"))
    spread = [P("g", *spec) for spec in (x_spec, w_spec, out_spec)]

    def body(x: jax.Array, w: jax.Array) -> jax.Array:
        y = op(x[0], w[0], axis_name="x", backend="copy_engine", **options)
        return y[None]

    run = jax.jit(
        jax.shard_map(
            body, mesh=mesh, in_specs=tuple(spread[:2]), out_specs=spread[2], check_vma=False
        )
    )
    rng = np.random.default_rng(0)
    dtype = jnp.dtype(changes.get("preferred_element_type", jnp.float16))
    x = jnp.asarray(rng.integers(-2, 3, (groups, M, K)), dtype)
    w = jnp.asarray(rng.integers(-2, 3, (groups, K, N)), dtype)
    return run, x, w


@needs_compiler
def test_independent_operators_leave_threads_to_each_other() -> None:
    """XLA starts them at once, on fewer threads than there are handlers that wait for peers."""
    mesh = Mesh(np.array(jax.devices()), ("x",))

    def body(x: jax.Array, w: jax.Array) -> jax.Array:
        options: dict[str, Any] = {"backend": "copy_engine", "launch": Launch(sms=8)}
        made = [ops.all_gather_matmul(x, i * w, axis_name="x", **options) for i in range(1, 13)]
        return sum(made[1:], made[0])

    run = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=(P("x"), P()), out_specs=P("x")))
    x, w = jnp.ones((1024, 64), jnp.float16), jnp.ones((64, 128), jnp.float16) / 4
    for _ in range(4):
        np.testing.assert_array_equal(run(x, w), np.full((8 * 1024, 128), 1248, np.float16))


@needs_compiler
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("ranks", [2, 4])
def test_values_on_simulated_devices(name: str, ranks: int) -> None:
    run, x, w = build_case(name, ranks)
    for turn in range(5):
        scaled = x * (turn + 1)
        expected = np.asarray(scaled, np.float64) @ np.asarray(w, np.float64)
        np.testing.assert_array_equal(np.asarray(run(scaled, w), np.float64), expected)


@needs_compiler
@pytest.mark.parametrize("target", ["mosaic_gpu", "triton"])
def test_bfloat16_on_simulated_devices(target: str) -> None:
    """XLA's CPU compiles a dot of it whose result is transposed to one that it cannot run."""
    run, x, w = build_case("gather m", preferred_element_type=jnp.bfloat16, target=target)
    expected = np.asarray(x, np.float64) @ np.asarray(w, np.float64)
    np.testing.assert_array_equal(np.asarray(run(x, w), np.float64), expected)


@needs_compiler
@pytest.mark.multigpu(n=2)
@pytest.mark.parametrize("name", CASES)
def test_values_on_gpus(name: str) -> None:
    run, x, w = build_case(name, ranks=2, platform="gpu", launch=None)
    for turn in range(200):
        scaled = x * (turn % 7 + 1)
        expected = np.asarray(scaled, np.float64) @ np.asarray(w, np.float64)
        np.testing.assert_array_equal(np.asarray(run(scaled, w), np.float64), expected)


@needs_compiler
def test_groups_along_other_axes_keep_apart() -> None:
    run, x, w = build_case("gather m", ranks=4, groups=2)
    expected = np.asarray(x, np.float64) @ np.asarray(w, np.float64)
    np.testing.assert_array_equal(np.asarray(run(x, w), np.float64), expected)


@needs_compiler
@pytest.mark.parametrize("name", CASES)
def test_it_lowers_for_cuda(name: str) -> None:
    run, x, w = build_case(name)
    text = run.trace(x, w).lower(lowering_platforms=("cuda",)).as_text()
    calls = ("@syncopate_start", "@mosaic_gpu_v2", "@syncopate_join")
    assert [text.count(f"custom_call {call}(") for call in calls] == [1, 1, 1]
    places = [text.index(f"custom_call {call}(") for call in calls]
    assert places == sorted(places)


@needs_known_jax
@pytest.mark.parametrize("letter", ["m", "k"])
def test_each_worker_waits_for_what_its_tiles_read(
    letter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of fewer workers than multiprocessors: a CTA more would wait for less, and race with one."""
    m, k, n, rank = 768, 128, 64, 1
    spec, lhs = all_gather._SPECS["x", letter], (1, m // 2, k) if letter == "m" else (1, m, k // 2)
    asked = {"backend": "copy_engine", "target": "mosaic_gpu", "split": 1}
    options = Options(**asked, tiles=TILES, launch=Launch(sms=4))
    layout = block(spec, lhs, (k, n), 2)
    operator, _ = fused.build(spec.kind, layout, "float16", "float32", ("x",), options)
    work, engine = operator.work, CopyEngine()
    schedule = work.schedule
    assert (schedule.num_tiles, schedule.workers, work.launch.sms) == (6, 3, 4)
    waited: dict[int, int] = {}

    def wait(warpgroup: Any, given: Any) -> list[Any]:
        (flag, where), count = given
        assert flag.array[where.starts[0]] >= count
        waited[warpgroup.cta.number] = waited.get(warpgroup.cta.number, 0) + 1
        return []

    launch, grids = plgpu.kernel, []

    def interpreted(*args: Any, **given: Any) -> Any:
        grids.append(given["grid"])
        return launch(*args, **given, interpret=plgpu.InterpretGPUParams())

    monkeypatch.setattr(plgpu, "kernel", interpreted)
    monkeypatch.setitem(inline.MEANINGS, "syncopate_jax.backends.copy_engine._Flags.wait", wait)
    rng = np.random.default_rng(0)
    x, w = (jnp.asarray(rng.integers(-2, 3, shape), jnp.float16) for shape in ((m, k), (k, n)))
    axis = "mk".index(letter)
    own = jnp.split(x, 2, axis)[rank].reshape(layout.operand_shape("lhs"))
    ((key, buffer),) = engine.gathered(work).items()
    arrived = jnp.stack(jnp.split(x, 2, axis)).at[rank].set(jnp.nan)  # its own is read in place
    flags = jnp.array([1, 0, rank], jnp.int32)
    (out,) = run_checked(
        lambda own, w, arrived: engine.behind(work, [own, w], {key: arrived}, flags),
        *(own, w.reshape(layout.operand_shape("rhs")), arrived.reshape(buffer.shape)),
    )
    np.testing.assert_array_equal(out.reshape(m, n), np.asarray(x, "f4") @ np.asarray(w, "f4"))
    wanted: dict[int, int] = {}
    for position in range(schedule.num_tiles):
        tile = schedule.at(rank, position)
        count = len(schedule.waits.row(tile)) + len(schedule.k_waits.row(tile))
        if count:
            wanted[position % 3] = wanted.get(position % 3, 0) + count
    assert grids == [(schedule.workers,)]
    assert waited == wanted


def refusal(name: str = "gather m", **changes: Any) -> str:
    run, x, w = build_case(name, **changes)
    with pytest.raises(UnsupportedError) as caught:
        run.trace(x, w)
    return str(caught.value)


def test_reasons() -> None:
    assert "copy_engine: has no watchdog_us in the kernel" in refusal(
        launch=Launch(sms=8, watchdog_us=10)
    )
    assert "what arrived before, and a copy is started ahead of the kernel" in refusal(
        plan="all_gather_ring"
    )


def test_several_processes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    assert "between the devices of one process, this program has 2; use" in refusal(split=1)


def test_folded_ranks_are_refused() -> None:
    work = SimpleNamespace(launch=Launch(sms=8, folded=True))
    reason = CopyEngine().unsupported_reason(work, "mosaic_gpu")  # type: ignore[arg-type]
    assert reason == (
        "copy_engine copies between devices; folded ranks share one: use 'tma_dedicated'"
    )


def test_without_a_compiler_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "absent-c++")
    assert "no compiler was found (absent-c++); install g++ or clang++" in refusal(split=4)


def test_results_that_tiles_write_are_refused() -> None:
    mesh = Mesh(np.array(jax.devices()[:4]), ("x",))

    def body(x: jax.Array, w: jax.Array) -> jax.Array:
        return ops.matmul_reduce_scatter(
            x,
            w,
            axis_name="x",
            backend="copy_engine",
            target="mosaic_gpu",
            tiles=TILES,
            launch=Launch(sms=8),
        )

    run = jax.jit(
        jax.shard_map(
            body, mesh=mesh, in_specs=(P(None, "x"), P("x")), out_specs=P("x"), check_vma=False
        )
    )
    text = (
        r"rank 3 op 0 \(push y(\S+) -> r0 y\1 sum after compute\(r3 y\1\) on nvlink\) moves what a "
        "tile made or what arrived before"
    )
    with pytest.raises(UnsupportedError, match=text):
        run.trace(jnp.ones((M, 4 * K), jnp.float16), jnp.ones((4 * K, N), jnp.float16))


def test_other_targets_are_refused() -> None:
    text = (
        "copy_engine: works with target 'mosaic_gpu' and 'triton', not 'tpu'; GPUs run it with "
        "target='mosaic_gpu'; on CPUs and TPUs use 'remote_dma' or 'xla'"
    )
    with pytest.raises(UnsupportedError, match=text):
        mesh = Mesh(np.array(jax.devices()[:2]), ("x",))
        jax.jit(
            jax.shard_map(
                lambda x, w: ops.all_gather_matmul(
                    x, w, axis_name="x", backend="copy_engine", target="tpu"
                ),
                mesh=mesh,
                in_specs=(P("x"), P()),
                out_specs=P(),
                check_vma=False,
            )
        ).trace(jnp.ones((M, K), jnp.float32), jnp.ones((K, N), jnp.float32))
