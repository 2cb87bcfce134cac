"""What happens before what: issue order, dependencies, cycles, and levels of the plan's rows.

In the *issue* graph a row follows its dependencies and the row issued before it on its rank and
channel, and the rows of one collective are one node, since each blocks until all are there. A cycle
in it is a deadlock. The *happens-before* graph has dependencies alone, since issue order says
nothing about completion: a P2P row follows what it waits for; a collective's row follows what those
members wait for whose data it receives, as a member that sends it nothing may come later.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from syncopate_jax.check.collectives import Instances, Transfers
from syncopate_jax.check.integers import distinct, expand
from syncopate_jax.check.report import Report
from syncopate_jax.ir import comm
from syncopate_jax.ir.plan import Plan

Array = np.ndarray


@dataclass(frozen=True, slots=True, eq=False)
class Order:
    """The happens-before graph of a plan without deadlock.

    Its nodes are the rows, then for each row of a collective the point from which it may start.

    Attributes:
      level: [rows] every row's level is above those of the rows it follows.
      position: [rows] place of each row in one legal order (by level, then row).
      depth: [nodes] a level for each node, as fine as the edges need.
      tail, head: [edges] the head follows the tail.
      entry: [rows] the node that follows a row's dependencies: its start, or a P2P row itself.
    """

    level: Array
    position: Array
    depth: Array
    tail: Array
    head: Array
    entry: Array


def node_of_row(plan: Plan, instances: list[Instances]) -> tuple[Array, int]:
    """[rows] node of each row with collectives merged, and the number of nodes."""
    node = np.arange(plan.columns.n)
    count = plan.columns.n
    for block in instances:
        ids = count + np.arange(len(block.rows))
        node[block.rows] = ids[:, None]
        count += len(block.rows)
    return node, count


def check_order(plan: Plan, instances: list[Instances], report: Report) -> None:
    """Finds one cycle of operations that wait for each other, and names all of it."""
    c = plan.columns
    index = np.arange(c.n) - c.row_start(plan.num_ranks)[c.rank]
    if not instances and np.all(c.dep_index < index[c.dep_owner()]):
        return  # every edge raises the index, so no path returns
    edges = _issue_edges(plan)
    node, count = node_of_row(plan, instances)
    level = find_levels(count, node[edges[0]], node[edges[1]])
    if np.any(level[node] < 0):
        cycle = _find_cycle(edges, node, level)
        head = cycle[0][1]
        report.add("deadlock", *report.place(head), _cycle_text(plan, report, cycle))


def happens_before(plan: Plan, instances: list[Instances], transfers: Transfers) -> Order:
    """The happens-before graph of a plan in which ``check_order`` finds nothing."""
    c = plan.columns
    dep, owner = c.dep_row(plan.num_ranks), c.dep_owner()
    node, count = node_of_row(plan, instances)
    level = find_levels(count, node[dep], node[owner])[node]
    position = np.empty(c.n, np.int64)
    position[np.argsort(level, kind="stable")] = np.arange(c.n)
    members = np.flatnonzero(c.kind != 0)
    entry = np.arange(c.n)
    entry[members] = c.n + np.arange(len(members))
    sent = np.flatnonzero(c.kind[transfers.src_row] != 0)
    depth = np.concatenate([2 * level + 1, 2 * level[members]])
    tail = np.concatenate([dep, entry[members], entry[transfers.src_row[sent]]])
    head = np.concatenate([entry[owner], members, transfers.dst_row[sent]])
    return Order(level, position, depth, tail, head, entry)


def find_levels(count: int, tail: Array, head: Array) -> Array:
    """[count] length of the longest path to each node; -1 on a cycle and behind one."""
    if not len(head):
        return np.zeros(count, np.int64)
    level = np.full(count, -1, np.int64)
    waiting = np.bincount(head, minlength=count)
    start, follows = group_edges(tail, head, count)
    ready = np.flatnonzero(waiting == 0)
    depth = 0
    while len(ready):
        level[ready] = depth
        freed = follows[expand(start[ready], start[ready + 1])]
        if len(freed) > count:
            waiting -= np.bincount(freed, minlength=count)
        else:
            np.subtract.at(waiting, freed, 1)
        ready = distinct(freed[waiting[freed] == 0])
        depth += 1
    return level


def group_edges(by: Array, other: Array, count: int) -> tuple[Array, Array]:
    """Edges grouped by one end: where the group of each node starts, and the other ends."""
    start = np.zeros(count + 1, np.int64)
    np.cumsum(np.bincount(by, minlength=count), out=start[1:])
    if np.all(by[1:] >= by[:-1]):
        return start, other
    return start, other[np.argsort(by)]


def _issue_edges(plan: Plan) -> tuple[Array, Array, Array]:
    """Tail row, head row, and whether the edge is a dependency (else issue order)."""
    c = plan.columns
    dep, owner = c.dep_row(plan.num_ranks), c.dep_owner()
    by_port = np.lexsort((np.arange(c.n), c.channel, c.rank))
    first, second = by_port[:-1], by_port[1:]
    follows = (c.rank[first] == c.rank[second]) & (c.channel[first] == c.channel[second])
    first, second = first[follows], second[follows]
    is_dep = np.arange(len(dep) + len(first)) < len(dep)
    return np.concatenate([dep, first]), np.concatenate([owner, second]), is_dep


def _find_cycle(
    edges: tuple[Array, Array, Array], node: Array, level: Array
) -> list[tuple[int, int, bool]]:
    """One cycle as edges (tail row, head row, is a dependency), each the cause of the one before.

    Every node without a level has a predecessor without one, so walking backwards must return.
    """
    stuck = np.flatnonzero((level[node[edges[0]]] < 0) & (level[node[edges[1]]] < 0))
    tails, heads, is_dep = (column[stuck].tolist() for column in edges)
    cause: dict[int, tuple[int, int, bool]] = {}
    for tail, head, dep in zip(tails, heads, is_dep, strict=True):
        cause.setdefault(int(node[head]), (tail, head, dep))
    seen: dict[int, int] = {}
    path: list[tuple[int, int, bool]] = []
    at = int(node[heads[0]])
    while at not in seen:
        seen[at] = len(path)
        path.append(cause[at])
        at = int(node[path[-1][0]])
    return path[seen[at] :]


def _cycle_text(plan: Plan, report: Report, cycle: list[tuple[int, int, bool]]) -> str:
    c = plan.columns
    steps = []
    for (tail, head, dep), (_, following, _) in zip(cycle, cycle[1:] + cycle[:1], strict=True):
        how = "waits for" if dep else f"is issued on channel {plan.channels[c.channel[head]]} after"
        step = f"{report.name(head)} {how} {report.name(tail)}"
        if following != tail:
            step += f", which meets {report.name(following)} in a {comm.KINDS[c.kind[tail]]}"
        steps.append(step)
    return "; ".join(steps) + "; break this cycle"
