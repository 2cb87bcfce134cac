"""Guards for kernels run in Pallas's TPU interpret mode: a deadlock, a race, or a semaphore left
counting fails the test with a message, where JAX hangs or prints a line.

Test tool only. It leans on private parts of JAX (read at 0.11.2 and 0.12.0.1), all of them
functions and methods looked up while a kernel runs, so that kernels compiled before are guarded
too. One kernel runs at a time in a process; do not guard from several threads.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import threading
import time
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
from jax._src import dispatch, source_info_util
from jax._src.pallas.mosaic.interpret import interpret_pallas_call as interpreter
from jax._src.pallas.mosaic.interpret import race_detection_state, shared_memory
from jax.experimental.pallas import tpu as pltpu

MODES = ("on_wait", "eager")
_CLOCKS = 512
_FIRST_SEMAPHORE = 2000  # SharedMemory numbers a kernel's semaphores from here, as declared


class DeadlockFound(AssertionError):
    """No device of an interpreted kernel made progress; says who waits for what."""


class RaceFound(AssertionError):
    """Two unordered accesses of one buffer, at least one a write; names both source lines."""


class LeftoverCount(AssertionError):
    """A semaphore was not back at zero when a device left the kernel."""


def params(mode: str = "on_wait", *, detect_races: bool = True) -> pltpu.InterpretParams:
    """Interpreter settings under which races are collected, not raised in the middle of a kernel.

    Args:
      mode: ``on_wait`` performs a copy only when somebody waits for it (as late as is legal),
        ``eager`` when it is started (as early as is legal). A protocol must survive both.
      detect_races: look for unordered accesses.
    """
    settings: dict[str, Any] = {
        "dma_execution_mode": mode,
        "detect_races": detect_races,
        # Copies share the clock entries that devices leave free, each at random; two on one entry
        # may hide a race. JAX's default leaves as many as there are devices.
        "vector_clock_size": _CLOCKS,
    }
    if "on_race" in {field.name for field in dataclasses.fields(pltpu.InterpretParams)}:
        settings["on_race"] = "warn"
    return pltpu.InterpretParams(**settings)


@dataclasses.dataclass(frozen=True, slots=True)
class Waiter:
    """One device inside a wait: on which semaphore, for which count, from which source line."""

    semaphore: Any
    core: int
    value: int
    line: str


@dataclasses.dataclass(slots=True)
class Report:
    """What was seen of the kernels that ran in one ``watch``."""

    races: list[str] = dataclasses.field(default_factory=list)
    leftovers: list[str] = dataclasses.field(default_factory=list)
    deadlock: str = ""
    steps: int = 0
    waiting: dict[int, Waiter] = dataclasses.field(default_factory=dict)

    def check(self) -> None:
        """Raise the first kind of fault that was seen: deadlock, race, leftover count."""
        if self.deadlock:
            raise DeadlockFound(self.deadlock)
        if self.races:
            raise RaceFound(f"{len(self.races)} race(s); the first:\n{self.races[0]}")
        if self.leftovers:
            raise LeftoverCount("; ".join(self.leftovers))


def run_guarded(
    fn: Callable[..., Any],
    *args: Any,
    timeout: float = 10.0,
    semaphores: Mapping[str, int] | None = None,
    late: int | None = None,
) -> Any:
    """Call a function that runs interpreted kernels, and fail on whatever is wrong with them.

    Args:
      fn: function of arrays; may be jitted, and may run several kernels.
      *args: its arguments.
      timeout: seconds without any step of any device after which a kernel counts as stuck.
      semaphores: name -> number, in the order in which the kernel declares them, for messages.
      late: device (position in the mesh, row-major) that enters each kernel 0.3 s after the others,
        so that a missing entry barrier shows: its buffers are not there yet, a KeyError.

    Returns:
      The results, ready.

    Raises:
      DeadlockFound, RaceFound, LeftoverCount: see there. The process can go on afterwards.
    """
    callback_log = logging.getLogger("jax._src.callback")  # a traceback per device and failure
    with (
        watch(timeout=timeout, semaphores=semaphores, late=late) as report,
        _replaced(callback_log, "disabled", True),
    ):
        try:
            result = _settled(fn(*args))
            jax.effects_barrier()
        except Exception as error:
            _reset()
            if report.deadlock:
                raise DeadlockFound(report.deadlock) from error
            raise
    report.check()
    return result


def _settled(result: Any) -> Any:
    """The results, once every device is through, failed or not: one at work fails the next run."""
    errors = []
    for leaf in jax.tree.leaves(result):
        for shard in leaf.addressable_shards:
            try:
                shard.data.block_until_ready()
            except Exception as error:
                errors.append(error)
    if errors:
        raise errors[0]
    return result


def in_both_modes(
    build: Callable[[pltpu.InterpretParams], Callable[..., Any]],
    *args: Any,
    timeout: float = 10.0,
    semaphores: Mapping[str, int] | None = None,
    late: int | None = None,
) -> tuple[Any, Any]:
    """Run what ``build`` makes of each copy mode's settings, guarded; the two results."""
    late_copies, eager_copies = (
        run_guarded(build(params(mode)), *args, timeout=timeout, semaphores=semaphores, late=late)
        for mode in MODES
    )
    return late_copies, eager_copies


