"""``syncopate plan``: builds a plan from a template, or lists the templates."""

from __future__ import annotations

import argparse
import inspect
import json
from collections.abc import Callable
from pathlib import Path

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
from syncopate_jax.commands.template_arguments import arguments
from syncopate_jax.errors import InputError
from syncopate_jax.ir import serial, text
from syncopate_jax.ir.plan import Plan
from syncopate_jax.registry import templates

# Arguments of templates that are common enough to have a flag of their own.
_FLAGS = ("split", "axis", "dtype", "mode", "channel")


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("template", metavar="TEMPLATE", nargs="?", help="name of a template")
    parser.add_argument("--list", action="store_true", help="list the templates and stop")
    parser.add_argument(
        "--arguments", action="store_true", help="list what TEMPLATE can be given, and stop"
    )
    parser.add_argument("--ranks", type=int, metavar="N", help="number of ranks")
    parser.add_argument(
        "--shape", metavar="A,B,…", help="extents of the whole tensor, such as 8192,4096"
    )
    parser.add_argument("--split", type=int, metavar="S", help="pieces a shard (default 1)")
    parser.add_argument("--axis", type=int, metavar="A", help="sharded axis (default 0)")
    parser.add_argument("--dtype", metavar="T", help="element type (default bfloat16)")
    parser.add_argument("--mode", metavar="M", help="push or pull")
    parser.add_argument("--channel", metavar="C", help="channel of its transfers")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="any other argument of the template, as plan TEMPLATE --arguments lists them; VALUE "
        "is JSON or a plain word",
    )
    parser.add_argument(
        "--out",
        type=file_name,
        metavar="FILE",
        help="write the plan here (default: print it)",
    )
    parser.add_argument(
        "--format",
        choices=("text", "json"),
        help="form of the plan (default: json for a FILE that ends in .json, else text)",
    )
    add_json_flag(parser)


def run(args: argparse.Namespace) -> int:
    if args.list:
        return _list(args.json)
    if args.arguments:
        if args.template is None:
            raise InputError("plan: --arguments needs TEMPLATE; plan --list shows the templates")
        return _list_arguments(templates.get(args.template), args.json)
    missing = [
        flag
        for flag, value in (
            ("TEMPLATE", args.template),
            ("--ranks", args.ranks),
            ("--shape", args.shape),
        )
        if value is None
    ]
    if missing:
        raise InputError(
            f"plan: needs {', '.join(missing)}; plan --list shows the templates, and "
            f"plan TEMPLATE --arguments what each takes"
        )
    if args.json and args.out is None and args.format == "text":
        raise InputError("plan: --json prints JSON, and --format text text; leave one of them out")
    template = templates.get(args.template)
    given = _arguments(args, template)
    shape = integers("--shape", args.shape, separators=",x")
    with Progress(f"plan {args.template}"):
        plan = template(args.ranks, shape, **given)
        form = args.format or _default_format(args)
        written = serial.to_json(plan) if form == "json" else text.to_text(plan)
    if args.out is None:
        print(written, end="" if written.endswith("\n") else "\n")
        return DONE
    with writing(args.out):
        Path(args.out).write_text(written, encoding="utf-8")
    _report(args, plan)
    return DONE


def _report(args: argparse.Namespace, plan: Plan) -> None:
    if args.json:
        counts = {"ranks": plan.num_ranks, "operations": plan.num_ops}
        print_json({"plan": plan.name, **counts, "file": args.out})
    else:
        print(f"{args.out}: {plan.name}, {plan.num_ranks} ranks, {plan.num_ops} operations")


def _default_format(args: argparse.Namespace) -> str:
    if args.out is None:
        return "json" if args.json else "text"
    return "json" if Path(args.out).suffix == ".json" else "text"


def _list(as_json: bool) -> int:
    found = {name: _summary(templates.get(name)) for name in templates.names()}
    if as_json:
        print_json([{"name": name, "summary": summary} for name, summary in found.items()])
        return DONE
    width = max(map(len, found), default=0)
    for name, summary in found.items():
        print(f"{name:<{width}}  {summary}")
    return DONE


def _list_arguments(template: Callable[..., Plan], as_json: bool) -> int:
    found = arguments(template)
    if as_json:
        print_json([argument.fields() for argument in found])
    else:
        print(*found, sep="\n")
    return DONE


def _summary(template: Callable[..., Plan]) -> str:
    """The first line of the docstring of the template's file: each holds one algorithm."""
    return (inspect.getdoc(inspect.getmodule(template)) or "").partition("\n")[0]


def _arguments(args: argparse.Namespace, template: Callable[..., Plan]) -> dict[str, object]:
    """The template's keyword arguments, from flags and ``--set``; each checked against its type."""
    pairs = [(flag, getattr(args, flag)) for flag in _FLAGS if getattr(args, flag) is not None]
    for item in args.set:
        key, equals, value = item.partition("=")
        if not equals:
            raise InputError(f"plan: --set {item!r} must be KEY=VALUE")
        pairs.append((key, _value(value)))
    known = {argument.name: argument for argument in arguments(template)}
    more = f"plan {args.template} --arguments describes them"
    for key, value in pairs:
        if key not in known:
            raise InputError(
                f"plan {args.template}: has no argument {key!r}; it takes {', '.join(known)}; "
                f"{more}"
            )
        if not _fits(value, known[key].kind):
            raise InputError(
                f"plan {args.template}: argument {key} must be {known[key].kind}, such as "
                f"{known[key].example}, found {value!r}; {more}"
            )
    return dict(pairs)


def _value(word: str) -> object:
    try:
        return json.loads(word)
    except (ValueError, RecursionError):
        return word


def _fits(value: object, annotation: str) -> bool:
    """Whether a JSON value is of a template's annotated type."""
    options = [option.strip() for option in annotation.split("|")]
    if value is None:
        return "None" in options
    if isinstance(value, list):
        rows = [value] if "Sequence[Sequence[int]]" not in options else value
        sequence = any(option.startswith(("Sequence", "tuple")) for option in options)
        return sequence and all(
            isinstance(row, list) and all(type(item) is int for item in row) for row in rows
        )
    return type(value).__name__ in options


COMMAND = Command("plan", "build a plan from a template", configure, run)
