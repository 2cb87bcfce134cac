"""Templates as attempts: where a regular topology has just the links that one takes, it may be as
good as what matching finds, and on some it is perfect."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from syncopate_jax.ir.comm import REDUCTIONS
from syncopate_jax.ir.plan import Plan
from syncopate_jax.registry import templates
from syncopate_jax.synthesis.request import Request

_TEMPLATES: dict[str, tuple[tuple[str, dict[str, Any]], ...]] = {
    "all_gather": (("all_gather_ring", {}), ("all_gather_double_ring", {})),
    "reduce_scatter": (("reduce_scatter_ring", {}),),
    "all_reduce": (("all_reduce_two_shot", {"algorithm": "ring"}),),
}
_SPLITS = (1, 2, 4)


def known_plans(request: Request) -> Iterator[Plan]:
    """The plans of templates that do what is asked over links that are there.

    None for a part of the topology's ranks, or where several channels are used.
    """
    net = request.network
    everyone = tuple(range(request.topology.num_ranks))
    if request.members != everyone or len(net.channels) != 1 or len(everyone) < 2:
        return
    joined = np.eye(len(everyone), dtype=bool)
    joined[net.src, net.dst] = True
    arguments: dict[str, Any] = {
        "axis": request.shards.axis,
        "shards": request.shards.sizes,
        "dtype": request.dtype,
        "mode": "pull" if request.pull else "push",
        "produced": request.produced,
        "tensor": request.tensor,
        "name": request.where,
        "channel": net.channels[0],
    }
    if request.kind != "all_gather":
        arguments["reduce"] = REDUCTIONS[request.reduce]
    if request.kind == "all_reduce":
        arguments["out"] = request.out
    for name, extra in _TEMPLATES.get(request.kind, ()):
        for split in _SPLITS:
            plan: Plan = templates.get(name)(
                len(everyone), request.shards.shape, split=split, **arguments, **extra
            )
            c = plan.columns
            if not np.all(joined[c.src_rank, c.dst_rank]):
                break
            yield plan