@contextlib.contextmanager
def watch(
    *, timeout: float, semaphores: Mapping[str, int] | None = None, late: int | None = None
) -> Iterator[Report]:
    """Collect a Report of the kernels run inside, and abort one that is stuck."""
    report = Report()
    names = [
        f"{name}[{i}]" if count > 1 else name
        for name, count in (semaphores or {}).items()
        for i in range(count)
    ]
    over = threading.Event()
    dog = threading.Thread(target=_abort_when_stuck, args=(report, names, timeout, over))
    with contextlib.ExitStack() as stack:
        stack.enter_context(_record_waits(report))
        stack.enter_context(_held_back(late))
        stack.enter_context(_record_races(report))
        stack.enter_context(_record_leftovers(report, names))
        dog.start()
        try:
            yield report
        finally:
            over.set()
            dog.join()


def _abort_when_stuck(
    report: Report, names: list[str], timeout: float, over: threading.Event
) -> None:
    seen, since = -1, time.monotonic()
    while not over.wait(0.05):
        memory = interpreter._shared_memory
        if memory is None or report.steps != seen or report.deadlock:
            seen, since = report.steps, time.monotonic()
            continue
        if time.monotonic() - since > timeout:
            report.deadlock = _describe(report, memory, names, timeout)
            memory.set_failed(RuntimeError(report.deadlock), top_level=False)
            if not over.wait(1.0):  # a device that never entered the kernel holds up the others
                memory.clean_up_barrier.abort()


def _describe(report: Report, memory: Any, names: list[str], timeout: float) -> str:
    waits = [
        f"device {w.core // memory.num_cores_per_device} waits for {_name(w.semaphore, names)} to "
        f"reach {w.value}, it is {int(w.semaphore.count_by_core[w.core])} ({w.line})"
        for w in sorted(list(report.waiting.values()), key=lambda w: w.core)
    ]
    waiting = {(id(w.semaphore), w.core) for w in report.waiting.values()}
    counts = [
        f"{_name(semaphore, names)} on device {core // memory.num_cores_per_device} is {int(count)}"
        for semaphore in (*memory.fixed_id_sem.values(), *memory.sem.values())
        for core, count in enumerate(semaphore.count_by_core)
        if count and (id(semaphore), core) not in waiting
    ]
    lines = [f"no device made a step for {timeout} s", *(waits or ["no device waits in a kernel"])]
    return "\n  ".join([*lines, f"other counts: {', '.join(counts) or 'all zero'}"])


def _name(semaphore: Any, names: list[str]) -> str:
    index = semaphore.id - _FIRST_SEMAPHORE
    if index < 0:
        return f"barrier semaphore {semaphore.id}"
    return names[index] if index < len(names) else f"semaphore {index}"


