"""Matrix products beside plans: what to schedule, run on the NumPy oracle and compare."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from syncopate_jax.check.execute_schedule import execute_schedule
from syncopate_jax.ir.build import build_plan
from syncopate_jax.ir.comm import OpDep
from syncopate_jax.ir.plan import Plan
from syncopate_jax.ir.schedule import Schedule
from syncopate_jax.kernel.access import Access, AnyAccess, BoxAccess
from syncopate_jax.kernel.axis_map import AxisMap
from syncopate_jax.kernel.tiles import Axis, TileSpace
from syncopate_jax.registry import templates

Array = np.ndarray
N = 4  # columns of w


@dataclass(frozen=True)
class Case:
    """``y = x @ w`` on every rank, one of x and y communicated.

    ``x[rank]`` is what tiles of the rank read, whole; ``w[rank]`` the other operand.
    """

    plan: Plan
    space: TileSpace
    accesses: Mapping[str, AnyAccess]
    axis_map: AxisMap
    x: list[Array]
    w: list[Array]
    inputs: dict[tuple[int, str], Array]
    expected: dict[tuple[int, str], tuple[tuple[slice, ...], Array]]
    given: tuple = field(init=False)

    def __post_init__(self) -> None:
        given = (self.plan, self.space, self.accesses, self.axis_map)
        object.__setattr__(self, "given", given)

    def tile(self, rank: int, tile: int, step: int, blocks: dict[str, Array]) -> dict[str, Array]:
        """The product of one tile and step; the block of x is cut where the rank's x ends."""
        (m_axis, n_axis), (k_axis,) = self.space.parallel, self.space.reduction
        i, j = divmod(tile, n_axis.count)
        x = self.x[rank]
        rows = slice(i * m_axis.tile, min((i + 1) * m_axis.tile, x.shape[0]))
        inner = slice(step * k_axis.tile, min((step + 1) * k_axis.tile, x.shape[1]))
        columns = slice(j * n_axis.tile, min((j + 1) * n_axis.tile, self.w[rank].shape[1]))
        block = blocks["x"] if "x" in blocks else x[rows, inner]
        full = self.accesses["y"].shape
        out = block @ self.w[rank][inner, columns]
        if "y" not in {binding.operand for binding in self.axis_map.bindings}:
            height = min((i + 1) * m_axis.tile, full[0]) - min(i * m_axis.tile, full[0])
            out = np.concatenate([out, np.zeros((height - len(out), out.shape[1]))])
        return {"y": out}

    def run(self, schedule: Schedule, seed: int) -> dict[tuple[int, str], Array]:
        return execute_schedule(
            schedule, *self.given[1:], self.tile, self.inputs, seed, accumulate=np.float64
        )

    def wrong(self, schedule: Schedule, seed: int) -> list[tuple[int, str]]:
        """Where a run's results differ from NumPy's; NaN differs from everything."""
        found = self.run(schedule, seed)
        return [
            key
            for key, (at, wanted) in self.expected.items()
            if not np.allclose(found[key][at], wanted, rtol=1e-12, atol=1e-12)
        ]


def product(m: int, k: int, tiles: tuple[int, int, int]) -> tuple[TileSpace, dict[str, AnyAccess]]:
    tm, tn, tk = tiles
    space = TileSpace((Axis("m", m, tm), Axis("n", N, tn), Axis("k", k, tk, reduction=True)))
    accesses: dict[str, AnyAccess] = {
        "x": Access("x", (m, k), ("m", "k")),
        "y": Access("y", (m, N), ("m", "n"), write=True),
    }
    return space, accesses


def boxed(case: Case) -> Case:
    """The same case with accesses given box by box."""
    accesses = {
        name: BoxAccess(name, a.shape, *a.boxes(case.space), write=a.write)
        for name, a in case.accesses.items()
    }
    return replace(case, accesses=accesses)


def full(array: Array) -> tuple[tuple[slice, ...], Array]:
    return tuple(slice(None) for _ in array.shape), array


def gather(
    template: str,
    ranks: int,
    m: int = 12,
    k: int = 6,
    axis: int = 0,
    tiles: tuple[int, int, int] = (2, 2, 3),
    **options,
) -> Case:
    """x is gathered along its rows or its contraction."""
    rng = np.random.default_rng(ranks)
    plan = templates.get(template)(ranks, (m, k), axis=axis, **options)
    x, w = rng.standard_normal((m, k)), rng.standard_normal((k, N))
    space, accesses = product(m, k, tiles)
    return Case(
        plan,
        space,
        accesses,
        AxisMap.of({"x": "x"}),
        [x] * ranks,
        [w] * ranks,
        {(r, "x"): x for r in range(ranks)},
        {(r, "y"): full(x @ w) for r in range(ranks)},
    )


