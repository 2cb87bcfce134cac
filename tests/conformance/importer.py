"""What every importer of files must do, with each of its fixtures.

A test module runs the suite by subclassing ``ImporterConformance``. A new importer needs a folder
of fixtures with its name in ``tests/fixtures``.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import random
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from syncopate_jax.check.verify import verify
from syncopate_jax.errors import FormatError, UnsupportedError
from syncopate_jax.importers.program import ImportedProgram, Reader
from syncopate_jax.registry import importers
from tests.importers.exchanges import assert_right

FIXTURES = Path(__file__).parents[1] / "fixtures"
READERS = [name for name in importers.names() if isinstance(importers.get(name), Reader)]
CASES = [(name, path) for name in READERS for path in sorted((FIXTURES / name).glob("*"))]
IDS = [f"{name}-{path.name}" for name, path in CASES]
# The longest a file of this size may take, on a busy machine: none may hang.
SECONDS = 20.0
WORDS = (
    "0", "-1", "3", "8", "4096", "99999999999999999999", "2147483648", "1e9", "nan", "null", "{}",
    "[]", "[[]]", '""', "%", "}", "{", ")", "(", "]", "[", "<", ">", ",", "=", "\x00", "\n", " ",
    "é", "\u202e", "true", "None", '"', "'", "\\",
)  # fmt: skip

NUMBERS = (
    "0", "1", "2", "3", "7", "8", "16", "64", "65536", "65537", "2147483647", "2147483648",
    "4294967296", "1099511627776", "9223372036854775807", "9223372036854775808", "1e400", "0x10",
    "00", "1.5", "9" * 5000,
)  # fmt: skip
VALUES: list[Any] = [
    None, True, False, 0, -1, 1, 2, 3, 8, 10**6, 2**31, 2**40, 2**63, 10**400, 1.5, 1e308, -0.0, "",
    "a", "é\u202e", "\ud800", [], {}, [[]], [None], {"a": 1}, [0] * 70_000, [1] * 3000,
    [2**20] * 40, "x" * 100_000,
]  # fmt: skip


def read(name: str, text: str) -> ImportedProgram | None:
    """The program, None where the importer refuses: with one FormatError that says where."""
    began = time.monotonic()
    try:
        return importers.get(name)(text)
    except FormatError as error:
        message = str(error)
        assert message and "Traceback" not in message and "\n  " not in message
        assert len(message) < 1000
        return None
    finally:
        assert time.monotonic() - began < SECONDS


def assert_sound(program: ImportedProgram) -> None:
    """No plan of it is wrong; a small one is run, too."""
    for collective in program.collectives:
        try:
            plan = collective.plan()
        except UnsupportedError:
            continue
        elements = np.prod(collective.result) * collective.num_ranks
        if collective.num_ranks <= 16 and elements < 20_000 and plan.num_ops < 200:
            assert_right(collective)
        elif plan.num_ops < 2000:
            assert verify(plan) == ()


def stripped(program: ImportedProgram) -> object:
    """What plans are made of: notes and names of the program aside."""
    parts = [dataclasses.replace(one, notes=()) for one in program.collectives]
    return program.num_ranks, parts


def mutated(text: str, rng: random.Random) -> str:
    """The text with one to three small faults."""
    for _ in range(rng.choice((1, 1, 2, 3))):
        at = rng.randrange(len(text) + 1)
        lines = text.split("\n")
        kind = rng.randrange(7)
        if kind == 0:
            text = text[:at] + rng.choice(WORDS) + text[at:]
        elif kind == 1:
            text = text[:at] + text[at + rng.choice((1, 1, 2, 5, 40)) :]
        elif kind == 2:
            text = text[:at] + rng.choice(WORDS) + text[at + 1 :]
        elif kind == 3:
            other = rng.randrange(len(text) + 1)
            text = text[:at] + text[other : other + 30] + text[at:]
        elif kind == 4 and len(lines) > 1:
            del lines[rng.randrange(len(lines))]
            text = "\n".join(lines)
        elif kind == 5:
            place = rng.randrange(len(lines))
            text = "\n".join([*lines[:place], lines[rng.randrange(len(lines))], *lines[place:]])
        else:
            digits = [i for i, c in enumerate(text) if c.isdecimal()]
            if digits:
                at = rng.choice(digits)
                text = text[:at] + rng.choice("0123456789") + text[at + 1 :]
    return text


def odd(text: str, rng: random.Random) -> str:
    """The text with one to three whole words, numbers or JSON values that are another's."""
    if text.lstrip().startswith("{") and rng.random() < 0.7:
        return _odd_json(text, rng)
    parts = re.findall(r"\d+|[A-Za-z_]+|\s+|.", text, re.DOTALL)
    numbers = [i for i, part in enumerate(parts) if part.isdecimal()]
    words = [i for i, part in enumerate(parts) if part.isidentifier()]
    for _ in range(rng.choice((1, 1, 2, 3))):
        kind, at, other = rng.randrange(6), rng.randrange(len(parts)), rng.randrange(len(parts))
        if kind < 2:
            parts[rng.choice(numbers)] = rng.choice(NUMBERS)
        elif kind == 2:
            old, new = parts[rng.choice(numbers)], rng.choice(NUMBERS)
            parts = [new if part == old else part for part in parts]
        elif kind == 3:
            parts[rng.choice(words)] = parts[rng.choice(words)]
        elif kind == 4:
            parts[at], parts[other] = parts[other], parts[at]
        else:
            low, high = sorted((at, other))
            parts[low] += "".join(parts[low : min(high, low + 200)])
    return "".join(parts)


