"""Every combination of operand and result shardings gives the value of the contraction."""

from __future__ import annotations

import itertools
import math
import random
import string
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from syncopate_jax.check.execute import execute
from syncopate_jax.errors import InputError
from syncopate_jax.importers.resharding import Move, ranks_of
from syncopate_jax.importers.shardings import Derived, derive, formula_of
from syncopate_jax.ops.derived import run
from syncopate_jax.options import Options
from syncopate_jax.registry import importers
from tests.importers.sharded_values import cut, every_spec, move, simulate

MESHES = ((2,), (3,), (4,), (2, 2), (2, 4))


def names(mesh: tuple[int, ...]) -> dict[str, int]:
    return dict(zip("ab", mesh, strict=False))


def arrays(formula: str, ranks: int) -> tuple[np.ndarray, np.ndarray]:
    """Operands of small integers, so that sums are exact; every extent is a multiple of ``ranks``.

    No two letters have the same extent, so that no mix-up of them goes unseen.
    """
    rng = np.random.default_rng(0)
    lhs, rhs = formula.split("->")[0].split(",")
    sizes = {x: ranks * (1 + i) for i, x in enumerate(sorted(set(lhs + rhs)))}
    x, w = (rng.integers(-4, 5, [sizes[x] for x in own]) for own in (lhs, rhs))
    return x.astype(np.float64), w.astype(np.float64)


def combinations(formula: str, mesh: dict[str, int]) -> list[tuple[Any, Any, Any]]:
    operands, out = formula.split("->")
    ranks = [len(own) for own in (*operands.split(","), out)]
    return list(itertools.product(*(every_spec(ndim, list(mesh)) for ndim in ranks)))


def check(formula: str, mesh: dict[str, int], cases: list[Any]) -> list[Derived]:
    x, w = arrays(formula, math.prod(mesh.values()))
    whole = np.einsum(formula, x, w)
    found = []
    for lhs, rhs, out in cases:
        derived = derive(formula, lhs, rhs, out, shapes=(x.shape, w.shape), mesh=mesh)
        wanted = cut(whole, out, mesh)
        for at, part in simulate(derived, x, w, lhs, rhs).items():
            np.testing.assert_array_equal(part, wanted[at], err_msg=f"{lhs} {rhs} {out}: {derived}")
        found.append(derived)
    return found


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_every_combination(mesh: tuple[int, ...]) -> None:
    cases = combinations("mk,kn->mn", names(mesh))
    assert len(cases) == (27 if len(mesh) == 1 else 1331)
    found = check("mk,kn->mn", names(mesh), cases)
    kinds = Counter(step.kind for derived in found for step in derived.moves)
    assert set(kinds) == {"all_gather", "all_reduce", "all_to_all", "reduce_scatter", "slice"}
    fused = Counter((d.fused.kind, d.fused.place) for d in found if d.fused)
    assert {(k, p) for k, p in fused if p != "out"} >= {
        ("all_gather", "lhs"),
        ("all_gather", "rhs"),
    }


@pytest.mark.parametrize("formula", ["bmk,bkn->bmn", "bmk,kn->bmn", "abk,kcd->cabd"])
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_batches_and_more_dimensions(mesh: tuple[int, ...], formula: str) -> None:
    cases = combinations(formula, names(mesh))
    cases = cases if len(cases) < 100 else random.Random(3).sample(cases, 100)
    check(formula, names(mesh), cases)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_every_combination_with_more_dimensions(mesh: tuple[int, ...]) -> None:
    """All that ``test_batches_and_more_dimensions`` takes a sample of."""
    cases = combinations("bmk,kn->bmn", names(mesh))
    assert len(cases) == (48 if len(mesh) == 1 else 3971)
    check("bmk,kn->bmn", names(mesh), cases)


@pytest.mark.parametrize("number", [60, pytest.param(None, marks=pytest.mark.slow)])
def test_every_plan_does_its_move(number: int | None) -> None:
    """Each different move of the exhaustive cases, by its plan, in the plan's own oracle.

    ``number`` of them, or all.
    """
    moves: dict[Any, tuple[Derived, Move]] = {}
    for sizes in MESHES:
        mesh = names(sizes)
        x, w = arrays("mk,kn->mn", math.prod(sizes))
        for lhs, rhs, out in combinations("mk,kn->mn", mesh):
            derived = derive("mk,kn->mn", lhs, rhs, out, shapes=(x.shape, w.shape), mesh=mesh)
            for step in derived.moves:
                letters = derived.letters(step.place)
                key = (step.kind, step.shape, ranks_of(step, mesh), step.place == "out")
                key += tuple(letters.find(x) if x else -1 for x in (step.gather, step.scatter))
                moves.setdefault(key, (derived, step))
    by_kind = {step.kind: (derived, step) for derived, step in moves.values()}
    rng = random.Random(0)
    every = list(moves.values())
    sample = [*by_kind.values(), *rng.sample(every, number)] if number else every
    for derived, step in sample:
        if step.kind != "slice":
            _check_plan(derived, step)


