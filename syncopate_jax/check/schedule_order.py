"""What has happened before what in a schedule, and whether that is all that is required.

Requirements are collected, then settled together. Nearly all are met by a wait of the same worker,
or of the operation itself, for a slot that exactly those raise who must have happened; what is
left is looked up in sets that are carried along one run from raises to waits.
"""

from __future__ import annotations

import numpy as np

from syncopate_jax.check.report import SHOWN, Report
from syncopate_jax.check.schedule_run import OP, TILE, Run
from syncopate_jax.check.schedule_tables import tile_name
from syncopate_jax.ir.schedule import Schedule

Array = np.ndarray
Event = tuple[int, int]
"""TILE or OP, and its row: a tile that has finished, an operation that has completed."""


class Order:
    """Requirements on the order of one run's tiles and operations."""

    def __init__(self, run: Run):
        self.run, self.schedule = run, run.schedule
        self.workers = run.schedule.workers
        self.full = _full_waits(run)
        self.raisers = _raisers(run)
        self._heard = self._heard_ops()
        self._covers: dict[tuple[int, bytes], bool] = {}
        self.steps: dict[Event, list[int]] = {}  # places inside a tile, beside its first
        for places in run.actors:
            for place in places:
                if place.step:
                    self.steps.setdefault((place.kind, place.row), []).append(place.step)
        # (place of the event that comes later) -> what must come before it, and why.
        self.open: dict[tuple[int, int, int], dict[Event, str]] = {}

    def tiles_after_op(self, rows: Array, steps: Array, op: int, why: str) -> None:
        """Tile ``rows[i]``, from step position ``steps[i]`` on, must come after ``op``."""
        if not len(rows):
            return
        tiles, width = self.schedule.num_tiles, self.schedule.num_steps + 1
        rank = int(rows[0]) // tiles
        first = self._heard.get((rank, op))
        when = rows * width + steps
        met = np.zeros(len(rows), bool) if first is None else first[rows % tiles % self.workers]
        met = (met <= when) & (met >= 0) if first is not None else met
        for row, step in zip(rows[~met].tolist(), steps[~met].tolist(), strict=True):
            self.open.setdefault((TILE, row, step), {})[OP, op] = why

    def op_after_op(self, op: int, dep: int) -> None:
        """``op`` must start after ``dep`` has completed."""
        if not any(self.raisers[slot] == {(OP, dep)} for slot in self.full.get((OP, op, 0), ())):
            self.open.setdefault((OP, op, 0), {})[OP, dep] = "depends on"

    def op_after_tiles(self, op: int, rows: Array, why: str) -> None:
        """``op`` must start after all tiles in ``rows`` have finished."""
        key = rows.tobytes()
        for slot in self.full.get((OP, op, 0), ()):
            if (slot, key) not in self._covers:
                self._covers[slot, key] = bool(np.isin(rows, self._tile_raisers(slot)).all())
            if self._covers[slot, key]:
                return
        before = self.open.setdefault((OP, op, 0), {})
        for row in rows.tolist():
            before[TILE, row] = f"depends on {why}:"

    def settle(self, report: Report, schedule: Schedule) -> None:
        """Reports the requirements that no chain of waits meets, where the run got that far."""
        missing = self._missing() if self.open else []
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

    def _heard_ops(self) -> dict[tuple[int, int], Array]:
        """For each rank and operation, when each worker has first waited for it; -1 for never."""
        tiles, width = self.schedule.num_tiles, self.schedule.num_steps + 1
        found: dict[tuple[int, int], Array] = {}
        for (kind, row, step), slots in self.full.items():
            if kind != TILE:
                continue
            when, worker = row * width + step, row % tiles % self.workers
            for slot in slots:
                if slot not in self.raisers:
                    continue
                for other, op in self.raisers[slot]:
                    if other == OP:
                        key = row // tiles, op
                        if key not in found:
                            found[key] = np.full(self.workers, -1)
                        at = found[key]
                        if at[worker] < 0 or when < at[worker]:
                            at[worker] = when
        return found

    def _tile_raisers(self, slot: int) -> Array:
        return np.array([row for kind, row in self.raisers[slot] if kind == TILE], np.int64)

    def _missing(self) -> list[tuple[tuple[int, int, int], dict[Event, str]]]:
        """Requirements that are not met, by carrying sets of events along the run."""
        events = sorted({event for wanted in self.open.values() for event in wanted})
        bit = {event: 1 << i for i, event in enumerate(events)}
        at_place: dict[tuple[int, int], list[int]] = {}
        for kind, row, step in self.open:
            at_place.setdefault((kind, row), []).append(step)
        known = [0] * len(self.run.actors)
        slot_known: dict[int, int] = {}
        missing = []
        for actor, place in self.run.trace:
            for slot in self.full.get((place.kind, place.row, place.step), ()):
                known[actor] |= slot_known.get(slot, 0)
            required = at_place.get((place.kind, place.row), [])
            for step in self._holds_from(place.kind, place.row, place.step, required):
                key = place.kind, place.row, step
                left = {e: w for e, w in self.open[key].items() if not known[actor] & bit[e]}
                if left:
                    missing.append((key, left))
            if place.last:
                after = known[actor] | bit.get((place.kind, place.row), 0)
                for slot in self.run.raises[place.kind][place.row]:
                    slot_known[slot] = slot_known.get(slot, 0) | after
                if place.kind == TILE:
                    known[actor] = after
        return sorted(missing, key=lambda item: item[0])

    def _holds_from(self, kind: int, row: int, step: int, required: list[int]) -> list[int]:
        """Those of the required steps that come between this place of a tile and its next one."""
        after = [other for other in self.steps.get((kind, row), ()) if other > step]
        end = min(after, default=self.schedule.num_steps + 1)
        return [other for other in required if step <= other < end]


def _full_waits(run: Run) -> dict[tuple[int, int, int], list[int]]:
    """For each place the slots that it waits for with the count of all their raises."""
    full = {}
    raises = run.slots.raises.tolist()
    for places in run.actors:
        for place in places:
            slots = [slot for slot, count in place.waits if count == raises[slot]]
            if slots:
                full[place.kind, place.row, place.step] = slots
    return full


def _raisers(run: Run) -> dict[int, set[Event]]:
    """Who raises each slot."""
    out: dict[int, set[Event]] = {}
    for kind, rows in enumerate(run.raises):
        for row, slots in enumerate(rows):
            for slot in slots:
                out.setdefault(slot, set()).add((kind, row))
    return out
