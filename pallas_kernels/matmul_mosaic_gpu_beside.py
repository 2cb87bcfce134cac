"""What a Hopper matrix product hides: which k step of a tile runs beside which access of memory.

A tile is stored, signalled, and its addends are read, beside the products of a tile: the one after
it, and its own. All are numbers that are known when the kernel is made.
"""

import dataclasses

LOOK_UP_STEPS = 2  # k steps that hide a read of the table from L2
ADDEND_STEPS = 6  # k steps that hide a wait that is over and a read of a tile from L2


@dataclasses.dataclass(frozen=True)
class Beside:
    """The k steps of one tile.

    Args:
      k_steps: how many there are.
      stores: output stores of a tile.
      looks_up: whether a table is read first of all.
      signals: whether a tile is signalled once it is stored.
      few_registers: whether signalling leaves the product enough of them.
    """

    k_steps: int
    stores: int
    looks_up: bool
    signals: bool
    few_registers: bool

    @property
    def first_store(self) -> int:
        """The k step of the first store; until then the table is read, beside step 0."""
        if not self.looks_up:
            return 0
        return min(LOOK_UP_STEPS, max(self.k_steps - self.stores, 0))

    @property
    def store_steps(self) -> list[int]:
        """The k steps beside which the tile before is stored, one output store each.

        A contraction with fewer leaves stores for after its last. Stores that go to other devices
        are spread over the product: all CTAs end a tile together, and the link would stall them.
        """
        first, count = self.first_store, min(self.stores, self.k_steps)
        end = self.signal_step if self.signals else min(self.stores + first, self.k_steps)
        early = (first + index * (end - first) // count for index in range(count))
        return [*early, *[self.k_steps] * (self.stores - count)]

    @property
    def signal_step(self) -> int:
        """The k step at which the tile before is signalled: its stores are long complete."""
        least = min(self.stores + self.first_store, self.k_steps)
        return max(3 * self.k_steps // 4, least)

    @property
    def signals_beside(self) -> bool:
        """Whether it is signalled beside that step, which hides a part, or ahead of it."""
        return self.few_registers and self.signal_step < self.k_steps

    @property
    def addend_step(self) -> int:
        """The k step beside which addends are read: late, as peers may be late, but hidden."""
        least = self.store_steps[-1] + 1
        if self.signals:
            least = self.signal_step + self.signals_beside
        return max(self.k_steps - ADDEND_STEPS, least)
