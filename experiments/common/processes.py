"""An experiment's stages as processes of their own: limits of time, and rows as they come.

A task is ``python -m module arguments…`` that prints a line of JSON a row. A kernel that hangs or a
process that dies costs its own limit and no other task. Where tasks are timed they take turns: all
of them trace and compile at once, then one after the other has the machine, the others stopped.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

from experiments.common import results

WAITS = "EXPERIMENT_WAITS_ITS_TURN"
READY = "ready"
READY_SECONDS = 150  # for all tasks of a stage to trace and compile
SAID = 300  # characters of what a failed task said last
SHARING = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "OMP_NUM_THREADS": "2"}
"""For tasks that are there at once: none takes most of a device's memory, nor all cores."""


def emit(row: Mapping[str, Any]) -> None:
    """In a task's process: a row of results."""
    print(json.dumps(row), flush=True)


def read(line: str) -> dict[str, Any] | None:
    """The row that a line of a task's output is; None for other words, and for a line cut short."""
    try:
        row = json.loads(line)
    except json.JSONDecodeError:
        return None
    return row if isinstance(row, dict) and line.endswith("\n") else None


def wait_turn() -> None:
    """In a task's process, once all is compiled: returns when the device is free for it."""
    if os.environ.get(WAITS):
        print(READY, flush=True)
        sys.stdin.readline()


@dataclass(frozen=True, slots=True)
class Task:
    """One process.

    Attributes:
      name: of the task in its stage.
      seconds: it may take, from when it has its turn.
      environment: variables beside this process's own.
    """

    name: str
    module: str
    arguments: tuple[str, ...] = ()
    seconds: float = 60
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Stage:
    """Tasks by importance.

    Attributes:
      together: how many run at once; 1: they take turns.
    """

    name: str
    tasks: tuple[Task, ...]
    together: int = 1

    def using(
        self,
        *arguments: str,
        environment: Mapping[str, str] | None = None,
        together: int = 0,
        slower: float = 1,
    ) -> Stage:
        """The stage with more arguments, variables and ``slower`` times the time for every task."""
        tasks = tuple(
            replace(
                task,
                arguments=(*task.arguments, *arguments),
                seconds=task.seconds * slower,
                environment={**task.environment, **(environment or {})},
            )
            for task in self.tasks
        )
        return Stage(self.name, tasks, together or self.together)


