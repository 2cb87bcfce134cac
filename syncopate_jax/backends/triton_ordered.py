"""A local Triton kernel in a given order of tiles, each behind its chunk's flag: no ranks, no plan.

For data that something outside the kernel brings, such as a copy from host memory.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from syncopate_jax.backends import triton_call
from syncopate_jax.backends.rank_table import TableMaker
from syncopate_jax.backends.triton_call import Launched
from syncopate_jax.backends.triton_layout import COUNTERS, check_reach
from syncopate_jax.backends.triton_transfers import wait_lists
from syncopate_jax.errors import InputError
from syncopate_jax.kernel.local import PallasKernel
from syncopate_jax.triton_source import module, rewrite
from syncopate_jax.triton_source.scheme import Columns, Scheme


@dataclass(frozen=True, slots=True, eq=False)
class OrderedTriton:
    """See the module.

    Attributes:
      order: [tiles, axes] index along each axis that the kernel's dispatch maps, by position.
      chunks: [tiles] the flag that a tile waits for, by position; None: no tile waits.
      workers: programs, which take positions in turn.
    """

    kernel: PallasKernel
    order: np.ndarray
    chunks: np.ndarray | None
    workers: int

    def __post_init__(self) -> None:
        check_reach(self.kernel.name, self.kernel.triton_body.shapes)
        axes = len(self.kernel.triton_body.source.variables)
        tiles = len(self.order)
        if self.order.ndim != 2 or self.order.shape[1] != axes:
            raise InputError(
                f"kernel {self.kernel.name} maps {axes} axes, the order has shape "
                f"{self.order.shape}; it needs (tiles, {axes})"
            )
        if self.chunks is not None and self.chunks.shape != (tiles,):
            raise InputError(
                f"kernel {self.kernel.name}: chunks have shape {self.chunks.shape}, the order's "
                f"tiles need ({tiles},)"
            )

    def __call__(self, *operands: jax.Array, flags: jax.Array) -> list[jax.Array]:
        """The kernel's results; ``flags`` is int32 [chunks], waited for until it is 1."""
        kernel = self.kernel
        pointers = kernel.triton_body.pointers
        table, scheme = self.table_and_scheme()
        inputs = dict(zip((pointers[name] for name in kernel.operands), operands, strict=True))
        inputs |= {"table_ptr": table, "peers_ptr": table, COUNTERS: flags}
        outputs = {
            pointers[name]: jax.ShapeDtypeStruct(out.shape, out.dtype)
            for name, out in zip(kernel.results, kernel.out_shape, strict=True)
        }
        made = triton_call.launch(self.launched(scheme, inputs, outputs), inputs, outputs)
        return [made[name] for name in outputs]

    def launched(self, scheme: Scheme, inputs: Iterable[str], outputs: Iterable[str]) -> Launched:
        """The rewritten kernel, as it is launched."""
        body = self.kernel.triton_body
        names = (*inputs, *outputs)
        text = rewrite.rewrite(body.source, scheme.using(names))
        return Launched(
            name=f"{body.source.name}{rewrite.SUFFIX}",
            path=module.save(body.source.name, text),
            given=triton_call.globals_of(body.function),
            arguments=tuple(body.arguments.items()),
            grid=self.workers,
            num_warps=body.num_warps,
            num_stages=body.num_stages,
            zeroed="",
            order=names,
            label=f"ordered_{self.kernel.name}",
        )

    def table_and_scheme(self) -> tuple[jax.Array, Scheme]:
        """What the rewritten kernel reads of tiles and flags, and where it does."""
        maker = TableMaker(1)
        order = maker.section(self.order[None])
        waits = None
        if self.chunks is not None:
            seen: set[tuple[int, int]] = set()
            points = []
            for position, chunk in enumerate(self.chunks.tolist()):
                entry = (position % self.workers, chunk)
                points.append([] if entry in seen else [[chunk, 1]])
                seen.add(entry)
            waits = wait_lists(maker, [points])
        table = maker.table
        scheme = Scheme(
            title="tiles in a given order, behind flags" if waits else "tiles in a given order",
            ranks=1,
            folded=False,
            tiles=len(self.order),
            workers=self.workers,
            table=table.shape[1],
            slots=1,
            parameters=(),
            arrays=(),
            order=Columns(order.offset, order.multiples),
            waits=waits,
        )
        return jnp.asarray(table), scheme