def _check_plan(derived: Derived, step: Move) -> None:
    ranks = ranks_of(step, dict(derived.mesh))
    letters = derived.letters(step.place)
    plan = derived.plan(step, dtype="float32")
    assert plan.num_ranks == ranks
    rng = np.random.default_rng(1)
    held = {(r,): rng.integers(-9, 9, step.shape).astype(np.float64) for r in range(ranks)}
    wanted = move(held, Move(**_over_one(step)), letters, {"r": ranks})
    tensor = plan.tensors[0].name
    inputs = {}
    for rank in range(ranks):
        whole = np.zeros(plan.tensors[0].shape)
        for region in plan.initial:
            if region.rank == rank and region.tensor == tensor:
                whole[_box(region.box)] = held[rank,].reshape(region.box.shape)
        inputs[rank, tensor] = whole
    done = execute(plan, inputs, seed=1)
    for rank in range(ranks):
        goals = [goal for goal in plan.goals if goal.rank == rank]
        ends = [_ends(goal.box) for goal in goals]
        box = tuple(
            slice(min(e[d][0] for e in ends), max(e[d][1] for e in ends))
            for d in range(len(ends[0]))
        )
        found = done[rank, goals[0].tensor][box]
        np.testing.assert_array_equal(found, wanted[rank,], err_msg=f"{derived}: {step}")


def _over_one(step: Move) -> dict[str, Any]:
    return {
        "place": step.place,
        "kind": step.kind,
        "axis_names": ("r",),
        "gather": step.gather,
        "scatter": step.scatter,
        "shape": step.shape,
    }


def _ends(box: Any) -> list[tuple[int, int]]:
    return list(zip(box.lo, box.hi, strict=True))


def _box(box: Any) -> tuple[slice, ...]:
    return tuple(slice(lo, hi) for lo, hi in _ends(box))


@pytest.mark.parametrize("sizes", [(3,), (2, 2)], ids=str)
def test_in_shard_map(sizes: tuple[int, ...]) -> None:
    """A sample of the combinations, on devices, all in one program."""
    mesh = names(sizes)
    formula = "mk,kn->mn"
    x, w = arrays(formula, math.prod(sizes))
    cases = random.Random(5).sample(combinations(formula, mesh), 20)
    count = math.prod(sizes)
    devices = jax.make_mesh(
        sizes, tuple(mesh), (AxisType.Auto,) * len(sizes), devices=jax.devices()[:count]
    )

    def product(lhs: Any, rhs: Any, out: Any) -> Any:
        derived = derive(formula, lhs, rhs, out, shapes=(x.shape, w.shape), mesh=devices)
        return jax.shard_map(
            lambda x, w: run(derived, x, w, options=Options(backend="xla"), out_dtype=jnp.float32),
            mesh=devices,
            in_specs=(P(*lhs), P(*rhs)),
            out_specs=P(*out),
            check_vma=False,
        )

    every = [product(*case) for case in cases]
    found = jax.jit(lambda x, w: [fn(x, w) for fn in every])(jnp.float32(x), jnp.float32(w))
    for got, case in zip(found, cases, strict=True):
        np.testing.assert_array_equal(got, np.einsum(formula, x, w), err_msg=str(case))


def test_what_is_derived_for_the_known_layers() -> None:
    """Tensor and sequence parallelism, FSDP and Ulysses, each with its operator."""

    def text(lhs: P, rhs: P, out: P, mesh: dict[str, int] | None = None) -> str:
        shapes = ((8, 64, 64), (64, 64))
        return str(derive("bmk,kn->bmn", lhs, rhs, out, shapes=shapes, mesh=mesh or {"t": 4}))

    rows, columns = P(None, "t"), P(None, None, "t")
    assert text(rows, P(None, "t"), columns) == "[all_gather lhs m over t + dot]"
    assert text(columns, P("t"), rows) == "[reduce_scatter out m over t + dot]"
    assert text(columns, P("t"), P()) == "[all_reduce out over t + dot]"
    assert text(rows, P("t"), rows) == "[all_gather rhs k over t + dot]"
    assert text(columns, P(), rows) == "[all_to_all lhs k to m over t + dot]"
    assert text(rows, P(), columns) == "[all_to_all out m to n over t + dot]"
    assert text(P("t"), P(), P("t")) == "dot"
    both = {"d": 2, "t": 4}
    found = text(P("d", None, "t"), P("t", "d"), P("d", "t"), both)
    assert found == "all_gather rhs n over d; [reduce_scatter out m over t + dot]"


def test_a_cut_that_is_decided_already() -> None:
    shapes, mesh = ((8, 8), (8, 8)), {"t": 2, "o": 1}
    x, w = (np.arange(64.0).reshape(8, 8) % n for n in (5, 7))
    texts = set()
    for letter in "mkn":
        cut_by = {letter: ("t", "o")}
        derived = derive("mk,kn->mn", P("t"), P("t"), P("t"), shapes=shapes, mesh=mesh, cut=cut_by)
        assert derived.computed == (("t", letter),)
        for at, part in simulate(derived, x, w, (("t",), ()), (("t",), ())).items():
            np.testing.assert_array_equal(part, cut(x @ w, (("t",), ()), mesh)[at])
        texts.add(str(derived))
    assert len(texts) == 3


