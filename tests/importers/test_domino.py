"""Domino's layers: the all-reduce of one slice runs while the next is computed."""

from __future__ import annotations

import copy
import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest

from syncopate_jax.errors import FormatError
from syncopate_jax.importers.domino import import_domino
from syncopate_jax.ir.comm import Collective, ComputeDep
from syncopate_jax.passes.expand_collectives import expand_collectives
from tests.importers.exchanges import assert_right

FIXTURES = Path(__file__).parents[1] / "fixtures" / "domino"


def layer(name: str = "llama_layer") -> dict[str, Any]:
    found: dict[str, Any] = json.loads((FIXTURES / f"{name}.json").read_text())
    return found


@pytest.mark.parametrize(("inputs", "weights"), [(1, 1), (2, 1), (1, 3), (2, 3), (3, 2)])
def test_one_all_reduce_for_each_slice_after_its_tiles(inputs: int, weights: int) -> None:
    given = layer() | {"slicing": {"inputs": inputs, "weights": weights}}
    forward = import_domino(json.dumps(given)).collectives[1]
    assert forward.name == "mlp.forward"
    assert_right(forward)
    plan = forward.plan()
    for rank in range(3):
        ops = list(plan.ops(rank))
        assert len(ops) == inputs * weights
        for op in ops:
            assert isinstance(op, Collective)
            assert op.deps == (ComputeDep(rank, op.src),)
        covered = [op.src.box for op in ops]
        assert sum(box.size for box in covered) == 4 * 4 * 12
        assert not any(a.intersect(b) for a, b in itertools.combinations(covered, 2))
        batches = [box.lo[1] for box in covered]
        assert batches == sorted(batches)  # all columns of a micro-batch before the next one


def test_lowered_slices_wait_for_their_own_tiles_only() -> None:
    forward = import_domino(json.dumps(layer("gpt_layer"))).collectives[1]
    plan = expand_collectives(forward.plan())
    waits = {
        dep.chunk.box.shape[1]
        for rank in range(plan.num_ranks)
        for op in plan.ops(rank)
        for dep in op.deps
        if isinstance(dep, ComputeDep)
    }
    assert waits <= {3, 2}  # micro-batches of a batch of 5


def test_sizes_and_notes() -> None:
    found = import_domino(json.dumps(layer("gpt_layer")))
    assert [one.name for one in found.collectives] == [
        "attention.forward", "mlp.forward", "attention.backward", "mlp.backward",
    ]  # fmt: skip
    assert [dict(one.notes)["contracted"] for one in found.collectives] == ["4", "16", "12", "16"]
    assert {one.operator for one in found.collectives} == {"matmul_all_reduce"}
    assert {one.dtype for one in found.collectives} == {"bfloat16"}
    assert found.note("lr") == "0.00015"
    gated = import_domino(json.dumps(layer()))
    assert dict(gated.collectives[3].notes)["contracted"] == "16"  # 2 * 24 / 3


def broken(path: str, value: Any) -> dict[str, Any]:
    found = copy.deepcopy(layer())
    *way, last = path.split("/")
    at: Any = found
    for step in way:
        at = at[step]
    if value is ...:
        del at[last]
    else:
        at[last] = value
    return found


BAD = [
    (broken("slicing", ...), "domino: has no 'slicing'; needs name, args, slicing"),
    (broken("args/hidden_size", ...), "domino.args: has no 'hidden_size'; needs num_layers"),
    (broken("args/hidden_size", "12"), "domino.args.hidden_size: found \"12\", needs an integer"),
    (broken("args/hidden_size", 13), "domino.args.hidden_size: 13 is not divided by 3 ranks"),
    (broken("args/ffn_hidden_size", 25), "ffn_hidden_size: 25 is not divided by 3 ranks"),
    (broken("args/num_attention_heads", 9), "num_attention_heads: found 9, needs a divisor of"),
    (broken("args/tensor_model_parallel_size", 0), "found 0, needs an integer in 1..2147483647"),
    (broken("args/tensor_model_parallel_size", 99999), "found 99999, needs at most 65536 ranks"),
    (broken("args/bf16", True), "domino.args.bf16: found true, needs false where fp16 is true"),
    (broken("args/fp16", 1), "domino.args.fp16: found 1, needs true or false"),
    (broken("slicing/inputs", 5), "domino.slicing.inputs: found 5, needs an integer in 1..4"),
    (broken("slicing/weights", 0), "domino.slicing.weights: found 0, needs an integer in 1..12"),
    (broken("slicing/columns", 1), "domino.slicing: has an unknown 'columns'"),
    (broken("args", []), "domino.args: found [], needs an object"),
    (broken("args/hidden_size", 12 * 10**8) | {"slicing": {"inputs": 2, "weights": 5000}},
     "domino.args: all_reduce attention.forward: is cut into more than 4096 parts"),
]  # fmt: skip


@pytest.mark.parametrize(("given", "message"), BAD, ids=range(len(BAD)))
def test_malformed(given: Any, message: str) -> None:
    with pytest.raises(FormatError, match=re.escape(message)):
        import_domino(json.dumps(given))
