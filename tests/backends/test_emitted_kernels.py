"""The kernels that GPU backends emit, run on simulated devices: right, and silent of races.

And not by luck: in each backend a missing wait, a signal before the data is there, a wait for
another chunk, an end before peers are done and a missing fence are seen.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from syncopate_jax.compiler import compile as compile_kernel
from syncopate_jax.errors import UnsupportedError
from syncopate_jax.ir.build import build_plan
from syncopate_jax.ir.chunk import Box, Chunk
from syncopate_jax.ir.comm import P2P, ComputeDep, OpDep, Operation
from syncopate_jax.ir.plan import Goal, Plan, Region, Tensor
from syncopate_jax.options import Launch
from syncopate_jax.pallas_kernels.contraction_mosaic_gpu import contraction
from syncopate_jax.pallas_kernels.matmul_mosaic_gpu_beside import least_steps
from syncopate_jax.pallas_kernels.matmul_mosaic_gpu_config import MatmulConfig
from syncopate_jax.runtime.folded import fold
from tests.backends import emitted_faults
from tests.backends.test_gpu_lowering import brings
from tests.mosaic_interpreter.run import RaceFound, run_checked
from tests.mosaic_interpreter.versions import needs_known_jax
from tests.ops import cases
from tests.ops.cases import BY_NAME, CASES, Case

pytestmark = needs_known_jax
BACKENDS = ("tma_dedicated", "ldst_dedicated", "tma_colocated", "ldst_colocated")
BRINGS = tuple(case.name for case in CASES if brings(case))
"""Cases whose exchange comes before the product: no tile is there to be sent from registers."""
TILES = {"m": 128, "n": 64, "k": 64}  # two warpgroups of the smallest wgmma
ERROR = {"bfloat16": 3e-3, "float16": 5e-4}
PAIRS = [(c, b) for c in CASES for b in BACKENDS if b != "ldst_colocated" or c.name not in BRINGS]
each_pair = pytest.mark.parametrize("case,backend", PAIRS, ids=lambda x: getattr(x, "name", x))


def options(backend: str, ranks: int = 1, **changes: Any) -> dict[str, Any]:
    """Two CTAs a rank, one of each kind where some only communicate; else one more may greet."""
    sms = 2 * ranks + ("colocated" in backend)
    given = {"tiles": TILES, "launch": Launch(sms=sms, communicating=1)}
    return {"target": "mosaic_gpu", "backend": backend} | given | changes


def small(ranks: int, dtype: str, blocks: int = 1, steps: int = 1) -> Any:
    """Operands of which a rank holds ``blocks`` tiles of rows, ``steps`` deep, one of columns."""
    return cases.operands(1, 128 * blocks * ranks, 64 * steps * ranks, 64 * ranks, dtype)


def steps_of(case: Case) -> int:
    """K steps in which tiles that are sent are stored beside the next ones."""
    return 1 if case.name in BRINGS else least_steps(1)


def run(
    case: Case, backend: str, ranks: int, arrays: Any, seed: int = 0, **changes: Any
) -> np.ndarray:
    fn = cases.sharded(case, cases.ranks_mesh(ranks), **options(backend, **changes))
    return np.asarray(run_checked(fn, *arrays[:2], seed=seed), np.float64)


@each_pair
def test_two_ranks(case: Case, backend: str) -> None:
    arrays = small(2, "bfloat16", steps=steps_of(case))
    found = run(case, backend, 2, arrays)
    assert cases.error(found, cases.exact(*arrays)[0]) < ERROR["bfloat16"]


SHARED_BY_COLUMNS = [
    pytest.param(
        case, backend, marks=[] if backend == "tma_colocated" else pytest.mark.slow,
        id=f"{case.name}-{backend}",
    )
    for case, backend in PAIRS
    if case.name in ("gather_x_m", "scatter_m", "all_reduce", "to_columns")
]  # fmt: skip


@pytest.mark.parametrize("case,backend", SHARED_BY_COLUMNS)
def test_low_tiles_are_shared_by_columns(case: Case, backend: str) -> None:
    arrays = cases.operands(1, 128, 128, 256, "bfloat16")
    found = run(case, backend, 2, arrays, tiles={"m": 64, "n": 128, "k": 64})
    assert cases.error(found, cases.exact(*arrays)[0]) < ERROR["bfloat16"]


@pytest.mark.parametrize("backend", ["tma_dedicated", "ldst_colocated"])
def test_ranks_that_come_late(backend: str) -> None:
    arrays = small(2, "bfloat16")
    launch = Launch(sms=3, communicating=1, late_us=50)
    found = run(BY_NAME["all_reduce"], backend, 2, arrays, launch=launch)
    assert cases.error(found, cases.exact(*arrays)[0]) < ERROR["bfloat16"]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
@each_pair
def test_three_ranks_in_pieces(case: Case, backend: str, seed: int) -> None:
    arrays = small(3, "float16", blocks=2)
    try:
        found = run(case, backend, 3, arrays, seed=seed, split=2)
    except UnsupportedError as error:
        assert backend == "tma_colocated" and case.name in BRINGS
        assert "straddles the edge" in str(error) or "depends on the tile" in str(error)
        return
    assert cases.error(found, cases.exact(*arrays)[0]) < ERROR["float16"]


@pytest.mark.slow
@each_pair
def test_edges_that_cut_tiles(case: Case, backend: str) -> None:
    """In all three dimensions; what a copy would read or write outside is clipped."""
    arrays = cases.operands(1, 208, 144, 384, "bfloat16")
    try:
        found = run(case, backend, 2, arrays, tiles={"m": 128, "n": 128, "k": 64})
    except UnsupportedError as error:
        assert backend == "ldst_colocated"
        assert "do not divide" in str(error)
        return
    assert cases.error(found, cases.exact(*arrays)[0]) < ERROR["bfloat16"]


@pytest.mark.slow
@pytest.mark.parametrize("sms,communicating", [(3, 1), (5, 2)])
@each_pair
def test_several_ctas_of_each_kind(case: Case, backend: str, sms: int, communicating: int) -> None:
    arrays = small(2, "bfloat16", blocks=2)
    found = run(case, backend, 2, arrays, launch=Launch(sms=sms, communicating=communicating))
    assert cases.error(found, cases.exact(*arrays)[0]) < ERROR["bfloat16"]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
@each_pair
def test_folded_ranks(case: Case, backend: str, ranks: int) -> None:
    """All ranks in one launch on one device."""

    def parts(x: jax.Array, dimension: int | None) -> jax.Array:
        whole = dimension is None
        return jnp.stack([x] * ranks if whole else jnp.split(x, ranks, dimension or 0))

    def local(x: jax.Array, w: jax.Array) -> jax.Array:
        return case.operator(x, w, axis_name="ranks", **case.options, **options(backend, ranks))

    x, w, ct = small(ranks, "bfloat16")
    try:
        found = run_checked(fold(local, "ranks"), parts(x, case.x), parts(w, case.w))
    except UnsupportedError as error:
        assert "straddles the edge" in str(error) or "depends on the tile" in str(error)
        return
    wanted = parts(jnp.asarray(cases.exact(x, w, ct)[0]), case.out)
    assert cases.error(np.asarray(found, np.float64), np.asarray(wanted)) < ERROR["bfloat16"]


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["tma_dedicated", "ldst_dedicated", "tma_colocated"])
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_gradients(case: Case, backend: str) -> None:
    x, w, ct = cases.operands(1, 256, 256, 256, "bfloat16")
    fn = cases.sharded(case, cases.ranks_mesh(2), **options(backend, tiles={}))

    def gradients(x: jax.Array, w: jax.Array, ct: jax.Array) -> Any:
        return jax.vjp(fn, x, w)[1](ct)

    found = run_checked(gradients, x, w, ct)
    for one, wanted in zip(found, cases.exact(x, w, ct)[1:], strict=True):
        assert cases.error(np.asarray(one, np.float64), wanted) < ERROR["bfloat16"]


def chained_plan() -> Plan:
    """Blocks of x to the other rank, and of y back; block 1 of x only behind block 0 of y."""
    shapes = {"x": (4, 128, 64 * least_steps(1)), "y": (4, 128, 64)}

    def block(tensor: str, index: int) -> Chunk:
        return Chunk(tensor, Box.full(shapes[tensor]).with_axis(0, index, index + 1))

    def bring(rank: int, index: int, *deps: OpDep) -> Operation:
        return P2P(rank, rank, 1 - rank, block("x", index), block("x", index), deps=deps)

    def add(rank: int, index: int) -> Operation:
        part = block("y", index)
        return P2P(rank, rank, 1 - rank, part, part, deps=(ComputeDep(rank, part),), reduce="sum")

    return build_plan(
        "chained",
        2,
        [
            Tensor("x", shapes["x"], "bfloat16"),
            Tensor("y", shapes["y"], "bfloat16", per_rank=True),
        ],
        [
            *(Region(i // 2, "x", block("x", i).box) for i in range(4)),
            *(Region(r, "y", Box.full(shapes["y"]), produced=True) for r in range(2)),
        ],
        [
            *(Goal(r, "x", Box.full(shapes["x"])) for r in range(2)),
            *(Goal(i // 2, "y", block("y", i).box, ranks=(0, 1), reduce="sum") for i in range(4)),
        ],
        [
            [bring(0, 0), bring(0, 1, OpDep(1, 0)), add(0, 2), add(0, 3)],
            [add(1, 0), add(1, 1), bring(1, 2), bring(1, 3)],
        ],
    )


@pytest.mark.parametrize("backend", ["tma_dedicated", "ldst_dedicated"])
def test_a_tile_that_waits_for_what_depends_on_the_one_before(backend: str) -> None:
    depth = 64 * least_steps(1)
    config = MatmulConfig(tile_m=128, tile_n=64, stages=2)
    local = contraction(
        "Gmk", "kn", "Gmn", {"G": 4, "m": 128, "k": depth, "n": 64},
        config=config, dtype="bfloat16", out_dtype="bfloat16",
    )  # fmt: skip
    assert config.overlaps(jnp.bfloat16, least_steps(1))
    fused = compile_kernel(
        local, chained_plan(), {"x": "lhs", "y": "out"}, axis_name="t", backend=backend,
        target="mosaic_gpu", launch=Launch(sms=2, communicating=1),
    )  # fmt: skip
    mesh = cases.ranks_mesh(2)
    x, w, _ = cases.operands(1, 4 * 128, 2 * depth, 64, "bfloat16")
    fn = jax.shard_map(
        lambda x, w: fused(x.reshape(2, 128, depth), w),
        mesh=mesh, in_specs=(P("t"), P("t")), out_specs=P("t"), check_vma=False,
    )  # fmt: skip
    x = x[0, :, :depth]
    found = np.asarray(run_checked(fn, x, w), np.float64).reshape(4 * 128, 64)
    wanted = np.asarray(x, np.float64) @ sum(np.asarray(w, np.float64).reshape(2, depth, 64))
    assert cases.error(found, wanted) < ERROR["bfloat16"]


# --- planted faults

FAULTS = (
    emitted_faults.missing_wait,
    emitted_faults.wrong_chunk,
    emitted_faults.signal_before_landing,
    emitted_faults.signal_before_stored,
    emitted_faults.leaves_early,
    emitted_faults.missing_fence,
)
each_fault = pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.__name__)
NEED_THREE_RANKS = (emitted_faults.wrong_chunk, emitted_faults.missing_fence)
"""Of two ranks one has a single peer, and reads its one addend without the copy unit."""


def has_place(case: Case, backend: str, fault: Callable[[], Any]) -> bool:
    """Whether a kernel has something that can be wrong in this way."""
    colocated, brings = "colocated" in backend, case.name in BRINGS
    if fault is emitted_faults.wrong_chunk:
        return not (colocated and brings)  # a tile reads its peers without waiting for them
    if fault is emitted_faults.signal_before_landing:
        # Nothing is sent, or by threads, whose stores nobody has to wait for.
        return not (colocated and brings) and backend != "ldst_colocated"
    if fault is emitted_faults.signal_before_stored:
        return not brings  # no tile is signalled
    if fault is emitted_faults.leaves_early:
        # Elsewhere tiles wait for all that arrives, and nothing is read from afar.
        return (colocated and brings) or case.name in ("all_reduce", "to_columns")
    if fault is emitted_faults.missing_fence and case.name == "to_columns":
        # Else the copy unit reads nothing that was waited for; and all CTAs compute, none greets.
        return backend == "tma_dedicated"
    return True


def check_seen(case: Case, backend: str, fault: Callable[[], Any], ranks: int) -> None:
    if backend == "tma_colocated" and case.name in BRINGS:
        split, ranks = 1, 2  # a tile reads from one peer
    else:
        split = 2
    arrays = small(ranks, "bfloat16", blocks=2, steps=steps_of(case))
    if has_place(case, backend, fault):
        with fault(), pytest.raises(RaceFound, match="is unordered with"):
            run(case, backend, ranks, arrays, split=split)
        return
    with fault():
        try:
            found = run(case, backend, ranks, arrays, split=split)
        except emitted_faults.NoPlace as error:
            assert "has no such wait" in str(error)
            return
    assert cases.error(found, cases.exact(*arrays)[0]) < ERROR["bfloat16"]


@pytest.mark.parametrize("fault", FAULTS[:4], ids=lambda f: f.__name__)
@pytest.mark.parametrize("backend", BACKENDS)
def test_fault_is_seen(backend: str, fault: Callable[[], Any]) -> None:
    check_seen(BY_NAME["all_reduce"], backend, fault, 2)


@pytest.mark.slow
@each_fault
@each_pair
def test_fault_is_seen_in_every_operator(
    case: Case, backend: str, fault: Callable[[], Any]
) -> None:
    check_seen(case, backend, fault, 3 if fault in NEED_THREE_RANKS else 2)
