"""What every registered backend must do: say why it cannot, or be right.

The works are made of every registered template, its data read by a kernel's tiles or written by
them, on two and on three ranks, and of a user's plan that does both. What a rank should get is
what the plan's goals say, by the NumPy oracle. Where a target cannot run, its programs are lowered.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from syncopate_jax.backends.interface import Backend, Work
from syncopate_jax.check.goals import run_goals
from syncopate_jax.compiler import compile as fuse
from syncopate_jax.errors import InputError, UnsupportedError
from syncopate_jax.ir.plan import Plan
from syncopate_jax.kernel.frame import corners, frame_box
from syncopate_jax.kernel.local import PallasKernel
from syncopate_jax.options import Launch
from syncopate_jax.pallas_kernels import contraction_mosaic_gpu, matmul_tpu
from syncopate_jax.passes.expand_collectives import expand_collectives
from syncopate_jax.registry import backends, templates
from syncopate_jax.runtime.operator import Operator
from tests.backends import own_kernels
from tests.conformance.template import VARIANTS
from tests.ops import cases

INNER = 3
PLATFORMS = {"tpu": "tpu", "mosaic_gpu": "cuda", "triton": "cuda"}
SMALL, LARGE = ((12, 6), "float32"), ((1536, 768), "bfloat16")
"""Shape and dtype of what runs and of what is lowered; two and three ranks divide the extents."""


@dataclass(frozen=True)
class Task:
    """A template with its arguments, between what ranks hold and what a kernel's tiles touch.

    Attributes:
      produced: tiles write the data; else they read it.
    """

    template: str
    ranks: int
    produced: bool
    options: dict[str, Any] = field(default_factory=dict, hash=False)

    def __str__(self) -> str:
        side = "written" if self.produced else "read"
        options = "-".join(f"{key}={value}" for key, value in self.options.items())
        return "-".join(filter(None, (self.template, options, side, str(self.ranks))))

    def plan(self, shape: tuple[int, int], dtype: str) -> Plan:
        template = templates.get(self.template)
        given: dict[str, Any] = {"dtype": dtype, "produced": self.produced} | self.options
        known = inspect.signature(template).parameters
        return template(self.ranks, shape, **{k: v for k, v in given.items() if k in known})

    def work(self, backend: Backend, target: str, *, large: bool) -> Work:
        """The work for ``backend``; made by the reference, which takes what any backend can take.

        Raises UnsupportedError where ranks start with data that no operand of the kernel is.
        """
        plan = expand_collectives(self.plan(*(LARGE if large else SMALL)))
        make = _large_kernel if large else _small_kernel
        kernel, operand = make(plan, target, self.produced)
        launch = Launch(sms=132)
        work = fuse(
            kernel, plan, {bound(plan, self.produced): operand}, axis_name="t", backend="xla",
            target=target if target in PLATFORMS else "tpu", launch=launch,
        ).work  # fmt: skip
        return work if backend.name == "xla" else _rescheduled(backend, work, target)


def _rescheduled(backend: Backend, work: Work, target: str) -> Work:
    """The work with a schedule for as many executors of tiles as the backend has."""
    from syncopate_jax.passes.schedule_plan import schedule_plan

    plan = work.schedule.plan
    workers = backend.workers(work.launch, plan.num_ranks) if target in backend.targets else 1
    schedule = schedule_plan(
        plan, work.space, work.accesses, work.axis_map, workers=max(workers, 1)
    )
    return Work(
        work.kernel, schedule, work.space, work.accesses, work.axis_map, ("t",), work.launch
    )


def bound(plan: Plan, produced: bool) -> str:
    """The tensor that tiles touch."""
    if produced:
        return next(region.tensor for region in plan.initial if region.produced)
    return plan.goals[0].tensor


def _touched(plan: Plan, produced: bool) -> tuple[int, int]:
    """Rows and columns of what tiles touch on a rank."""
    lo, hi = frame_box(plan, bound(plan, produced), write=produced)
    rows, columns = map(int, (hi - lo).max(axis=0))
    return rows, columns


def _small_kernel(plan: Plan, target: str, produced: bool) -> tuple[PallasKernel, str]:
    """A user's kernel, and the operand that the plan's tensor is."""
    rows, columns = _touched(plan, produced)
    if produced:
        return own_kernels.product(rows, INNER, columns, 2, has_addend=True), "out"
    return own_kernels.scale(rows, columns), "x"


def _large_kernel(plan: Plan, target: str, produced: bool) -> tuple[PallasKernel, str]:
    """A product in tiles that the target has, and the operand that the plan's tensor is."""
    rows, columns = _touched(plan, produced)
    sizes = {"m": rows, "n": columns if produced else 256, "k": 256 if produced else columns}
    _, dtype = LARGE
    letters = ("mk", "kn", "mn", sizes)
    if target == "mosaic_gpu":
        _, config = contraction_mosaic_gpu.choose_config("mn", sizes, {}, dtype, workers=1)
        kernel = contraction_mosaic_gpu.contraction(
            *letters, config=config, dtype=dtype, out_dtype=dtype
        )
    else:
        tiles = {"m": 128, "n": 128, "k": 128}
        kernel = matmul_tpu.matmul(*letters, tiles=tiles, dtype=dtype, out_dtype=dtype)
    return kernel, "out" if produced else "lhs"


