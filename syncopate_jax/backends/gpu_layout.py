"""The layout of a fused GPU kernel: what its text is made from, and where its buffers lie."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from syncopate_jax.backends.gpu_buffers import Key, Placed
from syncopate_jax.backends.rank_table import Lists, Section

Array = np.ndarray


@dataclass(frozen=True, slots=True)
class Read:
    """Where an operand that the plan moves is read.

    Attributes:
      own: buffer of what the rank has from the start.
      other: buffer of the rest: its own ``gathered``, or ``own`` of a peer.
      dims: dimensions in which what the rank has is less than all.
      region: row 0 and 1: where that starts and ends, in the operand's coordinates; row 2 and 3:
        what to add to them for coordinates in ``own`` and in ``other``.
      peer: for what lies with a peer: its rank, then as row 3 above; by tile or step position.
      peer_by_step: whether ``peer`` is by step.
    """

    own: Key
    other: Key
    dims: tuple[int, ...]
    region: Section
    peer: Section | None = None
    peer_by_step: bool = False


@dataclass(frozen=True, slots=True)
class Move:
    """One kind of operation: what differs in the program's text.

    Attributes:
      shape: extents of the chunk.
      pull: the far end is the source.
    """

    src: Key
    dst: Key
    shape: tuple[int, ...]
    pull: bool


@dataclass(slots=True)
class Layout:
    """All that the kernel's text needs; ``by_key`` gives buffers by their keys.

    Attributes:
      in_turn: a tile may wait for what depends on the tile before it.
    """

    table: Array
    buffers: list[Placed]
    results: dict[str, Key]
    reads: dict[str, Read]
    order: Section
    steps: Section | None
    waits: Lists
    k_waits: Lists
    e_waits: Lists
    addends: Lists
    addend_key: Key | None
    stores: Lists
    store_keys: list[Key]
    signals: Lists
    moves: list[Move]
    ops: Section
    op_waits: Lists
    op_signals: Lists
    programs: Section
    channels: int
    exit_waits: Lists
    exit_signals: Lists
    num_slots: int
    in_turn: bool
    by_key: dict[Key, Placed] = field(init=False)

    @property
    def reads_peers(self) -> bool:
        """Whether tiles read what lies with peers."""
        return any(read.peer is not None for read in self.reads.values())

    def __post_init__(self) -> None:
        self.by_key = {b.key: b for b in self.buffers}
