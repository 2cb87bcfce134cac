"""Runs functions whose Mosaic GPU kernels are interpreted, and fails on what is wrong with them."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import jax
import numpy as np
from jax._src import callback
from jax._src import core as jax_core
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call as replaced
from jax.experimental.pallas import mosaic_gpu as plgpu

from syncopate_jax.backends.interface import interpret_settings
from tests.mosaic_interpreter import allocate, control, operations
from tests.mosaic_interpreter.evaluate import Evaluator
from tests.mosaic_interpreter.machine import Grid, Machine, Warpgroup, unwritten
from tests.mosaic_interpreter.memory import Remote

REGISTERED = (allocate, control, operations)  # imported for what they register
MEETING_SECONDS = 60.0


class RaceFound(AssertionError):
    """Two unordered accesses of one place, at least one a write."""


def run_checked(fn: Callable[..., Any], *args: Any, seed: int = 0) -> Any:
    """Calls a function of arrays once, with its kernels interpreted.

    Args:
      fn: a function that calls operators of target ``mosaic_gpu``; not yet jitted.
      *args: its arguments.
      seed: of the order in which simulated warpgroups run; every order is a legal one.

    Returns:
      Its results, ready.

    Raises:
      DeadlockFound: no warpgroup of a launch can go on.
      RaceFound: accesses that only luck put in order.
      AssertionError, IndexError, NotImplementedError: another misuse, or what is not modelled.
    """
    with interpreted(seed) as launches:
        found = jax.block_until_ready(jax.jit(fn)(*args))
    launches.check()
    return found


@dataclass(slots=True)
class Launches:
    """What was seen of the launches inside ``interpreted``.

    Attributes:
      seed: of the order of warpgroups.
      count: launches that ran to their ends.
      failures: what ended others, in order; their results are NaN.
      races: in words.
      meetings: of devices that have entered a launch which others have not.
    """

    seed: int
    count: int = 0
    failures: list[BaseException] = field(default_factory=list)
    races: list[str] = field(default_factory=list)
    meetings: dict[Any, _Meeting] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def check(self) -> None:
        """Raises what was wrong first: a failure, or else a race."""
        if self.failures:
            raise self.failures[0]
        if self.races:
            raise RaceFound(f"{len(self.races)} race(s):\n" + "\n".join(self.races))


@dataclass(slots=True)
class _Meeting:
    """The devices that have come to one launch; the last of them runs it for all."""

    inputs: dict[int, list[np.ndarray]] = field(default_factory=dict)
    results: dict[int, list[np.ndarray]] = field(default_factory=dict)
    done: threading.Event = field(default_factory=threading.Event)


@contextlib.contextmanager
def interpreted(seed: int = 0) -> Iterator[Launches]:
    """Mosaic GPU kernels that are traced and run inside are interpreted."""
    launches = Launches(seed)
    token = interpret_settings.set(plgpu.InterpretGPUParams())
    _active.append(launches)
    try:
        with mock.patch.object(replaced, "interpret_pallas_call", _enter):
            yield launches
    finally:
        _active.remove(launches)
        interpret_settings.reset(token)


# The innermost is told. Looked up when a program runs: it may have been compiled for one before.
_active: list[Launches] = []


def _enter(
    *args: jax.Array,
    jaxpr: Any,
    grid_mapping: Any,
    mesh: Any,
    compiler_params: Any,
    out_avals: Sequence[Any],
    input_output_aliases: Any,
    **_: Any,
) -> Sequence[jax.Array]:
    """In place of JAX's own: one callback a device."""
    grid = _grid(mesh)
    if input_output_aliases or grid_mapping.num_index_operands:
        raise NotImplementedError("a kernel with aliased operands or scalar prefetch")
    axes = list(grid.mesh)
    together = not (compiler_params and compiler_params.skip_device_barrier)
    run = functools.partial(_callback, grid, jaxpr, together, tuple(out_avals))
    where = [jax.lax.axis_index(name) for name in axes]
    outs = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in out_avals]
    return callback.io_callback(run, outs, where, *args, ordered=True)


def _grid(mesh: Any) -> Grid:
    cluster = tuple(mesh.cluster or ())
    if any(extent != 1 for extent in cluster):
        raise NotImplementedError(f"a cluster of CTAs {cluster}")
    return Grid(
        tuple(mesh.grid),
        tuple(mesh.grid_names),
        int(mesh.num_threads or 1),
        mesh.thread_name,
        tuple(mesh.cluster_names or ()),
        dict(jax_core.get_axis_env().axis_sizes),
    )


def _callback(
    grid: Grid,
    jaxpr: Any,
    together: bool,
    out_avals: Sequence[Any],
    where: Sequence[Any],
    *args: Any,
) -> list[np.ndarray]:
    """Meets the other devices; never raises, because XLA would not come back from it cleanly."""
    launches, device = _active[-1], 0
    for at, extent in zip(where, grid.mesh.values(), strict=True):
        device = device * extent + int(at)
    key = id(jaxpr)
    with launches.lock:
        meeting = launches.meetings.setdefault(key, _Meeting())
        meeting.inputs[device] = [np.asarray(x) for x in args]
        last = len(meeting.inputs) == grid.devices
        if last:
            del launches.meetings[key]
    if last:
        outputs = [(aval.shape, aval.dtype) for aval in out_avals]
        try:
            meeting.results = _launch(launches, grid, jaxpr, together, meeting.inputs, outputs)
        except BaseException as error:
            launches.failures.append(error)
        meeting.done.set()
    elif not meeting.done.wait(MEETING_SECONDS):
        launches.failures.append(
            AssertionError(f"device {device} waited {MEETING_SECONDS} s for others to launch")
        )
    empty = [unwritten(aval.shape, aval.dtype) for aval in out_avals]
    return meeting.results.get(device, empty)


def _launch(
    launches: Launches,
    grid: Grid,
    jaxpr: Any,
    together: bool,
    inputs: dict[int, list[np.ndarray]],
    outputs: Sequence[tuple[tuple[int, ...], Any]],
) -> dict[int, list[np.ndarray]]:
    """Results by device."""
    arrays = [inputs[device] for device in range(grid.devices)]
    machine = Machine(grid, arrays, outputs, launches.seed + launches.count, together)
    arguments = len(arrays[0]) + len(outputs)

    def body(warpgroup: Warpgroup) -> None:
        refs = [Remote(warpgroup.device.number, key) for key in range(arguments)]
        Evaluator(warpgroup).run(jaxpr, refs)
        machine.end(warpgroup)

    machine.turns.run([(one.name, functools.partial(body, one)) for one in machine.warpgroups()])
    launches.count += 1
    launches.races += machine.races
    return {device.number: device.results for device in machine.devices}
