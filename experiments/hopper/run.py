"""Everything that one Hopper GPU can show, as one command, most important first.

Run from the repository's root, in two parts of less than ten minutes each::

  python -m experiments.hopper.run --first --out OUT.json
  python -m experiments.hopper.run --skip-done OUT.json --out OUT.json

Every task is a process with a limit of its own, and rows are written as they come, so that a run
that is cut short still counts. ``--lower`` lowers every program at its real size and ``--tiny``
runs tiny ones; neither needs a GPU.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import time
from collections.abc import Sequence
from typing import Any

from experiments.common import processes, results
from experiments.hopper import stages

SIMULATED = {"JAX_PLATFORMS": "cpu"}
SLOWER = 10  # a few cores are than sixteen and a GPU: dry runs are not to be cut short


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Per stage: tasks that ended well, checks and how many were right; and what was timed."""
    found: dict[str, Any] = {}
    for stage in dict.fromkeys(row["stage"] for row in rows):
        mine = [row for row in rows if row["stage"] == stage]
        ended = [row["ended"] for row in mine if "ended" in row]
        entry: dict[str, Any] = {"tasks": len(ended), "ended_well": ended.count(0)}
        checks = [row for row in mine if row.get("wrong") is not None]
        if checks:
            entry |= {"checked": len(checks), "right": sum(not row["wrong"] for row in checks)}
        for name in ("refused", "failed"):
            if count := sum(name in row for row in mine):
                entry[name] = count
        programs = [row for row in mine if "lowers" in row]
        if programs:
            entry |= {"programs": len(programs), "lower": sum(r["lowers"] for r in programs)}
        found[stage] = entry
    return found


def main(argv: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--stages", nargs="*", help="names; by default all")
    parser.add_argument("--first", action="store_true", help="the stages of the first command")
    parser.add_argument("--skip-done", type=pathlib.Path, help="keep this file's rows and go on")
    parser.add_argument("--seconds", type=float, default=540, help="end everything after these")
    parser.add_argument("--tiny", action="store_true", help="tiny problems, without a GPU")
    parser.add_argument("--lower", action="store_true", help="lower the programs, without a GPU")
    parser.add_argument("--commit", help="of the code, where this is no checkout")
    args = parser.parse_args(argv)
    deadline = time.monotonic() + args.seconds
    known = {stage.name: stage for stage in stages.stages()}
    names = args.stages or (stages.FIRST if args.first else list(known))
    if unknown := set(names) - set(known):
        parser.error(f"no stage {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    found = results.Results(
        args.out, {"experiment": "hopper", **processes.environment(args.commit)}, summary
    )
    done: set[tuple[str, str]] = set()
    if args.skip_done:
        rows = json.loads(args.skip_done.read_text())["rows"]
        done = processes.finished(rows)
        found.rows += [row for row in rows if (row["stage"], row.get("task")) in done]
    for name in names:
        stage = processes.without(known[name], done)
        if args.lower:
            stage = stage.using("--lower", environment=SIMULATED, together=2, slower=SLOWER)
        elif args.tiny:
            if name in stages.NEEDS_GPU:
                continue
            stage = stages.tiny(stage).using(environment=SIMULATED, slower=SLOWER)
        processes.run(stage, found, deadline)
    add_figures(found)
    return found.head


def add_figures(found: results.Results) -> None:
    """Adds what the timed stages' own scripts make of their rows, and writes the file again."""
    from experiments.host_stream import run as host_stream
    from experiments.local_gemm import run as local_gemm

    found.head["summary"] = summary(found.rows)
    for name, summed in (("local_gemm", local_gemm.summary), ("host_stream", host_stream.summary)):
        if rows := [row for row in found.rows if row["stage"] == name]:
            found.head["summary"][name] |= summed(rows)
    results.write(found.path, found.head, found.rows)


if __name__ == "__main__":
    main()
