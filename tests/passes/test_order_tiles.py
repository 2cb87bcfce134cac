"""Orders of tiles and steps: by arrival and deadline, and inside a chunk."""

from __future__ import annotations

import numpy as np
import pytest

from syncopate_jax.check.verify import verify
from syncopate_jax.errors import InputError, PlanError
from syncopate_jax.ir.text import from_text
from syncopate_jax.kernel.axis_map import AxisMap
from syncopate_jax.kernel.tiles import Axis, TileSpace
from syncopate_jax.passes.build_depgraph import build_depgraph
from syncopate_jax.passes.order_tiles import NEVER, TileOrder, order_tiles
from syncopate_jax.passes.schedule_plan import schedule_plan
from tests.passes.matmul_cases import Case, gather, gather_and_scatter, product, scatter, sent_out


def ordered(case: Case, **options) -> TileOrder:
    return order_tiles(build_depgraph(*case.given), **options)


def rows(case: Case, order: TileOrder, rank: int) -> list[int]:
    """Rows of tiles in order, each named once."""
    columns = case.space.parallel[-1].count
    return list(dict.fromkeys((order.order[rank] // columns).tolist()))


def test_consumers_start_with_what_is_local_then_by_arrival() -> None:
    case = gather("all_gather_swizzle", 4, m=8, tiles=(2, 2, 6))
    order = ordered(case)
    # Rank r sends to r+1 first, so what r receives first comes from r-1.
    assert rows(case, order, 0) == [0, 3, 2, 1]
    assert rows(case, order, 2) == [2, 1, 0, 3]
    assert order.ready[0].tolist() == [0, 0, 36, 36, 24, 24, 12, 12]
    assert (order.due == NEVER).all()


def test_pieces_arrive_one_after_the_other() -> None:
    case = gather("all_gather_swizzle", 2, m=8, tiles=(2, 4, 6), split=2)
    assert rows(case, ordered(case), 0) == [0, 1, 2, 3]
    assert rows(case, ordered(case), 1) == [2, 3, 0, 1]


def test_producers_by_deadline_and_the_own_share_last() -> None:
    case = scatter("reduce_scatter_direct", 4, m=8)
    order = ordered(case)
    assert rows(case, order, 0) == [1, 2, 3, 0]
    assert rows(case, order, 2) == [3, 0, 1, 2]
    assert (order.due[0, :2] == NEVER).all()
    case = scatter("reduce_scatter_ring", 4, m=8)
    assert rows(case, ordered(case), 0) == [3, 2, 1, 0]


def test_tiles_that_no_operation_needs_come_last() -> None:
    case = sent_out(2, m=8)
    order = ordered(case)
    # Rank 0 keeps columns 0:2, tiles 0 and 2; rank 1 keeps the others.
    assert order.order[0].tolist() == [1, 3, 0, 2]
    assert order.order[1].tolist() == [0, 2, 1, 3]


def test_both_by_deadline_then_arrival() -> None:
    case = gather_and_scatter(3, m=6)
    order = ordered(case)
    due = np.take_along_axis(order.due, order.order.astype(np.int64), axis=1)
    ready = np.take_along_axis(order.ready, order.order.astype(np.int64), axis=1)
    assert (order.ready <= order.due).all()
    assert (np.diff(due.astype(float)) >= 0).all()
    same = np.diff(due, axis=1) == 0
    assert (np.diff(ready, axis=1)[same] >= 0).all()


def test_a_tile_is_due_no_sooner_than_it_is_ready() -> None:
    """The hop of a reduction starts, in the estimate, once its tiles' inputs have arrived."""
    case = gather_and_scatter(4, m=8)
    graph = build_depgraph(*case.given)
    order = order_tiles(graph)
    for op, event in zip(graph.event_op, graph.event, strict=True):
        rank, tile = np.divmod(graph.events.row(event), graph.space.num_tiles)
        assert order.start[op] >= order.ready[rank, tile].max()
    assert (order.finish > order.start).all()


def test_steps_by_arrival() -> None:
    case = gather("all_gather_swizzle", 4, k=8, axis=1, tiles=(2, 2, 1))
    order = ordered(case)
    assert order.k_order[0].tolist() == [0, 1, 6, 7, 4, 5, 2, 3]
    assert order.k_order[3].tolist() == [6, 7, 4, 5, 2, 3, 0, 1]
    natural = ordered(case, inter="natural")
    assert natural.k_order.tolist() == [list(range(8))] * 4


def space_of(*counts: int) -> TileSpace:
    return TileSpace(tuple(Axis(f"a{i}", count, 1) for i, count in enumerate(counts)))


def alone(counts: tuple[int, ...], **options) -> list[int]:
    """The order of tiles that need nothing."""
    case = gather("all_gather_ring", 1)
    graph = build_depgraph(case.plan, space_of(*counts), {}, AxisMap(()))
    return order_tiles(graph, **options).order[0].tolist()


@pytest.mark.parametrize("group", (1, 4, 8, 16))
@pytest.mark.parametrize("height", (9, 10, 13))
def test_groups_that_do_not_divide(height: int, group: int) -> None:
    found = alone((height, 3), intra="grouped", group=group)
    wanted = []
    for top in range(0, height, group):
        for column in range(3):
            wanted += [row * 3 + column for row in range(top, min(top + group, height))]
    assert found == wanted


def test_snake() -> None:
    assert alone((3, 3), intra="snake") == [0, 1, 2, 5, 4, 3, 6, 7, 8]


def test_leading_axes_stay_outside() -> None:
    assert alone((2, 2, 2), intra="grouped") == [0, 2, 1, 3, 4, 6, 5, 7]
    assert alone((2, 2, 2), intra="snake") == [0, 1, 3, 2, 5, 4, 6, 7]
    assert alone((5,), intra="grouped", group=2) == [0, 1, 2, 3, 4]
    assert alone((), intra="snake") == [0]


@pytest.mark.parametrize("intra", ("grouped", "snake"))
def test_rows_count_from_the_first_of_their_chunk(intra: str) -> None:
    case = gather("all_gather_swizzle", 2, m=6, tiles=(1, 1, 6))
    found = ordered(case, intra=intra, group=2).order[0].reshape(2, 12)
    assert found[0].tolist() == (found[1] - 12).tolist()


def test_natural_order_of_everything() -> None:
    case = gather("all_gather_swizzle", 3, m=6)
    assert ordered(case, inter="natural").order.tolist() == [list(range(6))] * 3
    found = ordered(case, inter="natural", intra="grouped", group=3).order
    assert found.tolist() == [[0, 2, 4, 1, 3, 5]] * 3


@pytest.mark.parametrize(
    ("options", "text"),
    (
        ({"intra": "spiral"}, "intra 'spiral' is not one of natural, grouped, snake"),
        ({"inter": "random"}, "inter 'random' is not one of arrival, natural"),
        ({"group": 0}, "group must be in 1"),
        ({"workers": 0}, "workers must be in 1"),
    ),
)
def test_arguments_out_of_range(options: dict, text: str) -> None:
    case = gather("all_gather_ring", 2)
    with pytest.raises(InputError, match=f"schedule of all_gather_ring: {text}"):
        schedule_plan(*case.given, **options)


def test_tiles_that_straddle_chunks_of_a_reduction() -> None:
    case = scatter("reduce_scatter_ring", 3, m=9, tiles=(2, 4, 5))
    with pytest.raises(PlanError) as caught:
        ordered(case)
    assert {finding.code for finding in caught.value.findings} == {"circular-wait"}
    count = len(caught.value.findings)
    first, *listed, last = str(caught.value).splitlines()
    assert first == (
        f"reduce_scatter_ring: {count} finding(s); operations and tiles wait for each other, since "
        f"tiles make parts of several chunks: choose tiles that end where chunks end, or a plan "
        f"whose chunks end where tiles end; else verify the plan"
    )
    assert count > 3 and len(listed) == 3 and last == f"  … and {count - 3} more"
    assert "tiles of rank" in listed[0] and "in a circle of operations and tiles" in listed[0]


@pytest.mark.parametrize("after", ["compute(r0 y[0:4,0:4])", "r1.0 compute(r0 y[2:3,0:1])", "r1.0"])
def test_sums_that_wait_for_the_tiles_that_add_them(after: str) -> None:
    whole = "y[0:4,0:4]"
    plan = from_text(
        "plan late ranks 3\n"
        "tensor y [4,4] float32 per_rank\n"
        f"initial r0 {whole} produced\n"
        f"initial r1 {whole} produced\n"
        f"initial r2 {whole} produced\n"
        f"goal r0 {whole} over 0:3\n"
        f"r1.0 push {whole} -> r0 {whole} sum after compute(r1 {whole}) on nvlink\n"
        f"r2.0 push {whole} -> r0 {whole} sum after {after} compute(r2 {whole}) on nvlink\n"
    )
    assert verify(plan) == ()  # unfused it is sound
    graph = build_depgraph(plan, *product(4, 8, (4, 4, 8)), AxisMap.of({"y": "y"}))
    with pytest.raises(PlanError) as caught:
        order_tiles(graph)
    first, finding = str(caught.value).splitlines()
    assert first == (
        "late: 1 finding(s); operations that add to tiles wait for these very tiles, which take in "
        "what they bring before they are done: leave out the dependencies that are named; "
        "reductions need none on the destination's tiles nor on each other"
    )
    assert finding == (
        f"  rank 2 op 0 [circular-wait]: adds to {whole} of rank 0 and waits for "
        f"{after.replace(' compute', ', compute')}, which, fused, is done once the tiles that take "
        "in the sum are"
    )