def _odd_json(text: str, rng: random.Random) -> str:
    holder = [json.loads(text)]
    for _ in range(rng.choice((1, 1, 2, 3))):
        places: list[tuple[Any, Any]] = []
        todo: list[Any] = [holder]
        for item in todo:
            keys = item if isinstance(item, dict) else range(len(item))
            places += [(item, key) for key in keys]
            todo += [item[key] for key in keys if isinstance(item[key], dict | list)]
        item, key = rng.choice(places)
        old = item[key]
        new = [*VALUES, [old], [old, old], {"x": old}, str(old)]
        new += [old + 1, -old, old * 2] if type(old) is int else []
        new += [old * 2, old[:-1], old[::-1]] if isinstance(old, str | list) else []
        item[key] = copy.deepcopy(rng.choice(new))
    return json.dumps(holder[0])


def fuzz(
    name: str,
    path: Path,
    count: int,
    seed: int,
    change: Callable[[str, random.Random], str] = mutated,
) -> int:
    """How many of ``count`` faulty files were refused; none gives a wrong plan."""
    text = path.read_text(encoding="utf-8")
    whole = stripped(importers.get(name)(text))
    rng = random.Random(f"{name}{path.name}{seed}")
    refused = 0
    for _ in range(count):
        program = read(name, change(text, rng))
        refused += program is None
        if program is not None and stripped(program) != whole:
            assert_sound(program)
    return refused


def truncate(name: str, path: Path, count: int) -> None:
    """Cuts a file at ``count`` places, evenly spaced: nothing but the whole is imported."""
    text = path.read_text(encoding="utf-8").rstrip()
    whole = stripped(importers.get(name)(text))
    cuts = range(0, len(text), max(1, len(text) // count))
    refused = 0
    for cut in cuts:
        program = read(name, text[:cut])
        refused += program is None
        assert program is None or stripped(program) == whole, text[:cut][-80:]
    assert refused >= 0.9 * len(cuts)


class ImporterConformance:
    """The suite, run once for each fixture."""

    @pytest.mark.parametrize("name", READERS)
    def test_has_fixtures_and_says_what_it_reads(self, name: str) -> None:
        assert sum(other == name for other, _ in CASES) >= 2
        assert importers.get(name).reads

    @pytest.mark.parametrize(("name", "path"), CASES, ids=IDS)
    def test_plans_are_right(self, name: str, path: Path) -> None:
        program = importers.get(name)(path.read_text(encoding="utf-8"))
        assert program.num_ranks > 1
        assert program.collectives
        assert program.source
        assert len({plan.name for plan in program.plans()}) == len(program.collectives)
        for collective in program.collectives:
            assert_right(collective, seed=None)
            assert_right(collective)
            assert collective.name in str(program)

    @pytest.mark.parametrize(("name", "path"), CASES, ids=IDS)
    def test_the_same_text_gives_the_same_program(self, name: str, path: Path) -> None:
        text = path.read_text(encoding="utf-8")
        first, second = (importers.get(name)(text) for _ in range(2))
        assert first == second
        assert str(first) == str(second)

    @pytest.mark.parametrize(("name", "path"), CASES, ids=IDS)
    def test_a_truncated_file_is_refused(self, name: str, path: Path) -> None:
        truncate(name, path, 60)

    @pytest.mark.slow
    @pytest.mark.parametrize(("name", "path"), CASES, ids=IDS)
    def test_a_file_truncated_anywhere_is_refused(self, name: str, path: Path) -> None:
        truncate(name, path, 800)

    @pytest.mark.parametrize(("name", "path"), CASES, ids=IDS)
    def test_a_faulty_file_gives_no_wrong_plan(self, name: str, path: Path) -> None:
        assert fuzz(name, path, 40, seed=1) > 0

    @pytest.mark.slow
    @pytest.mark.parametrize(("name", "path"), CASES, ids=IDS)
    def test_many_faulty_files_give_no_wrong_plan(self, name: str, path: Path) -> None:
        assert fuzz(name, path, 1000, seed=2) > 0

    @pytest.mark.parametrize(("name", "path"), CASES, ids=IDS)
    def test_an_odd_file_gives_no_wrong_plan(self, name: str, path: Path) -> None:
        assert fuzz(name, path, 20, seed=3, change=odd) > 0

    @pytest.mark.slow
    @pytest.mark.parametrize(("name", "path"), CASES, ids=IDS)
    def test_many_odd_files_give_no_wrong_plan(self, name: str, path: Path) -> None:
        assert fuzz(name, path, 1000, seed=4, change=odd) > 0

    @pytest.mark.parametrize("name", READERS)
    def test_nonsense_is_refused(self, name: str) -> None:
        path = next(path for other, path in CASES if other == name)
        good = path.read_text(encoding="utf-8")
        bad = [
            "", " \n", "\x00", "null", "[]", "{}", "1", '"x"', "[" * 5000, "{" * 5000, "(" * 5000,
            '{"a":' * 5000, "%" * 1000, good + "}", good + good, good[::-1], "\ufeff" + good,
            good.replace("{", "").replace("}", ""), good.replace(",", ""), "é" * 100,
        ]  # fmt: skip
        for text in (one for one in bad if one != good):
            assert read(name, text) is None, text[:60]
