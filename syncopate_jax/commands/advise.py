"""``syncopate advise``: which tensor-parallel degree and plans suit a model on a topology."""

from __future__ import annotations

import argparse
from dataclasses import asdict

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
from syncopate_jax.commands.synthesize import add_topology_arguments, given_topology


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", metavar="MODEL", help="such as llama3-8b; an unknown one lists all"
    )
    add_topology_arguments(parser)
    parser.add_argument(
        "--degrees", metavar="A,B,…", help="tensor-parallel degrees (powers of 2 that fit)"
    )
    parser.add_argument("--tokens", type=int, default=8192, help="of one group (8192)")
    parser.add_argument("--dtype", default="bfloat16", help="of operands and results (bfloat16)")
    parser.add_argument(
        "--picture",
        type=file_name,
        metavar="FILE",
        help="draw the curve here (.svg or .png)",
    )
    add_json_flag(parser, units="times in seconds, efficiency a share of 1")


def run(args: argparse.Namespace) -> int:
    from syncopate_jax.advice import curve
    from syncopate_jax.advice.advise import advise
    from syncopate_jax.advice.layers import model_layers

    topology = given_topology(args)
    layers = model_layers(args.model)
    degrees = None
    if args.degrees is not None:
        degrees = integers("--degrees", args.degrees, least=1, example="2,4")
    if args.picture is not None:
        curve.check_picture(args.picture)
    with Progress(f"advise {args.model}") as progress:
        advice = advise(
            layers,
            topology,
            tp_degrees=degrees,
            tokens=args.tokens,
            dtype=args.dtype,
            progress=progress,
        )
    if args.picture is not None:
        title = f"{args.model}, {args.tokens} tokens, {topology.name}"
        with writing(args.picture):
            curve.draw(advice, args.picture, title)
    if args.json:
        print_json(
            {
                "model": args.model,
                "topology": topology.name,
                "tokens": args.tokens,
                "best_degree": advice.best,
                "layers": [asdict(choice) for choice in advice.choices],
                "curve": [
                    {
                        "degree": degree,
                        "seconds": advice.seconds(degree),
                        "efficiency": advice.efficiency(degree),
                    }
                    for degree in advice.degrees
                ],
                "refused": list(advice.refused),
            }
        )
    else:
        print(f"{args.model}: {curve.table(advice)}")
        for reason in advice.refused:
            print(f"  not usable at {reason}")
    return DONE


COMMAND = Command(
    "advise", "say which tensor-parallel degree and plans suit a model", configure, run
)
