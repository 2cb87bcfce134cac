"""``syncopate import``: plans from another system's file."""

from __future__ import annotations

import argparse
import inspect
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from syncopate_jax.commands.command import (
    DONE,
    NO,
    Command,
    add_json_flag,
    file_name,
    print_json,
    writing,
)
from syncopate_jax.commands.progress import Progress
from syncopate_jax.commands.simulate import read_topology
from syncopate_jax.errors import FormatError, InputError, SyncopateError, UnsupportedError
from syncopate_jax.ir import serial, text
from syncopate_jax.ir.arguments import one_of
from syncopate_jax.ir.comm import COLLECTIVES
from syncopate_jax.ir.plan import Plan
from syncopate_jax.ir.topology import Topology
from syncopate_jax.passes.expand_collectives import DIRECT, HOW, SYNTHESIS, expand_collectives
from syncopate_jax.registry import importers, templates

if TYPE_CHECKING:
    from syncopate_jax.importers.program import ImportedProgram, Reader


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("importer", metavar="IMPORTER", nargs="?", help="name of an importer")
    parser.add_argument("file", metavar="FILE", nargs="?", help="- reads standard input")
    parser.add_argument("--list", action="store_true", help="list the importers and stop")
    parser.add_argument(
        "--out",
        type=file_name,
        metavar="FOLDER",
        help="write each plan here (exit 1: there is none)",
    )
    parser.add_argument(
        "--how",
        default="direct",
        metavar="HOW",
        help="direct: collectives stay whole (the default); template: as transfers; synthesis: as "
        "transfers made for --topology",
    )
    parser.add_argument(
        "--topology",
        metavar="T",
        help="h100, h200, h200_measured, pcie, ring, nodes:AxB, torus:AxB or a JSON file",
    )
    parser.add_argument(
        "--choose",
        action="append",
        default=[],
        metavar="KIND=TEMPLATE",
        help="the template of a kind of collective, for --how template or synthesis; by default "
        "the one that the file's system uses, if it says so",
    )
    parser.add_argument(
        "--format", choices=("text", "json"), default="json", help="form of the plans"
    )
    add_json_flag(parser)


def run(args: argparse.Namespace) -> int:
    if args.list:
        return _list(args.json)
    if args.importer is None or args.file is None:
        raise InputError("import: needs IMPORTER and FILE; import --list shows the importers")
    reader = readers().get(args.importer)
    if reader is None:
        known = ", ".join(readers())
        raise InputError(
            f"import: no importer of files is called {args.importer!r}; known: {known}"
        )
    chosen = _chosen(args)
    with Progress(f"import {args.file}"):
        program = _read(reader, args.file)
        topology = (
            None if args.topology is None else read_topology(args.topology, program.num_ranks)
        )
        if topology is not None and topology.num_ranks != program.num_ranks:
            raise InputError(
                f"import: --topology {args.topology} has {topology.num_ranks} ranks, {args.file} "
                f"has {program.num_ranks}"
            )
        lowers = args.out is not None or args.json or chosen
        made = _lowered(program, args.how, chosen, topology) if lowers else []
    plans = [plan for plan in made if isinstance(plan, Plan)]
    files = [] if args.out is None else _write(plans, Path(args.out), args.format)
    code = NO if args.out is not None and not files else DONE
    if args.json:
        print_json(_summary(program, made, files))
        return code
    print(program)
    for plan, file in zip(plans, files, strict=False):
        print(f"{file}: {plan.name}, {plan.num_ranks} ranks, {plan.num_ops} operations")
    for reason in made:
        if isinstance(reason, str):
            print(f"no plan: {reason}")
    if code == NO:
        print(f"nothing was written to {args.out}: no collective that was found has a plan")
    return code


def readers() -> dict[str, Reader]:
    """Every importer that reads files, by name."""
    from syncopate_jax.importers.program import Reader  # it imports JAX

    found = {name: importers.get(name) for name in importers.names()}
    return {name: one for name, one in found.items() if isinstance(one, Reader)}


def _list(as_json: bool) -> int:
    files = readers()
    found = {
        name: files[name].reads if name in files else _in_python(importers.get(name))
        for name in importers.names()
    }
    if as_json:
        listed = [
            {"name": name, "reads": reads, "file": name in files} for name, reads in found.items()
        ]
        print_json(listed)
        return DONE
    width = max(map(len, found), default=0)
    for name, reads in found.items():
        print(f"{name:<{width}}  {reads}")
    return DONE