def scatter(
    template: str,
    ranks: int,
    m: int = 12,
    axis: int = 0,
    reduce: str = "sum",
    tiles: tuple[int, int, int] = (2, 2, 3),
    **options,
) -> Case:
    """y is reduced and scattered, or reduced onto every rank as ``out``."""
    rng = np.random.default_rng(ranks)
    k = 5
    plan = templates.get(template)(ranks, (m, N), axis=axis, reduce=reduce, **options)
    x = [rng.standard_normal((m, k)) for _ in range(ranks)]
    w = [rng.standard_normal((k, N)) for _ in range(ranks)]
    space, accesses = product(m, k, tiles)
    partial = np.stack([a @ b for a, b in zip(x, w, strict=True)])
    whole = partial.sum(0) if reduce == "sum" else partial.max(0)
    return Case(
        plan,
        space,
        accesses,
        AxisMap.of({"y": "y"}),
        x,
        w,
        {},
        {(g.rank, g.tensor): (g.box.slices, whole[g.box.slices]) for g in plan.goals},
    )


def resharded(ranks: int, m: int = 12, k: int = 6, **options) -> Case:
    """x goes from columns to rows before the product."""
    rng = np.random.default_rng(ranks)
    plan = templates.get("all_to_all_waves")(ranks, (m, k), split_from=1, split_to=0, **options)
    x, w = rng.standard_normal((m, k)), rng.standard_normal((k, N))
    rows = {goal.rank: goal.box.slices[0] for goal in plan.goals}
    mine = [x[rows.get(r, slice(0, 0))] for r in range(ranks)]
    space, accesses = product(max(len(part) for part in mine), k, (2, 2, 2))
    return Case(
        plan,
        space,
        accesses,
        AxisMap.of({"x": "x"}),
        mine,
        [w] * ranks,
        {(r, "x"): x for r in range(ranks)},
        {(r, "y"): ((slice(0, len(mine[r])), slice(None)), mine[r] @ w) for r in range(ranks)},
    )


def sent_out(ranks: int, m: int = 12, **options) -> Case:
    """y goes from rows to columns after the product."""
    rng = np.random.default_rng(ranks)
    k = 5
    plan = templates.get("all_to_all_waves")(
        ranks, (m, N), split_from=0, split_to=1, produced=True, tensor="y", **options
    )
    x, w = rng.standard_normal((m, k)), rng.standard_normal((k, N))
    rows = {region.rank: region.box.slices[0] for region in plan.initial}
    mine = [x[rows.get(r, slice(0, 0))] for r in range(ranks)]
    space, accesses = product(max(len(part) for part in mine), k, (2, 2, 2))
    return Case(
        plan,
        space,
        accesses,
        AxisMap.of({"y": "y"}),
        mine,
        [w] * ranks,
        {},
        {(g.rank, "y"): (g.box.slices, (x @ w)[g.box.slices]) for g in plan.goals},
    )


def dispatched(counts: list[list[int]], k: int = 6, **options) -> Case:
    """Blocks of any size arrive in ``recv``, as in an expert dispatch, and are multiplied."""
    ranks = len(counts)
    rng = np.random.default_rng(ranks)
    m = max(sum(row) for row in counts)
    plan = templates.get("all_to_all_blocks")(ranks, (m, k), counts=counts, **options)
    send = [rng.standard_normal((m, k)) for _ in range(ranks)]
    mine = []
    for d in range(ranks):
        starts = [sum(counts[s][:d]) for s in range(ranks)]
        parts = [send[s][a : a + counts[s][d]] for s, a in enumerate(starts)]
        mine.append(np.concatenate(parts))
    w = [rng.standard_normal((k, N)) for _ in range(ranks)]
    space, accesses = product(plan.tensor("recv").shape[0], k, (3, 2, 6))
    return Case(
        plan,
        space,
        accesses,
        AxisMap.of({"recv": "x"}),
        mine,
        w,
        {(r, "send"): send[r] for r in range(ranks)},
        {(r, "y"): ((slice(0, len(mine[r])), slice(None)), mine[r] @ w[r]) for r in range(ranks)},
    )


