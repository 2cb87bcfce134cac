"""How rewritten kernels are launched, with a stand-in for jax-triton; and what is refused."""

from __future__ import annotations

import dataclasses
import functools
import re
import sys
import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from syncopate_jax import cli, compiler
from syncopate_jax.backends import triton_call
from syncopate_jax.backends.triton_ordered import OrderedTriton
from syncopate_jax.errors import InputError, UnsupportedError
from syncopate_jax.ir.build import build_plan
from syncopate_jax.ir.chunk import Box, Chunk
from syncopate_jax.ir.comm import P2P
from syncopate_jax.ir.plan import Goal, Plan, Region, Tensor
from syncopate_jax.kernel.triton_kernel import triton_kernel
from syncopate_jax.ops import all_gather_matmul, matmul_all_to_all, stream_matmul
from syncopate_jax.options import Launch
from syncopate_jax.pallas_kernels import contraction_triton
from syncopate_jax.registry import templates
from syncopate_jax.runtime.folded import fold
from tests.backends.own_kernels import gather_plan, scale
from tests.kernel.test_directives import KERNEL, PERSISTENT, function
from tests.ops import cases

SMS = 6


MISSING = (
    "target 'triton' needs triton-that-is-not and jax-triton-neither, not installed here: "
    "pip install triton-that-is-not jax-triton-neither"
)


@pytest.fixture
def all_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_call, "NEEDED", ("triton_that_is_not", "jax_triton_neither"))


def named(run: Callable[[], Any]) -> str:
    with pytest.raises(UnsupportedError) as caught:
        run()
    return str(caught.value)


@pytest.mark.usefixtures("all_missing")
@pytest.mark.parametrize("backend", ["ldst_dedicated", "ldst_colocated", "copy_engine"])
def test_operators_name_what_is_missing_before_a_device(backend: str) -> None:
    given = {"backend": backend, "target": "triton"}
    fn = fold(lambda x, w: all_gather_matmul(x, w, axis_name="r", **given), "r")
    text = named(lambda: lowered(fn, X, W))
    assert text.endswith(f":\n  {backend}: {MISSING}") and "launch" not in text
    mesh = cases.ranks_mesh(2)
    fn = cases.sharded(cases.BY_NAME["gather_x_m"], mesh, **given)
    shapes = ((1, 32, 16), (16, 64))
    args = [jax.ShapeDtypeStruct(shape, "float32") for shape in shapes]
    assert named(lambda: lowered(fn, *args)).endswith(f":\n  {backend}: {MISSING}")


@pytest.mark.usefixtures("all_missing")
def test_compile_names_what_is_missing_before_a_device() -> None:
    plan, bound = gather_plan(2, x=(8, 3, 8)), {"x": "x"}
    make = functools.partial(compiler.compile, axis_name="r", target="triton")
    text = named(lambda: make(scaled(), plan, bound, backend="ldst_dedicated"))
    assert text.endswith(f":\n  ldst_dedicated: {MISSING}")
    plain = dataclasses.replace(scaled(), reference=lambda x: x, grid_spec=None)
    assert make(plain, plan, bound).backend.name == "xla"  # which needs neither


@pytest.mark.usefixtures("all_missing")
def test_streaming_names_what_is_missing_first() -> None:
    x = jnp.zeros((4, 4))  # not in host memory either
    text = named(lambda: stream_matmul.stream_matmul(x, x, target="triton"))
    assert text == f"stream_matmul: {MISSING}"


@pytest.mark.usefixtures("all_missing")
def test_explain_names_what_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    args = ["explain", "all_gather_matmul", "--shape", "1024,1024,1024", "--ranks", "2"]
    assert cli.main([*args, "--target", "triton"]) == 0
    assert capsys.readouterr().out.count(MISSING) == 3


@pytest.mark.usefixtures("all_missing")
def test_launching_names_what_is_missing() -> None:
    assert named(triton_call.jax_triton) == MISSING


def hosted(x: jax.Array) -> jax.Array:
    return jax.device_put(x, jax.memory.Space.Host)


def test_jax_triton_without_a_cuda_plugin_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_call, "NEEDED", ())
    monkeypatch.setitem(sys.modules, "jax_triton", None)
    with pytest.raises(
        UnsupportedError, match=r"jax-triton cannot be used here .* pip install 'jax\[cuda13\]'"
    ):
        triton_call.jax_triton()


