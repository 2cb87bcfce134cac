"""The simulated devices: their CTAs and warpgroups, what those hold, and what went wrong."""

from __future__ import annotations

import math
from collections import Counter as Tally
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.mosaic_interpreter.memory import Barrier, Buffer, Counter, Remote
from tests.mosaic_interpreter.regions import Region
from tests.mosaic_interpreter.turns import Turns
from tests.mosaic_interpreter.views import Access, Actor, Box, Knowledge, View, learn

RACES_KEPT = 20  # of a launch; the first say what is wrong


@dataclass(frozen=True, slots=True)
class Grid:
    """How a launch is laid out on a device, and the devices in their mesh.

    Attributes:
      ctas, cta_names: extents and names of the grid.
      warpgroups, warpgroup_name: of a CTA.
      ones: names of axes of extent 1: a cluster's.
      mesh: extents of the mesh of devices by name, slowest first.
    """

    ctas: tuple[int, ...]
    cta_names: tuple[str, ...]
    warpgroups: int
    warpgroup_name: str | None
    ones: tuple[str, ...]
    mesh: Mapping[str, int]

    @property
    def devices(self) -> int:
        return math.prod(self.mesh.values())

    def coordinates(self, device: int) -> dict[str, int]:
        """Mesh coordinates of a device by its number."""
        found = np.unravel_index(device, tuple(self.mesh.values())) if self.mesh else ()
        return {name: int(at) for name, at in zip(self.mesh, found, strict=True)}

    def device(self, address: Any, of: int) -> int:
        """Number of the device at a mesh address, coordinates left out being those of ``of``."""
        if not isinstance(address, dict):
            given = address if isinstance(address, tuple) else (address,)
            address = dict(zip(self.mesh, given, strict=True))
        number = 0
        for name, at in (self.coordinates(of) | address).items():
            if not 0 <= int(at) < self.mesh[name]:
                raise AssertionError(f"peer address {address}: {name} has {self.mesh[name]}")
            number = number * self.mesh[name] + int(at)
        return number


@dataclass(frozen=True, slots=True)
class By:
    """Who accesses: the ``count``-th access of an actor, in words."""

    actor: Actor
    count: int
    words: str


