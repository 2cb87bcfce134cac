"""The CUDA sanitizer over a small case of one backend: memory checks, or races in shared memory.

Prints a line of JSON; says so where the tool is not there. Its checks of races are of shared memory
alone: those between CTAs and ranks are the interpreter's (``docs/checks.md``).
"""

from __future__ import annotations

import argparse
import glob
import re
import shutil
import subprocess
import sys
import tempfile
from typing import Any

from experiments.common import processes, results

TOOL = "compute-sanitizer"
PLACES = ("/usr/local/cuda*/bin", "/usr/local/cuda*/compute-sanitizer", "/opt/nvidia/*/*")
KERNELS = "fused"  # in the names of our kernels; XLA's own are not looked at
NAME_OPTIONS = ("--kernel-name ", "--kernel-regex ")  # by version of the tool
SHOWN = 400
WATCHDOG_US = 5_000_000


def find() -> str | None:
    """Where the tool is; None where it is not installed."""
    found = [shutil.which(TOOL), *sorted(p for d in PLACES for p in glob.glob(f"{d}/{TOOL}"))]
    return next((path for path in found if path), None)


def name_option(path: str) -> list[str]:
    """Which kernels are looked at, as this version of the tool takes it."""
    text = subprocess.run([path, "--help"], capture_output=True, text=True, timeout=60).stdout
    for option in NAME_OPTIONS:
        if option in text:
            return [option.strip(), f"kernel_substring={KERNELS}"]
    return []


def read(said: str) -> dict[str, Any]:
    """What the tool said, as fields: its errors, and the first of them in words."""
    row: dict[str, Any] = {}
    summaries = re.findall(r"(?:ERROR|RACECHECK) SUMMARY: (.*)", said)
    row["summary"] = summaries[-1] if summaries else None
    counts = (
        [int(n) for n in re.findall(r"(\d+) (?:error|hazard)", summaries[-1])] if summaries else []
    )
    row["wrong"] = max(counts) if counts else None
    lines = [line[9:].strip() for line in said.splitlines() if line.startswith("=========")]
    first = [line for line in lines if re.match(r"(Invalid|Error|Warning|Program hit|Race)", line)]
    if first:
        row["first"] = first[0][:SHOWN]
    return row


def main(argv: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tool", choices=("memcheck", "racecheck"), required=True)
    parser.add_argument("--backend", required=True)
    parser.add_argument("--target", default="mosaic_gpu")
    parser.add_argument("--operators", nargs="*", default=["matmul_all_reduce"])
    parser.add_argument("--limit", type=float, default=600, help="seconds the tool may take")
    parser.add_argument("--tiny", action="store_true", help="by XLA, without a GPU")
    parser.add_argument("--lower", action="store_true", help="lower the program, without a GPU")
    args = parser.parse_args(argv)
    row: dict[str, Any] = {"tool": args.tool, "target": args.target, "backend": args.backend}
    row["operators"] = args.operators
    checked = ["-m", "experiments.two_gpus.correct", "--backend", args.backend]
    checked += ["--target", args.target, "--folded", "--calls", "1", "--even", "--sms", "16"]
    checked += ["--operators", *args.operators]
    if args.target == "mosaic_gpu":  # under the tool CTAs may not all run at once
        checked += ["--watchdog-us", str(WATCHDOG_US)]
    checked += [f"--{name}" for name in ("tiny", "lower") if getattr(args, name)]
    path = find()
    command = [sys.executable, *checked]
    if not args.lower:
        row["found_at"] = path or "not there"
        if path is None and not args.tiny:
            processes.emit(row)
            return row
        if path is not None:
            command = [path, "--tool", args.tool, *name_option(path), *command]
    with tempfile.TemporaryFile("w+") as said:
        try:
            done = subprocess.run(
                command, cwd=results.ROOT, stdout=said, stderr=said, text=True, timeout=args.limit
            )
            row["returned"] = done.returncode
        except subprocess.TimeoutExpired:
            row["failed"] = f"no end in {args.limit:.0f} s"
        said.seek(0)
        text = said.read()
    rows = map(processes.read, text.splitlines(keepends=True))
    row["values"] = [row for row in rows if row is not None]
    if path is not None and not args.lower:
        row |= read(text)
    if not row["values"]:
        row["failed"] = row.get("failed", "") + text[-SHOWN:]
    processes.emit(row)
    return row


if __name__ == "__main__":
    main()
