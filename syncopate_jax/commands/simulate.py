"""``syncopate simulate``: how long a plan takes on a topology."""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from pathlib import Path

from syncopate_jax.check.simulate import simulate
from syncopate_jax.check.timeline import check_picture, draw
from syncopate_jax.check.timing import Timeline
from syncopate_jax.check.trace import write_trace
from syncopate_jax.check.verify import verify
from syncopate_jax.commands.command import (
    DONE,
    Command,
    add_json_flag,
    file_name,
    print_json,
    writing,
)
from syncopate_jax.commands.plan_files import add_plan_argument, read_plan
from syncopate_jax.commands.progress import Progress
from syncopate_jax.errors import Finding
from syncopate_jax.ir import presets, topology_json
from syncopate_jax.ir.plan import Plan
from syncopate_jax.ir.topology import Topology
from syncopate_jax.passes.expand_collectives import expand_collectives

_PATH_STEPS = 8
GPUS_PER_NODE = 8


def configure(parser: argparse.ArgumentParser) -> None:
    add_plan_argument(parser)
    parser.add_argument(
        "--topology",
        required=True,
        metavar="T",
        help="h100, h200, h200_measured, pcie, ring, nodes:AxB, torus:AxB or a JSON file",
    )
    parser.add_argument(
        "--trace", type=file_name, metavar="FILE", help="write a Chrome/Perfetto trace here"
    )
    parser.add_argument(
        "--picture", type=file_name, metavar="FILE", help="draw the timeline here (.svg or .png)"
    )
    add_json_flag(parser, units="times such as makespan in seconds, utilisation a share of 1")


def run(args: argparse.Namespace) -> int:
    if args.picture is not None:
        check_picture(args.picture)
    with Progress(f"simulate {args.file}") as progress:
        plan = read_plan(args.file)
        if plan.has_collectives():
            plan = expand_collectives(plan)
            print("collectives were expanded into their templates' transfers", file=sys.stderr)
        findings = verify(plan)
        _warn_of(findings, plan)
        timeline = simulate(plan, read_topology(args.topology, plan.num_ranks), progress=progress)
        if args.trace is not None:
            with writing(args.trace):
                write_trace(timeline, args.trace)
        if args.picture is not None:
            with writing(args.picture):
                draw(timeline, args.picture)
        if args.json:
            print_json({**timeline.summary(), **_verdict(findings)})
        else:
            _report(timeline)
    return DONE


def _warn_of(findings: tuple[Finding, ...], plan: Plan) -> None:
    """A plan that does not verify has a time, but not one that means anything."""
    if findings:
        print(
            f"warning: {plan.name} does not verify: {len(findings)} finding(s), the first is "
            f"{findings[0]}",
            file=sys.stderr,
        )


def _verdict(findings: tuple[Finding, ...]) -> dict[str, object]:
    """Whether the figures mean anything, and the findings as ``verify --json`` has them."""
    return {"verified": not findings, "findings": [asdict(finding) for finding in findings]}


def read_topology(given: str, num_ranks: int) -> Topology:
    """The topology that ``--topology`` names: a file where one is there or meant, else a preset."""
    if given.endswith(".json") or Path(given).is_file():
        return topology_json.load(given)
    if given in ("h100", "h200", "h200_measured") and num_ranks > GPUS_PER_NODE:
        print(
            f"warning: {given} is one NVLink domain, and {num_ranks} ranks are more than the "
            f"{GPUS_PER_NODE} of a node; nodes:{-(-num_ranks // GPUS_PER_NODE)}x{GPUS_PER_NODE} "
            f"joins nodes by their NICs",
            file=sys.stderr,
        )
    return presets.preset(given, num_ranks)


def _report(timeline: Timeline) -> None:
    plan = timeline.plan
    moved = int(timeline.op_bytes.sum())
    print(
        f"{plan.name} on {timeline.topology.name}: {timeline.makespan * 1e6:.2f} us, "
        f"{plan.num_ranks} ranks, {plan.num_ops} operations, {moved} bytes"
    )
    for link in timeline.links()[:1]:
        print(
            f"busiest of the links: {link.channel} r{link.src_rank} to r{link.dst_rank}, "
            f"{link.bytes} bytes, {link.utilisation:.1%} of the time at full speed"
        )
    path = timeline.critical_path()
    if path:
        shown = path[-_PATH_STEPS:]
        print(f"critical path, the last {len(shown)} of {len(path)} steps:")
        for step in shown:
            print(f"  {step}")


COMMAND = Command("simulate", "predict how long a plan takes on a topology", configure, run)
