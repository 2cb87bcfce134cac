"""A timeline in the Chrome trace event format, which Perfetto and chrome://tracing open.

A rank is a process; its channels and its workers are threads; an arrow leads from a transfer to
each tile that waited for what it delivered. Times are in microseconds.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from syncopate_jax.check.lanes import OWN, Bar, Picture, lay_out
from syncopate_jax.check.timing import Timeline

_WORKER_THREADS = 1000
"""Threads below are channels, from here on workers."""

GUIDE = (
    "A process is a rank. Its threads are its channels, with a slice for each transfer it starts, "
    "and its workers, with a slice for each tile. An arrow leads from a transfer to a tile that "
    "waited for the data it brought."
)
"""What a viewer shows, in its file's ``otherData``."""


def trace_events(timeline: Timeline, max_ranks: int = 64) -> list[dict[str, Any]]:
    """The events of the first ``max_ranks`` ranks."""
    picture = lay_out(timeline, max_ranks)
    by_entity = {bar.entity: bar for bar in picture.bars}
    return [
        *_names(picture),
        *(_slice(picture, bar) for bar in picture.bars),
        *_arrows(timeline, picture, by_entity),
    ]


def write_trace(timeline: Timeline, path: str | Path, max_ranks: int = 64) -> None:
    """Writes the trace file of the first ``max_ranks`` ranks."""
    top = {
        "traceEvents": trace_events(timeline, max_ranks),
        "displayTimeUnit": "ns",
        "otherData": {
            "plan": timeline.plan.name,
            "topology": timeline.topology.name,
            "guide": GUIDE,
        },
    }
    Path(path).write_text(json.dumps(top) + "\n")


def _names(picture: Picture) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = []
    for rank in sorted({lane.rank for lane in picture.lanes}):
        events.append(_name("process_name", rank, 0, f"rank {rank}"))
        events.append(_meta("process_sort_index", rank, 0, {"sort_index": rank}))
    for lane in picture.lanes:
        if lane.channel >= 0:
            name = lane.label.removeprefix(f"rank {lane.rank} ")
            events.append(_name("thread_name", lane.rank, lane.channel, name))
            continue
        for worker in range(lane.rows):
            thread = _WORKER_THREADS + worker
            events.append(_name("thread_name", lane.rank, thread, f"worker {worker}"))
    return events


def _name(kind: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return _meta(kind, pid, tid, {"name": name})


def _meta(kind: str, pid: int, tid: int, args: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": args}


def _place(picture: Picture, bar: Bar) -> dict[str, int]:
    lane = picture.lanes[bar.lane]
    thread = lane.channel if lane.channel >= 0 else _WORKER_THREADS + bar.row
    return {"pid": lane.rank, "tid": thread}


def _slice(picture: Picture, bar: Bar) -> dict[str, Any]:
    tile = picture.lanes[bar.lane].channel < 0
    args: dict[str, Any] = {"chunk": "" if bar.chunk == OWN else picture.chunks[bar.chunk]}
    if not tile:
        args["landed_us"] = bar.finish * 1e6
    return {
        "ph": "X",
        "name": bar.text,
        "cat": "tile" if tile else "transfer",
        "ts": bar.start * 1e6,
        "dur": (bar.busy - bar.start) * 1e6,
        "args": args,
        **_place(picture, bar),
    }


def _arrows(
    timeline: Timeline, picture: Picture, by_entity: dict[int, Bar]
) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = []
    ops = timeline.plan.num_ops
    for number, (tile, op) in enumerate(timeline.waits.tolist()):
        send, wait = by_entity.get(op), by_entity.get(ops + tile)
        if send is None or wait is None:
            continue
        arrow = {"name": "waited for", "cat": "chunk", "id": number}
        # Each end must lie inside the slice that it joins.
        events.append({"ph": "s", "ts": send.start * 1e6, **arrow, **_place(picture, send)})
        end = max(wait.start, min(send.finish, wait.finish)) * 1e6
        events.append({"ph": "f", "bp": "e", "ts": end, **arrow, **_place(picture, wait)})
    return events
