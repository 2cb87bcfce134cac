"""Ranks that greet each other instead of a barrier: all orders of their steps, in several launches.

The steps are those of ``Greeting`` itself, recorded rank by rank; here they meet a model of memory.
Kernels whose ranks greet run in the interpreter too (``test_emitted_kernels.py``), one launch each.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import pytest
from jax.experimental import pallas as pl

from syncopate_jax.backends import gpu_greeting
from syncopate_jax.backends.gpu_greeting import ENTERED, GONE, SEEN, Greeting
from syncopate_jax.errors import InputError
from syncopate_jax.options import Launch
from tests.backends import emitted_faults
from tests.backends.test_emitted_kernels import options, run, small
from tests.backends.test_gpu_lowering import arrays, lowered
from tests.mosaic_interpreter.run import RaceFound
from tests.mosaic_interpreter.versions import needs_known_jax
from tests.ops import cases
from tests.ops.cases import BY_NAME

Step = tuple[Any, ...]


def recorded(rank: int, ranks: int) -> list[Step]:
    """What one rank does in a launch, in order."""
    steps: list[Step] = []

    class Slots:
        def __getitem__(self, slot: int) -> int:
            return slot

    signals: Any = types.SimpleNamespace(
        counters=types.SimpleNamespace(at=Slots()),
        wait=lambda slot, count: steps.append(("wait", slot, count)),
        signal=lambda peer, slot: steps.append(("tell", int(peer), slot)),
    )
    peers: Any = types.SimpleNamespace(ranks=ranks, peer_id=lambda peer: peer)
    greeting = Greeting(rank, "door", signals, peers, 0)
    with (
        mock.patch.object(gpu_greeting, "open_door", lambda _: steps.append(("open",))),
        mock.patch.object(gpu_greeting, "shut_door", lambda _: steps.append(("shut",))),
        mock.patch.object(
            gpu_greeting, "await_doors", lambda doors: steps.extend(("see", p) for p in doors)
        ),
        mock.patch.object(gpu_greeting.plgpu, "remote_ref", lambda _, peer: peer),
        mock.patch.object(pl, "semaphore_signal", lambda slot: steps.append(("tell", rank, slot))),
    ):
        greeting.open()
        greeting.greet()
        greeting.shut()
        greeting.leave()
    # Whoever has met peers may touch them at once; later, the waits at a launch's end keep them.
    told = steps.index(("tell", rank, ENTERED))
    return [*steps[: told + 1], ("touch",), *steps[told + 1 :]]


class Rank(NamedTuple):
    """Where a rank is, and what it holds."""

    launch: int
    step: int
    is_open: bool
    counters: tuple[int, ...]


class Broken(AssertionError):
    """A rank reached into memory that is not the launch's."""


State = tuple[Rank, ...]


def successors(programs: list[list[Step]], state: State) -> Iterator[State]:
    """The states after one step of one rank."""
    for number, rank in enumerate(state):
        step = programs[number][rank.step] if rank.step < len(programs[number]) else ("next",)
        ranks = list(state)
        ranks[number] = rank._replace(step=rank.step + 1)
        match step:
            case ("open",) | ("shut",):
                ranks[number] = ranks[number]._replace(is_open=step == ("open",))
            case ("see", peer):
                if not state[peer].is_open:
                    continue
                _check_there(state, number, peer)
            case ("touch",):
                for peer in range(len(state)):
                    _check_there(state, number, peer)
            case ("wait", slot, count):
                if rank.counters[slot] < count:
                    continue
            case ("tell", peer, slot):
                _check_there(state, number, peer)
                counters = list(ranks[peer].counters)
                counters[slot] += 1
                ranks[peer] = ranks[peer]._replace(counters=tuple(counters))
            case ("next",):
                # The next launch's counters are clear; its door may lie where this one's was.
                counters = (0,) * gpu_greeting.SLOTS
                ranks[number] = Rank(rank.launch + 1, 0, rank.is_open, counters)
        yield tuple(ranks)


def _check_there(state: State, number: int, peer: int) -> None:
    here, there = state[number], state[peer]
    if there.launch != here.launch or there.step == 0:
        raise Broken(f"rank {number} reaches rank {peer} {there}, itself at {here}")


