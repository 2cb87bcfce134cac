"""Templates as attempts: where a regular topology has just the links that one takes, it may be as
good as what matching finds, and on some it is perfect."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from syncopate_jax.ir.comm import REDUCTIONS
from syncopate_jax.ir.plan import Plan
from syncopate_jax.registry import templates
from syncopate_jax.synthesis.nodes import nodes_of
from syncopate_jax.synthesis.request import Request

# Rings with each of their splits; and plans in one hop, where latencies and overheads count.
_SPLITS, _WHOLE = (1, 2, 4), (1,)
_Known = tuple[tuple[str, dict[str, Any], tuple[int, ...]], ...]
_TEMPLATES: dict[str, _Known] = {
    "all_gather": (
        ("all_gather_ring", {}, _SPLITS),
        ("all_gather_double_ring", {}, _SPLITS),
        ("all_gather_swizzle", {}, _WHOLE),
    ),
    "reduce_scatter": (
        ("reduce_scatter_ring", {}, _SPLITS),
        ("reduce_scatter_direct", {}, _WHOLE),
    ),
    "all_reduce": (
        ("all_reduce_two_shot", {"algorithm": "ring"}, _SPLITS),
        ("all_reduce_two_shot", {"algorithm": "direct"}, _WHOLE),
    ),
    "all_to_all": (("all_to_all_blocks", {}, _WHOLE),),
}
_TWO_AXES: _Known = (("all_to_all_waves", {}, _WHOLE),)  # of an all-to-all from one axis to another
# Where nodes are joined by slower links, of which each operation takes long, finer ones pay too.
_OVER_NODES = ("all_gather", "reduce_scatter", "all_reduce")
_NODE_SPLITS = (1, 2, 4, 8)
# Ranks up to which time is short and templates that take no account of nodes are tried;
# operations of others, up to so many ranks and beyond, at most.
_FEW = 64
_MOST = {True: 40_000, False: 600_000}


def known_plans(request: Request) -> Iterator[Plan]:
    """The plans of templates that do what is asked over links that are there.

    None for a part of the topology's ranks.
    """
    net = request.network
    everyone = tuple(range(request.topology.num_ranks))
    if request.members != everyone or len(everyone) < 2:
        return
    if len(net.channels) == 1:
        if len(everyone) <= _FEW:
            yield from _flat(request)
    elif request.kind in _OVER_NODES:
        yield from _over_nodes(request)


def _flat(request: Request) -> Iterator[Plan]:
    net, ranks = request.network, len(request.members)
    joined = np.eye(ranks, dtype=bool)
    joined[net.src, net.dst] = True
    known = _TEMPLATES.get(request.kind, ()) if request.after is None else _TWO_AXES
    for name, extra, splits in known:
        for split in splits:
            plan: Plan = templates.get(name)(
                ranks,
                request.shards.shape,
                split=split,
                channel=net.channels[0],
                **_arguments(request),
                **extra,
            )
            c = plan.columns
            if not np.all(joined[c.src_rank, c.dst_rank]):
                break
            yield plan


def _over_nodes(request: Request) -> Iterator[Plan]:
    nodes, ranks = nodes_of(request.network), len(request.members)
    if nodes is None:
        return
    copies = request.topology.channel(nodes.inner).bandwidth.diagonal()
    if request.kind == "all_reduce" and not np.all(copies > 0):
        return
    phases = 2 if request.kind == "all_reduce" else 1
    for split in _NODE_SPLITS:
        if phases * ranks * ranks * split > _MOST[ranks <= _FEW]:
            return
        plan: Plan = templates.get(f"hierarchical_{request.kind}")(
            ranks,
            request.shards.shape,
            split=split,
            nodes=nodes.sizes,
            channel=nodes.inner,
            outer_channel=nodes.outer,
            **_arguments(request),
        )
        yield plan


def _arguments(request: Request) -> dict[str, Any]:
    """What the templates are told of the request."""
    arguments: dict[str, Any] = {
        "dtype": request.dtype,
        "mode": "pull" if request.pull else "push",
        "produced": request.produced,
        "tensor": request.tensor,
        "name": request.where,
    }
    shards, after = request.shards, request.after
    if after is not None:
        arguments |= {"split_from": shards.axis, "shards": shards.sizes}
        return arguments | {"split_to": after.axis, "shards_to": after.sizes}
    arguments["axis"] = shards.axis
    if request.kind in ("all_reduce", "all_to_all"):
        arguments["out"] = request.out
    if request.kind == "all_to_all":
        return arguments | {"counts": request.sent.tolist()}
    arguments["shards"] = shards.sizes
    if request.kind != "all_gather":
        arguments["reduce"] = REDUCTIONS[request.reduce]
    return arguments