def gather_and_scatter(ranks: int, m: int = 12, channel: str = "nic", **options) -> Case:
    """x is gathered and y reduced and scattered, in one plan of two channels (or one)."""
    rng = np.random.default_rng(ranks)
    k = 6
    first = templates.get("all_gather_swizzle")(ranks, (m, k), **options)
    second = templates.get("reduce_scatter_ring")(ranks, (m, N), channel=channel, **options)
    x = rng.standard_normal((m, k))
    w = [rng.standard_normal((k, N)) for _ in range(ranks)]
    space, accesses = product(m, k, (2, 2, 3))
    whole = sum(x @ part for part in w)
    return Case(
        beside(first, second),
        space,
        accesses,
        AxisMap.of({"x": "x", "y": "y"}),
        [x] * ranks,
        w,
        {(r, "x"): x for r in range(ranks)},
        {(g.rank, "y"): (g.box.slices, whole[g.box.slices]) for g in second.goals},
    )


def beside(first: Plan, second: Plan) -> Plan:
    """Both plans in one, each rank issuing the operations of ``first`` before the others."""
    before = [len(list(first.ops(r))) for r in range(first.num_ranks)]

    def moved(dep):
        return OpDep(dep.rank, dep.index + before[dep.rank]) if isinstance(dep, OpDep) else dep

    lists = [
        [
            *first.ops(r),
            *(replace(op, deps=tuple(map(moved, op.deps))) for op in second.ops(r)),
        ]
        for r in range(first.num_ranks)
    ]
    return build_plan(
        f"{first.name}+{second.name}",
        first.num_ranks,
        [*first.tensors, *second.tensors],
        [*first.initial, *second.initial],
        [*first.goals, *second.goals],
        lists,
    )


CASES: dict[str, Callable[[int], Case]] = {
    "gather_m_swizzle": lambda w: gather("all_gather_swizzle", w, split=2),
    "gather_m_ring_ragged": lambda w: gather("all_gather_ring", w, m=13),
    "gather_m_pull": lambda w: gather("all_gather_swizzle", w, mode="pull"),
    "gather_m_double_ring": lambda w: gather("all_gather_double_ring", w),
    "gather_m_mesh": lambda w: gather("all_gather_mesh", w),
    "gather_k": lambda w: gather("all_gather_swizzle", w, k=12, axis=1, split=2),
    "gather_k_ragged": lambda w: gather("all_gather_ring", w, k=13, axis=1),
    "scatter_direct": lambda w: scatter("reduce_scatter_direct", w, m=2 * w),
    "scatter_direct_pull": lambda w: scatter("reduce_scatter_direct", w, m=2 * w, mode="pull"),
    "scatter_direct_max": lambda w: scatter("reduce_scatter_direct", w, m=2 * w, reduce="max"),
    "scatter_ring_split": lambda w: scatter("reduce_scatter_ring", w, m=4 * w, split=2),
    "scatter_ring_pull": lambda w: scatter("reduce_scatter_ring", w, m=2 * w, mode="pull"),
    "scatter_ring_ragged": lambda w: scatter(
        "reduce_scatter_ring", w, m=2 * w + 3, shards=[2] * (w - 1) + [5]
    ),
    "scatter_ring_empty": lambda w: scatter(
        "reduce_scatter_ring", w, m=2 * w, shards=[2 * w] + [0] * (w - 1)
    ),
    "all_reduce_direct": lambda w: scatter("all_reduce_two_shot", w, m=4 * w, split=2),
    "all_reduce_joined": lambda w: scatter("all_reduce_two_shot", w, m=2 * w, most_listed=1),
    "all_reduce_ring": lambda w: scatter("all_reduce_two_shot", w, m=2 * w, algorithm="ring"),
    "all_reduce_ring_pull": lambda w: scatter(
        "all_reduce_two_shot", w, m=2 * w, algorithm="ring", mode="pull"
    ),
    "to_rows": lambda w: resharded(w, m=2 * w + 1),
    "to_rows_pull": lambda w: resharded(w, mode="pull", split=2),
    "to_columns": lambda w: sent_out(w, m=2 * w + 1),
    "to_columns_pull": lambda w: sent_out(w, mode="pull"),
    "dispatch": lambda w: dispatched([[(3 * s + d * d) % 5 for d in range(w)] for s in range(w)]),
    "gather_and_scatter": lambda w: gather_and_scatter(w, m=2 * w),
    "gather_and_scatter_one_channel": lambda w: gather_and_scatter(w, m=2 * w, channel="nvlink"),
}
