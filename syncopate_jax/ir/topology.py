"""A topology: which ranks are joined by which channels, how fast, and how fast each computes.

Cost model (time in seconds, sizes in bytes): a transfer of ``n`` bytes from rank s to rank d on
channel c holds the queue that issues it for ``overhead`` and then while its bytes flow, at most at
``bandwidth[s, d]`` and at its share of the egress port of s and the ingress port of d; the data has
landed ``latency[s, d]`` after its last byte left. ``presets.py`` holds ready topologies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from syncopate_jax.errors import InputError
from syncopate_jax.ir.arguments import integer

Array = np.ndarray
Number = float | int
MAX_TOPOLOGY_RANKS = 4096  # matrices of this many ranks squared must fit in memory


def check_ranks(where: str, ranks: int) -> None:
    """Raises InputError unless a topology may have that many ranks."""
    if integer(where, "number of ranks", ranks, 1) > MAX_TOPOLOGY_RANKS:
        raise InputError(
            f"{where}: number of ranks must be at most {MAX_TOPOLOGY_RANKS}, found {ranks}; "
            f"take one node of several, or fewer of them"
        )


@dataclass(frozen=True, slots=True, eq=False)
class Channel:
    """The links of one channel; ranks joined by no link have bandwidth 0. Equal if all figures are.

    Attributes:
      name: as operations name it, such as ``nvlink``.
      bandwidth: [ranks, ranks] bytes/s from row to column; the diagonal is for copies within a
        rank (for a host channel: from or to that rank's host memory).
      latency: [ranks, ranks] seconds from the last byte leaving to the data being visible.
      port: [ranks] the port that each rank uses; ranks may share one, as those of a node may a NIC.
      egress, ingress: [ports] bytes/s that all transfers out of and into a port share.
      overhead: seconds an issuing queue is held by each transfer before its bytes flow.
      local_ports: whether copies within a rank use its port too.
    """

    name: str
    bandwidth: Array
    latency: Array
    port: Array
    egress: Array
    ingress: Array
    overhead: float = 0.0
    local_ports: bool = False

    def __post_init__(self) -> None:
        for key in ("bandwidth", "latency", "egress", "ingress"):
            object.__setattr__(self, key, _frozen(getattr(self, key), np.float64))
        object.__setattr__(self, "port", _frozen(self.port, np.int64))
        self._check_shapes()
        self._check_values()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Channel):
            return NotImplemented
        return all(np.array_equal(getattr(self, k), getattr(other, k)) for k in self.__slots__)

    def __hash__(self) -> int:
        return hash((self.name, self.num_ranks))

    @property
    def num_ranks(self) -> int:
        return self.bandwidth.shape[0]

    def _check_shapes(self) -> None:
        ranks = self.bandwidth.shape[0] if self.bandwidth.ndim else 0
        wanted = {"bandwidth": (ranks, ranks), "latency": (ranks, ranks), "port": (ranks,)}
        wanted["ingress"] = self.egress.shape[:1]
        for key, shape in wanted.items():
            found = getattr(self, key).shape
            if found != shape:
                raise InputError(f"channel {self.name}: {key} has shape {found}, needs {shape}")

    def _check_values(self) -> None:
        for key in ("bandwidth", "latency", "egress", "ingress"):
            values = getattr(self, key)
            if not np.all(np.isfinite(values) & (values >= 0)):
                raise InputError(f"channel {self.name}: {key} must be finite and not negative")
        if not 0 <= self.overhead < float("inf"):
            raise InputError(
                f"channel {self.name}: overhead must be finite and not negative, "
                f"found {self.overhead}"
            )
        ports = len(self.egress)
        if np.any((self.port < 0) | (self.port >= ports)):
            raise InputError(
                f"channel {self.name}: port must name ports 0 to {ports - 1}, "
                f"found {self.port.min()} to {self.port.max()}"
            )
        used = np.unique(self.port)
        if np.any(self.egress[used] == 0) or np.any(self.ingress[used] == 0):
            raise InputError(
                f"channel {self.name}: a port in use has capacity 0; leave links out with "
                f"bandwidth 0 instead"
            )


@dataclass(frozen=True, slots=True, eq=False)
class Topology:
    """Ranks, the channels that join them and what each rank computes a second.

    Topologies are equal where every name and figure is.

    Attributes:
      name: for messages and titles.
      num_ranks: number of ranks.
      channels: one per path that progresses beside the others.
      flops: [ranks] floating-point operations a second that a rank's workers reach together; a
        single number given stands for all ranks.
      signal_latency: seconds until a signal raised by a tile is seen on another rank.
    """

    name: str
    num_ranks: int
    channels: tuple[Channel, ...]
    flops: Array = field(default_factory=lambda: np.array(0.0))
    signal_latency: float = 0.0

    def __post_init__(self) -> None:
        if self.num_ranks < 1:
            raise InputError(f"topology {self.name}: needs at least 1 rank, found {self.num_ranks}")
        flops = np.asarray(self.flops, np.float64)
        if flops.ndim == 0:
            flops = np.full(self.num_ranks, flops)
        object.__setattr__(self, "flops", _frozen(flops, np.float64))
        if self.flops.shape != (self.num_ranks,):
            raise InputError(
                f"topology {self.name}: flops has shape {self.flops.shape}, "
                f"needs ({self.num_ranks},)"
            )
        if not np.all(np.isfinite(self.flops) & (self.flops >= 0)):
            raise InputError(f"topology {self.name}: flops must be finite and not negative")
        if not 0 <= self.signal_latency < float("inf"):
            raise InputError(
                f"topology {self.name}: signal_latency must be finite and not negative, "
                f"found {self.signal_latency}"
            )
        names = [channel.name for channel in self.channels]
        if len(set(names)) != len(names):
            raise InputError(f"topology {self.name}: channel names repeat: {names}")
        for channel in self.channels:
            if channel.num_ranks != self.num_ranks:
                raise InputError(
                    f"topology {self.name}: channel {channel.name} joins {channel.num_ranks} "
                    f"ranks, needs {self.num_ranks}"
                )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Topology):
            return NotImplemented
        heads = ("name", "num_ranks", "channels", "signal_latency")
        same = all(getattr(self, head) == getattr(other, head) for head in heads)
        return same and np.array_equal(self.flops, other.flops)

    def __hash__(self) -> int:
        return hash((self.name, self.channels))

    def channel(self, name: str) -> Channel:
        """The channel called ``name``; raises InputError that lists those there are."""
        for channel in self.channels:
            if channel.name == name:
                return channel
        known = ", ".join(channel.name for channel in self.channels) or "none"
        raise InputError(f"topology {self.name}: no channel {name!r}; its channels are {known}")

    def joining(self, src: int, dst: int) -> tuple[str, ...]:
        """Names of the channels that have a link from ``src`` to ``dst``."""
        return tuple(c.name for c in self.channels if c.bandwidth[src, dst] > 0)


def uniform_channel(
    name: str,
    num_ranks: int,
    *,
    bandwidth: Number,
    latency: Number,
    overhead: Number = 0.0,
    local_bandwidth: Number = 0.0,
    port_bandwidth: Number | None = None,
    local_ports: bool = False,
) -> Channel:
    """A channel on which every two ranks are joined alike, each rank with a port of its own.

    ``port_bandwidth`` (bytes/s each way) defaults to ``bandwidth``: one link's worth.
    ``local_bandwidth`` is that of copies within a rank, which have no latency.
    """
    check_ranks(f"channel {name}", num_ranks)
    matrix = np.full((num_ranks, num_ranks), float(bandwidth))
    np.fill_diagonal(matrix, local_bandwidth)
    return link_channel(
        name,
        matrix,
        latency=latency,
        overhead=overhead,
        port_bandwidth=bandwidth if port_bandwidth is None else port_bandwidth,
        local_ports=local_ports,
    )


def link_channel(
    name: str,
    bandwidth: Array,
    *,
    latency: Number,
    port_bandwidth: Number | Sequence[Number],
    overhead: Number = 0.0,
    port: Array | None = None,
    local_ports: bool = False,
) -> Channel:
    """A channel from a matrix of bandwidths [ranks, ranks] and one latency for every link.

    ``port`` [ranks] defaults to a port for each rank; ``port_bandwidth`` is bytes/s each way.
    """
    ranks = len(bandwidth)
    delay = np.full((ranks, ranks), float(latency))
    if not local_ports:
        np.fill_diagonal(delay, 0.0)
    port = np.arange(ranks) if port is None else np.asarray(port)
    ports = np.broadcast_to(np.asarray(port_bandwidth, np.float64), (int(port.max()) + 1,))
    return Channel(
        name, bandwidth, delay, port, ports, ports, overhead=overhead, local_ports=local_ports
    )


def _frozen(values: Array | Sequence[Number], dtype: type) -> Array:
    array: Array = np.array(values, dtype=dtype)
    array.setflags(write=False)
    return array