def _record_waits(report: Report) -> contextlib.AbstractContextManager[None]:
    semaphore_type, memory_type = shared_memory.Semaphore, shared_memory.SharedMemory
    wait = semaphore_type.wait

    def recorded_wait(self: Any, value: int, core: int, **options: Any) -> None:
        info = options.get("logging_info")
        source = getattr(info, "source_info", None)
        line = source_info_util.summarize(source) if source is not None else "unknown line"
        report.waiting[threading.get_ident()] = Waiter(self, int(core), int(value), line)
        try:
            wait(self, value, core, **options)
        finally:
            del report.waiting[threading.get_ident()]
            report.steps += 1

    def counted(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            report.steps += 1
            return method(*args, **options)

        return call

    stack = contextlib.ExitStack()
    stack.enter_context(_replaced(semaphore_type, "wait", recorded_wait))
    for owner, name in (
        (semaphore_type, "signal"),
        (memory_type, "get_buffer_content"),
        (memory_type, "store_buffer_content"),
        (memory_type, "allocate_buffer"),
    ):
        stack.enter_context(_replaced(owner, name, counted(getattr(owner, name))))
    return stack


@contextlib.contextmanager
def _held_back(late: int | None, seconds: float = 0.3) -> Iterator[None]:
    enter = shared_memory.SharedMemory.allocate_buffer
    held: list[Any] = []

    def allocate(self: Any, key: Any, *args: Any, **options: Any) -> None:
        if key[2] == late and self not in held:
            held[:] = [self]
            time.sleep(seconds)
        enter(self, key, *args, **options)

    with _replaced(shared_memory.SharedMemory, "allocate_buffer", allocate):
        yield


@contextlib.contextmanager
def _record_races(report: Report) -> Iterator[None]:
    def keep(message: str) -> None:
        report.races.append(message)

    # 0.11 prints races; 0.12 logs them, to two loggers. Globals of the module shadow both.
    log = types.SimpleNamespace(warning=keep)
    with contextlib.ExitStack() as stack:
        for name, value in (("print", keep), ("logger", log), ("logging", log)):
            stack.enter_context(_replaced(race_detection_state, name, value))
        yield


def _record_leftovers(report: Report, names: list[str]) -> contextlib.AbstractContextManager[None]:
    method = "get_sempahores_with_nonzero_count"  # spelt so in JAX
    find = getattr(shared_memory.SharedMemory, method)

    left: list[int] = []

    def found(self: Any, device: int) -> list[Any]:
        report.leftovers += [
            f"device {device} left the kernel with {_name(semaphore, names)} at "
            f"{int(semaphore.count_by_core[core])}, not 0"
            for semaphore, core in find(self, device)
        ]
        left.append(device)
        if len(left) == self.num_devices:
            left.clear()
            report.leftovers += _unfinished_copies(self, names)
        return []

    return _replaced(shared_memory.SharedMemory, method, found)


def _unfinished_copies(memory: Any, names: list[str]) -> list[str]:
    """Copies nobody waited for: in ``on_wait`` mode they have not landed when the kernel ends."""
    return [
        f"a copy to device {copy.dst_device_id} that raises {_name(copy.dst_sem, names)} there was "
        f"never waited for ({source_info_util.summarize(copy.source_info)})"
        for semaphore in memory.sem.values()
        for tasks in semaphore.tasks
        for copy in (getattr(task, "__self__", None) for task in tasks)
        if copy is not None and copy.dst_sem is semaphore and copy.state.name != "COMPLETED"
    ]


@contextlib.contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name, None)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if before is None:
            delattr(owner, name)
        else:
            setattr(owner, name, before)


def _reset(patience: float = 2.0) -> None:
    """Forget a failed kernel. Devices still unwinding would fail the next one: wait for them."""
    deadline = time.monotonic() + patience
    while interpreter._shared_memory is not None and time.monotonic() < deadline:
        time.sleep(0.02)
    interpreter.reset_tpu_interpret_mode_state()
    dispatch.runtime_tokens.clear()
