"""Random plans and topologies against a second, slower simulator that shares no code with ours."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncopate_jax.check.simulate import simulate
from syncopate_jax.ir.comm import OpDep, Operation
from syncopate_jax.ir.plan import Plan
from syncopate_jax.ir.topology import Channel, Topology
from tests.check.small_schedules import plan_of, send


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Up to 4 ranks and 10 transfers on 2 channels; each may wait for earlier ones."""
    ranks = draw(st.integers(1, 4))
    some_rank = st.integers(0, ranks - 1)
    ops: list[list[Operation]] = [[] for _ in range(ranks)]
    made: list[OpDep] = []
    for _ in range(draw(st.integers(0, 10))):
        src, dst, push = draw(some_rank), draw(some_rank), draw(st.booleans())
        deps = draw(st.lists(st.sampled_from(made), max_size=2, unique=True)) if made else []
        size = draw(st.sampled_from([0, 100, 250, 1000]))
        on = src if push else dst
        name = draw(st.sampled_from(["nvlink", "nic"]))
        made.append(OpDep(on, len(ops[on])))
        ops[on].append(send(src, dst, size, *deps, on=on, channel=name))
    return plan_of(*ops)


@st.composite
def topologies(draw: st.DrawFn, ranks: int) -> Topology:
    speed = st.sampled_from([100.0, 250.0, 1000.0])

    def channel(name: str) -> Channel:
        ports = draw(st.integers(1, ranks))

        def matrix(values: st.SearchStrategy[float]) -> list[list[float]]:
            return [[draw(values) for _ in range(ranks)] for _ in range(ranks)]

        return Channel(
            name,
            np.array(matrix(speed)),
            np.array(matrix(st.sampled_from([0.0, 0.25]))),
            np.array([draw(st.integers(0, ports - 1)) for _ in range(ranks)]),
            np.array([draw(speed) for _ in range(ports)]),
            np.array([draw(speed) for _ in range(ports)]),
            overhead=draw(st.sampled_from([0.0, 0.125])),
            local_ports=draw(st.booleans()),
        )

    return Topology("random", ranks, (channel("nvlink"), channel("nic")))


def fair_rates(flows: dict[int, tuple[list[tuple[object, float]], float]]) -> dict[int, float]:
    """Max-min fair rates by raising all flows together; each has (port, capacity) pairs, a link."""
    rates = dict.fromkeys(flows, 0.0)
    growing = set(flows)
    while growing:
        steps = [flows[f][1] - rates[f] for f in growing]
        for port, capacity in {pair for ports, _ in flows.values() for pair in ports}:
            users = [f for f in flows if port in dict(flows[f][0])]
            rising = growing & set(users)
            if rising:
                steps.append((capacity - sum(rates[f] for f in users)) / len(rising))
        for f in growing:
            rates[f] += min(steps)
        full = {
            port
            for port, capacity in {pair for ports, _ in flows.values() for pair in ports}
            if sum(rates[f] for f in flows if port in dict(flows[f][0])) >= capacity - 1e-9
        }
        growing -= {
            f
            for f in growing
            if rates[f] >= flows[f][1] - 1e-9 or any(port in full for port, _ in flows[f][0])
        }
    return rates


def slow_finish(plan: Plan, topology: Topology) -> list[float]:
    """When each operation lands, by going through every operation at every instant."""
    ops = {(r, i): op for r in range(plan.num_ranks) for i, op in enumerate(plan.ops(r))}
    issued: dict[tuple[int, int], float] = {}
    left: dict[tuple[int, int], float] = {}
    landed: dict[tuple[int, int], float] = {}
    now = 0.0
    while len(landed) < len(ops):
        for key, op in ops.items():
            before = [k for k in ops if k[0] == key[0] and k[1] < key[1]]
            mine = [k for k in before if ops[k].channel == op.channel]
            ready = all(landed.get((d.rank, d.index), math.inf) <= now + 1e-12 for d in op.deps)
            if key not in issued and ready and all(k in landed for k in mine):
                issued[key] = now
                left[key] = float(op.src.box.size)
        flows = {}
        names = list(ops)
        for key in issued:
            op = ops[key]
            channel = topology.channel(op.channel)
            if key in landed or issued[key] + channel.overhead > now + 1e-12:
                continue
            ports: list[tuple[object, float]] = []
            if op.src_rank != op.dst_rank or channel.local_ports:
                out, into = channel.port[op.src_rank], channel.port[op.dst_rank]
                ports = [
                    (f"{op.channel} out {out}", float(channel.egress[out])),
                    (f"{op.channel} in {into}", float(channel.ingress[into])),
                ]
            link = float(channel.bandwidth[op.src_rank, op.dst_rank])
            flows[names.index(key)] = (ports, link)
        rates = fair_rates(flows)
        times = [now + left[names[f]] / rates[f] for f in flows]
        times += [
            issued[k] + topology.channel(ops[k].channel).overhead for k in issued if k not in landed
        ]
        times += list(landed.values())
        after = min((t for t in times if t > now + 1e-12), default=now)
        gone = [f for f in flows if left[names[f]] <= 1e-9]
        if gone:
            after = now
        for f in flows:
            left[names[f]] -= rates[f] * (after - now)
        for f in flows:
            key = names[f]
            if left[key] <= 1e-9:
                op = ops[key]
                delay = topology.channel(op.channel).latency[op.src_rank, op.dst_rank]
                landed[key] = after + float(delay)
        now = after
    return [landed[key] for key in ops]


@given(st.data())
def test_agrees_with_the_slow_simulator(data: st.DataObject) -> None:
    plan = data.draw(plans())
    topology = data.draw(topologies(plan.num_ranks))
    found = simulate(plan, topology)
    assert found.op_finish.tolist() == pytest.approx(slow_finish(plan, topology), abs=1e-6)


@given(st.data())
def test_times_obey_the_plan_and_the_topology(data: st.DataObject) -> None:
    plan = data.draw(plans())
    topology = data.draw(topologies(plan.num_ranks))
    found = simulate(plan, topology)
    ops = [(r, i, op) for r in range(plan.num_ranks) for i, op in enumerate(plan.ops(r))]
    row = {(r, i): n for n, (r, i, _) in enumerate(ops)}
    carried: dict[tuple[str, str, int], float] = {}
    for n, (_, _, op) in enumerate(ops):
        channel = topology.channel(op.channel)
        assert all(found.op_start[n] >= found.op_finish[row[d.rank, d.index]] for d in op.deps)
        link = channel.bandwidth[op.src_rank, op.dst_rank]
        least = channel.overhead + op.src.box.size / link
        least += channel.latency[op.src_rank, op.dst_rank]
        assert found.op_finish[n] - found.op_start[n] >= least * (1 - 1e-9)
        if op.src_rank != op.dst_rank or channel.local_ports:
            for side, rank in (("out", op.src_rank), ("in", op.dst_rank)):
                key = (op.channel, side, int(channel.port[rank]))
                carried[key] = carried.get(key, 0.0) + op.src.box.size
    for (name, side, port), size in carried.items():
        channel = topology.channel(name)
        capacity = (channel.egress if side == "out" else channel.ingress)[port]
        assert size / capacity <= found.makespan * (1 + 1e-9)
    for earlier, later in itertools.pairwise(found.critical_path()):
        assert earlier.start <= later.start <= earlier.finish * (1 + 1e-9)
