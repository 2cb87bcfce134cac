"""Small faults made on purpose in schedules that verify."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from syncopate_jax.ir.schedule import Rows, Schedule

WAITS = ("waits", "k_waits", "e_waits", "op_waits")
SIGNALS = ("signals", "op_signals")
ROWS = (*WAITS, *SIGNALS, "addends")


def listed(rows: Rows) -> list[list[tuple[int, ...]]]:
    return [rows.row(i) for i in range(rows.rows)]


def with_rows(schedule: Schedule, name: str, rows: list[list[tuple[int, ...]]]) -> Schedule:
    width = getattr(schedule, name).values.shape[1]
    return replace(schedule, **{name: Rows.of(rows, width)})


def mutants(schedule: Schedule, seed: int, each: int = 3) -> Iterator[tuple[str, Schedule]]:
    """``each`` random mutants of every kind that the schedule has room for, with a name."""
    rng = random.Random(seed)
    for kind in (_drop, _double, _recount, _retarget, _move):
        for name in ROWS:
            for _ in range(each):
                found = kind(schedule, name, rng)
                if found is not None:
                    yield f"{kind.__name__[1:]} in {name}", found
    for kind in (_swap_tiles, _swap_steps, _share_landing, _lose_landing):
        for _ in range(each):
            found = kind(schedule, rng)
            if found is not None:
                yield kind.__name__[1:], found


def _pick(rows: list[list[tuple[int, ...]]], rng: random.Random) -> tuple[int, int] | None:
    places = [(i, j) for i, row in enumerate(rows) for j in range(len(row))]
    return rng.choice(places) if places else None


def _drop(schedule: Schedule, name: str, rng: random.Random) -> Schedule | None:
    rows = listed(getattr(schedule, name))
    at = _pick(rows, rng)
    if at is None:
        return None
    del rows[at[0]][at[1]]
    return with_rows(schedule, name, rows)


def _double(schedule: Schedule, name: str, rng: random.Random) -> Schedule | None:
    rows = listed(getattr(schedule, name))
    at = _pick(rows, rng)
    if at is None or name in WAITS:
        return None
    rows[at[0]].append(rows[at[0]][at[1]])
    return with_rows(schedule, name, rows)


def _recount(schedule: Schedule, name: str, rng: random.Random) -> Schedule | None:
    rows = listed(getattr(schedule, name))
    at = _pick(rows, rng)
    if at is None or name not in WAITS:
        return None
    *head, count = rows[at[0]][at[1]]
    change = rng.choice((-1, 1)) if count > 1 else 1
    rows[at[0]][at[1]] = (*head, count + change)
    return with_rows(schedule, name, rows)


def _retarget(schedule: Schedule, name: str, rng: random.Random) -> Schedule | None:
    """Another slot, landing or rank, within range."""
    rows = listed(getattr(schedule, name))
    at = _pick(rows, rng)
    if at is None:
        return None
    entry = list(rows[at[0]][at[1]])
    if name in SIGNALS:
        targets = [
            (rank, slot) for rank, n in enumerate(schedule.num_slots.tolist()) for slot in range(n)
        ]
        entry = list(rng.choice(targets))
    else:
        rank = _rank(schedule, name, at[0])
        limit = schedule.num_landings if name == "addends" else schedule.num_slots
        entry[0 if name in ("addends", "waits", "e_waits", "op_waits") else 1] = rng.randrange(
            int(limit[rank])
        )
    if tuple(entry) == rows[at[0]][at[1]]:
        return None
    rows[at[0]][at[1]] = tuple(entry)
    return with_rows(schedule, name, rows)


def _move(schedule: Schedule, name: str, rng: random.Random) -> Schedule | None:
    """The entry belongs to the next row of the same rank."""
    rows = listed(getattr(schedule, name))
    at = _pick(rows, rng)
    if at is None or at[0] + 1 == len(rows):
        return None
    if _rank(schedule, name, at[0]) != _rank(schedule, name, at[0] + 1):
        return None
    rows[at[0] + 1].append(rows[at[0]].pop(at[1]))
    return with_rows(schedule, name, rows)


def _rank(schedule: Schedule, name: str, row: int) -> int:
    if name.startswith("op_"):
        return int(schedule.plan.columns.rank[row])
    return row // schedule.num_tiles


def _swap_tiles(schedule: Schedule, rng: random.Random) -> Schedule | None:
    return _swap(schedule, "order", rng)


def _swap_steps(schedule: Schedule, rng: random.Random) -> Schedule | None:
    return _swap(schedule, "k_order", rng)


def _swap(schedule: Schedule, name: str, rng: random.Random) -> Schedule | None:
    order = getattr(schedule, name).copy()
    if order.shape[1] < 2:
        return None
    rank = rng.randrange(len(order))
    a, b = rng.sample(range(order.shape[1]), 2)
    order[rank, [a, b]] = order[rank, [b, a]]
    return replace(schedule, **{name: order})


def _share_landing(schedule: Schedule, rng: random.Random) -> Schedule | None:
    landing, rank = schedule.landing.copy(), schedule.plan.columns.dst_rank
    rows = np.flatnonzero(landing >= 0).tolist()
    pairs = [(a, b) for a in rows for b in rows if a < b and rank[a] == rank[b]]
    if not pairs:
        return None
    a, b = rng.choice(pairs)
    landing[a] = landing[b]
    return replace(schedule, landing=landing)


def _lose_landing(schedule: Schedule, rng: random.Random) -> Schedule | None:
    landing = schedule.landing.copy()
    rows = np.flatnonzero(landing >= 0).tolist()
    if not rows:
        return None
    landing[rng.choice(rows)] = -1
    return replace(schedule, landing=landing)
