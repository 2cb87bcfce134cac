"""Many threads of which one runs at a time, in an order drawn from a seed.

So that a run can be repeated, and a deadlock is seen at once: no thread can go on.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

GOING_ON = 0.7  # the chance that a thread which could give way does not
STACK_BYTES = 16 << 20  # a kernel's nested regions are evaluated recursively


class DeadlockFound(AssertionError):
    """No simulated warpgroup can go on; says what each waits for."""


class Stopped(BaseException):
    """Ends a thread because another one failed."""


@dataclass(slots=True, eq=False)
class _Thread:
    name: str
    body: Callable[[], None]
    go: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    ready: Callable[[], bool] | None = None
    why: Callable[[], str] = str
    done: bool = False

    @property
    def can_run(self) -> bool:
        return not self.done and (self.ready is None or self.ready())


class Turns:
    """Runs bodies in turns.

    Args:
      seed: of the order; every order is a legal one.
    """

    def __init__(self, seed: int = 0):
        self._random = random.Random(seed)
        self._threads: list[_Thread] = []
        self._current: _Thread | None = None
        self._failure: BaseException | None = None
        self._all_done = threading.Event()

    def run(self, bodies: Sequence[tuple[str, Callable[[], None]]]) -> None:
        """Runs all named bodies to their ends; raises the first failure."""
        self._threads = [_Thread(name, body) for name, body in bodies]
        before = threading.stack_size(STACK_BYTES)
        try:
            workers = [
                threading.Thread(target=self._enter, args=(one,), name=one.name, daemon=True)
                for one in self._threads
            ]
            for worker in workers:
                worker.start()
        finally:
            threading.stack_size(before)
        self._next()
        self._all_done.wait()
        for worker in workers:
            worker.join()
        if self._failure is not None:
            raise self._failure

    def give_way(self) -> None:
        """Perhaps lets another thread run first."""
        if self._random.random() > GOING_ON:
            self._switch()

    def draw(self, most: int) -> int:
        """A number from 0 to ``most``."""
        return self._random.randint(0, most)

    def wait(self, ready: Callable[[], bool], why: Callable[[], str]) -> None:
        """Returns once ``ready()``; ``why`` says, for a deadlock, what is waited for.

        Raises:
          DeadlockFound: (in ``run``) it can never be.
        """
        current = self._now()
        while not ready():
            current.ready, current.why = ready, why
            self._switch()
            current.ready = None

    def _now(self) -> _Thread:
        assert self._current is not None, "called from outside the simulated threads"
        return self._current

    def _enter(self, one: _Thread) -> None:
        one.go.acquire()
        try:
            if self._failure is None:
                one.body()
        except Stopped:
            pass
        except BaseException as error:
            if self._failure is None:
                self._failure = error
        one.done = True
        self._next()

    def _switch(self) -> None:
        me = self._now()
        self._next()
        me.go.acquire()
        if self._failure is not None:
            raise Stopped

    def _next(self) -> None:
        """Lets one that can run run; if none can, all are ended."""
        left = [one for one in self._threads if not one.done]
        if not left:
            self._all_done.set()
            return
        ready = left if self._failure is not None else [one for one in left if one.can_run]
        if not ready:
            listed = "\n".join(f"  {one.name} waits for {one.why()}" for one in left)
            self._failure = DeadlockFound(f"no warpgroup can go on:\n{listed}")
            ready = left
        self._current = self._random.choice(ready)
        self._current.go.release()