@dataclass(slots=True)
class Cta:
    """A thread block: its shared memory, by where and how often it was asked for."""

    device: Device
    number: int
    scopes: dict[Any, list[Any]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"device {self.device.number} CTA {self.number}"


@dataclass(slots=True, eq=False)
class Warpgroup:
    """One of the threads that a kernel's text is written for, and what it knows.

    Attributes:
      published: how many of its own accesses a signal by one of its threads releases: those before
        it last made all its threads' stores visible.
      counts: accesses so far, by kind.
      scopes: how often it has entered each scope of allocations.
    """

    machine: Machine
    cta: Cta
    number: int
    knowledge: Knowledge = field(default_factory=Knowledge)
    published: int = 0
    counts: Tally[str] = field(default_factory=Tally)
    scopes: Tally[int] = field(default_factory=Tally)

    @property
    def name(self) -> str:
        return f"{self.cta.name} warpgroup {self.number}"

    @property
    def device(self) -> Device:
        return self.cta.device

    def actor(self, kind: str) -> Actor:
        return (kind, self.name)

    def buffer(self, ref: Buffer | Remote) -> Buffer:
        if isinstance(ref, Buffer):
            return ref
        return self.machine.devices[ref.device].buffers[ref.key]

    def counter(self, ref: Remote, index: tuple[int, ...]) -> Counter:
        counters = self.machine.devices[ref.device].counters
        name = f"counter {list(index)} of device {ref.device}"
        return counters.setdefault((ref.key, index), Counter(name))

    def load(self, buffer: Buffer, region: Region, words: str) -> np.ndarray:
        """A load by the warpgroup's threads."""
        found = self.machine.read(buffer, region, self._own(words), self.knowledge.generic)
        self.knowledge.generic[self.actor("threads")] = self.counts["threads"]
        return found

    def store(self, buffer: Buffer, region: Region, value: np.ndarray, words: str) -> None:
        """A store by the warpgroup's threads."""
        self.machine.write(buffer, region, value, self._own(words), self.knowledge.generic)
        self.knowledge.generic[self.actor("threads")] = self.counts["threads"]

    def _own(self, words: str) -> By:
        self.counts["threads"] += 1
        return By(self.actor("threads"), self.counts["threads"], words)

    def released(self) -> View:
        """What a signal by one thread of this warpgroup makes known."""
        found = dict(self.knowledge.generic)
        found[self.actor("threads")] = self.published
        return found


@dataclass(slots=True, eq=False)
class Device:
    """A device: GMEM, counters, and warpgroups.

    Attributes:
      running: warpgroups that have not ended.
      door: what peers read to know that it has begun; None before it is first written.
      greeted: what who reads it open knows.
      results: of the launch, as they were when the device left it.
    """

    number: int
    buffers: dict[Any, Buffer] = field(default_factory=dict)
    counters: dict[Any, Counter] = field(default_factory=dict)
    warpgroups: list[Warpgroup] = field(default_factory=list)
    running: int = 0
    door: Buffer | None = None
    greeted: View = field(default_factory=dict)
    results: list[np.ndarray] = field(default_factory=list)

    @property
    def start(self) -> Actor:
        return ("start", f"device {self.number}")


class Machine:
    """All devices of one launch.

    Args:
      grid: the launch.
      inputs: arrays of every device.
      outputs: (shape, dtype) of a device's results.
      seed: of the order in which warpgroups run.
      together: no device begins before all have come; else what a device holds is another
        program's until its part begins, of which peers have to hear.
    """

    def __init__(
        self,
        grid: Grid,
        inputs: Sequence[Sequence[np.ndarray]],
        outputs: Sequence[tuple[tuple[int, ...], Any]],
        seed: int,
        together: bool = True,
    ):
        self.grid, self.turns = grid, Turns(seed)
        self.races: list[str] = []
        self.starts: dict[int, str] = {}  # of devices that begin on their own, in words
        self.texts: dict[int, Any] = {}  # of jaxprs, as evaluators prepare them
        self.devices = [Device(number) for number in range(grid.devices)]
        self._num_inputs = len(inputs[0])
        for device, arrays in zip(self.devices, inputs, strict=True):
            held = [*map(np.array, arrays), *(unwritten(*output) for output in outputs)]
            for key, array in enumerate(held):
                name = f"argument {key} of device {device.number}"
                device.buffers[key] = Buffer(name, array, in_gmem=True)
            for number in range(math.prod(grid.ctas)):
                cta = Cta(device, number)
                device.warpgroups += [Warpgroup(self, cta, i) for i in range(grid.warpgroups)]
            device.running = len(device.warpgroups)
            if not together:
                self._begin(device)

    def _begin(self, device: Device) -> None:
        """From now on a device's memory is the launch's, as its own warpgroups know."""
        words = f"the start of the launch on device {device.number}"
        by = By(device.start, 1, words)
        for buffer in device.buffers.values():
            self._record(buffer, tuple((0, n) for n in buffer.array.shape), True, by, {})
        for one in device.warpgroups:
            one.knowledge.complete(device.start, 1)
        self.starts[device.number] = words

    def check_counter(self, device: int, view: View, words: str) -> None:
        """A counter of a device is raised: that has begun, for all that is known, and not left."""
        target = self.devices[device]
        if device in self.starts and not view.get(target.start):
            self.races.append(f"{words} is unordered with {self.starts[device]}")
        if not target.running:
            self.races.append(f"{words} of device {device}, which has left the launch")

    def warpgroups(self) -> Iterator[Warpgroup]:
        for device in self.devices:
            yield from device.warpgroups

    def read(self, buffer: Buffer, region: Region, by: By, view: View) -> np.ndarray:
        """What a region holds; the read is recorded."""
        self._report(self._record(buffer, region.box, False, by, view), buffer, by)
        return region.read(buffer.array)

    def write(self, buffer: Buffer, region: Region, value: np.ndarray, by: By, view: View) -> None:
        """Stores and records; to write what another write has put there is no race with it.

        The last piece of a chunk is copied so that it ends where the chunk does: it writes some
        elements a second time.
        """
        against = self._record(buffer, region.box, True, by, view)
        before = buffer.array.copy() if against else buffer.array
        region.write(buffer.array, value)

        def changed(other: Access) -> bool:
            pairs = zip(region.box, other.box, strict=True)
            both = tuple(slice(max(a[0], b[0]), min(a[1], b[1])) for a, b in pairs)
            return before[both].tobytes() != buffer.array[both].tobytes()

        against = [other for other in against if not other.writes or changed(other)]
        self._report(against, buffer, by)

    @staticmethod
    def _record(buffer: Buffer, box: Box, writes: bool, by: By, view: View) -> list[Access]:
        if any(lo >= hi for lo, hi in box):
            return []
        return buffer.history.add(Access(by.actor, by.count, writes, box, by.words), view)

    def _report(self, against: list[Access], buffer: Buffer, by: By) -> None:
        for other in against[: RACES_KEPT - len(self.races)]:
            where = list(map(list, other.box))
            self.races.append(
                f"{by.words} is unordered with {other.words}, of {buffer.name} {where}"
            )

    def end(self, warpgroup: Warpgroup) -> None:
        """A warpgroup has done; the last of a device ends its part of the launch."""
        started = warpgroup.counts["store"]
        if warpgroup.counts["stores read"] < started:
            raise AssertionError(
                f"{warpgroup.name} ended while the copy unit may still read its shared memory"
            )
        device = warpgroup.device
        device.running -= 1
        if not device.running:
            self._leave(device)

    def _leave(self, device: Device) -> None:
        """What a device held is another program's from now on."""
        if device.door is not None and device.door.array.view(np.int64).any():
            raise AssertionError(f"device {device.number} left, and its door is not shut")
        view: View = {}
        for one in device.warpgroups:
            learn(view, one.knowledge.generic)
        for actor, count in self._own_counts(device).items():
            learn(view, {actor: count})
        for buffer in device.buffers.values():
            box = tuple((0, n) for n in buffer.array.shape)
            words = f"the end of the launch on device {device.number}"
            by = By(("end", words), 1, words)
            self._report(self._record(buffer, box, True, by, view), buffer, by)
        held = list(device.buffers.values())[self._num_inputs :]
        device.results = [buffer.array.copy() for buffer in held]

    @staticmethod
    def _own_counts(device: Device) -> View:
        """All that a device's own warpgroups have started is complete when it leaves."""
        found: View = {}
        for one in device.warpgroups:
            for kind in ("threads", "store", "store read", "product"):
                found[one.actor(kind)] = one.counts["store" if "store" in kind else kind]
            for objects in one.cta.scopes.values():
                for barriers in objects:
                    if isinstance(barriers, np.ndarray):
                        for barrier in barriers.flat:
                            found[load_actor(barrier)] = barrier.loads
        return found


def load_actor(barrier: Barrier) -> Actor:
    """The copies that arrive at a barrier: a completed phase has all of them up to it."""
    return ("load", barrier.name)


def unwritten(shape: Sequence[int], dtype: Any) -> np.ndarray:
    """Memory that nobody has written: NaN, or the largest integer."""
    if np.issubdtype(dtype, np.integer):
        return np.full(shape, np.iinfo(dtype).max, dtype)
    return np.full(shape, np.nan, dtype)