def test_a_jax_triton_that_does_not_ask_for_the_plugin_is_asked_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """jax-triton 0.4 imports without it, and lowers nothing."""
    monkeypatch.setattr(triton_call, "NEEDED", ())
    monkeypatch.setitem(sys.modules, "jax_triton", types.ModuleType("jax_triton"))
    monkeypatch.setitem(sys.modules, "jaxlib.gpu_triton", types.ModuleType("jaxlib.gpu_triton"))
    with pytest.raises(UnsupportedError, match=r"'TritonKernel' .* pip install 'jax\[cuda13\]'"):
        triton_call.jax_triton()


# --- launches ----------------------------------------------------------------------------------


class Recorder:
    """Stands in for jax-triton; ``calls`` holds what each launch was given."""

    def __init__(self, new: bool):
        self.calls: list[dict[str, Any]] = []
        self.triton_call = self._new if new else self._old

    def _old(self, *args: Any, out_shape: Any, **given: Any) -> list[jax.Array]:
        return self._record(args, out_shape, given)

    def _new(
        self, *args: Any, out_type: Any, backend_options: Any = None, **given: Any
    ) -> list[jax.Array]:
        assert backend_options == {"ptx_version": triton_call.PTX_VERSION}
        return self._record(args, out_type, given)

    def _record(self, args: Any, outs: Any, given: dict[str, Any]) -> list[jax.Array]:
        self.calls.append({"args": args, "outs": outs, **given})
        return [jnp.zeros(out.shape, out.dtype) for out in outs]


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    pytest.importorskip("triton")
    found = Recorder(new=True)
    monkeypatch.setattr(triton_call, "NEEDED", ())
    monkeypatch.setattr(triton_call, "jax_triton", lambda: found)
    return found


def lowered(fn: Callable[..., Any], *args: Any) -> str:
    return jax.jit(fn).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


X, W = jax.ShapeDtypeStruct((2, 16, 16), "float32"), jax.ShapeDtypeStruct((2, 16, 32), "float32")
TILES = {"m": 16, "n": 16, "k": 16}


def gathered(backend: str, **launch: Any) -> str:
    launch = {"sms": SMS, "communicating": 1 if backend == "ldst_dedicated" else 0} | launch
    given = {"backend": backend, "target": "triton", "tiles": TILES, "launch": Launch(**launch)}
    return lowered(fold(lambda x, w: all_gather_matmul(x, w, axis_name="r", **given), "r"), X, W)


@pytest.mark.parametrize("new", [False, True])
def test_folded_ranks_are_one_launch(recorder: Recorder, new: bool) -> None:
    recorder.triton_call = recorder._new if new else recorder._old
    gathered("ldst_dedicated")
    (call,) = recorder.calls
    assert call["kernel"].arg_names[:7] == [
        "lhs_ptr", "rhs_ptr", "table_ptr", "peers_ptr", "out_ptr", "lhs_gathered_ptr",
        "counters_ptr",
    ]  # fmt: skip
    assert [a.shape[0] for a in call["args"]] == [2, 2, 2, 2]
    assert [(o.shape[0], str(o.dtype)) for o in call["outs"]] == [
        (2, "float32"), (2, "float32"), (2, "int32")
    ]  # fmt: skip
    assert call["grid"] == (SMS,) and call["zeroed_outputs"] == (2,)
    assert call["compute_capability"] == triton_call.HOPPER and call["BLOCK_m"] == 16


def test_ranks_of_a_mesh_meet_before_and_after(recorder: Recorder) -> None:
    mesh = cases.ranks_mesh(2)
    x, w = jax.ShapeDtypeStruct((1, 32, 16), "float32"), jax.ShapeDtypeStruct((16, 64), "float32")
    given = {"target": "triton", "launch": Launch(sms=SMS, communicating=1), "tiles": TILES}
    fn = cases.sharded(cases.BY_NAME["gather_x_m"], mesh, backend="ldst_dedicated", **given)
    text = lowered(fn, x, w)
    assert text.count("@syncopate_start") == text.count("@syncopate_join") == 1
    (call,) = recorder.calls
    assert call["kernel"].arg_names[:7] == [
        "lhs_ptr", "rhs_ptr", "table_ptr", "peers_ptr", "counters_ptr", "lhs_gathered_ptr",
        "out_ptr",
    ]  # fmt: skip
    assert call["args"][3].shape == (2 * 2, 2)  # counters and what is gathered, on two ranks
    assert call["zeroed_outputs"] == ()


