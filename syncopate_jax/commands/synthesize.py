"""``syncopate synthesize``: makes a plan for a topology, and says how near the bound it comes."""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path

from syncopate_jax.check.simulate import simulate
from syncopate_jax.check.verify import check
from syncopate_jax.commands.command import (
    DONE,
    Command,
    add_json_flag,
    file_name,
    integers,
    print_json,
    writing,
)
from syncopate_jax.commands.progress import Progress
from syncopate_jax.commands.simulate import read_topology
from syncopate_jax.errors import InputError
from syncopate_jax.ir import serial, text, topology_json
from syncopate_jax.ir.comm import COLLECTIVES
from syncopate_jax.ir.presets import BY_COUNTS, preset_counts
from syncopate_jax.ir.topology import Topology
from syncopate_jax.synthesis.synthesize import bound, synthesize

MOST_RANKS = 1024
"""Of the topologies for which plans are made here; 256 ranks take about a minute."""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("kind", choices=COLLECTIVES, metavar="KIND", help=", ".join(COLLECTIVES))
    add_topology_arguments(parser)
    parser.add_argument(
        "--shape", required=True, metavar="A,B,…",
        help="extents of the whole tensor (of an all_to_all: of what each rank sends)",
    )  # fmt: skip
    parser.add_argument("--group", metavar="R,S,…", help="ranks that take part (all)")
    parser.add_argument("--dimension", type=int, default=0, metavar="D", help="sharded one (0)")
    parser.add_argument(
        "--to-dimension", type=int, metavar="D", help="of an all_to_all that changes the dimension"
    )
    parser.add_argument("--root", type=int, metavar="R", help="of a broadcast")
    parser.add_argument("--dtype", default="bfloat16", help="element type (bfloat16)")
    parser.add_argument("--chunks", type=int, metavar="C", help="pieces a shard (tried out)")
    parser.add_argument("--seed", type=int, default=0, help="of random ties (0)")
    parser.add_argument("--mode", default="push", metavar="M", help="push or pull (push)")
    parser.add_argument("--channels", metavar="C,D,…", help="channels used (all but host)")
    parser.add_argument(
        "--out",
        type=file_name,
        metavar="FILE",
        help="write the plan here (default: print it)",
    )
    add_json_flag(parser, units="names that end in _us: microseconds")


def add_topology_arguments(parser: argparse.ArgumentParser) -> None:
    """``--topology`` and ``--ranks``, which a topology of fixed size needs not."""
    parser.add_argument(
        "--topology",
        default="h200",
        metavar="T",
        help="h100, h200, h200_measured, pcie, ring, nodes:AxB, torus:AxB or a JSON file (h200)",
    )
    parser.add_argument(
        "--ranks", type=int, metavar="N", help="number of ranks (8, or as the topology says)"
    )


def given_topology(args: argparse.Namespace) -> Topology:
    """The topology that ``--topology`` and ``--ranks`` name.

    Raises InputError where these disagree, or name more ranks than ``MOST_RANKS``.
    """
    if args.ranks is not None and args.ranks < 1:
        raise InputError(f"--ranks must be at least 1, found {args.ranks}")
    stored = None
    if args.topology.endswith(".json") or Path(args.topology).is_file():
        stored = topology_json.load(args.topology)
    ranks = args.ranks or 8
    if stored is not None or args.topology.partition(":")[0] in BY_COUNTS:
        ranks = stored.num_ranks if stored else math.prod(preset_counts(args.topology))
        if args.ranks not in (None, ranks):
            raise InputError(f"--ranks is {args.ranks}, {args.topology} has {ranks} ranks")
    if ranks > MOST_RANKS:
        raise InputError(
            f"--topology {args.topology} has {ranks} ranks, plans are made for at most "
            f"{MOST_RANKS}; name a part of the machine"
        )
    return stored or read_topology(args.topology, ranks)


def run(args: argparse.Namespace) -> int:
    topology = given_topology(args)
    shape = integers("--shape", args.shape)
    data = {
        "group": None if args.group is None else integers("--group", args.group, example="0,1,2"),
        "dimension": args.dimension,
        "to_dimension": args.to_dimension,
        "root": args.root,
        "dtype": args.dtype,
        "channels": None if args.channels is None else args.channels.split(","),
        "mode": args.mode,
    }
    with Progress(f"synthesize {args.kind}"):
        least = bound(args.kind, topology, shape, **data)
        plan = synthesize(args.kind, topology, shape, chunks=args.chunks, seed=args.seed, **data)
        check(plan)
        seconds = simulate(plan, topology).makespan
    if args.out is not None:
        as_json = args.out.endswith(".json")
        written = serial.to_json(plan) if as_json else text.to_text(plan)
        with writing(args.out):
            Path(args.out).write_text(written, encoding="utf-8")
    if args.json:
        print_json(
            {
                "kind": args.kind,
                "topology": topology.name,
                "ranks": topology.num_ranks,
                "operations": plan.num_ops,
                "origin": plan.origins[0],
                "predicted_us": seconds * 1e6,
                "bound_us": least.seconds * 1e6,
                "bound_by": least.term,
            }
        )
        return DONE
    if args.out is None:
        print(text.to_text(plan), end="")
    near = "; nothing has to move, so there is no bound"
    if least.seconds:
        times, us = seconds / least.seconds, least.seconds * 1e6
        near = f", {times:.3f} times the bound of {us:.1f} us ({least.term})"
    print(
        f"{plan.origins[0]}: {plan.num_ops} operations; {seconds * 1e6:.1f} us predicted{near}",
        file=sys.stderr if args.out is None else sys.stdout,
    )
    return DONE


COMMAND = Command("synthesize", "make a plan for a topology", configure, run)
