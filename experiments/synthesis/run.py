"""How near the bound synthesised plans and the best templates come, and how long synthesis takes.

Run from the root of the repository: ``python experiments/synthesis/run.py``; ``--table`` prints the
results of the last run as the tables of docs/synthesis.md. All times are ``simulate``'s; every
plan is verified.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from syncopate_jax.check.simulate import simulate
from syncopate_jax.check.verify import check
from syncopate_jax.errors import InputError
from syncopate_jax.ir import presets
from syncopate_jax.ir.topology import Topology, link_channel
from syncopate_jax.registry import templates
from syncopate_jax.synthesis.synthesize import bound, synthesize

RESULTS = Path(__file__).parent.parent / "results" / "synthesis.json"
MIB = 1 << 20
RANKS = (4, 8, 16, 32, 64)
SMALL_RANKS = (8, 64)
GRIDS = {4: (2, 2), 8: (2, 4), 16: (4, 4), 32: (4, 8), 64: (8, 8), 256: (16, 16)}
KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast")
# Bytes of a shard (all_to_all: of a block; broadcast: of the tensor), by bandwidth and by latency.
LARGE = dict.fromkeys(KINDS, 64 * MIB) | {"all_to_all": 16 * MIB, "broadcast": 16384 * MIB}
SMALL = dict.fromkeys(KINDS, 64 * 1024) | {"broadcast": MIB}
PARTS = {"large": LARGE, "small": SMALL}
PARTS_TEXT = {
    "large": "Bandwidth: 64 MiB a shard, 16 MiB a block, 16 GiB to broadcast",
    "small": "Latency: 64 KiB a shard or block, 1 MiB to broadcast",
}
TIMES_TEXT = {"cpu_s": "of the processor", "wall_s": "by the clock"}


def one_way_channels(grid: Topology) -> Topology:
    """The links of a ring or torus with a channel for each direction, so that a rank may send to
    all its neighbours at once. Where two directions lead to one neighbour, they are one channel."""
    old = grid.channels[0]
    steps: dict[int, np.ndarray] = {}
    for s, d in zip(*np.nonzero(old.bandwidth), strict=True):
        if s != d:
            size = grid.num_ranks
            step = (d - s) % size
            columns = GRIDS[size][1] if "torus" in grid.name else size
            row = (d // columns - s // columns) % (size // columns)
            step = row * columns * 2 + (d - s) % columns if "torus" in grid.name else step
            steps.setdefault(int(step), np.zeros_like(old.bandwidth))[s, d] = old.bandwidth[s, d]
    channels = tuple(
        link_channel(
            "nvlink" if k == 0 else f"nvlink{k}",
            matrix + np.diag(np.diagonal(old.bandwidth)),
            latency=float(old.latency.max()),
            overhead=old.overhead,
            port_bandwidth=float(matrix.max()),
        )
        for k, (_, matrix) in enumerate(sorted(steps.items()))
    )
    name = f"{grid.name}, {len(channels)} channels"
    return Topology(name, grid.num_ranks, channels, grid.flops, grid.signal_latency)


def topologies(ranks: int) -> dict[str, Topology]:
    """By family, the topologies of so many ranks."""
    ring, torus = presets.ring(ranks), presets.torus(*GRIDS[ranks])
    return {
        "fully connected": presets.h200_nvlink(ranks),
        "ring": ring,
        "ring, a channel each way": one_way_channels(ring),
        "torus": torus,
        "torus, a channel each way": one_way_channels(torus),
        "two nodes": presets.nodes(2, ranks // 2),
    }


def shape_of(kind: str, ranks: int, size: int) -> tuple[int, int]:
    """Extents in bfloat16 of the whole tensor, of which dimension 0 is cut."""
    rows = 256 if size >= 16 * MIB else 16
    if kind == "broadcast":
        return (1 << 20, size // 2 >> 20) if size >= 1024 * MIB else (1024, size // 2048)
    return (ranks * rows, size // rows // 2)


def candidates(
    kind: str, topology: Topology, shape: tuple[int, int], small: bool
) -> Iterator[tuple[str, Any]]:
    """The templates that do ``kind``, with what arguments make sense: (label, plan)."""
    ranks = topology.num_ranks
    tried: list[tuple[str, dict[str, Any]]] = [
        (name, {}) for name in templates.names() if name.startswith((kind, f"hierarchical_{kind}"))
    ]
    if kind == "all_to_all":
        tried = [("all_to_all_blocks", {}), ("hierarchical_all_to_all", {})]
    if kind == "all_reduce" and ranks <= 64:
        tried.append(("all_reduce_two_shot", {"algorithm": "ring"}))
    if kind == "broadcast":
        tried.append(("broadcast", {"algorithm": "direct"}))
    if any(channel.name == "nic" for channel in topology.channels):
        nodes = (ranks // 2, ranks // 2)
        tried = [
            (name, arguments | {"nodes": nodes, "outer_channel": "nic"})
            for name, arguments in tried
            if name.startswith("hierarchical")
        ]
        if kind == "all_gather":
            tried.append(("all_gather_double_ring", {"inner": ranks // 2, "outer_channel": "nic"}))
            mesh = {"mesh": (2, ranks // 2)}
            tried.append(("all_gather_mesh", mesh | {"first": "rows"}))
            tried[-1][1].update(channel="nic", second_channel="nvlink")
            tried.append(("all_gather_mesh", mesh | {"second_channel": "nic"}))
    splits = (1, 4) if ranks > 16 or small else (1, 2, 4, 8)
    if kind == "broadcast":
        splits = (1, 8) if small else (64, 256)
    for name, arguments in tried:
        for split in splits:
            plan = templates.get(name)(ranks, shape, split=split, **arguments)
            yield f"{name} {arguments or ''} split {split}".replace("  ", " "), plan


def best_template(
    kind: str, topology: Topology, shape: tuple[int, int], small: bool
) -> tuple[str, float]:
    """The template that is fastest on the topology and its seconds; none can: "none", inf."""
    best, least = "none", float("inf")
    for label, plan in candidates(kind, topology, shape, small):
        try:
            seconds = simulate(plan, topology).makespan
        except InputError:
            continue  # it uses links that are not there
        if seconds < least:
            best, least = label, seconds
    return best, least


def measure(kind: str, family: str, topology: Topology, part: str) -> dict[str, Any]:
    """One row of the results."""
    size = PARTS[part][kind]
    shape = shape_of(kind, topology.num_ranks, size)
    begun, began = time.process_time(), time.monotonic()
    plan = synthesize(kind, topology, shape)
    took, lasted = time.process_time() - begun, time.monotonic() - began
    check(plan)
    seconds = simulate(plan, topology).makespan
    least = bound(kind, topology, shape)
    row = {
        "part": part,
        "family": family,
        "ranks": topology.num_ranks,
        "kind": kind,
        "bytes": size,
        "operations": plan.num_ops,
        "origin": plan.origins[0].partition("(")[0]
        + " "
        + plan.origins[0].rpartition(", ")[2][:-1],
        "cpu_s": round(took, 3),
        "wall_s": round(lasted, 3),
        "load": round(os.getloadavg()[0], 1),
        "us": round(seconds * 1e6, 2),
        "bound_us": round(least.seconds * 1e6, 2),
        "bound_by": least.term,
        "ratio": round(seconds / least.seconds, 4),
    }
    if topology.num_ranks <= 64:
        label, template = best_template(kind, topology, shape, part == "small")
        row |= {"template": label, "template_us": round(template * 1e6, 2)}
        row["template_us"] = None if template == float("inf") else row["template_us"]
    return row


def table(rows: list[dict[str, Any]], part: str) -> str:
    """Ratios to the bound by topology and ranks, the best template's in brackets."""
    lines = []
    shown = [
        ranks
        for ranks in (*RANKS, 256)
        if any((r["part"], r["ranks"]) == (part, ranks) for r in rows)
    ]
    for kind in KINDS:
        lines += ["", f"{kind}:", "", "| topology | " + " | ".join(map(str, shown)) + " |"]
        lines.append("|---" * (1 + len(shown)) + "|")
        families = dict.fromkeys(row["family"] for row in rows if row["part"] == part)
        for family in families:
            cells = []
            for ranks in shown:
                found = [
                    row
                    for row in rows
                    if (row["part"], row["family"], row["ranks"], row["kind"])
                    == (part, family, ranks, kind)
                ]
                cells.append(_cell(found[0]) if found else "")
            lines.append(f"| {family} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def times(rows: list[dict[str, Any]], column: str) -> str:
    """The longest that synthesis took, by kind and ranks, in seconds."""
    shown = sorted({row["ranks"] for row in rows})
    lines = ["| kind | " + " | ".join(map(str, shown)) + " |", "|---" * (1 + len(shown)) + "|"]
    for kind in KINDS:
        cells = []
        for ranks in shown:
            took = [r[column] for r in rows if (r["kind"], r["ranks"]) == (kind, ranks)]
            cells.append(f"{max(took):.1f}" if took else "")
        lines.append(f"| {kind} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cell(row: dict[str, Any]) -> str:
    if "template" not in row:
        return f"{row['ratio']:.3f}"
    template = row["template_us"]
    other = f"{template / row['bound_us']:.2f}" if template else "none"
    return f"{row['ratio']:.3f} ({other})"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--table", action="store_true", help="print the last run's tables")
    parser.add_argument("--ranks", type=int, nargs="*", default=[*RANKS])
    parser.add_argument("--large-only", action="store_true")
    parser.add_argument("--most", action="store_true", help="256 ranks too, which takes longer")
    parser.add_argument("--out", type=Path, default=RESULTS, help="where results go")
    parser.add_argument("--workers", type=int, default=1, help="cases at a time (1)")
    args = parser.parse_args()
    if args.table:
        rows = json.loads(args.out.read_text())["rows"]
        for part, text in PARTS_TEXT.items():
            print(f"\n### {text}\n{table(rows, part)}")
        for column, text in TIMES_TEXT.items():
            print(f"\n### Seconds that synthesis takes, {text}\n\n{times(rows, column)}")
        return
    cases = [
        (kind, family, topology, part)
        for part in (("large",) if args.large_only else PARTS)
        for ranks in args.ranks
        if part == "large" or ranks in SMALL_RANKS
        for family, topology in topologies(ranks).items()
        for kind in KINDS
    ]
    if args.most:
        many = topologies(256) | {"32 nodes": presets.nodes(32, 8)}
        cases += [(kind, *one, "large") for kind in KINDS for one in many.items()]
    rows: list[dict[str, Any]] = []
    with ProcessPoolExecutor(args.workers) as pool:
        for row in pool.map(measure, *zip(*cases, strict=True)):
            rows.append(row)
            print(json.dumps(row), flush=True)
            save(rows, args.out)


def save(rows: list[dict[str, Any]], out: Path) -> None:
    """Writes what has been measured so far."""
    head = {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        "numpy": np.__version__,
        "note": "cpu_s is processor time of synthesize, wall_s what the clock said while load (the "
        "average over a minute) processes wanted the processors",
    }
    text = json.dumps(head, indent=1)[:-2]
    lines = ",\n  ".join(json.dumps(row) for row in rows)
    out.write_text(f'{text},\n "rows": [\n  {lines}\n ]\n}}\n')


if __name__ == "__main__":
    main()