def test_axes_of_one_rank_and_shardings_with_meshes() -> None:
    devices = jax.make_mesh((1, 2), ("o", "t"), devices=jax.devices()[:2])
    lhs, rhs, out = (NamedSharding(devices, s) for s in (P("o", "t"), P("t"), P("o")))
    derived = derive("mk,kn->mn", lhs, rhs, out, shapes=((4, 4), (4, 4)))
    assert str(derived) == "[all_reduce out over t + dot]"
    assert derived.communicates and derived.computed == (("t", "k"),)
    assert importers.get("shardings") is derive


def test_where_no_letter_can_be_cut_all_ranks_compute_the_same() -> None:
    """Neither 3 rows, nor 3 columns, nor the 2 terms of a sum have a part for each of 4 ranks."""
    shapes, mesh = ((3, 2), (2, 3)), {"t": 2, "u": 2}
    derived = derive("mk,kn->mn", P(None, "t"), P("u"), P(), shapes=shapes, mesh=mesh)
    assert len(derived.computed) < 2
    x, w = np.arange(6.0).reshape(shapes[0]), np.arange(6.0).reshape(shapes[1])
    for part in simulate(derived, x, w, ((), ("t",)), (("u",), ())).values():
        np.testing.assert_array_equal(part, x @ w)


@pytest.mark.parametrize(
    ("formula", "numbers"),
    [("mk,kn->mn", (((1,), (0,)), ((), ()))), ("bmk,bnk->bmn", (((2,), (2,)), ((0,), (0,))))],
)
def test_formula_of_a_dot(formula: str, numbers: Any) -> None:
    operands, out = formula.split("->")
    lhs, rhs = operands.split(",")
    found = formula_of(numbers, len(lhs), len(rhs))
    x, w = arrays(formula, 2)
    wanted = lax.dot_general(jnp.float32(x), jnp.float32(w), numbers)
    np.testing.assert_array_equal(np.einsum(found, x, w), wanted)
    assert set(found) <= {*string.ascii_lowercase, *",->"} and len(out) == len(found.split("->")[1])


BAD: list[tuple[dict[str, Any], str]] = [
    ({"formula": "mk,kn"}, "formula 'mk,kn': needs two operands and a result in lower-case"),
    ({"formula": "mm,kn->mn"}, "'mm' has a letter twice"),
    ({"formula": "mk,kn->m"}, "letter n is in one array only"),
    ({"shapes": ((4, 4, 4), (4, 4))}, r"lhs: letters 'mk' need 2 extents, found \(4, 4, 4\)"),
    ({"shapes": ((4, 4), (6, 4))}, "rhs: letter k has extent 6, but 4 in lhs"),
    ({"mesh": None}, "mesh: needs the extent of each mesh axis"),
    ({"lhs": P("t", None, None)}, "shards 3 dimensions, letters 'mk' have 2"),
    ({"lhs": P("x")}, "has no mesh axis 'x'; known: t"),
    ({"lhs": P(P.UNCONSTRAINED)}, "leaves letter m open"),
    ({"lhs": (("t",), ("t",))}, "has mesh axis 't' twice"),
    ({"shapes": ((3, 4), (4, 4)), "lhs": P("t")}, "letter m has extent 3, which the 2 ranks of t"),
    ({"cut": {"x": ("t",)}}, "cut: no letter 'x' in"),
    ({"cut": {"m": ("u",)}}, "cut: mesh axis 'u' is unknown, or cuts two letters"),
    ({"cut": {"m": ("t",), "n": ("t",)}}, "cut: mesh axis 't' is unknown, or cuts two letters"),
    ({"cut": {"m": ("t",)}, "shapes": ((3, 4), (4, 4))}, "cut: letter m has extent 3, which the 2"),
]


@pytest.mark.parametrize(("changes", "message"), BAD, ids=range(len(BAD)))
def test_bad_input(changes: dict[str, Any], message: str) -> None:
    given = {"formula": "mk,kn->mn", "lhs": P(), "rhs": P(), "out": P()}
    given |= {"shapes": ((4, 4), (4, 4)), "mesh": {"t": 2}} | changes
    args = [given.pop(name) for name in ("formula", "lhs", "rhs", "out")]
    with pytest.raises(InputError, match=message):
        derive(*args, **given)


def test_meshes_must_agree_and_slices_have_no_plan() -> None:
    one = NamedSharding(jax.make_mesh((2,), ("t",), devices=jax.devices()[:2]), P("t"))
    with pytest.raises(InputError, match="mesh: the shardings are over different meshes"):
        derive("mk,kn->mn", one, P(), P(), shapes=((4, 4), (4, 4)), mesh={"t": 4})
    derived = derive("mk,kn->mn", P(), P(), P("t"), shapes=((4, 4), (4, 4)), mesh={"t": 2})
    with pytest.raises(InputError, match="slice lhs m over t: it needs no communication"):
        derived.plan(derived.moves[0])