def _tasks(ranks: int) -> list[Task]:
    return [
        Task(name, ranks, produced, options)
        for name in templates.names()
        for options in VARIANTS.get(name, [{}])
        for produced in (False, True)
    ]


def _usual(task: Task) -> bool:
    """Whether it is quick: tiles read what is gathered and write what is reduced."""
    return task.options in ({}, {"kind": "all_gather"}) and task.produced == (
        "reduce" in task.template
    )


QUICK = (
    *filter(_usual, _tasks(2)),
    Task("all_gather_swizzle", 2, False, {"mode": "pull"}),
    Task("all_to_all_blocks", 2, True),
)
LOWERED = (Task("all_gather_ring", 2, False), Task("reduce_scatter_ring", 2, True))
TASKS = (*QUICK, *(task for task in (*_tasks(2), *_tasks(3)) if task not in QUICK))
"""The slow ones: the other way round, with templates' own arguments, and over three ranks."""


def _cases(quick: Sequence[Task], targets: Sequence[str]) -> Any:
    """Every registered backend, each of ``targets`` that it has, and every task."""
    return [
        pytest.param(
            name, target, task, id=f"{name}-{target}-{task}",
            marks=[] if task in quick else [pytest.mark.slow],
        )
        for name in backends.names()
        for target in backends.get(name).targets
        if target in targets
        for task in TASKS
    ]  # fmt: skip


def assert_helpful(reason: str) -> None:
    """A refusal says what to do instead."""
    assert len(reason) > 20
    assert any(word in reason for word in ("use", "with", "give", "choose", "must", "order"))


def accepted(task: Task, backend: Backend, target: str, *, large: bool) -> Work | None:
    """The work, if the backend can do it; what it says otherwise must help."""
    try:
        work = task.work(backend, target, large=large)
    except (UnsupportedError, InputError) as error:
        if isinstance(error, InputError) and "to no operand or result" not in str(error):
            raise  # a task binds one tensor, where some plans start from another
        assert_helpful(str(error))
        return None
    reason = backend.unsupported_reason(work, target)
    if reason is None:
        return work
    assert_helpful(reason)
    return None


def run(work: Work, backend: Backend, operands: Sequence[np.ndarray]) -> np.ndarray:
    """The result of every rank, from its operands: both with a leading rank axis."""
    operator = Operator(work, backend, "tpu")
    fn = jax.shard_map(
        lambda *local: operator(*(x[0] for x in local))[0][None],
        mesh=cases.ranks_mesh(len(operands[0])),
        in_specs=jax.P("t"),
        out_specs=jax.P("t"),
        check_vma=False,
    )
    return np.asarray(jax.jit(fn)(*map(jnp.asarray, operands)))


def assert_goals(
    plan: Plan, values: dict[str, np.ndarray], found: np.ndarray, lo: np.ndarray, factor: Any
) -> None:
    """``found[rank]`` starts at ``lo[rank]``, and holds each goal's value times ``factor``'s."""
    for outcome in run_goals(plan, values):
        rank, box = outcome.goal.rank, outcome.goal.box
        where = tuple(
            slice(a - start, b - start)
            for a, b, start in zip(box.lo, box.hi, lo[rank], strict=True)
        )
        wanted = outcome.expected * factor(rank)[where[:1]]
        chex.assert_trees_all_close(found[rank][where], wanted, rtol=1e-5, atol=1e-5)