def test_a_result_that_peers_write_is_made_by_the_handler(recorder: Recorder) -> None:
    mesh = cases.ranks_mesh(2)
    x, w = jax.ShapeDtypeStruct((1, 32, 16), "float32"), jax.ShapeDtypeStruct((16, 64), "float32")
    given = {"target": "triton", "launch": Launch(sms=SMS), "tiles": TILES}
    assert cases.BY_NAME["to_columns"].operator is matmul_all_to_all
    fn = cases.sharded(cases.BY_NAME["to_columns"], mesh, backend="ldst_colocated", **given)
    text = lowered(fn, x, w)
    (call,) = recorder.calls
    assert call["kernel"].arg_names[4:7] == ["counters_ptr", "out_ptr", "token_ptr"]
    assert [o.shape for o in call["outs"]] == [(1,)]
    # Handed over once: else XLA copies it ahead of the join, while peers are still writing.
    (operands,) = re.findall(r"@syncopate_join\((.*?)\)", text)
    names = operands.split(", ")
    assert len(names) == len(set(names)) == 3  # flags, result, token


def test_the_copy_engine_brings_what_a_triton_kernel_waits_for(recorder: Recorder) -> None:
    mesh = cases.ranks_mesh(2)
    x, w = jax.ShapeDtypeStruct((1, 32, 16), "float32"), jax.ShapeDtypeStruct((16, 64), "float32")
    given = {"target": "triton", "launch": Launch(sms=SMS), "tiles": TILES}
    fn = cases.sharded(cases.BY_NAME["gather_x_m"], mesh, backend="copy_engine", **given)
    text = lowered(fn, x, w)
    assert text.count("@syncopate_start") == text.count("@syncopate_join") == 1
    (call,) = recorder.calls
    assert call["grid"] == (4,)  # 8 tiles: as many turns as with all 6
    assert call["kernel"].arg_names[4:6] == ["counters_ptr", "lhs_gathered_ptr"]


def test_a_kernel_runs_alone_as_it_was_written(recorder: Recorder) -> None:
    from syncopate_jax.pallas_kernels import matmul_triton

    config = matmul_triton.MatmulConfig(16, 16, 16, persistent=False)
    kernel = matmul_triton.matmul(32, 16, 48, "float32", config)
    x, w = jnp.zeros((32, 16)), jnp.zeros((16, 48))
    (y,) = triton_call.run_alone(kernel, x, w, grid=6)
    assert y.shape == (32, 48) and recorder.calls[0]["kernel"] is matmul_triton.matmul_kernel
    assert recorder.calls[0]["grid"] == (6,)
    assert kernel.reference is not None
    np.testing.assert_array_equal(kernel.reference(x + 1, w + 1), np.full((32, 48), 16, np.float32))


def test_a_kernel_that_runs_alone_has_its_results_last(recorder: Recorder) -> None:
    first = PERSISTENT.replace("copied(x_ptr, y_ptr,", "copied(y_ptr, x_ptr,")
    made = triton_kernel(
        function(first, "copied", "<swapped>"), {"N": 8, "BLOCK": 4}, out_dtypes={"y_ptr": "int32"}
    )
    with pytest.raises(InputError, match="its pointers are y_ptr, x_ptr; to run alone it takes x_"):
        triton_call.run_alone(made, jnp.zeros(8, jnp.int32), grid=2)
    assert not recorder.calls


def test_streaming_takes_tiles_behind_flags(recorder: Recorder) -> None:
    from syncopate_jax.pallas_kernels import matmul_triton

    x, w = jnp.zeros((64, 16)), jnp.zeros((16, 48))
    config = matmul_triton.MatmulConfig(16, 16, 16)

    def run(x: jax.Array, w: jax.Array) -> jax.Array:
        return stream_matmul.stream_matmul(
            hosted(x), w, chunks=2, config=config, num_sms=4, target="triton"
        )

    lowered(run, x, w)
    (call,) = recorder.calls
    assert call["grid"] == (4,) and call["args"][4].shape == (4,)  # a flag a chunk, a place
    with pytest.raises(UnsupportedError, match=r"takes w as \[K, N\]; use target 'mosaic_gpu'"):
        lowered(
            lambda x, w: stream_matmul.stream_matmul(
                hosted(x), w, w_transposed=True, target="triton"
            ),
            x,
            jnp.zeros((48, 16)),
        )
    with pytest.raises(InputError, match="target needs 'mosaic_gpu' or 'triton', found 'cuda'"):
        lowered(lambda x, w: stream_matmul.stream_matmul(hosted(x), w, target="cuda"), x, w)


# --- refusals ----------------------------------------------------------------------------------


def scaled(text: str = KERNEL, **changed: int) -> Any:
    sizes = {"ROWS": 8, "COLUMNS": 3, "BLOCK": 4, "DEPTH": 8} | changed
    return triton_kernel(function(text, "scaled", "<c>"), sizes, out_dtypes={"y": "float32"})


