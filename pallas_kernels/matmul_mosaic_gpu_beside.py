"""What a Hopper matrix product hides: which k step of a tile runs beside which access of memory.

A tile is stored and signalled, and its addends are read, beside the products of a tile: the one
after it, and its own. Those who multiply store and read; what waits for other executors, or is
waited for by them, is left to the warpgroup that loads, which is some steps ahead. All are numbers
that are known when the kernel is made.
"""

import dataclasses

LOOK_UP_STEPS = 2  # k steps that hide a read of the table from L2
ADDEND_STEPS = 6  # k steps that hide a read of a tile from L2
SETTLE_STEPS = 4  # k steps in which a store arrives
FLIGHT_STEPS = 9  # k steps in which a signal is raised and seen by a peer


def least_steps(stores: int) -> int:
    """K steps in which every store, the end of all, and the addends find one of their own."""
    return LOOK_UP_STEPS + stores + 2


@dataclasses.dataclass(frozen=True)
class Beside:
    """The k steps of one tile.

    Args:
      k_steps: how many there are, ``least_steps(stores)`` at least.
      stages: of operands, by which loading is ahead of multiplying at most.
      stores: output stores of a tile.
      looks_up: whether a table is read first of all.
      signals: whether a tile is signalled once it is stored.
      sends: whether a tile may be stored at a peer.
      adds: whether addends are read beside the product.
    """

    k_steps: int
    stages: int
    stores: int
    looks_up: bool = False
    signals: bool = False
    sends: bool = False
    adds: bool = False

    @property
    def first_store(self) -> int:
        """The k step of the first store; until then the table is read, beside step 0."""
        return LOOK_UP_STEPS if self.looks_up else 0

    @property
    def store_steps(self) -> list[int]:
        """The k steps beside which the tile before is stored, one output store each."""
        return [self.first_store + index * self.stagger for index in range(self.stores)]

    @property
    def stagger(self) -> int:
        """How many k steps there are from a store to the next.

        Stores that go to other devices are spread over the product, and executors put theirs off by
        0 to one less steps, each by another number: all CTAs end a tile together, and the copy unit
        loads nothing while the link is too busy to take what it stores.
        """
        if not self.sends:
            return 1
        room = self.stored_step - self.first_store
        settle = min(SETTLE_STEPS, room // 8, room - self.stores)  # a step each, at least
        return (room - settle) // self.stores

    @property
    def stored_step(self) -> int:
        """The k step beside which the stores, long complete, are said to be."""
        found = self.first_store + self.stores
        if self.sends:
            late = 7 * self.k_steps // 8
            if self.adds:  # a peer may add this tile to its next
                late = min(late, self.k_steps - ADDEND_STEPS - FLIGHT_STEPS - self.stages)
            found = max(found, late, 3 * self.k_steps // 4)
        else:  # others bring it to peers, the sooner the better
            found += SETTLE_STEPS
        return min(found, self.k_steps - 2)

    @property
    def addend_step(self) -> int:
        """The k step beside which addends are read: late, as peers may be late, but hidden."""
        return max(self.k_steps - ADDEND_STEPS, self.stored_step + 1)

    @property
    def signal_step(self) -> int:
        """The k step before whose loads the tile before is signalled: nobody waits for its stores.

        Those who multiply have begun ``stored_step`` once the stages behind it are free again.
        """
        last = self.addend_step if self.adds else self.k_steps
        return min(self.stored_step + self.stages + 1, last)
