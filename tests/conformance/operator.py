"""What every operator of ``syncopate_jax.ops`` must do; a new one is found by what it takes.

An operator is a function of ``x`` and ``w`` whose other arguments are keywords. How its arrays are
sharded follows from what it is registered as; ``tests/ops/cases.py`` has its variants.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from typing import Any

import chex
import jax
import jax.numpy as jnp
import pytest

from syncopate_jax import ops, registry
from syncopate_jax.errors import InputError, MeshError
from syncopate_jax.registry import backends
from tests.ops import cases
from tests.ops.cases import CASES, Case


def operators() -> dict[str, Any]:
    """Public functions of x, w and a mesh axis in the package's files, by name.

    ``matmul`` is none of them: it takes whole sharded arrays and finds its mesh axes itself.
    """
    found = {}
    for entry in pkgutil.iter_modules(ops.__path__):
        module = importlib.import_module(f"{ops.__name__}.{entry.name}")
        for name, fn in inspect.getmembers(module, inspect.isfunction):
            parameters = list(inspect.signature(fn).parameters)
            here = fn.__module__ == module.__name__ and not name.startswith("_")
            if here and parameters[:2] == ["x", "w"] and "axis_name" in parameters:
                found[name] = fn
    return found


OPERATORS = operators()
OPTIONS = ("axis_name", "preferred_element_type", "backend", "target", "plan", "split", "tiles")


class OperatorConformance:
    """Subclass it in a test module to run it."""

    @pytest.fixture(params=OPERATORS)
    def operator(self, request: pytest.FixtureRequest) -> Any:
        return OPERATORS[request.param]

    @pytest.fixture(params=CASES, ids=lambda case: case.name)
    def case(self, request: pytest.FixtureRequest) -> Case:
        return request.param

    def test_is_offered_by_the_package(self, operator: Any) -> None:
        assert getattr(ops, operator.__name__) is operator

    def test_has_a_case_by_what_it_is_registered_as(self, operator: Any) -> None:
        found = cases.case_of(operator.__name__)
        assert any(
            (found.x, found.w, found.out) == (case.x, case.w, case.out) and not case.options
            for case in CASES
            if case.operator is operator
        )

    def test_is_registered_by_what_it_does(self, operator: Any) -> None:
        spec = registry.operators.get(operator.__name__)
        assert (spec.lhs, spec.rhs, spec.out) == ("bmk", "kn", "bmn") and spec.kind != "none"

    def test_has_a_variant_among_the_cases(self, operator: Any) -> None:
        assert [case.name for case in CASES if case.operator is operator]

    def test_takes_two_arrays_and_the_usual_keywords(self, operator: Any) -> None:
        parameters = inspect.signature(operator).parameters
        assert list(parameters)[:2] == ["x", "w"]
        for name in OPTIONS:
            assert parameters[name].kind is inspect.Parameter.KEYWORD_ONLY
        required = [n for n, p in parameters.items() if p.default is inspect.Parameter.empty]
        assert required == ["x", "w", "axis_name"]

    def test_documents_shapes_results_and_errors(self, operator: Any) -> None:
        text = operator.__doc__
        assert text and all(part in text for part in ("Args:", "Returns:", "Raises:", "[..., M"))

    def test_names_itself_in_errors(self, operator: Any) -> None:
        with pytest.raises(MeshError, match=f"{operator.__name__} communicates over mesh axis"):
            operator(jnp.ones((4, 4)), jnp.ones((4, 4)), axis_name="t")
        with pytest.raises(InputError, match=f"{operator.__name__}: w must be"):
            operator(jnp.ones((4, 4)), jnp.ones(4), axis_name="t")

    def test_shape_and_type_do_not_depend_on_the_backend(self, case: Case) -> None:
        x, w, ct = cases.operands(2, 12, 12, 12)
        mesh = cases.ranks_mesh(3)
        for backend in ("auto", *backends.names()):
            if not _for_tpu(backend):
                continue
            y = jax.eval_shape(cases.sharded(case, mesh, backend=backend), x, w)
            chex.assert_shape(y, ct.shape)
            chex.assert_type(y, ct.dtype)

    def test_equals_float64(self, case: Case) -> None:
        arrays = cases.operands(1, 6, 6, 6)
        fn = cases.sharded(case, cases.ranks_mesh(2))
        found = cases.value_and_gradients(fn, *arrays)
        cases.assert_near(found, cases.exact(*arrays), 1e-6)


def _for_tpu(backend: str) -> bool:
    return backend == "auto" or "tpu" in backends.get(backend).targets
