"""Backend ``xla``: JAX's own collectives beside the local kernel; reference and fallback."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from syncopate_jax.backends import stepwise
from syncopate_jax.backends.buffers import Buffer, place_buffers, result_tensor
from syncopate_jax.backends.interface import Emitted, Work
from syncopate_jax.errors import InputError, SyncopateError
from syncopate_jax.kernel.frame import frame_box
from syncopate_jax.options import Launch
from syncopate_jax.registry import backends


@dataclass(frozen=True, slots=True)
class Exchange:
    """What communication does to one array, whichever plan does it.

    Attributes:
      kind: ``all_gather``, ``reduce_scatter``, ``all_reduce``, ``all_to_all`` or ``none``.
      gather: the dimension that grows by the number of ranks, -1 if none does.
      scatter: the dimension that shrinks by it, -1 if none does.
    """

    kind: str
    gather: int = -1
    scatter: int = -1


def exchange(x: jax.Array, what: Exchange, axis_names: tuple[str, ...]) -> jax.Array:
    """``x`` after the exchange over ``axis_names``; reductions are sums, in ``x``'s dtype.

    Raises InputError for another ``kind`` than those of ``Exchange``.
    """
    if what.kind == "all_gather":
        return lax.all_gather(x, axis_names, axis=what.gather, tiled=True)
    if what.kind == "reduce_scatter":
        return lax.psum_scatter(x, axis_names, scatter_dimension=what.scatter, tiled=True)
    if what.kind == "all_reduce":
        return lax.psum(x, axis_names)
    if what.kind == "all_to_all":
        return lax.all_to_all(
            x, axis_names, split_axis=what.scatter, concat_axis=what.gather, tiled=True
        )
    if what.kind == "none":
        return x
    raise InputError(f"exchange: {what.kind!r} is no kind of exchange")


class Xla:
    """The plan ``ppermute`` by ``ppermute``, before or after the kernel's plain-JAX reference.

    The ready operators do not come here: they use one collective and one dot (``exchange``).
    """

    name = "xla"
    targets = ("tpu", "mosaic_gpu", "triton")
    folds = False
    keeps_gathered = True

    def workers(self, launch: Launch, ranks: int) -> int:
        """One executor, which takes all tiles in order."""
        return 1

    def unsupported_reason(self, work: Work, target: str) -> str | None:
        """Why the work cannot be done here; None when it can."""
        if target not in self.targets:
            return f"xla works with targets {', '.join(self.targets)}, not {target!r}"
        if fault := work.kernel.unfused_fault(self.name):
            return fault
        try:
            work.axis_map.require_in_order()
            place_buffers(work.schedule.plan, work.axis_map, work.kernel.results)
            stepwise.rounds(work.schedule.plan)
        except SyncopateError as error:
            return str(error)
        return None

    def emit(self, work: Work, target: str) -> Emitted:
        """Communication of what is read, the local kernel, communication of what is written."""

        def emitted(*operands: jax.Array, platform: str, interpret: Any) -> Sequence[jax.Array]:
            return _Run(work, interpret if platform == "cpu" else False).run(operands)

        return emitted


class _Run:
    def __init__(self, work: Work, interpret: Any):
        self.work, self.interpret = work, interpret
        self.plan = work.schedule.plan
        self.places = place_buffers(self.plan, work.axis_map, work.kernel.results)
        self.bound = {b.operand: b for b in work.axis_map.bindings}

    def run(self, operands: Sequence[jax.Array]) -> list[jax.Array]:
        kernel = self.work.kernel
        named = dict(zip(kernel.operands, operands, strict=True))
        seen = [self._gathered(n, x) if n in self.bound else x for n, x in named.items()]
        outs = kernel.unfused(*seen, runner="xla", interpret=self.interpret)
        made = zip(kernel.results, outs, strict=True)
        results = [self._reduced(n, out) if n in self.bound else out for n, out in made]
        kept = zip(kernel.operands, seen, strict=True)
        return [*results, *(x for n, x in kept if n in self.bound and self.work.keep)]

    def _gathered(self, operand: str, x: jax.Array) -> jax.Array:
        """What tiles see of an operand: this rank's goals, from what every rank holds."""
        tensor = self.bound[operand].tensor
        held, whole = self.places.items[tensor, "input"], self.places.items[tensor, "gathered"]
        x = x.reshape(held.shape)
        start = _around(held, whole)
        # What arrives only to be handed on, such as a ring's partial sums, is none of it.
        seen = Buffer(tensor, "gathered", *frame_box(self.plan, tensor, write=False))
        return self._cut(self._run_plan({tensor: (x, held, start)})[tensor], start, seen)

    def _reduced(self, operand: str, out: jax.Array) -> jax.Array:
        """A result: this rank's goals, from what the tiles of every rank wrote."""
        tensor = self.bound[operand].tensor
        home = result_tensor(self.plan, self.bound[operand])
        made, goal = self.places.items[tensor, "send"], self.places.items[home, "result"]
        start = _around(made, goal) if home == tensor else made
        arrays = self._run_plan({tensor: (out.reshape(made.shape), made, start)})
        return self._cut(arrays[home], start if home == tensor else goal, goal)

    def _run_plan(self, given: dict[str, tuple[jax.Array, Buffer, Buffer]]) -> stepwise.Arrays:
        """Runs the operations on given tensors (value, part it is of, part its buffer holds)."""
        rank = lax.axis_index(self.work.axis_names)
        places = self.places.items.items()
        buffers = {tensor: buffer for (tensor, kind), buffer in places if kind == "result"}
        arrays = {
            name: jnp.zeros(b.shape, self.plan.tensor(name).dtype) for name, b in buffers.items()
        }
        for name, (x, held, whole) in given.items():
            at = jnp.asarray(held.lo - whole.lo)[rank]
            room = jnp.zeros(np.add(whole.shape, _beyond(held, whole)), x.dtype)
            x = lax.dynamic_update_slice(room, x, at)[tuple(map(slice, whole.shape))]
            buffers[name], arrays[name] = whole, x
        return stepwise.run(self.plan, buffers, arrays, self.work.axis_names)

    def _cut(self, x: jax.Array, whole: Buffer, part: Buffer) -> jax.Array:
        at = jnp.asarray(part.lo - whole.lo)[lax.axis_index(self.work.axis_names)]
        x = jnp.pad(x, [(0, n) for n in _beyond(part, whole)])
        return lax.dynamic_slice(x, at, part.shape)


def _beyond(part: Buffer, whole: Buffer) -> list[int]:
    """How far ``part`` reaches beyond ``whole`` on a rank that holds less than ``part``'s shape.

    A slice there needs the room: JAX would shift it back, onto other elements.
    """
    ends = (part.lo - whole.lo + part.shape).max(axis=0)
    return [max(int(end) - extent, 0) for end, extent in zip(ends, whole.shape, strict=True)]


def _around(a: Buffer, b: Buffer) -> Buffer:
    """A buffer that holds both, on every rank."""
    lo = np.where(np.all(a.lo < a.hi, axis=-1, keepdims=True), np.minimum(a.lo, b.lo), b.lo)
    return Buffer(a.tensor, "whole", lo, np.maximum(a.hi, b.hi))


backends.register("xla")(Xla())
