"""Timing of several versions of one computation against each other, on one device."""

import random
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax


def block_seconds(function: Callable[..., Any], inputs: Sequence[tuple], calls: int) -> float:
    """Wall seconds a call, over ``calls`` calls in a row, after two that are not counted.

    Calls rotate through ``inputs``, so that one call does not find its operands in the cache.
    """
    for index in range(2):
        jax.block_until_ready(function(*inputs[index % len(inputs)]))
    begin = time.perf_counter()
    for index in range(calls):
        result = function(*inputs[index % len(inputs)])
    jax.block_until_ready(result)
    return (time.perf_counter() - begin) / calls


def keep_busy(
    function: Callable[..., Any], inputs: Sequence[tuple], seconds: float, calls: int = 16
) -> None:
    """Calls ``function`` for so long, waiting every ``calls``; none for 0 seconds.

    What is timed next then runs at the clock that the device keeps to under this load.
    """
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for index in range(calls):
            result = function(*inputs[index % len(inputs)])
        jax.block_until_ready(result)


def interleaved_seconds(
    versions: Mapping[str, Callable[..., Any]],
    inputs: Sequence[tuple],
    *,
    rounds: int,
    calls: int,
    pause: float = 0.0,
    seed: int = 0,
) -> dict[str, list[float]]:
    """Each version's ``block_seconds``, once a round, in an order drawn anew each round.

    The device slows itself down to keep to its power limit, over some 100 ms; the order must not
    decide who runs on the hot device. ``pause`` seconds before each block let it cool down.
    """
    order, draw = list(versions), random.Random(seed)
    found: dict[str, list[float]] = {name: [] for name in order}
    for _ in range(rounds):
        draw.shuffle(order)
        for name in order:
            time.sleep(pause)
            found[name].append(block_seconds(versions[name], inputs, calls))
    return found
