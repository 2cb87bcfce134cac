"""Programs compiled here for eight devices: imported, verified, executed against NumPy."""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path

import jax
import jax.export
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from syncopate_jax.errors import UnsupportedError
from syncopate_jax.importers.hlo import import_hlo
from syncopate_jax.importers.program import ImportedProgram
from syncopate_jax.ops import derived
from syncopate_jax.options import Options
from tests.importers.exchanges import assert_right
from tests.importers.hlo_programs import PROGRAMS, texts

FIXTURES = Path(__file__).parents[1] / "fixtures" / "hlo"
# What each program is known to do: collectives by kind, and the operators that they make.
KINDS = {
    "megatron": {"all_gather": 2, "reduce_scatter": 2},
    "fsdp": {"all_gather": 2},
    "ulysses": {"all_to_all": 2},
    "ring": {"all_gather": 2, "permute": 2},
    "experts": {"all_to_all": 2},
    "reductions": {"all_reduce": 4},
}
OPERATORS = {
    "megatron": {"all_gather_matmul": 2, "matmul_reduce_scatter": 2},
    "fsdp": {"all_gather_matmul": 2},
    "experts": {"all_to_all_matmul": 1},
    "exchanges": {"all_to_all_matmul": 1, "matmul_all_to_all": 1},
}
DEAR = ("explicit_gradient",)


def program(name: str, form: int) -> ImportedProgram:
    return import_hlo(texts(name)[form])


@pytest.mark.parametrize("form", [0, 1], ids=["hlo", "stablehlo"])
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow) if name in DEAR else name for name in PROGRAMS],
)
def test_import_verify_execute(name: str, form: int) -> None:
    found = program(name, form)
    assert found.num_ranks == 8
    assert found.collectives
    done = set()
    for collective in found.collectives:
        key = (collective.kind, collective.shape, collective.groups)
        if collective.reduce not in ("none", "sum", "max"):
            with pytest.raises(UnsupportedError, match="plans reduce by sum or max, this one by"):
                collective.plan()
        elif key not in done:
            done.add(key)
            assert_right(collective)


@pytest.mark.parametrize("form", [0, 1], ids=["hlo", "stablehlo"])
@pytest.mark.parametrize("name", KINDS)
def test_every_collective_is_found(name: str, form: int) -> None:
    assert Counter(one.kind for one in program(name, form).collectives) == KINDS[name]


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("megatron", 0),
        ("megatron", 1),
        ("fsdp", 0),
        ("fsdp", 1),
        ("experts", 0),
        ("experts", 1),
        ("exchanges", 0),
        ("exchanges", 1),
    ],
)
def test_what_is_one_operator(name: str, form: int) -> None:
    found = Counter(one.operator for one in program(name, form).collectives if one.operator)
    assert found == OPERATORS[name], str(program(name, form))


def test_exchanges_are_the_same_pairs_in_both_forms() -> None:
    """XLA makes slices, a tuple and a join of an all-to-all; found again is what was written."""
    pairs = [{str(one.pair) for one in program("exchanges", form).collectives} for form in (0, 1)]
    assert (
        pairs[0]
        == pairs[1]
        == {
            "[all_to_all lhs b to a over ranks + dot]",
            "[all_to_all out c to b over ranks + dot]",
        }
    )


def test_the_partitioner_s_collectives_are_those_its_shardings_imply() -> None:
    compiled, derived = (program("partitioned", form) for form in (0, 1))
    assert [one.kind for one in compiled.collectives] == ["all_gather", "all_reduce"]
    assert {one.operator for one in derived.collectives} >= {"all_gather_matmul"}
    assert len(derived.contractions) == 2


def test_what_explicit_axes_imply() -> None:
    """In the loop's body and in a jit of its own; what the partitioner makes of it adds nothing."""
    found = program("explicit", 1)
    assert [(one.kind, one.operator) for one in found.collectives] == [
        ("all_gather", ""),  # of what a function is called with
        ("reduce_scatter", "matmul_reduce_scatter"),
    ]
    assert [(name, str(derived)) for name, derived in found.contractions] == [
        ("main/while.1:%9", "[reduce_scatter out c over t + dot]"),
        ("up:%0", "dot"),
    ]
    assert found.skipped == ()
    compiled = program("explicit", 0)
    # The CPU's compiler makes an all-reduce and a slice of a reduce-scatter.
    assert [one.kind for one in compiled.collectives] == ["all_gather", "all_reduce"]
    assert [one.shape for one in compiled.collectives] == [one.shape for one in found.collectives]


def test_the_gradient_on_explicit_axes() -> None:
    found = program("explicit_gradient", 1)
    assert Counter(one.operator for one in found.collectives if one.operator) == {
        "matmul_reduce_scatter": 1,
        "all_gather_matmul": 2,
        "matmul_all_reduce": 2,
    }
    assert found.skipped == ()


