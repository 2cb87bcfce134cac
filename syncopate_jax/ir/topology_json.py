"""Topologies as JSON, so that a calibrated one can be stored and read back.

A figure that every pair of ranks (or every rank, or port) shares is written once::

    {"format": "syncopate-topology", "version": 1, "name": "…", "num_ranks": 8,
     "flops": number | [ranks], "signal_latency": number,
     "channels": [{"name": "nvlink", "overhead": number, "local_ports": bool,
                   "bandwidth": matrix, "latency": matrix,
                   "port": [ranks], "egress": number | [ports], "ingress": number | [ports]}]}
    matrix := {"pair": number, "self": number}      between ranks; within a rank
            | [[number, …], …]                      row: from, column: to

Units are bytes, seconds and floating-point operations a second. ``port`` may be left out when each
rank has its own.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from syncopate_jax.errors import FormatError, InputError
from syncopate_jax.ir.topology import MAX_TOPOLOGY_RANKS, Channel, Topology

FORMAT = "syncopate-topology"
VERSION = 1
_TOP = {"format", "version", "name", "num_ranks", "flops", "signal_latency", "channels"}
_CHANNEL = {
    "name", "overhead", "local_ports", "bandwidth", "latency", "port", "egress", "ingress",
}  # fmt: skip

Array = np.ndarray


def to_dict(topology: Topology) -> dict[str, Any]:
    """The JSON object for ``topology``."""
    return {
        "format": FORMAT,
        "version": VERSION,
        "name": topology.name,
        "num_ranks": topology.num_ranks,
        "flops": _short(topology.flops),
        "signal_latency": topology.signal_latency,
        "channels": [_channel_dict(channel) for channel in topology.channels],
    }


def from_dict(found: object) -> Topology:
    """The topology of a JSON object; raises FormatError that names the place at fault."""
    top = _object(found, "topology", _TOP)
    if top["format"] != FORMAT:
        raise FormatError(f"topology: format is {top['format']!r}, needs {FORMAT!r}")
    if top["version"] != VERSION:
        raise FormatError(f"topology: version is {top['version']!r}, this release reads {VERSION}")
    name = _text(top["name"], "topology: name")
    ranks = top["num_ranks"]
    if (
        not isinstance(ranks, int)
        or isinstance(ranks, bool)
        or not 1 <= ranks <= MAX_TOPOLOGY_RANKS
    ):
        raise FormatError(
            f"topology: num_ranks must be an integer from 1 to {MAX_TOPOLOGY_RANKS}, "
            f"found {ranks!r}"
        )
    if not isinstance(top["channels"], list):
        raise FormatError("topology: channels must be a list")
    try:
        return Topology(
            name,
            ranks,
            tuple(
                _channel(item, ranks, f"topology: channels[{i}]")
                for i, item in enumerate(top["channels"])
            ),
            _vector(top["flops"], ranks, "topology: flops"),
            _number(top["signal_latency"], "topology: signal_latency"),
        )
    except InputError as error:
        raise FormatError(str(error)) from error


def save(topology: Topology, path: str | Path) -> None:
    """Writes ``topology`` to a file."""
    Path(path).write_text(json.dumps(to_dict(topology), indent=1) + "\n")


def load(path: str | Path) -> Topology:
    """The topology in a file; raises FormatError when it is none."""
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{path}: not JSON: {error}") from error
    try:
        return from_dict(found)
    except FormatError as error:
        raise FormatError(f"{path}: {error}") from error


def _channel_dict(channel: Channel) -> dict[str, Any]:
    found: dict[str, Any] = {
        "name": channel.name,
        "overhead": channel.overhead,
        "local_ports": channel.local_ports,
        "bandwidth": _short_matrix(channel.bandwidth),
        "latency": _short_matrix(channel.latency),
        "egress": _short(channel.egress),
        "ingress": _short(channel.ingress),
    }
    ports = np.arange(channel.num_ranks)
    if not np.array_equal(channel.port, ports) or len(channel.egress) != len(ports):
        found["port"] = channel.port.tolist()
        found["egress"] = channel.egress.tolist()
        found["ingress"] = channel.ingress.tolist()
    return found


def _channel(found: object, ranks: int, where: str) -> Channel:
    item = _object(found, where, _CHANNEL, optional=frozenset({"port"}))
    if not isinstance(item["local_ports"], bool):
        raise FormatError(f"{where}: local_ports must be true or false")
    port = item.get("port", list(range(ranks)))
    whole = isinstance(port, list) and all(type(p) is int for p in port)
    if not whole or len(port) != ranks or not all(0 <= p < MAX_TOPOLOGY_RANKS for p in port):
        raise FormatError(f"{where}: port must be a list of {ranks} port numbers")
    shared = [item[key] for key in ("egress", "ingress") if isinstance(item[key], list)]
    ports = len(shared[0]) if shared else max(port) + 1
    return Channel(
        _text(item["name"], f"{where}: name"),
        _matrix(item["bandwidth"], ranks, f"{where}: bandwidth"),
        _matrix(item["latency"], ranks, f"{where}: latency"),
        np.array(port),
        _vector(item["egress"], ports, f"{where}: egress"),
        _vector(item["ingress"], ports, f"{where}: ingress"),
        _number(item["overhead"], f"{where}: overhead"),
        item["local_ports"],
    )


def _short(values: Array) -> float | list[float]:
    return float(values[0]) if np.all(values == values[0]) else values.tolist()


def _short_matrix(matrix: Array) -> dict[str, float] | list[list[float]]:
    off = matrix[~np.eye(len(matrix), dtype=bool)]
    own = np.diagonal(matrix)
    if np.all(own == own[0]) and np.all(off == off[:1]):
        return {"pair": float(off[0]) if off.size else 0.0, "self": float(own[0])}
    return matrix.tolist()


def _object(
    found: object, where: str, keys: set[str], optional: frozenset[str] = frozenset()
) -> dict[str, Any]:
    if not isinstance(found, dict):
        raise FormatError(f"{where}: must be an object, found {type(found).__name__}")
    missing, unknown = sorted(keys - optional - set(found)), sorted(set(found) - keys)
    if missing or unknown:
        raise FormatError(f"{where}: lacks {missing}, has unknown {unknown}")
    return found


def _text(found: object, where: str) -> str:
    if not isinstance(found, str) or not found:
        raise FormatError(f"{where} must be a non-empty string, found {found!r}")
    return found


def _number(found: object, where: str) -> float:
    if isinstance(found, bool) or not isinstance(found, int | float):
        raise FormatError(f"{where} must be a number, found {found!r}")
    # An integer of hundreds of digits does not fit a float.
    value = float(found) if abs(found) < 1e300 else math.inf
    if not 0 <= value < math.inf:
        raise FormatError(f"{where} must be finite and not negative, found {found!r:.40}")
    return value


def _vector(found: object, length: int, where: str) -> Array:
    if not isinstance(found, list):
        return np.full(length, _number(found, where))
    if len(found) != length:
        raise FormatError(f"{where} has {len(found)} entries, needs {length}")
    return np.array([_number(value, f"{where}[{i}]") for i, value in enumerate(found)])


def _matrix(found: object, ranks: int, where: str) -> Array:
    if isinstance(found, dict):
        pair = _object(found, where, {"pair", "self"})
        matrix = np.full((ranks, ranks), _number(pair["pair"], f"{where}.pair"))
        np.fill_diagonal(matrix, _number(pair["self"], f"{where}.self"))
        return matrix
    if not isinstance(found, list) or len(found) != ranks:
        raise FormatError(f"{where} must be pair and self, or {ranks} rows of {ranks} numbers")
    rows = [_row(row, ranks, f"{where}[{i}]") for i, row in enumerate(found)]
    return np.array(rows).reshape(ranks, ranks)


def _row(found: object, ranks: int, where: str) -> Array:
    if not isinstance(found, list):
        raise FormatError(f"{where} must be a list of {ranks} numbers")
    return _vector(found, ranks, where)