def _in_python(function: Callable[..., object]) -> str:
    """What an importer is that takes arguments and no file."""
    first = (inspect.getdoc(function) or "").partition("\n")[0]
    return f"no file, called in Python as {function.__module__}.{function.__name__}: {first}"


def _chosen(args: argparse.Namespace) -> dict[str, str]:
    """The template of each kind that ``--choose`` names; checks it and what it goes with."""
    one_of("import", "--how", args.how, HOW)
    if args.how == SYNTHESIS and args.topology is None:
        raise InputError("import: --how synthesis needs --topology")
    if args.how == DIRECT and args.choose:
        raise InputError(
            f"import: --choose {args.choose[0]!r} needs --how template; with --how direct "
            f"collectives stay whole"
        )
    chosen = {}
    for word in args.choose:
        kind, equals, template = word.partition("=")
        if not equals or not template:
            raise InputError(f"import: --choose {word!r} must be KIND=TEMPLATE")
        one_of("import", f"--choose {word!r}: kind", kind, COLLECTIVES)
        if template == SYNTHESIS and args.topology is None:
            raise InputError(f"import: --choose {word!r} needs --topology")
        if template not in (DIRECT, SYNTHESIS):
            _check_serves(word, kind, template)
        chosen[kind] = template
    return chosen


def _check_serves(word: str, kind: str, template: str) -> None:
    """Raises InputError unless the template does some collective of the kind."""
    templates.get(template)
    reasons = []
    # An all-to-all may join the axis that it splits or another one: they have other templates.
    for axes in ({}, {"concat_axis": 1}) if kind == "all_to_all" else ({},):
        small = templates.get("collective")(4, (4, 4), kind=kind, **axes)
        try:
            expand_collectives(small, "template", {kind: template})
        except SyncopateError as error:
            reasons.append(str(error))
        else:
            return
    raise InputError(f"import: --choose {word!r}: {reasons[0]}")


def _read(reader: Reader, name: str) -> ImportedProgram:
    raw = sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
    shown = "standard input" if name == "-" else name
    try:
        return reader(raw.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise FormatError(f"{shown}: is not UTF-8 ({error})") from error
    except FormatError as error:
        raise FormatError(f"{shown}: {error}") from error


def _lowered(
    program: ImportedProgram, how: str, chosen: dict[str, str], topology: Topology | None
) -> list[Plan | str]:
    """The plan of each collective, or why it has none."""
    made: list[Plan | str] = []
    for i, collective in enumerate(program.collectives):
        own = collective.choose if how == "template" else {}
        try:
            plan = expand_collectives(collective.plan(), how, {**own, **chosen}, topology)
        except UnsupportedError as error:
            if collective.kind in chosen:
                raise UnsupportedError(f"{collective.name}: {error}") from error
            made.append(str(error))
        else:
            made.append(replace(plan, name=f"{i:03}_{plan.name}"))
    return made


def _write(plans: list[Plan], folder: Path, form: str) -> list[str]:
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for plan in plans:
        path = folder / f"{plan.name}.{'json' if form == 'json' else 'txt'}"
        written = serial.to_json(plan) if form == "json" else text.to_text(plan)
        with writing(str(path)):
            path.write_text(written, encoding="utf-8")
        files.append(str(path))
    return files


def _summary(
    program: ImportedProgram, made: list[Plan | str], files: list[str]
) -> dict[str, object]:
    return {
        "program": program.name,
        "ranks": program.num_ranks,
        "collectives": [
            {
                "name": collective.name,
                "kind": collective.kind,
                "operator": collective.operator,
                "alone": collective.alone,
                "operations": plan.num_ops if isinstance(plan, Plan) else None,
                "no_plan": None if isinstance(plan, Plan) else plan,
                "notes": dict(collective.notes),
            }
            for collective, plan in zip(program.collectives, made, strict=True)
        ],
        "contractions": {name: str(derived) for name, derived in program.contractions},
        "skipped": dict(program.skipped),
        "files": files,
    }


COMMAND = Command("import", "plans from another system's file", configure, run)
