"""``syncopate plan``: what a template can be given, and how that is found out."""

from __future__ import annotations

import inspect
import json

import pytest

from syncopate_jax import cli
from syncopate_jax.commands.template_arguments import arguments
from syncopate_jax.registry import templates

each_template = pytest.mark.parametrize("name", templates.names())


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    code = cli.main(["plan", *argv])
    printed = capsys.readouterr()
    return code, printed.out, printed.err


def test_arguments_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "hierarchical_all_gather", "--arguments")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[:2] == [
        "nodes: Sequence[int] | None, default None; --set 'nodes=[4,4]'",
        "    ranks of each node, in order; equal ones, as square as can be, if None.",
    ]
    at = lines.index("mode: str, default push; --set mode=push")
    assert lines[at + 1].startswith("    ``push`` lists each hop on its sender")
    assert "produced: bool, default false; --set produced=true" in lines


def test_long_descriptions_are_whole(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "all_to_all_blocks", "--arguments", "--json")
    (counts,) = (item for item in json.loads(out) if item["name"] == "counts")
    assert counts == {
        "name": "counts",
        "type": "Sequence[Sequence[int]] | None",
        "default": None,
        "help": "[ranks][ranks] extent along ``axis`` that rank s sends to rank d, as an expert "
        "dispatch needs; each row may add up to less than the extent.",
        "example": "--set 'counts=[[0,1],[2,3]]'",
    }


@each_template
def test_every_argument_is_described(name: str) -> None:
    template = templates.get(name)
    found = arguments(template)
    assert [argument.name for argument in found] == list(inspect.signature(template).parameters)[2:]
    assert [argument.name for argument in found if not argument.help] == []


@each_template
def test_every_example_is_of_its_type(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    for argument in arguments(templates.get(name)):
        given = argument.example.removeprefix("--set ").strip("'")
        _, _, err = run(capsys, name, "--ranks", "8", "--shape", "8,8", "--set", given)
        assert f"argument {argument.name} must be" not in err


def test_a_value_of_another_type_is_shown_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    given = ("hierarchical_all_gather", "--ranks", "8", "--shape", "8,8", "--set")
    code, out, err = run(capsys, *given, "nodes=2")
    assert (code, out) == (2, "")
    assert err == (
        "syncopate plan: error: plan hierarchical_all_gather: argument nodes must be "
        "Sequence[int] | None, such as --set 'nodes=[4,4]', found 2; plan hierarchical_all_gather "
        "--arguments describes them\n"
    )
    _, _, err = run(capsys, *given, "foo=1")
    assert "has no argument 'foo'; it takes nodes, dtype, axis" in err
    assert err.endswith("; plan hierarchical_all_gather --arguments describes them\n")


def test_arguments_of_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "--arguments")
    assert code == 2 and "--arguments needs TEMPLATE; plan --list shows the templates" in err


def test_two_forms_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "all_gather_ring", "--ranks", "2", "--shape", "4,4", "--json"]
    assert cli.main([*words, "--format", "text"]) == 2
    assert "--json prints JSON, and --format text text" in capsys.readouterr().err
    assert cli.main([*words, "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["num_ranks"] == 2
