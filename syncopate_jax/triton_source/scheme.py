"""What a rewritten kernel does beside its tiles, as data: the rewriter's second input.

All that differs between ranks and tiles is in a table, one int32 row a rank; a scheme says where in
the row it is. Combinations of its parts give the paper's schemes: waits (consumer), signals
(producer), both, waits inside the reduction loop, places at peers (co-located), and programs that
only communicate (dedicated).
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Columns:
    """Rows of ``len(multiples)`` integers from ``offset`` of the table's row on.

    Attributes:
      multiples: what every entry of a column is a multiple of; 0 if all entries are 0.
    """

    offset: int
    multiples: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Lists:
    """A list of rows at every point; that of point i ends where that of point i + 1 begins.

    Attributes:
      single: of waits: every point has one row, of count 0 where nothing is waited for.
    """

    starts: int
    rows: Columns
    single: bool = False


@dataclass(frozen=True, slots=True)
class Array:
    """One array of the launch.

    Attributes:
      name: its parameter.
      size: elements of one rank's part where folded ranks have parts of their own; 0 if they share.
      number: its row in the table of peers' addresses, -1 where no peer touches it.
    """

    name: str
    size: int = 0
    number: int = -1


@dataclass(frozen=True, slots=True)
class Spot:
    """Where a tile's data may be: in an array of this rank, or of the rank that a table names."""

    array: str
    peer: bool = False


@dataclass(frozen=True, slots=True)
class Read:
    """Where tiles find an operand: one of ``spots``, a column of ``where``; shifted by another.

    Attributes:
      pointer: the kernel's parameter.
      where: columns (spot, rank, shift in elements); a row a tile, a run of reduction steps, or a
        run of a tile.
      by_run, by_tile: which of these it is.
    """

    pointer: str
    spots: tuple[Spot, ...]
    where: Columns
    by_run: bool = False
    by_tile: bool = True


@dataclass(frozen=True, slots=True)
class Write:
    """Where a tile is stored; ``where`` has a list (spot, rank, shift) a tile.

    Attributes:
      single: every tile has exactly one place.
    """

    pointer: str
    spots: tuple[Spot, ...]
    where: Lists
    single: bool


@dataclass(frozen=True, slots=True)
class Addends:
    """Partial results that the epilogue adds; ``where`` has a list (shift,) a tile.

    Attributes:
      pointer: the kernel's parameter of the result that they are parts of.
    """

    pointer: str
    array: str
    where: Lists


@dataclass(frozen=True, slots=True)
class Runs:
    """Reduction steps that lie in order, one after the other.

    Attributes:
      count: runs of a tile.
      bounds: columns (first step, past the last), a row a run.
      waits: a list (slot, count) a run of a tile, or None.
    """

    count: int
    bounds: Columns
    waits: Lists | None


@dataclass(frozen=True, slots=True)
class Block:
    """Part of a transfer: ``rows`` of ``width`` elements, ``pitch`` apart, from ``at`` on."""

    src_at: int
    src_pitch: int
    dst_at: int
    dst_pitch: int
    width: int
    rows: int


@dataclass(frozen=True, slots=True)
class Move:
    """One kind of transfer; the far end is the source if ``pull``."""

    src: str
    dst: str
    pull: bool
    blocks: tuple[Block, ...]


@dataclass(frozen=True, slots=True)
class Transfers:
    """What the communicating programs do.

    Attributes:
      programs: communicating programs of a rank.
      channels: ports; program p serves channel ``p % channels``.
      begins: offset of each channel's first operation, and of the last one's end.
      ops: columns (move, far rank, start in the source, start in the destination).
      piece: elements that a program copies at once.
    """

    programs: int
    channels: int
    begins: int
    ops: Columns
    waits: Lists | None
    signals: Lists | None
    moves: tuple[Move, ...]
    piece: int


@dataclass(frozen=True, slots=True)
class Scheme:
    """One launch.

    Attributes:
      title: what it is, in words.
      ranks: how many there are; ``folded``: they share one launch.
      tiles: of a rank; ``workers``: its computing programs.
      table: entries of a rank's row; ``slots``: counters of a rank.
      parameters: every array of the launch, in the order in which it is passed.
      arrays: those beside the kernel's own, and the kernel's own where folded or seen by peers.
      order: columns, one a mapped axis, a row a position.
    """

    title: str
    ranks: int
    folded: bool
    tiles: int
    workers: int
    table: int
    slots: int
    parameters: tuple[str, ...]
    arrays: tuple[Array, ...]
    order: Columns
    waits: Lists | None = None
    epilogue_waits: Lists | None = None
    signals: Lists | None = None
    reads: tuple[Read, ...] = ()
    write: Write | None = None
    addends: Addends | None = None
    runs: Runs | None = None
    transfers: Transfers | None = None

    def using(self, parameters: tuple[str, ...]) -> Scheme:
        """This scheme with the launch's arrays in the order in which they are passed."""
        return replace(self, parameters=parameters)

    @property
    def programs(self) -> int:
        """Programs of a rank."""
        return self.workers + (self.transfers.programs if self.transfers else 0)
