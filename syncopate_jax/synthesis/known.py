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

_TEMPLATES: dict[str, tuple[tuple[str, dict[str, Any]], ...]] = {
    "all_gather": (("all_gather_ring", {}), ("all_gather_double_ring", {})),
    "reduce_scatter": (("reduce_scatter_ring", {}),),
    "all_reduce": (("all_reduce_two_shot", {"algorithm": "ring"}),),
}
_SPLITS = (1, 2, 4)
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
    for name, extra in _TEMPLATES.get(request.kind, ()):
        for split in _SPLITS:
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
        "axis": request.shards.axis,
        "shards": request.shards.sizes,
        "dtype": request.dtype,
        "mode": "pull" if request.pull else "push",
        "produced": request.produced,
        "tensor": request.tensor,
        "name": request.where,
    }
    if request.kind != "all_gather":
        arguments["reduce"] = REDUCTIONS[request.reduce]
    if request.kind == "all_reduce":
        arguments["out"] = request.out
    return arguments
