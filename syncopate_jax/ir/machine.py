"""A machine that was measured: the few physical figures that predicted times come from, as data.

``h200_measured.json`` holds those of two H200s; ``experiments/simulate/calibrate.py`` fits them to
the times of bare products, bare exchanges and links, never to those of fused operators.
"""

from __future__ import annotations

import functools
import json
import math
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from syncopate_jax.errors import FormatError

FORMAT = "syncopate-machine"
VERSION = 1


@dataclass(frozen=True, slots=True)
class Machine:
    """One device, its links to peers and what a call costs; seconds and bytes a second.

    Attributes:
      name: for messages and titles.
      multiprocessors: of a device; each computes one tile at a time.
      tile_m, tile_n: the tile that ``step_seconds`` is of.
      step_seconds: a tile takes on one multiprocessor for one element of the contraction.
      tile_seconds: a tile takes beside that, whatever the contraction and its size: its first
        operands come from memory, and its result goes there.
      sustained_flops: operations a second of a product in a long program, where the device's power
        limits its clock.
      link_bandwidth: one direction of a device's links; the copy engine reaches it.
      copy_engine_latency: of a copy that no multiprocessor makes.
      copy_unit_cta_bandwidth, copy_unit_bandwidth: one CTA's and all CTAs' copies by the copy unit,
        while the others send as much.
      load_store_cta_bandwidth, load_store_bandwidth: the same by loads and stores.
      call_seconds: on the device, beside a kernel that talks to peers: addresses and cleared
        counters, which are kernels of their own.
      copier_seconds: start and end of a kernel that only copies.
      collective_seconds, collective_bandwidth, all_reduce_bandwidth, all_to_all_bandwidth: start
        and rate of XLA's collectives, by what a device receives; an all-reduce, which does so
        twice, and an all-to-all, which follows no ring, have their own.
      rearrange_bandwidth: of XLA's transposition of what an all-to-all exchanges.
      host_product, host_exchange: the host's work for one call of a program without and with
        communication.
      between_seconds: on the device, from an operator in a loop of a program to the next one: what
        the loop itself starts.
      block_seconds: from the first call of a block to its kernel, and from the last kernel's end
        back to the host; a block of n timed calls has it once.
    """

    name: str
    multiprocessors: int
    tile_m: int
    tile_n: int
    step_seconds: float
    tile_seconds: float
    sustained_flops: float
    link_bandwidth: float
    copy_engine_latency: float
    copy_unit_cta_bandwidth: float
    copy_unit_bandwidth: float
    load_store_cta_bandwidth: float
    load_store_bandwidth: float
    call_seconds: float
    copier_seconds: float
    collective_seconds: float
    collective_bandwidth: float
    all_reduce_bandwidth: float
    all_to_all_bandwidth: float
    rearrange_bandwidth: float
    host_product: float
    host_exchange: float
    between_seconds: float
    block_seconds: float

    @property
    def flops(self) -> float:
        """Operations a second of all multiprocessors while they compute full tiles."""
        return self.multiprocessors * 2.0 * self.tile_m * self.tile_n / self.step_seconds

    def tile(self, elements: int, k: int) -> float:
        """Seconds that a tile of the result, contracted over k, takes on one multiprocessor."""
        share = elements / (self.tile_m * self.tile_n)
        return share * k * self.step_seconds + self.tile_seconds

    def product(self, m: int, k: int, n: int) -> float:
        """Seconds of a product on one device, by whole waves of tiles, whole or half as wide."""

        def waves(width: int) -> float:
            tiles = -(-m // self.tile_m) * -(-n // width)
            return -(-tiles // self.multiprocessors) * self.tile(self.tile_m * width, k)

        return min(waves(self.tile_n), waves(self.tile_n // 2))

    def collective(self, kind: str, received: float) -> float:
        """Seconds of XLA's collective of a kind in which each device receives so many bytes."""
        own = {"all_reduce": self.all_reduce_bandwidth, "all_to_all": self.all_to_all_bandwidth}
        return self.collective_seconds + received / own.get(kind, self.collective_bandwidth)

    def exchange(self, kind: str, received: float, held: float) -> float:
        """Seconds of the collective, and for an all-to-all of rearranging ``held`` bytes for it."""
        rearranging = held / self.rearrange_bandwidth if kind == "all_to_all" else 0.0
        return self.collective(kind, received) + rearranging

    def sustained(self, product: float, flops: float) -> float:
        """Seconds in a long program of what takes ``product`` seconds on a device that is cool.

        Of a product alone: exchanges between products do not let the clock rise again.
        """
        return max(product, flops / self.sustained_flops)

    def timed(self, device: float, host: float, calls: int) -> float:
        """What a clock shows of one call among ``calls`` in a row, first to last.

        The host's work for a call hides behind the device's for the one before, or the reverse.
        """
        return max(device, host) + self.block_seconds / calls


def to_dict(machine: Machine) -> dict[str, Any]:
    """The JSON object for ``machine``; floats to four significant digits."""
    found = {
        key: float(f"{value:.4g}") if isinstance(value, float) else value
        for key, value in asdict(machine).items()
    }
    return {"format": FORMAT, "version": VERSION, **found}


def from_dict(found: object) -> Machine:
    """The machine of a JSON object; raises FormatError that names the field at fault."""
    kinds = {field.name: field.type for field in fields(Machine)}
    if not isinstance(found, dict):
        raise FormatError(f"machine: must be an object, found {type(found).__name__}")
    for key, wanted in (("format", FORMAT), ("version", VERSION)):
        if found.get(key) != wanted:
            raise FormatError(f"machine: {key} is {found.get(key)!r}, needs {wanted!r}")
    given = {key: value for key, value in found.items() if key not in ("format", "version")}
    missing, unknown = sorted(set(kinds) - set(given)), sorted(set(given) - set(kinds))
    if missing or unknown:
        raise FormatError(f"machine: lacks {missing}, has unknown {unknown}")
    for key, value in given.items():
        whole, number = type(value) is int, type(value) in (int, float)
        if kinds[key] == "str":
            fits, needed = isinstance(value, str) and bool(value), "a non-empty string"
        elif kinds[key] == "int":
            fits, needed = whole and value > 0, "a positive integer"
        else:
            fits, needed = number and 0 < value < math.inf, "a positive, finite number"
        if not fits:
            raise FormatError(f"machine: {key} must be {needed}, found {value!r}")
    return Machine(**given)


def save(machine: Machine, path: str | Path) -> None:
    """Writes ``machine`` to a file."""
    Path(path).write_text(json.dumps(to_dict(machine), indent=1) + "\n")


def load(path: str | Path) -> Machine:
    """The machine in a file; raises FormatError when it is none."""
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{path}: not JSON: {error}") from error
    try:
        return from_dict(found)
    except FormatError as error:
        raise FormatError(f"{path}: {error}") from error


@functools.cache
def h200() -> Machine:
    """Two H200s joined by NVLink, measured (``experiments/two_gpus``)."""
    return load(Path(__file__).with_name("h200_measured.json"))
