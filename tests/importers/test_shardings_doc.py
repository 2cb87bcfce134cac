"""docs/shardings.md is what ``derive`` says today; ``UPDATE_GOLDEN=1`` writes it anew."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

from jax.sharding import PartitionSpec as P

from syncopate_jax.importers.resharding import Move
from syncopate_jax.importers.shardings import Derived, derive
from syncopate_jax.registry import USUAL_TEMPLATES

DOC = Path(__file__).parents[2] / "docs" / "shardings.md"
FORMULA, BATCHED = "bmk,kn->bmn", "bmk,bkn->bmn"
SHAPES = {FORMULA: ((8, 4096, 4096), (4096, 4096)), BATCHED: ((8, 4096, 4096), (8, 4096, 4096))}

HEAD = """\
# From shardings to communication

What `syncopate_jax.importers.shardings.derive` makes of a contraction, from the sharding of its
operands and of its result; `syncopate_jax.ops.sharded.matmul` runs it under plain `jit`, for an `x`
of any dimensions and a `w` of two. This page is written by `tests/importers/test_shardings_doc.py`
and compared with the code by it.

Along each mesh axis the product is *cut* along one letter. An operand that has the letter must be
sharded along it, one that lacks it must be whole; the local results are blocks of the result, or,
for a contracted letter, terms of a sum. What an array lacks for that it gets by moves:

| array has | array needs | move | plan template | one operator with the product |
|---|---|---|---|---|
| the axis on another letter | it on the cut letter | all-to-all | `{all_to_all}` | yes |
| the axis on some letter | the axis nowhere | all-gather | `{all_gather}` | of an operand |
| the axis nowhere | it on the cut letter | slice of what is there | none needed | |
| terms of a sum | the axis on a letter | reduce-scatter | `{reduce_scatter}` | yes |
| terms of a sum | the axis nowhere | all-reduce | `{all_reduce}` | yes |

Of all cuts that is taken which leaves the fewest moves without a product to overlap with, then that
which sends least. One move, next to the product, is fused with it (in brackets below); what else is
to be moved runs before or after it, by its own plan. An axis that shards an operand always cuts the
product, so nothing is gathered only for all ranks to compute the same; the exception is an extent
that the ranks do not divide. Axes of one rank are left out. A letter with several axes is cut by
the first of them slowest; only its last axes can be moved, so an order that must change costs an
all-gather and a slice, for which no single plan serves. An all-gather of the result has no product
after it, so nothing overlaps it: shard the result, and gather it where it is next multiplied.

## One axis

`t` has 4 ranks. A dash is an array without the axis; *none* needs no communication.

"""
TWO = """
## Batch letters

`{batched}`: a letter of all three arrays. Sharded in both operands it needs no communication.
`matmul` has no such letter, its `w` has two dimensions; `syncopate_jax.overlap` takes such products
where they are written as `x @ w` or `jnp.einsum`, and `derive` says what they become.

"""
THREE = """
## Several axes

`d` has 2 ranks and `t` 4. Each axis is decided with the others, because moves meet the arrays as
the others cut them.

"""
SEVERAL = (
    ("data and tensor parallel, in", P("d", "t"), P(None, "t"), P("d", None, "t")),
    ("data and tensor parallel, out", P("d", None, "t"), P("t"), P("d", "t")),
    ("the same, result whole along t", P("d", None, "t"), P("t"), P("d")),
    ("FSDP along d, tensor parallel", P("d", "t"), P("d", "t"), P("d", None, "t")),
    ("FSDP along d, tensor parallel, out", P("d", None, "t"), P("t", "d"), P("d", "t")),
    ("FSDP along both", P(("d", "t")), P(("d", "t")), P(("d", "t"))),
    ("2-D weight", P(None, "d", "t"), P("d", "t"), P(None, "d", "t")),
    ("2-D weight, rows whole", P(None, None, "d"), P("d", "t"), P(None, None, "t")),
    ("rows over both", P(None, ("d", "t")), P(None, ("d", "t")), P(None, None, ("d", "t"))),
    ("sum over both", P(None, None, ("d", "t")), P(("d", "t")), P(None, ("d", "t"))),
    ("other order of axes", P(None, ("d", "t")), P(), P(None, ("t", "d"))),
    ("replicated along d", P(None, "t"), P(None, "t"), P(None, None, "t")),
)


def row(formula: str, lhs: P, rhs: P, out: P, mesh: dict[str, int]) -> Derived:
    return derive(formula, lhs, rhs, out, shapes=SHAPES[formula], mesh=mesh)


def says(derived: Derived) -> str:
    if not derived.communicates:
        return "*none*" + "".join(f", {_step(move)}" for move in derived.moves)
    steps = [f"**[{_step(m)}]**" if m is derived.fused else _step(m) for m in derived.moves]
    at = len(derived.before)
    return "; ".join([*steps[:at], *([] if derived.fused else ["product"]), *steps[at:]])


def _step(move: Move) -> str:
    along = " to ".join(x for x in (move.gather, move.scatter) if x)
    along = f" along {along}" if along else ""
    return f"{move.kind.replace('_', '-')} {move.place}{along} over {', '.join(move.axis_names)}"


def one_axis(formula: str) -> list[str]:
    operands, out = formula.split("->")
    lhs, rhs = operands.split(",")
    lines = ["| lhs | rhs | result | moves | sent |", "|---|---|---|---|---|"]
    for places in itertools.product(*([None, *range(len(own))] for own in (lhs, rhs, out))):
        specs = [P(*(None,) * d, "t") if d is not None else P() for d in places]
        derived = row(formula, specs[0], specs[1], specs[2], {"t": 4})
        letters = [
            own[d] if d is not None else "-" for own, d in zip((lhs, rhs, out), places, strict=True)
        ]
        lines.append(f"| {' | '.join(letters)} | {says(derived)} | {_sent(derived)} |")
    return lines


def _sent(derived: Derived) -> str:
    return f"{derived.elements_sent / 2**20:g}" if derived.communicates else "0"


def page() -> str:
    shapes = "`sent` is in units of 2^20 elements a rank, for lhs {} and rhs {}."
    lines = [f"`{FORMULA}`. " + shapes.format(*map(list, SHAPES[FORMULA])), ""]
    lines += one_axis(FORMULA)
    lines += TWO.format(batched=BATCHED).splitlines() + one_axis(BATCHED)
    lines += THREE.splitlines()
    lines += ["| what | lhs | rhs | result | moves |", "|---|---|---|---|---|"]
    for what, *specs in SEVERAL:
        derived = row(FORMULA, specs[0], specs[1], specs[2], {"d": 2, "t": 4})
        shown = (f"`{_spec(spec)}`" for spec in specs)
        lines.append(f"| {what} | {' | '.join(shown)} | {says(derived)} |")
    return HEAD.format(**USUAL_TEMPLATES) + "\n".join(lines) + "\n"


def _spec(spec: P) -> str:
    return "P(" + ", ".join(map(repr, spec)) + ")"


def test_the_page_is_what_the_code_does() -> None:
    found = page()
    if os.environ.get("UPDATE_GOLDEN"):
        DOC.write_text(found, encoding="utf-8")
    assert DOC.read_text(encoding="utf-8") == found
    assert found.count("*none*") > 5
