"""Pictures of timelines: lanes, colours, SVG and PNG."""

from __future__ import annotations

import importlib.util
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from syncopate_jax.check.lanes import OWN, chunk_colour, lay_out
from syncopate_jax.check.simulate import simulate
from syncopate_jax.check.timeline import draw, svg, ticks
from syncopate_jax.check.timing import Timeline
from syncopate_jax.errors import InputError, UnsupportedError
from tests.check.small_schedules import (
    LATENCY,
    gather_schedule,
    plan_of,
    schedule_of,
    send,
    topology,
)

GREY = "tile that no transfer feeds or waits for"
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def fused() -> Timeline:
    schedule = gather_schedule(3, 4, 375, workers=2)
    return simulate(schedule.plan, topology(3), schedule, tile_seconds=0.5)


def test_a_lane_for_tiles_and_one_for_each_channel(fused: Timeline) -> None:
    lanes = lay_out(fused).lanes
    assert [lane.label for lane in lanes[:2]] == ["rank 0 tiles", "rank 0 nvlink"]
    assert [lane.rows for lane in lanes] == [2, 1] * 3


def test_tiles_have_the_colour_of_the_chunk_they_waited_for(fused: Timeline) -> None:
    picture = lay_out(fused)
    assert picture.chunks == ("x[0:375]", "x[375:750]", "x[750:1125]")
    tiles = [bar.chunk for bar in picture.bars if bar.lane == 0]
    assert tiles == [OWN] * 4 + [2] * 4 + [1] * 4
    colours = {picture.colour(chunk) for chunk in (OWN, 0, 1, 2)}
    assert len(colours) == 4


def test_tiles_that_wait_for_nothing_have_the_colour_of_what_they_feed() -> None:
    plan = plan_of([send(0, 1, 10), send(0, 1, 10, at=10)], [])
    schedule = schedule_of(
        plan,
        3,
        slots=2,
        signals={0: [(0, 1)], 1: [(0, 0)]},
        op_waits={0: [(0, 1)], 1: [(1, 1)]},
    )
    picture = lay_out(simulate(plan, topology(2), schedule, tile_seconds=1.0))
    assert [bar.chunk for bar in picture.bars if bar.lane == 0] == [1, 0, OWN]


def test_a_transfer_in_flight_is_the_faint_part_of_its_bar(fused: Timeline) -> None:
    bar = next(bar for bar in lay_out(fused).bars if bar.lane == 1)
    assert bar.finish - bar.busy == pytest.approx(LATENCY)
    assert bar.text == "r0 to r1, 375 bytes"


def test_only_the_first_ranks_are_shown(fused: Timeline) -> None:
    picture = lay_out(fused, max_ranks=1)
    assert {lane.rank for lane in picture.lanes} == {0}
    assert "1 of 3 ranks shown" in picture.title


def test_title_gives_the_figures(fused: Timeline) -> None:
    makespan = fused.makespan * 1e6
    assert lay_out(fused).title.startswith(
        f"small on round: ends at {makespan:.1f} us, computing alone takes "
    )
    assert lay_out(fused).title.endswith(" us of communication are not hidden")


def test_guide_explains_what_is_drawn_in_lines_that_fit(fused: Timeline) -> None:
    both, alone = lay_out(fused).guide, lay_out(simulate(fused.plan, topology(3))).guide
    assert all(words in " ".join(both) for words in ("one tile", "faint tail", "gap", "grey"))
    assert "one transfer" in alone[0] and "tile" not in " ".join(alone)
    assert max(map(len, (*both, *alone))) <= 180


def test_legend_is_cut_to_what_fits(fused: Timeline) -> None:
    picture = lay_out(fused)
    assert [words for _, words in picture.legend(8)] == [GREY, *picture.chunks]
    assert [words for _, words in picture.legend(2)] == [
        GREY,
        "x[0:375]",
        "x[750:1125]",
        "2 of 3 chunks listed",
    ]


@pytest.mark.parametrize("count", [8, 9, 40])
def test_colours_differ(count: int) -> None:
    assert len({chunk_colour(i, count) for i in range(count)}) == count


@pytest.mark.parametrize(
    ("span", "last", "count"),
    [(0.0, 0.0, 1), (1e-5, 10.0, 11), (2.5e-5, 25.0, 6), (99e-6, 90.0, 10), (3.0, 3e6, 7)],
)
def test_ticks_are_round(span: float, last: float, count: int) -> None:
    found = ticks(span)
    assert len(found) == count
    assert found[-1] == pytest.approx(last, rel=0.25)
    assert found[-1] <= span * 1e6 * (1 + 1e-9)


def test_svg_is_well_formed_and_complete(fused: Timeline) -> None:
    picture = lay_out(fused)
    root = ElementTree.fromstring(svg(picture))
    assert len(root.findall(f"{SVG}g")) == len(picture.bars) == 3 * 12 + 6
    texts = {text.text for text in root.iter(f"{SVG}text")}
    assert {picture.title, *picture.guide, "time (us)", "rank 2 nvlink", "x[0:375]"} <= texts
    for bar in root.iter(f"{SVG}rect"):
        assert float(bar.get("width", "nan")) >= 0
        assert float(bar.get("x", "0")) + float(bar.get("width", "0")) <= 1200.01


def test_svg_of_nothing() -> None:
    picture = lay_out(simulate(plan_of([], []), topology(2)))
    root = ElementTree.fromstring(svg(picture))
    assert root.find(f"{SVG}g") is None


def test_svg_is_the_same_each_time(fused: Timeline) -> None:
    assert svg(lay_out(fused)) == svg(lay_out(fused))


def test_draw_writes_svg(fused: Timeline, tmp_path: Path) -> None:
    draw(fused, tmp_path / "t.SVG")
    assert (tmp_path / "t.SVG").read_text() == svg(lay_out(fused))


def test_draw_writes_png(fused: Timeline, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the viz extra is not installed")
    draw(fused, tmp_path / "t.png")
    assert (tmp_path / "t.png").read_bytes().startswith(b"\x89PNG")
    draw(simulate(plan_of([], []), topology(2)), tmp_path / "empty.png")
    assert (tmp_path / "empty.png").read_bytes().startswith(b"\x89PNG")


def test_png_without_matplotlib_says_what_to_install(
    fused: Timeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UnsupportedError, match="pip install matplotlib; or ask for an"):
        draw(fused, tmp_path / "t.png")
    draw(fused, tmp_path / "t.svg")
    assert (tmp_path / "t.svg").exists()


def test_other_names_are_refused(fused: Timeline) -> None:
    with pytest.raises(InputError, match=r"picture t\.pdf: needs a name that ends in \.svg or"):
        draw(fused, "t.pdf")