def test_what_auto_axes_leave_to_the_partitioner_is_named() -> None:
    found = program("automatic", 1)
    assert [one.operator for one in found.collectives] == ["matmul_all_reduce"]
    ((name, reason),) = found.skipped
    assert (name, reason[:44]) == ("%1", "the sharding of its result is not in the tex")
    assert len(program("automatic", 0).collectives) == 3


@pytest.mark.parametrize("name", ["explicit", "automatic", "partly_manual"])
def test_fixtures_are_what_jax_prints(name: str) -> None:
    """The same by all versions of JAX that are tested; so is the text with source lines."""
    fixture = import_hlo((FIXTURES / f"{name}.mlir").read_text(encoding="utf-8"))
    fn, *args = PROGRAMS[name]()
    lowered = (fn if hasattr(fn, "lower") else jax.jit(fn)).lower(*args)
    for text in (lowered.as_text(), lowered.as_text(debug_info=True)):
        found = import_hlo(text)
        assert found.contractions == fixture.contractions
        assert found.skipped == fixture.skipped
        assert [dataclasses.replace(one, notes=()) for one in found.collectives] == [
            dataclasses.replace(one, notes=()) for one in fixture.collectives
        ]


@pytest.mark.parametrize("form", ["hlo", "stablehlo"])
def test_batches_that_xla_merges_with_what_is_exchanged(form: str) -> None:
    def layer(x, w_in, w_out):  # x [2, S/8, K], gathered and scattered along S
        hidden = jax.lax.all_gather(x, "t", axis=1, tiled=True) @ w_in
        return jax.lax.psum_scatter(hidden @ w_out, "t", scatter_dimension=1, tiled=True)

    step = jax.shard_map(
        layer,
        mesh=jax.make_mesh((8,), ("t",), (AxisType.Auto,)),
        in_specs=(P(None, "t"), P(None, "t"), P("t")),
        out_specs=P(None, "t"),
    )
    args = np.ones((2, 64, 32), np.float32), np.ones((32, 48), np.float32), np.ones((48, 40), "f")
    lowered = jax.jit(step).lower(*args)
    found = import_hlo(lowered.compile().as_text() if form == "hlo" else lowered.as_text())
    gather, scatter = found.collectives
    assert (gather.operator, scatter.operator) == ("all_gather_matmul", "matmul_reduce_scatter")
    shapes = {"lhs": (2, 8, 32), "out": (2, 64, 40)}
    for pair in (gather.pair, scatter.pair):
        assert pair is not None and pair.fused is not None
        assert pair.fused.shape == shapes.pop(pair.fused.place)
        assert pair.lhs[1] == pair.out[1] == pair.fused.gather + pair.fused.scatter
        assert pair.lhs[0] == pair.out[0] and len(pair.rhs) == 2  # a batch of one operand


def test_exported_programs() -> None:
    """``jax.export`` prints source lines behind every argument and operation."""
    fn, *args = PROGRAMS["automatic"]()
    found = import_hlo(jax.export.export(fn)(*args).mlir_module())
    assert [str(derived) for _, derived in found.contractions] == ["[all_reduce out over t + dot]"]


def test_a_pair_runs_as_the_operator_it_is() -> None:
    """The pair of a gather and a product, by the operators' own machinery, on four devices."""
    pair = program("megatron", 0).collectives[0].pair
    assert pair is not None
    sizes = {letter: 4 * (i + 1) for i, letter in enumerate(sorted(pair.lhs + pair.rhs))}
    rng = np.random.default_rng(0)
    x, w = (
        rng.integers(-4, 5, [sizes[letter] for letter in own]).astype(np.float32)
        for own in (pair.lhs, pair.rhs)
    )
    assert pair.fused is not None and pair.fused.place == "lhs"
    rows = P(*("ranks" if letter == pair.fused.gather else None for letter in pair.lhs))
    run = jax.shard_map(
        lambda x, w: derived.run(pair, x, w, options=Options(backend="xla"), out_dtype=x.dtype),
        mesh=jax.make_mesh((4,), ("ranks",), (AxisType.Auto,), devices=jax.devices()[:4]),
        in_specs=(rows, P()),
        out_specs=P(),
        check_vma=False,
    )
    wanted = np.einsum(f"{pair.lhs},{pair.rhs}->{pair.out}", x, w)
    np.testing.assert_array_equal(jax.jit(run)(x, w), wanted)


def test_collectives_in_loops_say_so() -> None:
    compiled, _ = (program("ring", form) for form in (0, 1))
    notes = [dict(one.notes) for one in compiled.collectives if one.kind == "permute"]
    assert {note["trip_count"] for note in notes} == {"4"}
    assert all(note["computation"] != "main.0_spmd" for note in notes)
    gathers = [dict(one.notes) for one in compiled.collectives if one.kind == "all_gather"]
    assert not any("trip_count" in note for note in gathers)