def refusal(
    kernel: Any, plan: Any, axis_map: dict[str, Any], backend: str = "ldst_dedicated", **launch: Any
) -> str:
    with pytest.raises(UnsupportedError) as caught:
        compiler.compile(
            kernel,
            plan,
            axis_map,
            axis_name="r",
            backend=backend,
            target="triton",
            launch=Launch(**({"sms": 4, "communicating": 1, "folded": True} | launch)),
        )
    return str(caught.value)


def scatter() -> Any:
    return templates.get("reduce_scatter_direct")(2, (8, 3), axis=0, tensor="y", dtype="float32")


def test_xla_needs_the_reference_of_a_kernel_without_a_body() -> None:
    plan = gather_plan(2, x=(8, 3, 8))
    assert refusal(scaled(), plan, {"x": "x"}, "xla") == (
        "no backend can fuse plan own_gather with kernel scaled for target triton:\n"
        "  xla: runs a kernel's plain-JAX reference or its ordinary Pallas body, and kernel "
        "scaled has neither; give it reference=, a function of the operands x in plain JAX"
    )
    with pytest.raises(UnsupportedError, match="scaled: a kernel for triton alone, without a body"):
        compiler.compile(
            scaled(), plan, {"x": "x"}, axis_name="r", backend="remote_dma", target="tpu"
        )


def test_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_call, "NEEDED", ())
    plan = gather_plan(2, x=(8, 3, 8))
    assert "kernel scale is not written for triton; make it of an annotated Triton" in refusal(
        scale(8, 4), gather_plan(2, x=(8, 4)), {"x": "x"}
    )
    assert "needs at least 1 program of a rank to compute and 1 to communicate, found 2 and 0" in (
        refusal(scaled(), plan, {"x": "x"}, communicating=0)
    )
    assert "needs at least 1 program of a rank to compute, found 0; see Launch" in refusal(
        scaled(), plan, {"x": "x"}, "ldst_colocated", sms=1
    )
    assert "has no watchdog_us in Triton kernels; use launch.watchdog_us=0" in refusal(
        scaled(), plan, {"x": "x"}, watchdog_us=10
    )
    assert "adds partial results to tiles, and kernel scaled says not to what" in refusal(
        scaled(KERNEL.replace("epilogue total", "epilogue")), scatter(), {"y": "y"}
    )
    without = KERNEL.replace("    # syncopate: epilogue total\n", "").replace(
        "    # syncopate: end epilogue\n", ""
    )
    assert "moves what kernel scaled writes, and the kernel has no epilogue directive" in refusal(
        scaled(without), scatter(), {"y": "y"}
    )


def test_strides_that_differ_along_a_tile_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_call, "NEEDED", ())
    plan = templates.get("all_gather_swizzle")(2, (8, 3, 8), axis=2, tensor="x", dtype="float32")
    text = refusal(scaled(), plan, {"x": "x"})
    assert "x and x_ptr have other strides along dimension 0, 24 and 12 elements" in text

    text = refusal(
        scaled(COLUMNS=4),
        templates.get("reduce_scatter_direct")(2, (8, 4), axis=1, tensor="y", dtype="float32"),
        {"y": "y"},
    )
    assert "y and y_ptr have other strides along dimension 0, 4 and 2 elements" in text


@pytest.fixture
def nothing_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_call, "NEEDED", ())


@pytest.mark.usefixtures("nothing_missing")
def test_tensors_keep_the_order_of_dimensions() -> None:
    plan = gather_plan(2, x=(4, 8, 8))
    text = refusal(scaled(COLUMNS=4), plan, {"x": ("x", (1, 0, 2))})
    assert "tensor x is bound with dims (1, 0, 2); a copy keeps the order of dimensions" in text


@pytest.mark.usefixtures("nothing_missing")
def test_offsets_reach_as_far_as_32_bits() -> None:
    large = {"ROWS": 2**20, "BLOCK": 2**18, "DEPTH": 2**12}
    text = refusal(scaled(**large), gather_plan(2, x=(2**20, 3, 2**12)), {"x": "x"})
    wanted = "(1048576, 3, 4096); a Triton kernel's offsets reach 2147483648: use another target"
    assert f"x has 12884901888 elements {wanted}" in text


def exchange(ops: list[list[P2P]], starts: list[Box], goals: list[Box], shape: Any) -> Plan:
    """A plan of one tensor x over two ranks."""
    return build_plan(
        "exchange",
        2,
        [Tensor("x", shape, "float32")],
        [Region(r, "x", box) for r, box in enumerate(starts)],
        [Goal(r, "x", box) for r, box in enumerate(goals)],
        ops,
    )


