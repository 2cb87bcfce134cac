"""A timeline as lanes of coloured bars: what the pictures and the trace show, before any format.

Each rank has a lane for its tiles, cut into a row for each worker, and one for each channel it
issues transfers on. A colour stands for a chunk: of a transfer the chunk it delivers, of a tile the
chunk its worker last waited for or, failing that, the one it helps to produce.
"""

from __future__ import annotations

import colorsys
from dataclasses import dataclass

import numpy as np

from syncopate_jax.check.timing import Timeline
from syncopate_jax.ir.chunk import Box, Chunk

Array = np.ndarray
OWN = -1
OWN_COLOUR = "#b8b8b8"
# Okabe and Ito's palette, which stays apart for colour-blind readers (yellow and black left out).
_FEW = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#7a5195", "#8c6d31")


@dataclass(frozen=True, slots=True)
class Lane:
    """One horizontal band: ``rows`` workers of a rank, or (``rows`` 1) the transfers it issues."""

    rank: int
    label: str
    rows: int
    channel: int = -1


@dataclass(frozen=True, slots=True)
class Bar:
    """One tile or transfer.

    Attributes:
      lane, row: where it is drawn.
      start, busy, finish: seconds; a transfer's bytes flow until ``busy``, then it is in flight.
      chunk: index of the chunk that gives its colour, or ``OWN``.
      text: what it is, for tool tips and traces.
      entity: row of the operation, or operations + row of the tile.
    """

    lane: int
    row: int
    start: float
    busy: float
    finish: float
    chunk: int
    text: str
    entity: int


@dataclass(frozen=True, slots=True)
class Picture:
    """Everything a picture shows.

    Attributes:
      title: what was simulated, and its figures.
      chunks: names of the chunks that the bars refer to.
      makespan: seconds.
    """

    title: str
    lanes: tuple[Lane, ...]
    bars: tuple[Bar, ...]
    chunks: tuple[str, ...]
    makespan: float

    def colour(self, chunk: int) -> str:
        """Colour of a chunk, ``#rrggbb``."""
        return OWN_COLOUR if chunk == OWN else chunk_colour(chunk, len(self.chunks))

    @property
    def guide(self) -> tuple[str, ...]:
        """How to read the bars and colours, in lines of at most 180 letters."""
        if all(lane.channel >= 0 for lane in self.lanes):
            return (
                "A bar is one transfer, on the line of the rank that starts it; its faint tail is "
                "data still on the way. A colour is the chunk of data that it brings.",
            )
        return (
            "A bar is one tile being computed or one transfer; a transfer's faint tail is data "
            "still on the way. A gap in a row of tiles is a worker that waits for data.",
            "A colour is a chunk of data: a transfer has that of the chunk it brings, a tile that "
            "of the chunk it last waited for or else helps to make; grey tiles do neither.",
        )

    def legend(self, most: int) -> list[tuple[str, str]]:
        """(colour, words) for at most ``most`` chunks, spread over all of them."""
        count = len(self.chunks)
        shown = np.unique(np.linspace(0, max(count - 1, 0), min(count, most)).astype(int))
        found = [(self.colour(i), self.chunks[i]) for i in shown.tolist()]
        if any(bar.chunk == OWN for bar in self.bars):
            found.insert(0, (OWN_COLOUR, "tile that no transfer feeds or waits for"))
        if count > most:
            found.append(("none", f"{most} of {count} chunks listed"))
        return found


def lay_out(timeline: Timeline, max_ranks: int = 16) -> Picture:
    """Lanes and bars of the first ``max_ranks`` ranks of ``timeline``."""
    ranks = min(timeline.plan.num_ranks, max_ranks)
    chunk_of, names = _chunks(timeline, ranks)
    lanes = _lanes(timeline, ranks)
    at = {(lane.rank, lane.channel): i for i, lane in enumerate(lanes)}
    bars = [*_tile_bars(timeline, ranks, at, chunk_of), *_op_bars(timeline, ranks, at, chunk_of)]
    return Picture(
        _title(timeline, ranks), tuple(lanes), tuple(bars), tuple(names), timeline.makespan
    )


def chunk_colour(chunk: int, count: int) -> str:
    """One of ``count`` colours that are told apart; neighbours differ in lightness too."""
    if count <= len(_FEW):
        return _FEW[chunk]
    lightness = (0.42, 0.56, 0.70)[chunk % 3]
    red, green, blue = colorsys.hls_to_rgb(chunk / count, lightness, 0.65)
    return f"#{round(red * 255):02x}{round(green * 255):02x}{round(blue * 255):02x}"


