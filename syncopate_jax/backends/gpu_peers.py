"""Buffers of this rank and of its peers: on a mesh of devices, or folded onto one.

On a mesh every rank runs the kernel on a device of its own, and a peer's buffer is a remote ref.
Folded, all ranks run in one launch on one device: every array has a leading rank axis, the CTAs are
divided among the ranks, and a peer's buffer is another slice. The kernel's text is the same.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from syncopate_jax.backends.gpu_buffers import Key, Placed
from syncopate_jax.backends.peers import peer_id
from syncopate_jax.kernel.loop import Use


@dataclass(frozen=True, slots=True)
class Peers:
    """Where buffers are.

    Attributes:
      refs: by key.
      placed: by key.
      shared: keys of buffers that folded ranks share: arrays without a rank axis.
      rank: of this CTA.
      ranks: how many there are.
      axis_names: mesh axes the ranks run along; empty when they are folded.
    """

    refs: Mapping[Key, Any]
    placed: Mapping[Key, Placed]
    shared: frozenset[Key]
    rank: Any
    ranks: int
    axis_names: tuple[str, ...]

    @property
    def folded(self) -> bool:
        return not self.axis_names

    def peer_id(self, rank: Any) -> Any:
        """Mesh address of a rank."""
        return peer_id(self.axis_names, rank)

    def own(self, key: Key, starts: Sequence[Any], use: Use) -> None:
        """Calls ``use`` with the block at ``starts`` of this rank's buffer."""
        rank = self.rank if self.folded and key not in self.shared else None
        self.placed[key].matrix(self.refs[key], starts, rank, use)

    def far(
        self, key: Key, peer: Any, starts: Sequence[Any], use: Use, *, copied: bool = True
    ) -> None:
        """Calls ``use`` with the block at ``starts`` of a peer's buffer.

        The copy unit needs a descriptor made before the launch for every buffer, so for it
        (``copied``) there is a branch a peer; loads and stores compute the address.
        """
        placed, ref = self.placed[key], self.refs[key]
        if self.folded:
            placed.matrix(ref, starts, peer, use)
        elif self.ranks == 1:  # without peers there are no addresses of them either
            placed.matrix(ref, starts, None, use)
        elif not copied:
            placed.matrix(plgpu.remote_ref(ref, self.peer_id(peer)), starts, None, use)
        else:
            for rank in range(self.ranks):

                @pl.when(peer == rank)
                def _(rank: int = rank) -> None:
                    # The address is computed on the host too, from nothing but constants.
                    remote = plgpu.remote_ref(ref, self.peer_id(rank))
                    placed.matrix(remote, starts, None, use)


def choose(count: int, number: Any, do: Callable[[int], None]) -> None:
    """Calls ``do(i)`` under the condition that ``number`` is ``i``."""
    if count == 1:
        do(0)
        return
    for i in range(count):
        pl.when(number == i)(functools.partial(do, i))


def split_cta(cta: Any, ctas: int, folded: bool) -> tuple[Any, Any]:
    """The rank that a CTA belongs to if ranks are folded, and its number among the rank's."""
    if not folded:
        return jnp.int32(0), cta
    return lax.div(cta, jnp.int32(ctas)), lax.rem(cta, jnp.int32(ctas))
