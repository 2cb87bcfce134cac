"""What text means that a kernel hands to the compiler past Pallas: the seam for such text.

By the function that makes it; a function that is not listed is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from syncopate_jax.backends import gpu_greeting, gpu_signals
from tests.mosaic_interpreter.machine import Warpgroup
from tests.mosaic_interpreter.memory import Buffer
from tests.mosaic_interpreter.views import learn

Meaning = Callable[[Warpgroup, Sequence[Any]], Sequence[Any]]


def fence(wg: Warpgroup, _: Sequence[Any]) -> Sequence[Any]:
    """What the warpgroup knows, the copy unit's accesses of GMEM come after."""
    learn(wg.knowledge.gmem, wg.knowledge.generic)
    return []


def publish(wg: Warpgroup, given: Sequence[Any]) -> Sequence[Any]:
    """A fence, and all threads' accesses come before a signal by one of them."""
    wg.published = wg.counts["threads"]
    return fence(wg, given)


def be_late(wg: Warpgroup, _: Sequence[Any]) -> Sequence[Any]:
    """Others go on meanwhile, for a number of turns that is drawn."""
    for _ in range(wg.machine.turns.draw(64)):
        wg.machine.turns.give_way()
    return []


def open_door(wg: Warpgroup, given: Sequence[Any]) -> Sequence[Any]:
    """A release of what the warpgroup knows and its threads have stored, to who reads the door."""
    _write_word(wg, given, gpu_greeting.OPEN)
    return []


def shut_door(wg: Warpgroup, given: Sequence[Any]) -> Sequence[Any]:
    """A release too."""
    _write_word(wg, given, gpu_greeting.SHUT)
    return []


def _write_word(wg: Warpgroup, given: Sequence[Any], word: int) -> None:
    ((door, _),) = given
    wg.published = wg.counts["threads"]
    door.array.view(np.int64)[...] = word
    wg.device.door = door
    wg.device.greeted = wg.released()
    wg.machine.turns.give_way()


def await_doors(wg: Warpgroup, given: Sequence[Any]) -> Sequence[Any]:
    """An acquire from each."""
    doors: list[Buffer] = [door for door, _ in given]

    def shut() -> list[str]:
        return [one.name for one in doors if one.array.view(np.int64) != gpu_greeting.OPEN]

    wg.machine.turns.give_way()
    wg.machine.turns.wait(lambda: not shut(), lambda: f"{wg.name}: doors {shut()} to open")
    for device in wg.machine.devices:
        if device.door in doors:
            learn(wg.knowledge.generic, device.greeted)
    return []


MEANINGS: dict[str, Meaning] = {
    f"{made.__module__}.{made.__qualname__}": meaning
    for made, meaning in (
        (gpu_signals.fence, fence),
        (gpu_signals.publish, publish),
        (gpu_signals.be_late, be_late),
        (gpu_greeting.open_door, open_door),
        (gpu_greeting.shut_door, shut_door),
        (gpu_greeting.await_doors, await_doors),
    )
}


def meaning(made: Any) -> Meaning:
    """The meaning of the text that ``made``, a function defined inside a named one, writes."""
    name = f"{made.__module__}.{made.__qualname__}".split(".<locals>")[0]
    if name not in MEANINGS:
        raise NotImplementedError(
            f"the kernel has inline text of {name}, whose meaning is not known; add it to "
            f"{__name__}.MEANINGS"
        )
    return MEANINGS[name]