def _title(timeline: Timeline, ranks: int) -> str:
    plan = timeline.plan
    parts = [f"ends at {timeline.makespan * 1e6:.1f} us"]
    if timeline.tile_start.size:
        parts.append(f"computing alone takes {timeline.compute_alone().max() * 1e6:.1f} us")
        parts.append(f"{timeline.exposed().max() * 1e6:.1f} us of communication are not hidden")
    if ranks < plan.num_ranks:
        parts.append(f"{ranks} of {plan.num_ranks} ranks shown")
    return f"{plan.name} on {timeline.topology.name}: {', '.join(parts)}"


def _chunks(timeline: Timeline, ranks: int) -> tuple[Array, list[str]]:
    """[ops] index of the chunk each operation of the shown ranks delivers, and the names."""
    plan, c = timeline.plan, timeline.plan.columns
    shown = (c.rank < ranks) | (c.dst_rank < ranks)
    key = np.concatenate([c.dst_tensor[:, None], c.dst_lo, c.dst_hi], axis=1)[shown]
    found, inverse = np.unique(key, axis=0, return_inverse=True)
    names = []
    for row in found.tolist():
        tensor = plan.tensors[row[0]]
        d = len(tensor.shape)
        box = Box(tuple(row[1 : 1 + d]), tuple(row[1 + c.ndim : 1 + c.ndim + d]))
        names.append(str(Chunk(tensor.name, box)))
    chunk_of = np.full(plan.num_ops, OWN)
    chunk_of[shown] = inverse.reshape(-1)
    return chunk_of, names


def _lanes(timeline: Timeline, ranks: int) -> list[Lane]:
    plan, c = timeline.plan, timeline.plan.columns
    lanes = []
    for rank in range(ranks):
        if timeline.tile_start.size:
            lanes.append(Lane(rank, f"rank {rank} tiles", timeline.num_workers))
        lo, hi = np.searchsorted(c.rank, (rank, rank + 1))
        for channel in np.unique(c.channel[lo:hi]).tolist():
            lanes.append(Lane(rank, f"rank {rank} {plan.channels[channel]}", 1, channel))
    return lanes


def _tile_bars(
    timeline: Timeline, ranks: int, at: dict[tuple[int, int], int], chunk_of: Array
) -> list[Bar]:
    schedule = timeline.schedule
    if schedule is None:
        return []
    feeds = _fed_operations(timeline)
    bars = []
    ops, tiles, workers = timeline.plan.num_ops, schedule.num_tiles, timeline.num_workers
    for rank in range(ranks):
        for position in range(tiles):
            op = int(timeline.tile_op[rank, position])
            op = op if op >= 0 else int(feeds[rank * tiles + position])
            start = float(timeline.tile_start[rank, position])
            finish = float(timeline.tile_finish[rank, position])
            tile = f"tile {schedule.order[rank, position]}"
            bars.append(
                Bar(
                    at[rank, -1],
                    position % workers,
                    start,
                    finish,
                    finish,
                    int(chunk_of[op]) if op >= 0 else OWN,
                    tile,
                    ops + rank * tiles + position,
                )
            )
    return bars


def _fed_operations(timeline: Timeline) -> Array:
    """[tiles of all ranks] row of the first operation that waits for a slot the tile raises."""
    schedule = timeline.schedule
    feeds = np.full(timeline.tile_start.size, -1)
    if schedule is None or not len(schedule.signals.values) or not len(schedule.op_waits.values):
        return feeds
    stride = int(schedule.num_slots.max()) + 1
    waits, signals = schedule.op_waits, schedule.signals
    waited = timeline.plan.columns.rank[waits.owner].astype(np.int64) * stride + waits.values[:, 0]
    raised = signals.values[:, 0].astype(np.int64) * stride + signals.values[:, 1]
    slots, first = np.unique(waited, return_index=True)
    place = np.minimum(np.searchsorted(slots, raised), len(slots) - 1)
    known = slots[place] == raised
    feeds[signals.owner[known][::-1]] = waits.owner[first[place[known]]][::-1]
    return feeds


def _op_bars(
    timeline: Timeline, ranks: int, at: dict[tuple[int, int], int], chunk_of: Array
) -> list[Bar]:
    plan, c = timeline.plan, timeline.plan.columns
    stop = int(np.searchsorted(c.rank, ranks))
    latency = [
        timeline.topology.channel(name).latency if np.any(c.channel == i) else None
        for i, name in enumerate(plan.channels)
    ]
    bars = []
    for row in range(stop):
        channel, s, d = int(c.channel[row]), int(c.src_rank[row]), int(c.dst_rank[row])
        delay = latency[channel]
        finish = float(timeline.op_finish[row])
        flowing = finish - (float(delay[s, d]) if delay is not None else 0.0)
        rank = int(c.rank[row])
        text = f"r{s} to r{d}, {int(timeline.op_bytes[row])} bytes"
        start, chunk = float(timeline.op_start[row]), int(chunk_of[row])
        bars.append(Bar(at[rank, channel], 0, start, flowing, finish, chunk, text, row))
    return bars
