"""The operations of a plan as objects: the readable view of one row of the plan's columns.

Grammar (paper section 5.1)::

    operation  := P2P(src_rank, dst_rank, src, dst, deps, reduce, channel)
                | Collective(kind, src, dst, ranks, deps, reduce, channel, split_axis, concat_axis)
    dependency := OpDep(rank, index)            the operation at that place has completed
                | ComputeDep(rank, chunk)       the tiles that produce that chunk have completed
    reduce     := none | sum | max              how the data meets what the destination holds
    channel    := nvlink | nic | host | …       ports progress side by side

A P2P listed on its source is a push, on its destination a pull, and with both on one rank a local
copy. Operations of one rank and one channel are issued in list order; completion is ordered by
dependencies alone. A reduction commutes with the destination's own production and with other
reductions; a plain write commutes with nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from syncopate_jax.ir.chunk import Chunk

REDUCTIONS = ("none", "sum", "max")
COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast")
KINDS = ("p2p", *COLLECTIVES)
DEFAULT_CHANNEL = "nvlink"


@dataclass(frozen=True, slots=True, order=True)
class OpDep:
    """Completion of operation ``index`` in the list of ``rank``."""

    rank: int
    index: int

    def __str__(self) -> str:
        return f"r{self.rank}.{self.index}"


@dataclass(frozen=True, slots=True, order=True)
class ComputeDep:
    """Completion, on ``rank``, of the compute tiles that produce ``chunk``."""

    rank: int
    chunk: Chunk

    def __str__(self) -> str:
        return f"compute(r{self.rank} {self.chunk})"


Dependency = OpDep | ComputeDep


@dataclass(frozen=True, slots=True)
class P2P:
    """A transfer of one chunk between two ranks, or within one.

    Attributes:
      rank: the rank that lists (and drives) the operation: its source or its destination.
      src_rank, dst_rank: where the data is read and written.
      src, dst: chunks of equal shape.
      deps: what must have completed before it starts.
      reduce: ``none`` overwrites, ``sum`` and ``max`` accumulate into the destination.
      channel: the port it travels on.
      origin: where it came from, such as the template and its arguments.
    """

    rank: int
    src_rank: int
    dst_rank: int
    src: Chunk
    dst: Chunk
    deps: tuple[Dependency, ...] = ()
    reduce: str = "none"
    channel: str = DEFAULT_CHANNEL
    origin: str = ""

    @property
    def direction(self) -> str:
        """``push``, ``pull`` or ``copy``."""
        if self.src_rank == self.dst_rank:
            return "copy"
        return "push" if self.rank == self.src_rank else "pull"


@dataclass(frozen=True, slots=True)
class Collective:
    """One rank's part of a collective over ``ranks``.

    The k-th collective over a group in one member's list belongs with the k-th of every other
    member. ``src`` is what this rank contributes, ``dst`` what it receives.

    * all_gather: contributions are concatenated along ``concat_axis`` in group order.
    * reduce_scatter: the reduced ``src`` is cut along ``split_axis``, a piece for each rank.
    * all_reduce: every rank receives the reduction of the contributions.
    * all_to_all: ``src`` is cut along ``split_axis``; piece j goes to rank j of the group, which
      concatenates what arrives along ``concat_axis`` in group order.
    * broadcast: every rank receives the contribution of the group's first rank.
    """

    rank: int
    kind: str
    src: Chunk
    dst: Chunk
    ranks: tuple[int, ...]
    deps: tuple[Dependency, ...] = ()
    reduce: str = "none"
    channel: str = DEFAULT_CHANNEL
    split_axis: int = -1
    concat_axis: int = -1
    origin: str = ""


Operation = P2P | Collective
