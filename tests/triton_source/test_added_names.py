"""Names of a rewritten kernel beside the user's: constants are renamed, all others are refused."""

from __future__ import annotations

import ast
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("triton")

from syncopate_jax.errors import UnsupportedError
from syncopate_jax.kernel import directives_tree
from syncopate_jax.kernel.annotated import assigned
from syncopate_jax.triton_source import rewrite
from syncopate_jax.triton_source.scheme import (
    Addends,
    Array,
    Block,
    Columns,
    Lists,
    Move,
    Read,
    Runs,
    Scheme,
    Spot,
    Transfers,
    Write,
)

KERNEL = """
def product(x_ptr, X_ptr, y_ptr, M, K, BLOCK):
    # syncopate: axis m: extent=M, tile=BLOCK
    # syncopate: axis k: extent=K, tile=BLOCK
    # syncopate: reads x_ptr[m, k] as x
    # syncopate: reads X_ptr[k] as w
    # syncopate: writes y_ptr[m] as y
    base = 4
    # syncopate: dispatch pid -> m=row
    pid = tl.program_id(0)
    row = pid
    # syncopate: end dispatch
    base += row
    total = 0.0
    ptrs = X_ptr + row
    kept = X_ptr + 1
    # syncopate: reduce k=step
    for step in range(tl.cdiv(K, BLOCK)):
        total += tl.load(x_ptr + row + step) * tl.load(ptrs) + tl.load(kept + step)
        ptrs += BLOCK
    # syncopate: epilogue total
    total = total * 2
    tl.store(y_ptr + row + base, total)
    # syncopate: end epilogue
"""
LISTS = Lists(3, Columns(5, (1, 1)))
PLACES = (Spot("x_ptr"), Spot("x_gathered_ptr", peer=True))
ALL = Scheme(
    title="all that a scheme can have",
    ranks=2,
    folded=True,
    tiles=4,
    workers=2,
    table=99,
    slots=3,
    parameters=(
        "x_ptr", "X_ptr", "table_ptr", "peers_ptr", "y_ptr", "x_gathered_ptr", "y_landing_ptr",
        "counters_ptr",
    ),
    arrays=(Array("x_ptr", 6, 1), Array("X_ptr", 7), Array("x_gathered_ptr", 8, 2),
            Array("y_ptr", 9, 3), Array("y_landing_ptr", 10, 4)),
    order=Columns(0, (1,)),
    waits=LISTS,
    epilogue_waits=LISTS,
    signals=LISTS,
    reads=(
        Read("x_ptr", PLACES, Columns(20, (1, 1, 1))),
        Read("X_ptr", (Spot("X_ptr"),), Columns(21, (0, 0, 1)), by_run=True),
    ),
    write=Write(
        "y_ptr", (Spot("y_ptr"), Spot("y_ptr", True)), Lists(3, Columns(7, (1, 1, 1))), False
    ),
    addends=Addends("y_ptr", "y_landing_ptr", Lists(3, Columns(8, (1,)))),
    runs=Runs(2, Columns(9, (1, 1)), LISTS),
    transfers=Transfers(
        2, 2, 11, Columns(12, (1, 1, 1, 1)), LISTS, LISTS,
        (Move("x_ptr", "x_gathered_ptr", False, (Block(0, 1, 0, 1, 1, 1),)),
         Move("y_ptr", "y_landing_ptr", True, (Block(0, 1, 0, 1, 1, 1),))), 16,
    ),
)  # fmt: skip


def source(text: str = KERNEL) -> Any:
    return directives_tree.read_source(text.lstrip("\n"), "k.py", 7)


def fused(text: str = KERNEL, scheme: Scheme = ALL) -> tuple[str, ast.FunctionDef, list[str]]:
    """The module's text, its kernel, and its constants."""
    found = rewrite.rewrite(source(text), scheme)
    tree = ast.parse(found)
    (function,) = (node for node in tree.body if isinstance(node, ast.FunctionDef))
    constants = [node.target.id for node in tree.body if isinstance(node, ast.AnnAssign)]  # type: ignore[union-attr]
    return found, function, constants


