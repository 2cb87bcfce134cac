"""What a rewritten kernel says of its table, its arrays and its flags: expressions and lines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from syncopate_jax.triton_source.scheme import Array, Columns, Lists, Read, Scheme, Spot


@dataclass
class Phrases:
    """The phrases of one kernel; the constants they speak of are the module's.

    Attributes:
      taken: names of the kernel, which nothing that is added may have.
      fenced: whether the copy unit loads what is waited for, which takes a fence after the wait.
      stored: whether the copy unit stores, whose stores end later than their statements.
      constants: those asked for so far, in that order.
      added: names that the lines asked for so far assign.
    """

    scheme: Scheme
    taken: frozenset[str]
    fenced: bool
    stored: bool
    constants: dict[str, int] = field(init=False, default_factory=dict)
    added: set[str] = field(init=False, default_factory=set)

    def constant(self, name: str, value: int) -> str:
        """The name of a constant of the module, ``name`` itself where that is free."""
        while name in self.taken or self.constants.get(name, value) != value:
            name += "_"
        self.constants[name] = value
        return name

    @property
    def tiles(self) -> str:
        return self.constant("TILES", self.scheme.tiles)

    @property
    def workers(self) -> str:
        return self.constant("WORKERS", self.scheme.workers)

    @property
    def slots(self) -> str:
        """Counters of a rank."""
        return self.constant("SLOTS", self.scheme.slots)

    @property
    def ranks(self) -> str:
        """How many there are, and whether they are folded: two arguments."""
        folded = self.constant("FOLDED", int(self.scheme.folded))
        return f"{self.constant('RANKS', self.scheme.ranks)}, {folded}"

    def new(self, name: str, value: str) -> str:
        """The line that makes a variable of the rewritten kernel's own."""
        self.added.add(name)
        return f"{name} = {value}"

    def each(self, name: str, values: str) -> str:
        """The header of a loop over a variable of the rewritten kernel's own."""
        self.added.add(name)
        return f"for {name} in {values}:"

    def entry(self, name: str, columns: Columns, row: str, column: int) -> str:
        """An expression for one entry of a row."""
        multiple = columns.multiples[column]
        if multiple == 0:
            return "0"
        at = self.row(name, columns, row) + (f" + {column}" if column else "")
        return f"sync.entry(table_ptr, {at}, {multiple})"

    def row(self, name: str, columns: Columns, row: str) -> str:
        """Where a row is in the table."""
        offset, width = self.constant(name, columns.offset), len(columns.multiples)
        return f"{offset} + {row}" if width == 1 else f"{offset} + {width} * {row}"

    def list_at(self, name: str, lists: Lists, point: str) -> str:
        """Where what is looked up first of a list is in the table."""
        if lists.single:
            return self.row(name, lists.rows, point)
        return f"{self.lists(name, lists)[0]} + {point}"

    @staticmethod
    def read(read: Read) -> str:
        """The constant that says where the table's rows of an operand begin."""
        return f"READ_{read.pointer.removesuffix('_ptr').upper()}"

    def lists(self, name: str, lists: Lists) -> tuple[str, str]:
        """Constants: where the lists of a kind start, and their rows."""
        return self.constant(name, lists.starts), self.constant(f"{name}_ROWS", lists.rows.offset)

    def base(self, array: Array) -> str:
        """The name under which rank 0's part stays known, where peers' parts are computed."""
        far = {spot.array for spot in self._spots() if spot.peer}
        moves = self.scheme.transfers.moves if self.scheme.transfers else ()
        far |= {move.src if move.pull else move.dst for move in moves}
        return f"{array.name}_0" if self.scheme.folded and array.name in far else array.name

    def _spots(self) -> list[Spot]:
        found = [spot for read in self.scheme.reads for spot in read.spots]
        return found + list(self.scheme.write.spots if self.scheme.write else ())

    def far(self, name: str, rank: str) -> str:
        """An expression for the array of another rank."""
        (array,) = (a for a in self.scheme.arrays if a.name == name)
        size = array.size if self.scheme.folded else 0
        given = f"{self.base(array)}, peers_ptr, {rank}, {array.number}, {size}, {self.ranks}"
        return f"sync.at_rank({given})"

    def place(
        self,
        name: str,
        stem: str,
        spots: Sequence[Spot],
        label: str,
        where: Columns,
        row: str,
    ) -> list[str]:
        """Points ``name`` to the spot that a row of the table names."""
        spot, rank, shift = (self.entry(label, where, row, c) for c in range(3))
        lines = []
        if len(spots) > 1:
            lines.append(self.new(f"{stem}_spot", spot))
        if any(one.peer for one in spots):
            lines.append(self.new(f"{stem}_rank", rank))
        found = self._pointer(spots, f"{stem}_spot", f"{stem}_rank")
        if shift == "0":
            return [*lines, self.new(name, found)]
        lines.append(self.new(f"{stem}_shift", shift))
        return [*lines, self.new(name, f"{found} + {stem}_shift")]

    def _pointer(self, spots: Sequence[Spot], spot: str, rank: str) -> str:
        """An expression for the array of a spot that a table names."""
        found = [self.far(s.array, rank) if s.peer else s.array for s in spots]
        expression = found[0]
        for number, other in enumerate(found[1:], 1):
            chosen = spot if len(found) == 2 else f"{spot} == {number}"
            expression = f"sync.pick({chosen}, {other}, {expression})"
        return expression

    def wait(self, name: str, lists: Lists | None, point: str) -> list[str]:
        """Waits for all that row ``point`` lists, if there are such lists."""
        if lists is None:
            return []
        if lists.single:
            rows = self.constant(name, lists.rows.offset)
            given = f"table_ptr, own_counters, {point}, {rows}, FENCED={self.fenced}"
            return [f"sync.wait_one({given})"]
        starts, rows = self.lists(name, lists)
        given = f"table_ptr, own_counters, {point}, {starts}, {rows}, FENCED={self.fenced}"
        return [f"sync.wait_all({given})"]

    def signal(self, name: str, lists: Lists | None, point: str) -> list[str]:
        """Raises all that row ``point`` lists, if there are such lists."""
        if lists is None:
            return []
        starts, rows = self.lists(name, lists)
        first = f"table_ptr, counters_ptr, peers_ptr, {point}, {starts}, {rows}"
        ended = ["sync.stored()"] if self.stored else []
        return [*ended, f"sync.signal_all({first}, {self.slots}, {self.ranks})"]
