"""``syncopate verify``: proves that a plan cannot hang, race or miss its goals."""

from __future__ import annotations

import argparse
from dataclasses import asdict

from syncopate_jax.check.verify import verify
from syncopate_jax.commands.command import DONE, NO, Command, add_json_flag, print_json
from syncopate_jax.commands.plan_files import add_plan_argument, read_plan
from syncopate_jax.commands.progress import Progress


def configure(parser: argparse.ArgumentParser) -> None:
    add_plan_argument(parser)
    add_json_flag(parser)


def run(args: argparse.Namespace) -> int:
    with Progress(f"verify {args.file}"):
        plan = read_plan(args.file)
        findings = verify(plan)
    if args.json:
        print_json(
            {
                "plan": plan.name,
                "proven": not findings,
                "findings": [asdict(finding) for finding in findings],
            }
        )
    elif findings:
        for finding in findings:
            print(finding)
    else:
        print(f"{plan.name}: proven, {plan.num_ranks} ranks, {plan.num_ops} operations")
    return NO if findings else DONE


COMMAND = Command("verify", "prove that a plan is sound (exit 1: it is not)", configure, run)
