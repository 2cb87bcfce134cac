"""Runs rewritten Triton kernels of folded ranks on the CPU, in Triton's interpreter.

The interpreter runs programs one after another and cannot spin, so each program gets a thread here,
of which one runs at a time: a program that waits hands over until its counter is there. The order
in which programs run is drawn at random or goes round; where none can go on, that is a deadlock.

Test tool only. It leans on private parts of Triton (read at 3.6.0 and 3.7.1), and multiplies
float16 and float32 only: Triton's interpreter gets bfloat16 products wrong.
"""

from __future__ import annotations

import ctypes
import random
import threading
import types
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import triton
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.jit import JITFunction

from syncopate_jax.backends.triton_call import Launched
from syncopate_jax.errors import DeadlockError
from syncopate_jax.triton_source import module

POINTERS = {
    "float16": tl.float16, "bfloat16": tl.bfloat16, "float32": tl.float32, "int32": tl.int32,
}  # fmt: skip
DEVICE = Path(module.__file__).with_name("device.py")


class _Ended(Exception):
    """Raised inside a program that is to end because another one failed."""


class Program:
    """One program of a launch, on a thread that runs while it holds the turn."""

    def __init__(self, number: int, body: Callable[[], None]):
        self.number, self.body = number, body
        self.turn, self.back = threading.Semaphore(0), threading.Semaphore(0)
        self.ready: Callable[[], bool] = lambda: True
        self.waits_for = ""
        self.done, self.ending = False, False
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        self.turn.acquire()
        try:
            if not self.ending:
                self.body()
        except _Ended:
            pass
        except BaseException as error:  # handed to the thread that resumes
            self.error = error
        self.done = True
        self.back.release()

    def resume(self) -> None:
        interpreter.interpreter_builder.set_grid_idx(self.number, 0, 0)
        self.turn.release()
        self.back.acquire()
        if self.error is not None:
            raise self.error

    def hand_over(self, ready: Callable[[], bool], waits_for: str) -> None:
        """Called by the program itself: lets others run until ``ready``."""
        self.ready, self.waits_for = ready, waits_for
        self.back.release()
        self.turn.acquire()
        if self.ending:
            raise _Ended
        self.waits_for = ""


class Interpreter:
    """A ``Simulator``; ``seed`` draws the order of programs, None goes round.

    Attributes:
      raised: how often each counter was raised in the last launch, by its place in the array.
      waited: (program, place, count) of every wait of the last launch.
    """

    def __init__(self, seed: int | None = None):
        self.seed = seed
        self.raised: Counter[int] = Counter()
        self.waited: list[tuple[int, int, int]] = []
        self.counters = np.zeros(0, np.int32)

    def run(self, launched: Launched, arrays: dict[str, np.ndarray]) -> None:
        self.raised.clear()
        self.waited.clear()
        self.counters = arrays["counters_ptr"]
        kernel = self._kernel(launched)
        arguments = {name: _pointer(arrays[name]) for name in launched.order}
        arguments |= dict(launched.arguments)
        with _interpreting():
            function = _plain(kernel.fn)
            interpreter.interpreter_builder.set_grid_dim(launched.grid, 1, 1)
            self._programs = [
                Program(i, lambda: function(**arguments)) for i in range(launched.grid)
            ]
            try:
                self._schedule()
            finally:
                for program in self._programs:
                    program.ending = True
                    while not program.done:
                        program.turn.release()
                        program.back.acquire()

    def _kernel(self, launched: Launched) -> Any:
        """The kernel, in a module of its own, whose waits and signals are this object's."""
        found = module.made(launched.path, launched.given)
        device = module.made(DEVICE, {})
        device.wait_rows, device.signal = self._wait, self._signal  # type: ignore[attr-defined]
        device.wait_count = self._wait_count  # type: ignore[attr-defined]
        device.stored, device.ahead = lambda: None, lambda ptr: None  # type: ignore[attr-defined]
        found.sync = device  # type: ignore[attr-defined]
        for name, value in list(vars(found).items()):
            if isinstance(value, tl.constexpr):
                setattr(found, name, value.value)
        return getattr(found, launched.name)

    def _schedule(self) -> None:
        draw = random.Random(self.seed)
        left = list(self._programs)
        while left:
            able = [program for program in left if program.ready()]
            if not able:
                stuck = "; ".join(f"program {p.number} waits for {p.waits_for}" for p in left)
                raise DeadlockError(f"no program can go on: {stuck}")
            chosen = able if self.seed is None else [draw.choice(able)]
            for program in chosen:
                program.resume()
            left = [program for program in left if not program.done]

    @property
    def _current(self) -> Program:
        thread = threading.current_thread()
        return next(program for program in self._programs if program.thread is thread)

    def _place(self, pointer: Any) -> tuple[Any, int]:
        address = int(pointer.handle.data.item())
        found = ctypes.cast(address, ctypes.POINTER(ctypes.c_int32))
        return found, (address - self.counters.ctypes.data) // 4

    def _wait(self, rows: Any, begin: Any, end: Any, pointer: Any, FENCED: bool) -> None:
        """``wait_rows``, which is assembly."""
        row = ctypes.cast(int(rows.handle.data.item()), ctypes.POINTER(ctypes.c_int32))
        counters, first = self._place(pointer)
        for at in range(int(begin), int(end)):
            slot, wanted = row[2 * at], row[2 * at + 1]
            self._wait_until(counters, first, slot, wanted)

    def _wait_count(self, pointer: Any, count: Any, FENCED: bool) -> None:
        """``wait_count``, which is assembly."""
        if int(count) > 0:
            self._wait_until(*self._place(pointer), 0, int(count))

    def _wait_until(self, counters: Any, first: int, slot: int, wanted: int) -> None:
        program = self._current
        self.waited.append((program.number, first + slot, wanted))
        text = f"counter {first + slot} to reach {wanted}, it is {counters[slot]}"
        program.hand_over(lambda: counters[slot] >= wanted, text)

    def _signal(self, pointer: Any) -> None:
        counter, place = self._place(pointer)
        counter[0] += 1
        self.raised[place] += 1
        self._current.hand_over(lambda: True, "its turn")


