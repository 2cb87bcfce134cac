"""What has happened before what in a schedule, and whether that is all that is required.

Requirements are collected, then settled together. Nearly all are met by a wait of the same worker,
or of the operation itself, for a slot that exactly those raise who must have happened; what is
left is looked up in sets that are carried along one run from raises to waits.
"""

from __future__ import annotations

import numpy as np

from syncopate_jax.check.report import SHOWN, Report
from syncopate_jax.check.schedule_run import OP, TILE, Run
from syncopate_jax.check.schedule_tables import Slots, tile_name
from syncopate_jax.ir.schedule import Schedule

Array = np.ndarray
Event = tuple[int, int]
"""TILE or OP, and its row: a tile that has finished, an operation that has completed."""


class Order:
    """Requirements on the order of one schedule's tiles and operations."""

    def __init__(self, schedule: Schedule, slots: Slots):
        self.schedule, self.slots = schedule, slots
        self.workers = schedule.workers
        self._raise_start, self._raise_kind, self._raise_row = _raisers(schedule, slots)
        self.full = _full_waits(schedule, slots)
        self._heard = self._heard_ops()
        self._covers: dict[tuple[int, bytes], bool] = {}
        self._mark = np.zeros(schedule.plan.num_ranks * schedule.num_tiles, bool)
        self._wanted: list[tuple[Array, Array, int, str]] = []
        # (place of the event that comes later) -> what must come before it, and why.
        self.open: dict[tuple[int, int, int], dict[Event, str]] = {}

    def tiles_after_op(self, rows: Array, steps: Array, op: int, why: str) -> None:
        """Tile ``rows[i]``, from step position ``steps[i]`` on, must come after ``op``.

        The tiles are of the rank that ``op`` writes to.
        """
        if len(rows):
            self._wanted.append((rows, steps, op, why))

    def op_after_op(self, op: int, dep: int) -> None:
        """``op`` must start after ``dep`` has completed."""
        for slot in self.full.get((OP, op, 0), ()):
            lo, hi = self._raise_start[slot : slot + 2]
            if hi == lo + 1 and (self._raise_kind[lo], self._raise_row[lo]) == (OP, dep):
                return
        self.open.setdefault((OP, op, 0), {})[OP, dep] = "depends on"

    def starts_after(self, op: int, rows: Array) -> bool:
        """Whether ``op`` itself waits for a slot that all tiles in ``rows`` raise."""
        key = rows.tobytes()
        for slot in self.full.get((OP, op, 0), ()):
            if (slot, key) not in self._covers:
                raisers = self._tile_raisers(slot)
                self._mark[raisers] = True
                self._covers[slot, key] = bool(self._mark[rows].all())
                self._mark[raisers] = False
            if self._covers[slot, key]:
                return True
        return False

    def op_after_tiles(self, op: int, rows: Array, why: str) -> None:
        """``op`` must start after all tiles in ``rows`` have finished."""
        before = self.open.setdefault((OP, op, 0), {})
        for row in rows.tolist():
            before[TILE, row] = f"depends on {why}:"

    def settle(self, report: Report, schedule: Schedule) -> None:
        """Reports the requirements that no chain of waits meets, where the run got that far."""
        self._open_tiles()
        missing = self._missing(Run(schedule, self.slots)) if self.open else []
        for (kind, row, step), events in missing[:SHOWN]:
            (other, _), why = next(iter(events.items()))
            names = [
                report.name(r) if k == OP else tile_name(schedule, r)
                for k, r in sorted(events)
                if k == other
            ]
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            who = report.name(row) if kind == OP else tile_name(schedule, row)
            if kind == TILE and why == "reads what":
                who += f" at step position {step}"
            tail = " brings" if kind == TILE else ""
            place = report.place(row) if kind == OP else (row // schedule.num_tiles, -1)
            report.add(
                "unordered",
                *place,
                f"{who} {why} {', '.join(names[:3])}{more}{tail}, but nothing makes it wait for "
                f"that; wait for a slot that all of them raise, with its full count",
            )
        report.more("unordered", len(missing), "tiles and operations")

    def _heard_ops(self) -> tuple[Array, Array]:
        """For each operation and worker of the rank it writes to, when it has first waited for it.

        Returns keys ``op * workers + worker``, ascending, and places ``row * (steps + 1) + step``.
        """
        tiles, width = self.schedule.num_tiles, self.schedule.num_steps + 1
        waits = [(*key, slot) for key, slots in self.full.items() for slot in slots]
        table = np.array(waits, np.int64).reshape(-1, 4)
        _, row, step, slot = table[table[:, 0] == TILE].T
        start, count = self._raise_start[slot], np.diff(self._raise_start)[slot]
        entry = np.repeat(np.arange(len(slot)), count)
        first = np.repeat(start - (np.cumsum(count) - count), count)
        raiser = first + np.arange(len(entry))
        op, row, step = self._raise_row[raiser], row[entry], step[entry]
        mine = self._raise_kind[raiser] == OP
        mine[mine] = self.schedule.plan.columns.dst_rank[op[mine]] == row[mine] // tiles
        op, row, when = op[mine], row[mine], (row * width + step)[mine]
        key = op * self.workers + row % tiles % self.workers
        order = np.lexsort((when, key))
        known, at = np.unique(key[order], return_index=True)
        return known, when[order][at]

    def _open_tiles(self) -> None:
        """Keeps what is wanted of tiles unless their own worker has waited for it by then."""
        if not self._wanted:
            return
        tiles, width = self.schedule.num_tiles, self.schedule.num_steps + 1
        row, step = (np.concatenate([want[i] for want in self._wanted]) for i in (0, 1))
        number = np.repeat(np.arange(len(self._wanted)), [len(want[0]) for want in self._wanted])
        op = np.array([want[2] for want in self._wanted], np.int64)[number]
        known, when = self._heard
        key = op * self.workers + row % tiles % self.workers
        if len(known):
            at = np.minimum(np.searchsorted(known, key), len(known) - 1)
            met = (known[at] == key) & (when[at] <= row * width + step)
        else:
            met = np.zeros(len(key), bool)
        for i in np.flatnonzero(~met).tolist():
            before = self.open.setdefault((TILE, int(row[i]), int(step[i])), {})
            before[OP, int(op[i])] = self._wanted[number[i]][3]

    def _tile_raisers(self, slot: int) -> Array:
        lo, hi = self._raise_start[slot : slot + 2]
        return self._raise_row[lo:hi][self._raise_kind[lo:hi] == TILE]

    def _missing(self, run: Run) -> list[tuple[tuple[int, int, int], dict[Event, str]]]:
        """Requirements that are not met, by carrying sets of events along the run."""
        events = sorted({event for wanted in self.open.values() for event in wanted})
        bit = {event: 1 << i for i, event in enumerate(events)}
        at_place: dict[tuple[int, int], list[int]] = {}
        for kind, row, step in self.open:
            at_place.setdefault((kind, row), []).append(step)
        steps: dict[Event, list[int]] = {}  # places inside a tile, beside its first
        for places in run.actors:
            for place in places:
                if place.step:
                    steps.setdefault((place.kind, place.row), []).append(place.step)
        known = [0] * len(run.actors)
        slot_known: dict[int, int] = {}
        missing = []
        for actor, place in run.trace:
            for slot in self.full.get((place.kind, place.row, place.step), ()):
                known[actor] |= slot_known.get(slot, 0)
            required = at_place.get((place.kind, place.row), [])
            inside = steps.get((place.kind, place.row), [])
            for step in self._holds_from(place.step, inside, required):
                key = place.kind, place.row, step
                left = {e: w for e, w in self.open[key].items() if not known[actor] & bit[e]}
                if left:
                    missing.append((key, left))
            if place.last:
                after = known[actor] | bit.get((place.kind, place.row), 0)
                for slot in run.raises[place.kind][place.row]:
                    slot_known[slot] = slot_known.get(slot, 0) | after
                if place.kind == TILE:
                    known[actor] = after
        return sorted(missing, key=lambda item: item[0])

    def _holds_from(self, step: int, inside: list[int], required: list[int]) -> list[int]:
        """Those of the required steps that come between this place of a tile and its next one."""
        after = [other for other in inside if other > step]
        end = min(after, default=self.schedule.num_steps + 1)
        return [other for other in required if step <= other < end]


def _full_waits(schedule: Schedule, slots: Slots) -> dict[tuple[int, int, int], list[int]]:
    """For each place the slots that it waits for with the count of all their raises."""
    full: dict[tuple[int, int, int], list[int]] = {}
    tables = (
        (TILE, schedule.waits, 0),
        (TILE, schedule.k_waits, 0),
        (TILE, schedule.e_waits, schedule.num_steps),
        (OP, schedule.op_waits, 0),
    )
    for kind, rows, at in tables:
        owner = rows.owner
        rank = schedule.plan.columns.rank[owner] if kind == OP else owner // schedule.num_tiles
        slot = slots.first[rank] + rows.values[:, -2]
        step = rows.values[:, 0] if rows.values.shape[1] == 3 else np.full(len(owner), at)
        whole = rows.values[:, -1] == slots.raises[slot]
        entries = zip(
            owner[whole].tolist(), step[whole].tolist(), slot[whole].tolist(), strict=True
        )
        for row, place, number in entries:
            full.setdefault((kind, row, place), []).append(number)
    return full


def _raisers(schedule: Schedule, slots: Slots) -> tuple[Array, Array, Array]:
    """Who raises each slot: slot s by kind and row of ``start[s]:start[s + 1]``, each once."""
    found = []
    for kind, rows in ((TILE, schedule.signals), (OP, schedule.op_signals)):
        slot = slots.first[rows.values[:, 0]] + rows.values[:, 1]
        found.append(np.stack([slot, np.full(len(slot), kind), rows.owner], axis=1))
    table = np.concatenate(found)
    table = table[np.lexsort(table.T[::-1])]
    again = np.append(False, np.all(table[1:] == table[:-1], axis=1))[: len(table)]
    slot, kind, row = table[~again].T
    start = np.searchsorted(slot, np.arange(len(slots.raises) + 1))
    return start, kind, row