def added() -> list[str]:
    """All that the rewritten kernel assigns or takes and the kernel does not."""
    function, own = fused()[1], source().function
    names = assigned([function]) | {arg.arg for arg in function.args.args} | {function.name, "sync"}
    return sorted(names - assigned([own]) - {arg.arg for arg in own.args.args})


@pytest.mark.parametrize("name", added())
def test_a_name_that_is_taken_is_refused(name: str) -> None:
    text = KERNEL.replace("    total = 0.0\n", f"    total = 0.0\n    {name} = 3\n")
    with pytest.raises(UnsupportedError, match=rf"k.py:7: the name {name} is one that the rew"):
        fused(text)


@pytest.mark.parametrize("name", fused()[2])
def test_a_constant_whose_name_is_taken_gets_another(name: str) -> None:
    """The kernel's own is then named where the kernel names it, and nowhere else."""
    text = KERNEL.replace("    total = 0.0\n", f"    total = 0.0 * {name}\n")
    _, function, constants = fused(text)
    assert name not in constants and f"{name}_" in constants
    uses = [n for n in ast.walk(function) if isinstance(n, ast.Name) and n.id == name]
    assert len(uses) == 1


def test_all_that_a_scheme_adds_is_tried() -> None:
    names, constants = added(), fused()[2]
    assert {"x_ptr_here", "x_spot", "x_rank", "x_shift", "x_gathered_ptr_0", "ptrs_start"} < {
        *names
    }
    assert {"kept_here", "base_here", "total_again", "shares", "position", "run_last"} < {*names}
    assert {"product_fused", "own_counters", "addend_ptr", "place", "src_ptr"} < {*names}
    assert {"TILES", "WORKERS", "COMMUNICATING", "SLOTS", "RANKS", "FOLDED"} < {*constants}


def test_arrays_that_differ_by_case_have_constants_of_their_own() -> None:
    text, _, constants = fused()
    assert "X_SIZE: tl.constexpr = tl.constexpr(6)" in text and "x_ptr += tl.cast(rank" in text
    assert "X_SIZE_: tl.constexpr = tl.constexpr(7)" in text
    assert "X_ptr += tl.cast(rank, tl.int64) * X_SIZE_" in text
    assert {"READ_X", "READ_X_"} < {*constants}


PLAIN = replace(
    ALL, folded=False, reads=(), write=None, addends=None, runs=None, transfers=None, arrays=(),
    parameters=("x_ptr", "X_ptr", "table_ptr", "peers_ptr", "y_ptr", "counters_ptr"),
)  # fmt: skip


@pytest.mark.parametrize("name", ["rank", "src_ptr", "addend_ptr"])
def test_a_name_that_this_scheme_does_not_add_is_free(name: str) -> None:
    text = KERNEL.replace("    total = 0.0\n", f"    total = 0.0\n    {name} = 3\n")
    assert f"        {name} = 3\n" in fused(text, PLAIN)[0]


def test_a_pointer_may_not_be_another_array_of_the_launch() -> None:
    with pytest.raises(UnsupportedError, match=r"the name peers_ptr is one that the rewritten"):
        fused(KERNEL.replace("X_ptr", "peers_ptr"), PLAIN)
    twice = PLAIN.using((*PLAIN.parameters, "y_ptr"))
    with pytest.raises(UnsupportedError, match=r"the name y_ptr is one that the rewritten"):
        fused(KERNEL, twice)


def test_what_the_module_imports_means_the_same_in_the_kernel() -> None:
    with pytest.raises(UnsupportedError, match=r"the name triton is one that the rewritten"):
        fused(KERNEL.replace("    total = 0.0\n", "    triton = 3\n    total = 0.0\n"))
    text, known = KERNEL.lstrip("\n"), {"tl": pytest}
    kernel = directives_tree.read_source(text.replace("tl.program_id(0)", "0"), "k.py", 7, known)
    with pytest.raises(UnsupportedError, match=r"the name tl is one that the rewritten"):
        rewrite.rewrite(kernel, ALL)
