"""Programs compiled here for eight devices: imported, verified, executed against NumPy."""

from __future__ import annotations

from collections import Counter

import jax
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
}


def program(name: str, form: int) -> ImportedProgram:
    return import_hlo(texts(name)[form])


@pytest.mark.parametrize("form", [0, 1], ids=["hlo", "stablehlo"])
@pytest.mark.parametrize("name", PROGRAMS)
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
    ("name", "form"), [("megatron", 0), ("megatron", 1), ("fsdp", 0), ("fsdp", 1), ("experts", 1)]
)
def test_what_is_one_operator(name: str, form: int) -> None:
    found = Counter(one.operator for one in program(name, form).collectives if one.operator)
    assert found == OPERATORS[name], str(program(name, form))


def test_the_partitioner_s_collectives_are_those_its_shardings_imply() -> None:
    compiled, derived = (program("partitioned", form) for form in (0, 1))
    assert [one.kind for one in compiled.collectives] == ["all_gather", "all_reduce"]
    assert {one.operator for one in derived.collectives} >= {"all_gather_matmul"}
    assert len(derived.contractions) == 2


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