def push(rank: int, box: Box, channel: str = "nvlink") -> P2P:
    """What ``rank`` has of x, to the other one."""
    return P2P(rank, rank, 1 - rank, Chunk("x", box), Chunk("x", box), channel=channel)


@pytest.mark.usefixtures("nothing_missing")
def test_every_channel_has_a_program() -> None:
    whole = Box.full((8, 3, 8))
    parts = [whole.with_axis(0, 4 * r, 4 * r + 4) for r in range(2)]
    ops = [
        [push(r, parts[r].with_axis(1, *columns), channel) for columns, channel in halves]
        for r in range(2)
        for halves in [[((0, 2), "nvlink"), ((2, 3), "nic")]]
    ]
    plan = exchange(ops, parts, [whole] * 2, (8, 3, 8))
    text = refusal(scaled(), plan, {"x": "x"})
    assert "plan exchange has 2 channels, and 1 programs a rank communicate" in text


@pytest.mark.usefixtures("nothing_missing")
def test_a_transfer_in_many_blocks_is_refused() -> None:
    shape = (40, 4, 8)
    whole = Box.full(shape)
    parts = [whole.with_axis(1, 2 * r, 2 * r + 2) for r in range(2)]
    ops = [[push(r, parts[r].with_axis(2, k, k + 4)) for k in (0, 4)] for r in range(2)]
    plan = exchange(ops, parts, [whole] * 2, shape)
    text = refusal(scaled(ROWS=40, COLUMNS=4, BLOCK=1), plan, {"x": "x"})
    assert "is 40 separate blocks of rows, at most 32 are copied as one" in text


@pytest.mark.usefixtures("nothing_missing")
def test_tiles_beyond_what_a_rank_gets_are_not_read_at_peers() -> None:
    whole = Box.full((8, 3, 8))
    parts = [whole.with_axis(0, 4 * r, 4 * r + 4) for r in range(2)]
    plan = exchange([[], [push(1, parts[1])]], parts, [whole, parts[1]], (8, 3, 8))
    text = refusal(scaled(), plan, {"x": "x"}, "ldst_colocated")
    assert "plan exchange brings only part of what tiles read of x" in text


def test_a_triton_kernel_is_no_pallas_kernel() -> None:
    with pytest.raises(
        UnsupportedError, match="scaled: a kernel for triton alone, without a body that runs on a"
    ):
        scaled()(jnp.zeros((8, 3, 8)))


def test_other_platforms_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_call, "NEEDED", ())
    given = {"backend": "ldst_dedicated", "target": "triton", "tiles": TILES}
    given |= {"launch": Launch(sms=SMS, communicating=1)}
    fn = fold(lambda x, w: all_gather_matmul(x, w, axis_name="r", **given), "r")
    text = "CUDA GPUs, this program is for cpu; on CPUs and TPUs use backend 'remote_dma' or 'xla'"
    with pytest.raises(UnsupportedError, match=text):
        jax.jit(fn)(jnp.zeros(X.shape), jnp.zeros(W.shape))


def test_ordered_kernels_check_their_order() -> None:
    kernel = scaled()
    order = np.zeros((6, 2), np.int32)
    with pytest.raises(InputError, match=r"maps 2 axes, the order has shape \(6, 3\); it needs"):
        OrderedTriton(kernel, np.zeros((6, 3), np.int32), None, 2)
    with pytest.raises(
        InputError, match=r"chunks have shape \(5,\), the order's tiles need \(6,\)"
    ):
        OrderedTriton(kernel, order, np.zeros(5, np.int32), 2)


def test_ordered_kernels_reach_all_of_their_operands() -> None:
    kernel = scaled(ROWS=2**20, BLOCK=2**18, DEPTH=2**12)
    order = np.zeros((12, 2), np.int32)
    with pytest.raises(UnsupportedError, match=r"kernel scaled: x has 12884901888 elements \(1048"):
        OrderedTriton(kernel, order, None, 2)


def test_contractions_check_their_letters_and_tiles() -> None:
    given: dict[str, Any] = {"dtype": "float32", "out_dtype": "float32", "tiles": TILES}
    sizes = {"m": 16, "n": 16, "k": 16}
    make = contraction_triton.contraction
    with pytest.raises(InputError, match="rhs 'k' needs two of the letters m, n, k"):
        make("mk", "k", "mn", sizes, **given)
    with pytest.raises(InputError, match="tiles of n are 24 elements; Triton needs a power of two"):
        make("mk", "kn", "mn", sizes, **given | {"tiles": TILES | {"n": 24}})
    with pytest.raises(InputError, match="operands are bfloat16, float16, float32, found int32"):
        make("mk", "kn", "mn", sizes, **given | {"dtype": "int32"})
