"""Relations between boxes and tiles, and the plans that no tile space can serve."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from syncopate_jax.errors import InputError, PlanError, UnsupportedError
from syncopate_jax.ir.build import build_plan
from syncopate_jax.ir.chunk import Box, Chunk
from syncopate_jax.ir.comm import P2P, ComputeDep, OpDep
from syncopate_jax.ir.plan import Plan, Region, Tensor
from syncopate_jax.kernel.access import Access, BoxAccess
from syncopate_jax.kernel.axis_map import AxisMap
from syncopate_jax.kernel.tiles import Axis, TileSpace
from syncopate_jax.passes.build_depgraph import DepGraph, build_depgraph
from syncopate_jax.passes.tile_sets import Sets, touched
from syncopate_jax.registry import templates
from tests.passes.matmul_cases import gather, scatter

SPACE = TileSpace((Axis("m", 8, 2), Axis("n", 4, 2), Axis("k", 6, 2, reduction=True)))
Y = Access("y", (8, 4), ("m", "n"), write=True)
BOUND = AxisMap.of({"y": "y"})


def plan_of(*ops: P2P, produced: str = "[0:8,0:4]") -> Plan:
    """Two ranks, each of which produces part of y; ``ops`` are listed on their sources."""
    lists = [[op for op in ops if op.rank == rank] for rank in (0, 1)]
    initial = [Region(rank, "y", Box.parse(produced), True) for rank in (0, 1)]
    tensors = [Tensor("y", (8, 4), "float32", True), Tensor("z", (8, 4), "float32")]
    return build_plan("small", 2, tensors, initial, [], lists)


def push(src: str, dst: str, *deps: ComputeDep | OpDep, reduce: str = "none") -> P2P:
    """Rank 0 pushes ``src`` into ``dst`` of rank 1, both such as ``y[0:2,0:4]``."""
    one, other = (Chunk(text[0], Box.parse(text[1:])) for text in (src, dst))
    return P2P(0, 0, 1, one, other, deps, reduce=reduce)


def made(text: str, rank: int = 0) -> ComputeDep:
    return ComputeDep(rank, Chunk(text[0], Box.parse(text[1:])))


def pairs(graph: DepGraph, op: int) -> list[int]:
    at = np.flatnonzero(graph.need_op == op)
    return sorted({t for i in at for t in graph.tile_sets.row(graph.need_tiles[i]).tolist()})


def events(graph: DepGraph, op: int) -> list[list[int]]:
    return [graph.events.row(e).tolist() for e in graph.event[graph.event_op == op]]


@pytest.mark.parametrize("boxes", (False, True))
@pytest.mark.parametrize("seed", range(4))
def test_touched_tiles_equal_brute_force(seed: int, boxes: bool) -> None:
    rng = np.random.default_rng(seed)
    space = TileSpace(
        (
            Axis("b", 3, 1),
            Axis("k", 7, 2, reduction=True),
            Axis("m", 7, 3),
            Axis("j", 4, 3, reduction=True),
            Axis("n", 5, 2),
        )
    )
    dims = [("m", "k"), ("j", None, "n"), ("b", "m"), (None, "k", "j")][seed]
    access = Access("x", tuple(9 if d is None else space.axis(d).extent for d in dims), dims)
    tile_lo, tile_hi = access.boxes(space)
    lo = rng.integers(0, 9, (30, len(dims)))
    hi = np.minimum(lo + rng.integers(0, 5, lo.shape), access.shape)
    given = BoxAccess("x", access.shape, tile_lo, tile_hi) if boxes else access
    found = touched(given, space, lo, hi)
    mask = np.zeros((30, space.num_tiles, space.num_steps), bool)
    for box, tiles, steps in zip(found.box, found.tiles, found.steps, strict=True):
        assert not mask[box, found.tile_sets.row(tiles)].any()  # no tile twice
        mask[box, found.tile_sets.row(tiles)] = found.step_sets[steps]
    for box in range(30):
        meets = np.all(np.maximum(tile_lo, lo[box]) < np.minimum(tile_hi, hi[box]), axis=-1)
        assert np.array_equal(mask[box], meets)
    box, tile = found.pairs()
    assert np.array_equal(np.stack([box, tile], 1), np.argwhere(mask.any(-1)))


def test_sets_expand_in_order() -> None:
    sets = Sets.of(np.array([0, 0, 2]), np.array([4, 5, 6]), 3)
    owner, items = sets.expand(np.array([2, 1, 0, 0]))
    assert owner.tolist() == [0, 2, 2, 3, 3]
    assert items.tolist() == [6, 4, 5, 4, 5]


def test_consumers_need_what_their_rows_hold() -> None:
    case = gather("all_gather_swizzle", 2, m=8, k=6, tiles=(2, 4, 6))
    graph = build_depgraph(*case.given)
    assert graph.plan.row(0).dst_rank == 1
    assert pairs(graph, 0) == [0, 1]
    assert pairs(graph, 1) == [2, 3]
    assert graph.step_sets[graph.need_steps].all()
    assert not graph.lands.any()


def test_a_gathered_contraction_is_needed_at_its_steps() -> None:
    case = gather("all_gather_swizzle", 2, m=4, k=6, axis=1, tiles=(4, 4, 2))
    graph = build_depgraph(*case.given)
    steps = graph.step_sets[graph.need_steps].tolist()
    assert steps == [[True, True, False], [False, True, True]]  # 0:3 and 3:6 in steps of 2


def test_bound_dimensions_may_be_permuted() -> None:
    case = gather("all_gather_swizzle", 2, m=8, k=6, tiles=(2, 4, 6))
    turned = {
        "x": Access("x", (6, 8), ("k", "m")),
        "y": case.accesses["y"],
    }
    axis_map = AxisMap.of({"x": ("x", (1, 0))})
    graph = build_depgraph(case.plan, case.space, turned, axis_map)
    assert [pairs(graph, op) for op in (0, 1)] == [[0, 1], [2, 3]]


def test_producers_and_addends() -> None:
    plan = plan_of(
        push("y[0:4,0:2]", "y[0:4,0:2]", made("y[0:4,0:2]"), reduce="sum"),
        push("y[4:8,0:4]", "z[4:8,0:4]", made("y[4:8,0:4]")),
    )
    graph = build_depgraph(plan, SPACE, {"y": Y}, BOUND)
    assert graph.lands.tolist() == [True, False]
    assert (graph.addend_tile - 8).tolist() == [0, 2]
    assert events(graph, 0) == [[0, 2]]
    assert events(graph, 1) == [[4, 5, 6, 7]]


def test_completion_of_a_landing_is_that_of_the_tiles_that_add_it() -> None:
    plan = plan_of(
        push("y[0:2,0:4]", "y[0:2,0:4]", made("y[0:2,0:4]"), reduce="sum"),
        push("y[2:4,0:4]", "z[2:4,0:4]", made("y[2:4,0:4]"), OpDep(0, 0)),
    )
    graph = build_depgraph(plan, SPACE, {"y": Y}, BOUND)
    assert events(graph, 1) == [[2, 3], [8, 9]]
    assert not len(graph.after_op)


def test_chunks_of_the_same_tiles_are_one_event_and_parts_are_left_out() -> None:
    plan = plan_of(
        push("y[0:1,0:4]", "z[0:1,0:4]", made("y[0:1,0:4]"), made("y[1:2,0:3]")),
        push("y[0:4,0:4]", "z[0:4,0:4]", made("y[0:4,0:4]"), made("y[2:3,0:4]")),
    )
    graph = build_depgraph(plan, SPACE, {"y": Y}, BOUND)
    assert events(graph, 0) == [[0, 1]]
    assert events(graph, 1) == [[0, 1, 2, 3]]


def test_an_empty_chunk_waits_for_nothing() -> None:
    plan = plan_of(push("y[0:0,0:4]", "z[0:0,0:4]", made("y[0:0,0:4]")))
    assert events(build_depgraph(plan, SPACE, {"y": Y}, BOUND), 0) == []


def test_collectives_must_be_expanded() -> None:
    plan = templates.get("collective")(2, (8, 4), kind="all_gather")
    with pytest.raises(UnsupportedError, match=r"transfers only; .*\(pass expand_collectives\)"):
        build_depgraph(plan, SPACE, {"y": Y}, BOUND)


def test_an_axis_map_that_does_not_fit() -> None:
    with pytest.raises(InputError, match="tensor y is bound to operand 'q'; the kernel's operands"):
        build_depgraph(plan_of(), SPACE, {"y": Y}, AxisMap.of({"y": "q"}))


def test_a_reduction_axis_of_nothing() -> None:
    space = TileSpace((Axis("m", 8, 2), Axis("n", 4, 2), Axis("k", 0, 2, reduction=True)))
    with pytest.raises(InputError, match="reduction axis k of the tile space has extent 0"):
        build_depgraph(plan_of(), space, {"y": Y}, BOUND)


@pytest.mark.parametrize("boxes", (False, True))
def test_all_faults_at_once(boxes: bool) -> None:
    plan = plan_of(
        push("y[0:2,0:4]", "z[0:2,0:4]", made("y[4:7,0:4]")),
        push("y[0:2,0:4]", "z[0:2,0:4]", made("z[0:2,0:4]")),
        push("y[0:2,0:4]", "y[0:2,0:4]"),
        push("y[2:6,0:4]", "y[2:6,0:4]", reduce="sum"),
        produced="[0:4,0:4]",
    )
    access = BoxAccess("y", (8, 4), *Y.boxes(SPACE), write=True) if boxes else Y
    with pytest.raises(PlanError) as caught:
        build_depgraph(plan, SPACE, {"y": access}, BOUND)
    texts = [str(finding) for finding in caught.value.findings]
    assert texts == [
        "rank 0 op 2 [overwrites-tiles]: writes y[0:2,0:4] on rank 1, which tiles there write "
        "too; reduce into it, or receive into another tensor",
        "rank 0 op 3 [lands-in-part]: reduces into y[2:6,0:4] on rank 1, whose tiles write only "
        "part of it (they produce y[0:4,0:4]); cut the chunk where tiles end",
        "rank 0 op 0 [not-produced]: waits for compute(r0 y[4:7,0:4]), which tiles there do not "
        "write in full; they produce y[0:4,0:4]",
        "rank 0 op 1 [not-produced]: waits for compute(r0 z[0:2,0:4]), which tiles there do not "
        "write in full; the axis map binds it to no result",
    ]


def test_ragged_ranks_have_tiles_outside() -> None:
    case = scatter("reduce_scatter_direct", 2, m=4)
    wide = replace(case.accesses["y"], shape=(8, 4))
    space = TileSpace((Axis("m", 8, 2), *case.space.axes[1:]))
    graph = build_depgraph(case.plan, space, {"y": wide}, case.axis_map)
    assert set((graph.events.items % space.num_tiles).tolist()) == {0, 1, 2, 3}
