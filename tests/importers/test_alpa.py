"""Alpa's specs, strategies, plans and log: what each gives, and what is refused."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from syncopate_jax.errors import FormatError
from syncopate_jax.importers.alpa import import_alpa
from syncopate_jax.importers.alpa_specs import Spec, read_spec
from syncopate_jax.importers.alpa_strategies import read_strategy
from syncopate_jax.importers.shardings import Derived
from tests.importers.sharded_values import cut, simulate

FIXTURES = Path(__file__).parents[1] / "fixtures" / "alpa"


@pytest.mark.parametrize(
    ("text", "mesh", "wanted"),
    [
        ("ShardingSpec((Chunked(2), NoSharding()), (ShardedAxis(axis=0), Replicated(replicas=4)))",
         (2, 4), ((0,), ())),
        ("ShardingSpec([Chunked([2]), NoSharding()], [ShardedAxis(0), Replicated(4)])",
         (2, 4), ((0,), ())),
        ("ShardingSpec(sharding=(Chunked((2,)), NoSharding(),), "
         "mesh_mapping=(Replicated(4), ShardedAxis(0)))", (4, 2), ((1,), ())),
        ("ShardingSpec((Chunked(2), Chunked(4)), (ShardedAxis(axis=1), ShardedAxis(axis=0)))",
         (4, 2), ((1,), (0,))),
        ("ShardingSpec((NoSharding(), Chunked(2,4)), (ShardedAxis(axis=0), ShardedAxis(axis=1)))",
         (2, 4), ((), (0, 1))),
        ("ShardingSpec((Chunked(2,4), NoSharding()), (ShardedAxis(axis=1), ShardedAxis(axis=0)))",
         (4, 2), ((1, 0), ())),
        ("ShardingSpec((Chunked(8), NoSharding()), (ShardedAxis(axis=0),))", (2, 4), ((0, 1), ())),
        ("ShardingSpec((Chunked(chunks=[8]), NoSharding()), (ShardedAxis(axis=0),))",
         (1, 8), ((1,), ())),
        ("ShardingSpec((NoSharding(), NoSharding()), (Replicated(replicas=8),))", (2, 4), ((), ())),
    ],
)  # fmt: skip
def test_specs(text: str, mesh: tuple[int, ...], wanted: Spec) -> None:
    assert read_spec(text, (16, 16), mesh) == wanted


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("Sharding((), ())", "line 1, column 1: found 'Sharding', needs 'ShardingSpec'"),
        ("ShardingSpec((Chunked(2)), (ShardedAxis(0), Replicated(4)))", "shards 1 dimensions, the"),
        ("ShardingSpec((Chunked(2), NoSharding()), (Replicated(8),))", "has 1 chunked axes, its"),
        ("ShardingSpec((Chunked(2), NoSharding()), (ShardedAxis(0), Replicated(2)))",
         "a factor of 2 devices is no run of dimensions of the logical mesh (2, 4)"),
        ("ShardingSpec((Chunked(2), NoSharding()), (ShardedAxis(0),))",
         "is over 2 devices, the logical mesh (2, 4) has 8"),
        ("ShardingSpec((Chunked(4), NoSharding()), (Replicated(2), ShardedAxis(0)))",
         "extent 6 is not divided by 4 chunks"),
        ("ShardingSpec((Chunked([]), NoSharding()), ())", "at least one chunk before this"),
        ("ShardingSpec((Chunked(0), NoSharding()), ())", "at least one chunk before this"),
        ("ShardingSpec((Unstacked(2), NoSharding()), ())", "found 'Unstacked', needs 'Chunked'"),
        ("ShardingSpec((NoSharding(), NoSharding()), (Whole(8),))",
         "found 'Whole', needs ShardedAxis(…) or Replicated(…)"),
        ("ShardingSpec(NoSharding(), ())", "needs '(' or '['"),
        ("ShardingSpec((NoSharding(), NoSharding()), (Replicated(8),)) x", "the end of the spec"),
    ],
)  # fmt: skip
def test_malformed_specs(text: str, message: str) -> None:
    with pytest.raises(FormatError, match=re.escape(message)):
        read_spec(text, (6, 16), (2, 4))


@pytest.mark.parametrize(
    ("name", "cuts", "scatters"),
    [
        ("SS = SR x RS @ {0,1}", {"lhs_space": 0, "rhs_space": 1}, ""),
        ("SS = SR x RS @ {1,0}", {"lhs_space": 1, "rhs_space": 0}, ""),
        ("SR = SS x SR @ {0,1} (allreduce @ 1)", {"lhs_space": 0, "contracted": 1}, ""),
        ("RS = RS x SS @ {0,1} (allreduce @ 0)", {"contracted": 0, "rhs_space": 1}, ""),
        ("RR = RS x SR @ {0} (allreduce @ 0)", {"contracted": 0}, ""),
        ("SS = SS x SR @ {0,1} (reduce-scatter @ 1)", {"lhs_space": 0, "contracted": 1},
         "rhs_space"),
        ("SS = RS x SS @ {1,0} (reduce-scatter @ 1)", {"contracted": 1, "rhs_space": 0},
         "lhs_space"),
        ("Si = Si x R @ {0}", {"lhs_space": 0}, ""),
        ("Sj = R x Sj @ {0}", {"rhs_space": 0}, ""),
        ("R = Sk x Sk @ {0} (allreduce @ {0})", {"contracted": 0}, ""),
        ("Sb_1 = Sb x Sb @ {0}", {"batch1": 0}, ""),
        ("Sb = Sb x Sb @ {0,1}", {"batch0": 0, "batch1": 1}, ""),
    ],
)  # fmt: skip
def test_strategies(name: str, cuts: dict[str, int], scatters: str) -> None:
    found = read_strategy(name)
    assert (found.by_role, found.scatters) == (cuts, scatters)


def test_the_page_has_strategies_that_are_read() -> None:
    page = (Path(__file__).parents[2] / "docs/importers.md").read_text()
    names = re.findall(r"`([^`]* = [^`]* x [^`]*@ [^`]*)`", page)
    assert len(names) == 12
    assert [read_strategy(name).name for name in names] == names


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("SS", "needs the form"),
        ("SS = SR x RS @ {0,0}", "a mesh dimension is named twice"),
        ("SS = SR x RS @ {0}", "cuts 2 dimensions, names 1 of the mesh"),
        ("SS = SX x RS @ {0,1}", "an array needs two letters of S and R"),
        ("SR = SS x RR @ {0,1} (allreduce @ 1)", "the contracted dimension is cut on one side"),
        ("SR = SS x SR @ {0,1}", "is cut by mesh dimension 1, the reduction is over None"),
        ("SR = SS x SR @ {0,1} (allreduce @ 0)", "the reduction is over 0"),
        ("SS = SR x RS @ {0,1} (allreduce @ 0)", "is cut by mesh dimension None"),
        ("SS = SS x SR @ {0,1} (allreduce @ 1)", "the result 'SS' does not follow"),
        ("RS = SR x RS @ {0,1}", "the result 'RS' does not follow"),
        ("SR = SS x SR @ {0,1} (reduce-scatter @ 1)", "the result 'SR' does not follow"),
        ("Sb_0 = Sb x Sb @ {0,1}", "batches are cut as"),
        ("SS = Sb x Sb @ {0,1}", "batches are cut as"),
    ],
)
def test_strategies_that_contradict_themselves(name: str, message: str) -> None:
    with pytest.raises(FormatError, match=re.escape(message)):
        read_strategy(name)


def plan(**changes: Any) -> dict[str, Any]:
    found = {
        "name": "p",
        "logical_mesh_shape": [2, 2],
        "operators": [
            {
                "name": "dot",
                "formula": "mk,kn->mn",
                "lhs": {"shape": [8, 4], "dtype": "float32"},
                "rhs": {"shape": [4, 12], "dtype": "float32"},
                "strategy": "SR = SS x SR @ {0,1} (allreduce @ 1)",
            }
        ],
    }
    return found | changes


MN, NAMES = "mk,kn->mn", ("mesh0", "mesh1")
WHOLE = ((), ())


@pytest.mark.parametrize(
    ("strategy", "lhs", "rhs", "out", "wanted"),
    [
        ("SS = SR x RS @ {0,1}", (("mesh0",), ()), ((), ("mesh1",)), (("mesh0",), ("mesh1",)),
         "dot"),
        ("SR = SS x SR @ {0,1} (allreduce @ 1)", (("mesh0",), ("mesh1",)), (("mesh1",), ()),
         (("mesh0",), ()), "[all_reduce out over mesh1 + dot]"),
        ("RS = RS x SS @ {1,0} (allreduce @ 1)", ((), ("mesh1",)), (("mesh1",), ("mesh0",)),
         ((), ("mesh0",)), "[all_reduce out over mesh1 + dot]"),
        ("SS = SS x SR @ {0,1} (reduce-scatter @ 1)", (("mesh0",), ("mesh1",)),
         (("mesh1",), ()), (("mesh0",), ("mesh1",)), "[reduce_scatter out n over mesh1 + dot]"),
        ("RR = RS x SR @ {0} (allreduce @ 0)", ((), ("mesh0",)), (("mesh0",), ()), WHOLE,
         "[all_reduce out over mesh0 + dot]"),
    ],
)  # fmt: skip
def test_a_strategy_s_contraction_is_right(
    strategy: str, lhs: Any, rhs: Any, out: Any, wanted: str
) -> None:
    """Its moves, run in NumPy on every rank, give the product sharded as it says."""
    given = plan()
    given["operators"][0]["strategy"] = strategy
    ((_, derived),) = import_alpa(json.dumps(given)).contractions
    assert str(derived) == wanted
    check(derived, lhs, rhs, out)


def check(derived: Derived, lhs: Any, rhs: Any, out: Any) -> None:
    rng = np.random.default_rng(0)
    x, w = (rng.integers(-4, 5, shape).astype(np.float64) for shape in ((8, 4), (4, 12)))
    mesh = dict(derived.mesh)
    parts = cut(x @ w, out, mesh)
    for at, part in simulate(derived, x, w, lhs, rhs).items():
        np.testing.assert_array_equal(part, parts[at])


def test_operands_held_otherwise_are_moved_first() -> None:
    given = plan()
    spec = "ShardingSpec((Chunked(4), NoSharding()), (ShardedAxis(axis=0),))"
    given["operators"][0]["lhs"]["sharding_spec"] = spec
    found = import_alpa(json.dumps(given))
    ((_, derived),) = found.contractions
    assert [one.kind for one in found.collectives] == ["all_to_all", "all_reduce"]
    check(derived, (("mesh0", "mesh1"), ()), (("mesh1",), ()), (("mesh0",), ()))


def test_without_a_strategy_the_specs_decide() -> None:
    given = plan()
    rows = "ShardingSpec((Chunked(4), NoSharding()), (ShardedAxis(axis=0),))"
    whole = "ShardingSpec((NoSharding(), NoSharding()), (Replicated(replicas=4),))"
    operator = given["operators"][0]
    del operator["strategy"]
    operator["lhs"]["sharding_spec"] = rows
    operator["rhs"]["sharding_spec"] = rows
    operator["out"] = {"sharding_spec": rows}
    ((_, derived),) = import_alpa(json.dumps(given)).contractions
    assert str(derived) == "[all_gather rhs k over mesh0,mesh1 + dot]"
    operator["rhs"]["sharding_spec"] = whole
    assert import_alpa(json.dumps(given)).collectives == ()


def test_groups_follow_the_device_assignment() -> None:
    found = import_alpa(json.dumps(plan(id_mesh=[[0, 2], [1, 3]])))
    assert found.collectives[0].groups == ((0, 2), (1, 3))


def test_notes() -> None:
    found = import_alpa((FIXTURES / "mlp.json").read_text())
    assert "layers=[0, 1]" in found.note("stage 0")
    assert dict(found.collectives[0].notes)["stage"] == "0"
    assert import_alpa((FIXTURES / "log.json").read_text()).note("solver objective") == "1.05"


def broken(path: str, value: Any) -> dict[str, Any]:
    """The plan with another value at ``path``; ``...`` leaves the field out."""
    found = copy.deepcopy(plan())
    *way, last = path.split("/")
    at: Any = found
    for step in way:
        at = at[int(step) if step.isdigit() else step]
    if value is ...:
        del at[last]
    else:
        at[last] = value
    return found


LOG = {"name": "p", "logical_mesh_shape": [2, 2]}
LINE = "0 p = f32[4,8] parameter(0)  S0"
BAD = [
    (broken("name", ...), "alpa: has no 'name'; needs name, logical_mesh_shape"),
    (broken("name", 3), "alpa.name: found 3, needs a string that is not empty"),
    (broken("more", 3), "alpa: has an unknown 'more'; known: name, logical_mesh_shape"),
    (broken("logical_mesh_shape", []), "alpa.logical_mesh_shape: found [], needs 1 to 65536"),
    (broken("logical_mesh_shape", [0]), "found 0, needs an integer in 1..65536"),
    (broken("logical_mesh_shape", [4096, 4096]), "needs 1 to 65536 devices in all"),
    (broken("id_mesh", [[0, 1]]), "alpa.id_mesh: found [[0, 1]], needs a list of 2"),
    (broken("id_mesh", [[0, 1], [2, 2]]), "needs the device numbers from 0 on, each once"),
    (broken("operators", ...), "needs operators, reshardings or auto_sharding_log"),
    (broken("operators", 1), "alpa.operators: found 1, needs a list"),
    (broken("operators/0/lhs/shape", []), "operators[0].lhs.shape: found [], needs 1 to 8 extents"),
    (broken("operators/0/lhs/dtype", "f32"), "lhs.dtype: found \"f32\", needs one of bfloat16"),
    (broken("operators/0/lhs/sharding_spec", "x"), "lhs.sharding_spec: alpa sharding spec: line 1"),
    (broken("operators/0/formula", "mk"), "alpa.operators[0]: formula 'mk': needs"),
    (broken("operators/0/formula", "mk,kn->m"), "letter n is in one array only"),
    (broken("operators/0/strategy", "SS = SR x RS @ {0,2}"), "(2, 2) has no dimension 2"),
    (broken("operators/0/strategy", "SS = SR x RR @ {0,1}"),
     "alpa.operators[0].strategy: strategy 'SS = SR x RR @ {0,1}': cuts 1 dimensions, names 2"),
    (broken("operators/0/strategy", "Sb_0 = Sb x Sb @ {0}"), "the contraction has no batch0"),
    (broken("operators/0/strategy", ...), "needs a strategy, or the specs of both operands"),
    (broken("operators/0/lhs/shape", [7, 4]), "letter m has extent 7, which the 2 ranks"),
    (LOG | {"auto_sharding_log": "x"}, "needs the line '=== Auto sharding strategy ==='"),
    (LOG | {"auto_sharding_log": f"=== Auto sharding strategy ===\n{LINE}"}, "was the log cut?"),
    (LOG | {"auto_sharding_log": f"=== Auto sharding strategy ===\n{LINE}\nx\n=== Memory ==="},
     "line 3 must be 1, an instruction and its strategy, found 'x'"),
    (LOG | {"auto_sharding_log": "=== Auto sharding strategy ===\n0 p = f32[  S0\n=== Memory ==="},
     "in the table, hlo: line 2"),
    (LOG | {"auto_sharding_log": f"=== Auto sharding strategy ===\n{LINE}\n"
            "1 d = f32[4,4] dot(p, p), lhs_contracting_dims={1}  RR\n=== Memory ==="},
     "contraction d: contracting dimensions [1] and [] do not fit"),
    (LOG | {"auto_sharding_log": f"=== Auto sharding strategy ===\n{LINE}\n"
            "1 d = f32[4,4] dot(p, p), lhs_contracting_dims={1}, rhs_contracting_dims={1}  RR\n- "},
     "dot d: strategy 'RR': needs the form"),
    (LOG | {"auto_sharding_log": f"=== Auto sharding strategy ===\n{LINE}\n"
            "1 t = () tuple()  R\n2 d = f32[4,4] dot(p, t)  RR\n- "}, "an operand is no array"),
    (LOG | {"auto_sharding_log": f"=== Auto sharding strategy ===\n{LINE}\n"
            "1 t = () tuple() u = () tuple()  R\n- "}, "its table needs one instruction a line"),
    (LOG | {"reshardings": [{"name": "r", "shape": [], "dtype": "float32", "src": "", "dst": ""}]},
     "alpa.reshardings[0].shape: found [], needs 1 to 8 extents"),
]  # fmt: skip


@pytest.mark.parametrize(("given", "message"), BAD, ids=range(len(BAD)))
def test_malformed_plans(given: Any, message: str) -> None:
    with pytest.raises(FormatError, match=re.escape(message)):
        import_alpa(json.dumps(given))
