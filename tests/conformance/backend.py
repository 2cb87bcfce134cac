"""What every registered backend must do: say why it cannot, or be right.

The works are plans of every template and of users, with kernels that gather, that walk what is
gathered, that scatter, and that do both.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from syncopate_jax.backends.interface import Backend, Work
from syncopate_jax.compiler import compile as fuse
from syncopate_jax.ir.plan import Plan
from syncopate_jax.kernel.local import PallasKernel
from syncopate_jax.registry import backends, templates
from syncopate_jax.runtime.operator import Operator
from tests.backends import own_kernels
from tests.ops import cases

RANKS, ROWS = 2, 8


@dataclass(frozen=True)
class Task:
    """A kernel, a plan and what every rank should get."""

    name: str
    kernel: Callable[[], PallasKernel]
    plan: Callable[[], Plan]
    bound: dict[str, str]
    operands: tuple[tuple[int, ...], ...]
    wanted: Callable[..., list[np.ndarray]]

    def work(self) -> Work:
        # The reference takes any plan that verifies, so that the work can be built.
        return fuse(self.kernel(), self.plan(), self.bound, axis_name="t", backend="xla").work


def _scaled(x: np.ndarray, s: np.ndarray) -> list[np.ndarray]:
    """From stacked operands [ranks, ...]: each rank scales all rows by its own s."""
    return [np.concatenate(x) * s[r] for r in range(RANKS)]


def _product(x: np.ndarray, w: np.ndarray) -> list[np.ndarray]:
    total = sum(x[r] @ w[r] for r in range(RANKS))
    return np.split(total, RANKS)


def _both(x: np.ndarray, w: np.ndarray) -> list[np.ndarray]:
    return np.split(sum(np.concatenate(x) @ w[r] for r in range(RANKS)), RANKS)


def _gathered(template: str, **options: Any) -> Task:
    return Task(
        f"{template}-{options}" if options else template,
        lambda: own_kernels.scale(ROWS, 4),
        lambda: templates.get(template)(RANKS, (ROWS, 4), dtype="float32", **options),
        {"x": "x"},
        ((ROWS // RANKS, 4), (ROWS, 1)),
        _scaled,
    )


def _reduced(template: str, has_addend: bool = True) -> Task:
    return Task(
        f"{template}-{'addend' if has_addend else 'plain'}",
        lambda: own_kernels.product(ROWS, 3, 6, 2, has_addend=has_addend),
        lambda: templates.get(template)(RANKS, (ROWS, 6), dtype="float32", tensor="y"),
        {"y": "out"},
        ((ROWS, 3), (3, 6)),
        _product,
    )


TASKS = (
    *(_gathered(t) for t in ("all_gather_swizzle", "all_gather_ring")),
    _gathered("all_gather_swizzle", mode="pull"),
    _gathered("all_gather_swizzle", split=2),
    _gathered("collective", kind="all_gather"),
    _reduced("reduce_scatter_direct"),
    _reduced("reduce_scatter_ring"),
    _reduced("reduce_scatter_direct", has_addend=False),
    Task(
        "both",
        lambda: own_kernels.product(ROWS, 3, 6, 2, has_addend=True),
        lambda: own_kernels.gather_and_scatter_plan(RANKS, (ROWS, 3), (ROWS, 6)),
        {"x": "x", "y": "out"},
        ((ROWS // RANKS, 3), (3, 6)),
        _both,
    ),
)


class BackendConformance:
    """Subclass it in a test module to run it."""

    @pytest.fixture(params=backends.names())
    def backend(self, request: pytest.FixtureRequest) -> Backend:
        return backends.get(request.param)

    def test_is_called_what_it_is_registered_as(self, backend: Backend) -> None:
        assert backends.get(backend.name) is backend
        assert backend.targets and all(isinstance(target, str) for target in backend.targets)

    def test_refuses_a_target_it_does_not_know(self, backend: Backend) -> None:
        reason = backend.unsupported_reason(TASKS[0].work(), "abacus")
        assert reason and "abacus" in reason

    @pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
    def test_says_why_not_or_is_right(self, backend: Backend, task: Task) -> None:
        work = task.work()
        target = "tpu"
        reason = backend.unsupported_reason(work, target)
        if reason is not None:
            assert len(reason) > 20 and ("use" in reason or "with" in reason or "give" in reason)
            return
        rng = np.random.default_rng(0)
        given = [rng.standard_normal((RANKS, *s)).astype("f") for s in task.operands]
        operator = Operator(work, backend, target)
        fn = jax.shard_map(
            lambda *local: operator(*(x[0] for x in local))[0][None],
            mesh=cases.ranks_mesh(RANKS),
            in_specs=jax.P("t"),
            out_specs=jax.P("t"),
        )
        found = np.asarray(jax.jit(fn)(*map(jnp.asarray, given)))
        for one, wanted in zip(found, task.wanted(*given), strict=True):
            np.testing.assert_allclose(one, wanted, rtol=1e-5, atol=1e-5)