class BackendConformance:
    """Subclass it in a test module to run it."""

    @pytest.fixture(params=backends.names())
    def backend(self, request: pytest.FixtureRequest) -> Backend:
        return backends.get(request.param)

    def test_is_called_what_it_is_registered_as(self, backend: Backend) -> None:
        assert backends.get(backend.name) is backend
        assert backend.targets and set(backend.targets) <= set(PLATFORMS)

    def test_refuses_a_target_it_does_not_know(self, backend: Backend) -> None:
        reason = backend.unsupported_reason(QUICK[0].work(backend, "abacus", large=False), "abacus")
        assert reason and "abacus" in reason

    @pytest.mark.parametrize("name,target,task", _cases(QUICK, ["tpu"]))
    def test_says_why_not_or_is_right(self, name: str, target: str, task: Task) -> None:
        backend = backends.get(name)
        work = accepted(task, backend, target, large=False)
        if work is None:
            return
        (self._written if task.produced else self._read)(work, backend)

    def _read(self, work: Work, backend: Backend) -> None:
        plan, rng = work.schedule.plan, np.random.default_rng(0)
        tensor = plan.tensor(bound(plan, produced=False))
        per_rank = (plan.num_ranks,) if tensor.per_rank else ()
        value = rng.standard_normal((*per_rank, *tensor.shape)).astype("f")
        regions = [r for r in plan.initial if r.tensor == tensor.name]
        held, _ = corners(plan, tensor.name, ((r.rank, r.box) for r in regions))
        shape = Operator(work, backend, "tpu").operand_shapes()["x"]
        x = np.zeros((plan.num_ranks, *shape), "f")
        for region in regions:
            place = tuple(
                slice(a - start, b - start)
                for a, b, start in zip(region.box.lo, region.box.hi, held[region.rank], strict=True)
            )
            own = value[region.rank] if tensor.per_rank else value
            x[region.rank][place] = own[region.box.slices]
        rows = work.kernel.out_shape[0].shape[0]
        s = rng.standard_normal((plan.num_ranks, rows, 1)).astype("f")
        lo, _ = frame_box(plan, tensor.name, write=False)
        found = run(work, backend, [x, s])
        assert_goals(plan, {tensor.name: value}, found, lo, lambda rank: s[rank])

    def _written(self, work: Work, backend: Backend) -> None:
        plan, rng = work.schedule.plan, np.random.default_rng(0)
        tensor = plan.tensor(bound(plan, produced=True))
        rows, columns = work.kernel.out_shape[0].shape
        x = rng.standard_normal((plan.num_ranks, rows, INNER)).astype("f")
        w = rng.standard_normal((plan.num_ranks, INNER, columns)).astype("f")
        lo, hi = frame_box(plan, tensor.name, write=True)
        per_rank = (plan.num_ranks,) if tensor.per_rank else ()
        value = np.zeros((*per_rank, *tensor.shape), "f")
        for rank in range(plan.num_ranks):
            box = tuple(map(slice, lo[rank], hi[rank]))
            size = tuple(slice(0, n) for n in hi[rank] - lo[rank])
            (value[rank] if tensor.per_rank else value)[box] = (x[rank] @ w[rank])[size]
        home = plan.goals[0].tensor
        ends, _ = corners(plan, home, ((g.rank, g.box) for g in plan.goals if g.tensor == home))
        found = run(work, backend, [x, w])
        assert_goals(plan, {tensor.name: value}, found, ends, lambda rank: np.ones((99, 1), "f"))

    def test_a_gathered_operand_and_a_scattered_result(self, backend: Backend) -> None:
        plan = own_kernels.gather_and_scatter_plan(2, (8, 3), (8, 6))
        kernel = own_kernels.product(8, 3, 6, 2, has_addend=True)
        compiled = functools.partial(
            fuse, kernel, plan, {"x": "x", "y": "out"}, axis_name="t", backend=backend.name
        )
        if "tpu" not in backend.targets:
            with pytest.raises(UnsupportedError, match=f"{backend.name}: .*'tpu'"):
                compiled()
            return
        rng = np.random.default_rng(0)
        x, w = (rng.standard_normal((2, *s)).astype("f") for s in ((4, 3), (3, 6)))
        found = run(compiled().work, backend, [x, w])
        total = sum(np.concatenate(x) @ w[rank] for rank in range(2))
        chex.assert_trees_all_close(np.concatenate(found), total, rtol=1e-5, atol=1e-5)

    @pytest.mark.parametrize("name,target,task", _cases(LOWERED, list(PLATFORMS)))
    def test_says_why_not_or_is_lowered(self, name: str, target: str, task: Task) -> None:
        backend = backends.get(name)
        work = accepted(task, backend, target, large=True)
        if work is None:
            return
        lowered = lower(work, backend, target)
        calls = lowered.count("custom_call @tpu_custom_call")
        calls += lowered.count("custom_call @mosaic_gpu_v2")
        assert calls == (0 if backend.name == "xla" else 1)


def lower(work: Work, backend: Backend, target: str) -> str:
    """The program of all ranks for the target's platform."""
    operator = Operator(work, backend, target)
    kernel, ranks = work.kernel, work.schedule.plan.num_ranks
    shapes = operator.operand_shapes()
    rows, columns = kernel.out_shape[0].shape
    depth = work.accesses["lhs"].shape[1] if "lhs" in shapes else 256
    shapes = {"lhs": (rows, depth), "rhs": (depth, columns)} | shapes
    dtype = kernel.out_shape[0].dtype
    operands = [jax.ShapeDtypeStruct((ranks, *shapes[n]), dtype) for n in kernel.operands]
    fn = jax.shard_map(
        lambda *local: operator(*(x[0] for x in local))[0][None],
        mesh=cases.ranks_mesh(ranks),
        in_specs=jax.P("t"),
        out_specs=jax.P("t"),
        check_vma=False,
    )
    text: str = (
        jax.jit(fn).trace(*operands).lower(lowering_platforms=(PLATFORMS[target],)).as_text()
    )
    return text