def run(stage: Stage, found: results.Results, deadline: float) -> None:
    """Runs a stage's tasks and adds their rows, and a last one a task that says how it ended.

    Tasks that have not begun by ``deadline``, of ``time.monotonic``, are left out, and those that
    run are ended then.
    """
    if stage.together > 1 or len(stage.tasks) == 1:
        with ThreadPoolExecutor(stage.together) as pool:
            done = [pool.submit(_alone, stage, task, found, deadline) for task in stage.tasks]
        for one in done:
            one.result()
        return
    with contextlib.ExitStack() as ends:
        started = []
        for task in stage.tasks:
            if time.monotonic() < deadline:
                started.append((task, ends.enter_context(_Process.of(task, waits=True))))
            else:
                found.add(stage.name, _left_out(task))
        ready_by = min(time.monotonic() + READY_SECONDS, deadline)
        threads = [
            threading.Thread(target=process.get_ready, args=(ready_by - time.monotonic(),))
            for _, process in started
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for task, process in started:
            _collect(stage, task, process, found, deadline)


def _alone(stage: Stage, task: Task, found: results.Results, deadline: float) -> None:
    if time.monotonic() >= deadline:
        found.add(stage.name, _left_out(task))
        return
    with _Process.of(task, waits=False) as process:
        _collect(stage, task, process, found, deadline)


def _left_out(task: Task) -> dict[str, Any]:
    return {"task": task.name, "ended": "left out: out of time", "seconds": 0}


def _collect(
    stage: Stage, task: Task, process: _Process, found: results.Results, deadline: float
) -> None:
    begun = time.monotonic()
    for row in process.rows(min(task.seconds, max(deadline - begun, 0))):
        found.add(stage.name, {"task": task.name, **row})
    seconds = round(time.monotonic() - begun, 1)
    found.add(stage.name, {"task": task.name, "ended": process.end(), "seconds": seconds})


@dataclass(slots=True, eq=False)
class _Process:
    """A running task.

    Attributes:
      waits: it has not had its turn.
      early: what it printed before.
    """

    popen: subprocess.Popen[str]
    said: pathlib.Path
    waits: bool
    killed: bool = False
    early: list[str] = field(default_factory=list)

    @classmethod
    @contextlib.contextmanager
    def of(cls, task: Task, waits: bool) -> Iterator[_Process]:
        """Starts a task; it has ended when the context is left."""
        environment = {**os.environ, **task.environment}
        environment |= {WAITS: "1"} if waits else {}
        with tempfile.TemporaryDirectory() as folder:
            said = pathlib.Path(folder) / "said"
            with said.open("w") as errors:
                popen = subprocess.Popen(
                    [sys.executable, "-m", task.module, *task.arguments],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    text=True,
                    cwd=results.ROOT,
                    env=environment,
                    process_group=0,  # ended with the processes that it starts
                )
            process = cls(popen, said, waits)
            try:
                yield process
            finally:
                process.kill()
                popen.wait()

    def get_ready(self, seconds: float) -> None:
        """Returns once it waits, stopped, for its turn, or has ended; is ended after ``seconds``.

        Stopped, as its runtime's threads would take time of the host from the task that is timed.
        """
        assert self.popen.stdout is not None
        timer = threading.Timer(max(seconds, 0), self.kill)
        timer.start()
        for line in self.popen.stdout:
            if line.strip() == READY:
                self.send(signal.SIGSTOP)
                break
            self.early.append(line)
        timer.cancel()

    def rows(self, seconds: float) -> Iterator[dict[str, Any]]:
        """Its rows; it is ended after ``seconds``."""
        assert self.popen.stdout is not None and self.popen.stdin is not None
        if self.waits:
            self.waits = False
            self.send(signal.SIGCONT)
            with contextlib.suppress(BrokenPipeError):  # it has ended; ``end`` says how
                self.popen.stdin.write("go\n")
                self.popen.stdin.flush()
        timer = threading.Timer(seconds, self.kill)
        timer.start()
        for line in itertools.chain(self.early, self.popen.stdout):
            if (row := read(line)) is not None:
                yield row
        timer.cancel()

    def kill(self) -> None:
        """Ends it and what it has started, which may live on and hold its output."""
        self.killed |= self.popen.poll() is None
        self.send(signal.SIGKILL)

    def send(self, what: signal.Signals) -> None:
        """Sends a signal to it and what it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.popen.pid, what)

    def end(self) -> str | int:
        """0 where all went well, else what happened."""
        code = self.popen.wait()
        if not code:
            return 0
        how = "out of its time" if self.killed else f"ended with {code}"
        return f"{how}: {self.said.read_text()[-SAID:].strip()}"


def finished(rows: Iterable[Mapping[str, Any]]) -> set[tuple[str, str]]:
    """(stage, task) of the tasks that ended well."""
    return {(row["stage"], row["task"]) for row in rows if row.get("ended") == 0}


def without(stage: Stage, done: set[tuple[str, str]]) -> Stage:
    """The stage's tasks that are not among those done."""
    left = tuple(task for task in stage.tasks if (stage.name, task.name) not in done)
    return Stage(stage.name, left, stage.together)


def environment(commit: str | None = None) -> dict[str, Any]:
    """As ``results.environment``, asked in a process that ends: this one keeps off the devices."""
    code = "import json; from experiments.common import results; "
    code += "print(json.dumps(results.environment()))"
    command: Sequence[str] = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=results.ROOT, capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found | ({"commit": commit} if commit else {})
