"""Makes a plan for a topology: attempts of several sizes and styles, of which the best is kept.

Attempts are ranked by the synthesiser's own clock; the best few are then simulated, with queues and
ports contended for, beside templates that the topology can carry, and the fastest is the plan.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from syncopate_jax.check.simulate import simulate
from syncopate_jax.ir.arguments import integer
from syncopate_jax.ir.plan import Plan
from syncopate_jax.ir.shards import check_listed, check_pieces
from syncopate_jax.ir.topology import Topology
from syncopate_jax.synthesis.bound import Bound
from syncopate_jax.synthesis.bundles import bundled_drafts, has_several_hops
from syncopate_jax.synthesis.chain import best_pieces, find_chains
from syncopate_jax.synthesis.draft import Draft, chained, draft, one_shot_draft
from syncopate_jax.synthesis.known import known_plans
from syncopate_jax.synthesis.matching import Style
from syncopate_jax.synthesis.merged import merged_drafts
from syncopate_jax.synthesis.request import Request, make_request

# Chunks a shard that are tried, as long as attempts get better with more of them.
_PIECES = (1, 2, 4, 8, 16)
# Transfers of all attempts together beyond which no further one is begun.
_BUDGET = 60_000
# Transfers of one attempt at a broadcast, up to 64 ranks and beyond: matched, and along chains.
_MATCHED, _CHAINED = {True: 40_000, False: 66_000}, {True: 150_000, False: 400_000}
# Numbers of pieces up to which all smaller powers of two are tried.
_CHEAP = 16
# Ranks one after the other through which a matched broadcast's pieces go, as far as their best
# number tells.
_DEPTH = 16
# Transfers of an all-to-all beyond which blocks are not sent one by one.
_MOST_HOPS = 1_000_000
# An attempt this near the bound needs no better one.
_NEAR = 1.01
# Beyond this, overheads count, and operations that carry several shards are tried.
_FAR = 1.1
# Attempts that are simulated: some anyway, and more of them if they are small.
_FINAL, _SMALL = 2, 16_000
# Ranks up to which time is short.
_FEW = 64
# Deadlines that slow links are given, as multiples of the bound.
_DEADLINES = (1.0, 1.05, math.inf)


def synthesize(
    kind: str,
    topology: Topology,
    shape: Sequence[int],
    *,
    group: Sequence[int] | None = None,
    dimension: int = 0,
    sizes: Sequence[Any] | None = None,
    to_dimension: int | None = None,
    sizes_to: Sequence[int] | None = None,
    root: int | None = None,
    reduce: str = "sum",
    dtype: str = "bfloat16",
    chunks: int | None = None,
    tries: int = 2,
    seed: int = 0,
    one_shot: bool = True,
    channels: Sequence[str] | None = None,
    mode: str = "push",
    produced: bool | None = None,
    tensor: str | None = None,
    out: str | None = None,
    name: str | None = None,
) -> Plan:
    """A plan of ``kind`` for ``topology``; the same arguments give the same plan.

    Data is laid out as by the templates: an all-gather or a broadcast fills the shared tensor
    ``x``; a reduce-scatter leaves each member's shard of ``y`` in place; an all-reduce sums ``y``
    into ``out``; an all-to-all sends blocks of ``send`` to ``recv`` or, with ``to_dimension``,
    moves the sharding of the shared ``x`` from one dimension to the other. Ranks outside the group
    take part only where the group's own links do not join it.

    Args:
      kind: one of ``comm.COLLECTIVES``.
      shape: extents of the whole tensor (an all-to-all's without ``to_dimension``: of what each
        member sends), in elements.
      group: the ranks of ``topology`` that take part, in order; all if None.
      dimension: along which shards or blocks are cut.
      sizes: extent of each member's shard along ``dimension``; of an all-to-all's blocks, by
        destination, or a row a source. As equal as can be if None.
      to_dimension, sizes_to: of an all-to-all that changes the sharded dimension.
      root: of a broadcast; the group's first rank if None.
      chunks: pieces a shard (or block); tried out if None.
      tries: attempts with random ties, beside the one with none.
      seed: of random ties.
      one_shot: whether members of an all-reduce may add whole partials to each other's sums, which
        is fastest for small tensors; not where sums are to replace partials.
      channels: names of the channels used; if None, all but ``host``, or with it where the group
        is not joined without.
      mode: ``push`` lists transfers on their senders, ``pull`` on their receivers.
      produced: whether compute tiles produce the data; only for reductions if None.
      tensor, out: names of the tensors.

    Raises:
      InputError: an argument is out of range, or ranks cannot reach each other; it names them.
    """
    request = make_request(
        kind, topology, shape, group=group, dimension=dimension, sizes=sizes,
        to_dimension=to_dimension, sizes_to=sizes_to, root=root, reduce=reduce, dtype=dtype,
        channels=channels, mode=mode, produced=produced, tensor=tensor, out=out, name=name,
    )  # fmt: skip
    counts = None if chunks is None else (integer(request.where, "chunks", chunks, 1),)
    if counts is not None:
        _check_chunks(request, *counts)
    tries, seed = (
        integer(request.where, label, n, 0) for label, n in (("tries", tries), ("seed", seed))
    )
    return _best(request, counts, tries, seed, one_shot)


def bound(kind: str, topology: Topology, shape: Sequence[int], **arguments: Any) -> Bound:
    """What no plan for these arguments of ``synthesize`` (those of the data) can beat."""
    return make_request(kind, topology, shape, **arguments).bound()


def _best(
    request: Request, counts: tuple[int, ...] | None, tries: int, seed: int, one_shot: bool
) -> Plan:
    least = request.bound().seconds
    if request.kind == "broadcast":
        found = list(_broadcasts(request, counts, tries, seed, least))
    elif counts is None and _block_hops(request) > _MOST_HOPS and has_several_hops(request):
        found = list(bundled_drafts(request))
    else:
        found = list(_attempts(request, counts or _PIECES, tries, seed, least))
    if request.kind == "all_reduce" and counts is None and one_shot:
        small = one_shot_draft(request, min(one.seconds for one in found))
        found += [] if small is None else [small]
    if counts is None and min(one.seconds for one in found) > _FAR * least:
        found += merged_drafts(request)
        found += bundled_drafts(request) if _block_hops(request) <= _MOST_HOPS else ()
    found.sort(key=lambda one: one.seconds)
    before = np.cumsum([0, *(one.transfers for one in found)])
    last = max(_FINAL, int(np.searchsorted(before, _SMALL)))
    plans = [build() for one in found[:last] for build in one.builds]
    if counts is None and found[0].seconds > _NEAR * least:
        plans += known_plans(request)
    if len(plans) == 1:
        return plans[0]
    return min(plans, key=lambda plan: simulate(plan, request.topology).makespan)


def _check_chunks(request: Request, chunks: int) -> None:
    """Raises InputError where so many chunks a shard, or block, make a plan too long."""
    members, shards = len(request.members), request.shards
    parts, extent = len(shards.sizes), max(shards.sizes)
    if request.kind == "all_to_all":
        parts = members * members
        extent = int(request.sent.max()) if request.after is None else max(request.after.sizes)
    pieces = parts * max(1, min(chunks, extent))
    check_pieces(request.where, chunks, pieces, members, "chunks")
    if request.kind != "all_to_all":
        check_listed(request.where, pieces * (members - 1))


def _block_hops(request: Request) -> float:
    """Transfers of an all-to-all whose blocks are sent one by one; 0 for any other kind."""
    if request.kind != "all_to_all" or request.after is not None:
        return 0.0
    members = np.array(request.members)
    return float(request.network.hops()[np.ix_(members, members)][request.sent > 0].sum())


def _attempts(
    request: Request, counts: tuple[int, ...], tries: int, seed: int, least: float
) -> Iterator[Draft]:
    """Attempts with more and more pieces, until these do not pay or the budget is spent."""
    best, spent, worse = math.inf, 0, 0
    for pieces in counts:
        fastest = math.inf
        for style in _styles(request, tries, seed, least):
            one = draft(request, pieces, style)
            yield one
            fastest = min(fastest, one.seconds)
            spent += one.transfers
            if fastest <= _NEAR * least or spent > _BUDGET:
                break
        worse = worse + 1 if fastest >= best else 0
        best = min(best, fastest)
        if worse == 2 or best <= _NEAR * least or spent * 2 > _BUDGET:
            return


def _broadcasts(
    request: Request, counts: tuple[int, ...] | None, tries: int, seed: int, least: float
) -> Iterator[Draft]:
    """Attempts at a broadcast: along chains, then matched, and the best of these cut otherwise."""
    net, few = request.network, len(request.members) <= _FEW
    size = request.demand().sizes.sum()
    chains = find_chains(net, request.root, request.pull)
    if chains is not None and size:
        most = max(_CHAINED[few] // chains.hops, 1)
        yield chained(request, counts[0] if counts else best_pieces(chains, size, most), chains)
    pieces = counts[0] if counts else _pieces(request, size, _MATCHED[few])
    # How ties are best broken is tried with fewer pieces, which takes less time.
    trial = pieces if counts or pieces <= _CHEAP else pieces // 2
    styles = list(_styles(request, (tries + 1) // 2, seed, least))
    made = [(draft(request, trial, style), style) for style in styles]
    yield from (one for one, _ in made)
    _, style = min(made, key=lambda pair: pair[0].seconds)
    if counts is None and size:
        others = {pieces >> k for k in range(5 if pieces <= _CHEAP else 1)} - {0, trial}
        others |= {pieces * 2} if few else set()
        yield from (draft(request, other, style) for other in sorted(others))


def _pieces(request: Request, size: float, most: int) -> int:
    """A power of two near the number of pieces that suits a broadcast, of at most ``most`` sends.

    As of a chain of ``_DEPTH`` hops: more pieces cost overheads, fewer keep ranks waiting.
    """
    net = request.network
    own = net.src == request.root
    overhead, rate = net.overhead.max(initial=0.0), net.bandwidth[own].max(initial=0.0)
    limit = most // max(len(request.members) - 1, 1)
    best = math.sqrt(_DEPTH * size / rate / overhead) if overhead and rate else limit
    return 1 << int(math.log2(min(max(best, 1.0), max(limit, 1))) + 0.5)


def _styles(request: Request, tries: int, seed: int, least: float) -> Iterator[Style]:
    if request.kind == "all_to_all":
        yield from (Style(one) for one in (None, *range(seed, seed + tries)))
        return
    slow = len(request.network.src) and request.network.levels().max() > 0
    for one in (None, *range(seed, seed + tries)):
        deadlines = _DEADLINES if slow else (math.inf,)
        for deadline in deadlines[-2:] if request.kind == "broadcast" else deadlines:
            yield Style(one, deadline * least / (2 if request.kind == "all_reduce" else 1))
