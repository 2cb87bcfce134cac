"""Progress on stderr, for work that turns out to take longer than a few seconds."""

from __future__ import annotations

import sys
import threading
import time
from types import TracebackType

FIRST_AFTER, THEN_EVERY = 3.0, 2.0


class Progress:
    """Used as ``with Progress("verify x") as progress:``; says nothing before ``FIRST_AFTER`` s.

    Calling it with (done, total) adds a percentage.
    """

    def __init__(
        self, label: str, first_after: float = FIRST_AFTER, then_every: float = THEN_EVERY
    ):
        self._label, self._first, self._every = label, first_after, then_every
        self._share: float | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._tell, daemon=True)
        self._begun = 0.0

    def __call__(self, done: int, total: int) -> None:
        self._share = done / total if total else None

    def __enter__(self) -> Progress:
        self._begun = time.monotonic()
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._thread.join()

    def _tell(self) -> None:
        wait = self._first
        while not self._stop.wait(wait):
            wait = self._every
            share = "" if self._share is None else f", {self._share:.0%}"
            seconds = time.monotonic() - self._begun
            print(f"{self._label}: {seconds:.0f} s{share} …", file=sys.stderr, flush=True)