def _pointer(array: np.ndarray) -> Any:
    kind = tl.pointer_type(POINTERS[array.dtype.name])
    data = np.array([array.ctypes.data], np.uint64)
    return tl.tensor(interpreter.TensorHandle(data, kind), kind)


def _plain(function: Any) -> Callable[..., Any]:
    """The function as the interpreter runs it."""
    return interpreter.InterpretedFunction(function).rewrite()


def _rounded_pairs(
    asm: str, constraints: str, args: list[Any], dtype: Any, is_pure: bool, pack: int
) -> Any:
    """The one instruction that kernels name: float32 of two tensors, in the halves of a word."""
    assert asm == "cvt.rn.f16x2.f32 $0, $2, $1;" and (constraints, pack) == ("=r,r,r", 1)
    left, right = (arg.handle.data.astype(np.float16).view(np.uint16) for arg in args)
    words = (right.astype(np.uint32) << 16 | left).view(np.int32)
    shape = tl.block_type(dtype, list(words.shape))
    return tl.tensor(interpreter.TensorHandle(words, dtype), shape)


@contextmanager
def _interpreting() -> Iterator[None]:
    """Triton's language means NumPy inside."""
    names = types.SimpleNamespace(__globals__={"tl": tl, "core": tl.core})
    scope = interpreter._patch_lang(names)
    # NumPy no longer turns arrays of one element into numbers by itself.
    for name in ("__index__", "__int__"):
        scope.set_attr(tl.tensor, name, lambda self: int(self.handle.data.item()))
    scope.set_attr(JITFunction, "__call__", lambda self, *a, **k: _plain(self.fn)(*a, **k))
    scope.set_attr(tl, "debug_barrier", lambda: None)
    scope.set_attr(tl, "inline_asm_elementwise", _rounded_pairs)
    # Checks of integer overflow take half of the time.
    options = interpreter.InterpreterOptions(sanitize_overflow=False)
    scope.set_attr(interpreter.interpreter_builder, "options", options)
    try:
        yield
    finally:
        scope.restore()


def run_alone(kernel: Any, grid: int, arrays: dict[str, np.ndarray], **arguments: Any) -> None:
    """Runs a kernel that was not rewritten, one program after another, on arrays in place."""
    with _interpreting():
        function = _plain(kernel.fn)
        interpreter.interpreter_builder.set_grid_dim(grid, 1, 1)
        given = {name: _pointer(array) for name, array in arrays.items()}
        for number in range(grid):
            interpreter.interpreter_builder.set_grid_idx(number, 0, 0)
            function(**given, **arguments)


VERSION = tuple(int(part) for part in triton.__version__.split(".")[:2])
