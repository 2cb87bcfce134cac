"""Chrome traces: valid events, one process a rank, arrows from transfers to waiting tiles."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from syncopate_jax.check.simulate import simulate
from syncopate_jax.check.timing import Timeline
from syncopate_jax.check.trace import GUIDE, trace_events, write_trace
from tests.check.small_schedules import gather_schedule, topology


@pytest.fixture
def fused() -> Timeline:
    schedule = gather_schedule(3, 4, 375, workers=2)
    return simulate(schedule.plan, topology(3), schedule, tile_seconds=0.125)


def test_file_is_a_trace(fused: Timeline, tmp_path: Path) -> None:
    write_trace(fused, tmp_path / "t.json")
    top = json.loads((tmp_path / "t.json").read_text())
    assert top["otherData"] == {"plan": "small", "topology": "round", "guide": GUIDE}
    for event in top["traceEvents"]:
        assert {"ph", "name", "pid", "tid"} <= event.keys()
        assert event["ph"] in "MXsf"
        assert event["ph"] == "M" or event["ts"] >= 0
        assert event["ph"] != "X" or event["dur"] >= 0


def test_ranks_are_processes_and_lanes_are_threads(fused: Timeline) -> None:
    events = trace_events(fused)
    names = {
        (event["name"], event["pid"], event["tid"]): event["args"].get("name")
        for event in events
        if event["ph"] == "M"
    }
    assert names["process_name", 2, 0] == "rank 2"
    assert names["thread_name", 1, 0] == "nvlink"
    assert names["thread_name", 1, 1001] == "worker 1"
    slices = [event for event in events if event["ph"] == "X"]
    assert len(slices) == 3 * 12 + 6
    assert {(event["pid"], event["tid"]) for event in slices} == {
        (rank, thread) for rank in range(3) for thread in (0, 1000, 1001)
    }


def test_slices_of_a_thread_do_not_overlap(fused: Timeline) -> None:
    """Perfetto nests slices that overlap, which would draw a transfer inside another."""
    events = [event for event in trace_events(fused) if event["ph"] == "X"]
    for thread in {(event["pid"], event["tid"]) for event in events}:
        ours = sorted(
            (event["ts"], event["dur"])
            for event in events
            if (event["pid"], event["tid"]) == thread
        )
        for (start, length), (after, _) in itertools.pairwise(ours):
            assert start + length <= after * (1 + 1e-12)


def test_arrows_lead_from_a_transfer_to_the_tile_that_waited(fused: Timeline) -> None:
    events = trace_events(fused)
    starts = {event["id"]: event for event in events if event["ph"] == "s"}
    ends = {event["id"]: event for event in events if event["ph"] == "f"}
    assert len(starts) == len(ends) == len(fused.waits) == 3 * 2 * 2
    slices = [event for event in events if event["ph"] == "X"]
    for number, start in starts.items():
        end = ends[number]
        assert (start["name"], start["cat"]) == (end["name"], end["cat"])
        for event, kind in ((start, "transfer"), (end, "tile")):
            holder = [
                s
                for s in slices
                if (s["pid"], s["tid"]) == (event["pid"], event["tid"])
                and s["ts"] <= event["ts"] <= s["ts"] + s["dur"]
            ]
            assert kind in {s["cat"] for s in holder}
        assert start["pid"] != end["pid"]


def test_only_the_first_ranks_are_written(fused: Timeline) -> None:
    events = trace_events(fused, max_ranks=2)
    assert {event["pid"] for event in events} == {0, 1}
    starts = {event["id"] for event in events if event["ph"] == "s"}
    assert starts == {event["id"] for event in events if event["ph"] == "f"}
    assert starts
