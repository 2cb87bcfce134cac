"""The knobs that every operator takes, as one hashable value."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from syncopate_jax.errors import InputError

MOST_LATE_US = 1_000_000
ORDERS = ("natural", "grouped", "snake")


@dataclass(frozen=True, slots=True)
class Launch:
    """What a fused GPU kernel may use of a device, and how ranks are laid on it.

    Attributes:
      sms: CTAs of a launch, one a multiprocessor; None: as many as the device has.
      communicating: CTAs of a rank that only communicate, for backends that have such; None: the
        backend's usual number.
      watchdog_us: for development: a wait that takes longer, in microseconds, is given up, and the
        call raises an error that names it; 0: waits are never given up.
      late_us: for development: every rank, and every CTA of it, begins up to so many microseconds
        late (a CTA up to a quarter more), drawn anew in each launch, so that ranks meet in other
        orders than they usually do.
      folded: all ranks run in one launch on one device, which they share.
      device_barrier: XLA's barrier between devices comes before a kernel that talks to peers; else
        ranks greet each other inside it, beside its first tiles (not with ``ldst_colocated`` or
        ``watchdog_us``, which have the barrier).
    """

    sms: int | None = None
    communicating: int | None = None
    watchdog_us: int = 0
    late_us: int = 0
    folded: bool = False
    device_barrier: bool = False

    def __post_init__(self) -> None:
        for name, least, optional in (
            ("sms", 1, True),
            ("communicating", 0, True),
            ("watchdog_us", 0, False),
            ("late_us", 0, False),
        ):
            given = getattr(self, name)
            if given is None and optional:
                continue
            value = _count(given, least)
            if value is None:
                needed = f"at least {least}" if isinstance(given, int) else "an integer"
                raise InputError(f"launch: {name} needs {needed}, found {given!r}")
            object.__setattr__(self, name, value)
        if self.late_us > MOST_LATE_US:
            raise InputError(
                f"launch: late_us needs at most {MOST_LATE_US}, a second, found {self.late_us}"
            )
        for name in ("folded", "device_barrier"):
            given = getattr(self, name)
            if not isinstance(given, bool):
                raise InputError(f"launch: {name} needs True or False, found {given!r}")

    def ctas(self, ranks: int) -> int:
        """CTAs of a rank; raises InputError while ``sms`` is not known."""
        if self.sms is None:
            raise InputError(
                "launch: there is no GPU whose multiprocessors could be counted; on CPUs and TPUs "
                "use backend 'remote_dma' or 'xla' (and leave out target), or give "
                "launch=syncopate_jax.options.Launch(sms=132) to compile for a GPU that is not "
                "here, by jax.jit(f).trace(…).lower(lowering_platforms=('cuda',)); with that "
                "launch backend 'copy_engine' runs on CPUs too"
            )
        return self.sms // ranks if self.folded else self.sms

    def using(self, **changes: Any) -> Launch:
        """This launch with some fields changed."""
        return replace(self, **changes)


@dataclass(frozen=True, slots=True)
class Options:
    """How an operator is realised; the result's value does not depend on it.

    Attributes:
      backend: how chunks are moved, or ``auto``: what ``syncopate_jax.tune`` has as the fastest
        for a shape like this on this kind of GPU, if no other knob is set; else ``xla``, which uses
        none of them. (``compile``, of whose kernels none was measured, takes the first that can.)
        Kernels that talk to peers need a mesh whose devices are in the order of their ids.
      target: what the local kernel is written in; None: the usual one of the backend, ``tpu`` for
        ``remote_dma`` (which CPUs interpret) and ``mosaic_gpu`` for what runs on GPUs.
      plan: a Plan, the name of a plan template, or None for the operator's usual template; ``xla``
        refuses one that fused backends would refuse, and uses none.
      split: pieces each rank's chunk is cut into; None lets the operator choose. Where partial
        results are added it is lowered to the next number that gives whole tiles.
      tiles: tile sizes by letter (``{"m": 128, "n": 128, "k": 64}``), in elements, kept as sorted
        pairs; letters left out take the target's default. On GPUs that is 128x256 elements of the
        result, or 128x128 where wider tiles would leave multiprocessors idle or be done in a turn.
      order: order of the tiles inside a chunk: ``natural``, ``grouped`` or ``snake``; None: the
        target's usual.
      launch: of GPU kernels.

    Raises:
      InputError: a knob has another type or range; the message names it and what it needs.
    """

    backend: str = "auto"
    target: str | None = None
    plan: Any = None
    split: int | None = None
    tiles: Mapping[str, int] | tuple[tuple[str, int], ...] | None = ()
    order: str | None = None
    launch: Launch | None = None

    def __post_init__(self) -> None:
        for name, asked in (("backend", self.backend), ("target", self.target)):
            if not isinstance(asked, str) and not (name == "target" and asked is None):
                raise InputError(f"{name}: needs a name, found {asked!r}")
        if self.launch is None:
            object.__setattr__(self, "launch", Launch())
        if not isinstance(self.launch, Launch):
            raise InputError(f"launch: needs a Launch or None, found {self.launch!r}")
        if self.split is not None:
            split = _count(self.split, 1)
            if split is None:
                raise InputError(
                    f"split: needs an integer of at least 1 or None, found {self.split!r}"
                )
            object.__setattr__(self, "split", split)
        object.__setattr__(self, "tiles", _tiles(self.tiles))
        if self.order is not None and not is_order(self.order):
            raise InputError(f"order: needs one of {', '.join(ORDERS)}, found {self.order!r}")

    @property
    def tile_sizes(self) -> dict[str, int]:
        """``tiles`` as a dictionary."""
        pairs: Any = self.tiles
        return dict(pairs)

    @property
    def launched(self) -> Launch:
        """``launch``, the default filled in."""
        return self.launch or Launch()

    def using(self, **changes: Any) -> Options:
        """These options with some changed."""
        return replace(self, **changes)


def is_order(value: object) -> bool:
    """Whether ``value`` names an order of the tiles inside a chunk."""
    return isinstance(value, str) and value in ORDERS


def _tiles(given: object) -> tuple[tuple[str, int], ...]:
    """Tile sizes as sorted pairs; raises InputError for what is none."""
    pairs: Any = () if given is None else given
    try:
        if not isinstance(pairs, Mapping | tuple):
            raise TypeError
        tiles: dict[Any, Any] = dict(pairs)
    except (TypeError, ValueError) as error:
        raise InputError(
            f"tiles: needs a mapping of letters to sizes, such as {{'m': 128, 'n': 128, 'k': 64}}, "
            f"found {given!r}"
        ) from error
    for letter, size in tiles.items():
        if not isinstance(letter, str):
            raise InputError(f"tiles: needs letters as keys, found {letter!r}")
        tiles[letter] = _count(size, 1)
        if tiles[letter] is None:
            raise InputError(f"tiles: {letter} needs an integer of at least 1, found {size!r}")
    return tuple(sorted(tiles.items()))


def _count(value: Any, least: int) -> int | None:
    """``value`` as an int, NumPy's among them, of at least ``least``; else None."""
    if isinstance(value, bool):
        return None
    try:
        found = operator.index(value)
    except TypeError:
        return None
    return found if found >= least else None