def walk(programs: list[list[Step]], launches: int) -> int:
    """Goes through all states of some launches in a row; their number.

    Raises:
      Broken: a rank reaches another that has not begun, or has left.
      AssertionError: ranks can go no further before the last launch.
    """
    start = tuple(Rank(0, 0, False, (0,) * gpu_greeting.SLOTS) for _ in programs)
    seen, left = {start}, [start]
    while left:
        state = left.pop()
        if all(rank.launch == launches for rank in state):
            continue
        after = [s for s in successors(programs, state) if all(r.launch <= launches for r in s)]
        assert after, f"stuck: {state}"
        left += [one for one in after if one not in seen]
        seen.update(after)
    return len(seen)


@pytest.mark.parametrize("ranks,launches", [(2, 4), (3, 2)])
def test_every_order(ranks: int, launches: int) -> None:
    programs = [recorded(rank, ranks) for rank in range(ranks)]
    assert ("wait", GONE, ranks - 1) in programs[0]
    assert walk(programs, launches) > 10 * launches


Change = Callable[[Step], bool]
MISSING: dict[str, Change] = {
    "see": lambda step: step[0] == "see",
    "seen": lambda step: step[:2] == ("wait", SEEN),
    "shut": lambda step: step == ("shut",),
    "gone": lambda step: step[:2] == ("wait", GONE),
    "told of seen": lambda step: step[0] == "tell" and step[2] == SEEN,
    "told of gone": lambda step: step[0] == "tell" and step[2] == GONE,
}


@pytest.mark.parametrize("name", MISSING)
def test_no_step_can_be_left_out(name: str) -> None:
    programs = [recorded(rank, 2) for rank in range(2)]
    programs[1] = [step for step in programs[1] if not MISSING[name](step)]
    with pytest.raises(AssertionError):
        walk(programs, 3)


# --- in kernels

GREET = ["tma_dedicated", "ldst_dedicated", "tma_colocated"]


@needs_known_jax
@pytest.mark.parametrize("backend", GREET)
def test_touching_a_peer_too_early_is_seen(backend: str) -> None:
    with (
        emitted_faults.meets_nobody(),
        pytest.raises(RaceFound, match="unordered with the start of the launch"),
    ):
        run(BY_NAME["all_reduce"], backend, 2, small(2, "bfloat16"))


@needs_known_jax
def test_a_door_left_open_is_seen() -> None:
    with (
        mock.patch.object(gpu_greeting, "shut_door", lambda door: None),
        pytest.raises(AssertionError, match="its door is not shut"),
    ):
        run(BY_NAME["scatter_m"], "tma_colocated", 2, small(2, "bfloat16"))


@needs_known_jax
@pytest.mark.parametrize("blocks", [1, 2])
@pytest.mark.parametrize("backend", ["tma_dedicated", "tma_colocated"])
def test_a_barrier_instead(backend: str, blocks: int) -> None:
    """Of as many tiles as CTAs, and of more."""
    given = small(2, "bfloat16", blocks)
    launch = options(backend)["launch"].using(device_barrier=True)
    found = run(BY_NAME["scatter_m"], backend, 2, given, launch=launch)
    assert cases.error(found, cases.exact(*given)[0]) < 3e-3
    again = run(BY_NAME["scatter_m"], backend, 2, given)
    assert (found == again).all()


@pytest.mark.parametrize(
    "backend,sms,barrier,skipped",
    [
        ("tma_dedicated", 10, False, True),
        ("tma_dedicated", 10, True, False),
        ("tma_colocated", 10, False, True),
        ("tma_colocated", 8, False, False),
        ("ldst_colocated", 10, False, False),
    ],
)
def test_which_launches_skip_the_barrier(
    backend: str, sms: int, barrier: bool, skipped: bool
) -> None:
    """Not those that are told so, have no CTA left for it, or no registers."""
    launch = Launch(sms=sms, communicating=2, device_barrier=barrier)
    given = options(backend, launch=launch)
    fn = cases.sharded(BY_NAME["scatter_m"], cases.ranks_mesh(2), **given)
    text, _ = lowered(fn, *arrays(2)[:2])
    assert f"skip_device_barrier = {str(skipped).lower()}" in text


def test_the_option_is_a_bool() -> None:
    with pytest.raises(InputError, match="launch: device_barrier needs True or False, found 1"):
        Launch(device_barrier=1)  # type: ignore[arg-type]
