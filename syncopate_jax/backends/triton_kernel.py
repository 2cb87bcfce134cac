"""The fused kernel of target ``triton``: rewritten, loaded, and called with its arrays.

On a mesh, ranks meet before the kernel to exchange the addresses of their buffers, and after it,
so that none is written or read once its rank has gone on. Folded, they share one launch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from syncopate_jax.backends import triton_call
from syncopate_jax.backends.gpu_buffers import Placed
from syncopate_jax.backends.interface import Emitted, Work, wrong_platform
from syncopate_jax.backends.triton_call import Launched, Simulator
from syncopate_jax.backends.triton_layout import COUNTERS, Laid
from syncopate_jax.errors import UnsupportedError
from syncopate_jax.native import copies
from syncopate_jax.triton_source import module, rewrite
from syncopate_jax.triton_source.scheme import Scheme

TABLE, PEERS, TOKEN = "table_ptr", "peers_ptr", "token_ptr"


@dataclass(frozen=True, slots=True, eq=False)
class FusedTriton:
    """The kernel of one operator.

    Attributes:
      name: the backend's.
      laid: scheme, table and buffers.
    """

    name: str
    work: Work
    laid: Laid

    @property
    def ranks(self) -> int:
        return self.work.schedule.plan.num_ranks

    @property
    def pointers(self) -> dict[str, str]:
        """Parameter of each of the kernel's own operands and results."""
        return self.work.kernel.triton_body.pointers

    @property
    def result_types(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Parameter, shape and dtype of every result on a rank."""
        found = {}
        kernel = self.work.kernel
        for name, out in zip(kernel.results, kernel.out_shape, strict=True):
            pointer = self.laid.results.get(name, self.pointers[name])
            buffer = self.laid.buffers.get(pointer)
            shape = out.shape if buffer is None else buffer.shape
            found[pointer] = jax.ShapeDtypeStruct(shape, out.dtype)
        return found

    @property
    def between(self) -> dict[str, Placed]:
        """Buffers that are neither the caller's nor results."""
        own = {*self.pointers.values(), *self.result_types}
        return {name: b for name, b in self.laid.buffers.items() if name not in own}

    def emit(self) -> Emitted:
        """The kernel as a backend hands it over."""

        def emitted(
            *operands: jax.Array,
            platform: str,
            interpret: Any,
            shared: Sequence[bool] | None = None,
        ) -> Sequence[jax.Array]:
            run = self._runner(platform, interpret)
            if self.work.launch.folded:
                return self._folded(operands, shared or [False] * len(operands), run)
            return self._meshed(operands, run)

        return emitted

    def _runner(self, platform: str, interpret: Any) -> Callable[..., dict[str, jax.Array]]:
        if platform == "cuda":
            return triton_call.launch
        if platform == "cpu" and isinstance(interpret, Simulator) and self.work.launch.folded:
            return functools.partial(triton_call.simulate, interpret)
        raise UnsupportedError(wrong_platform(self.name, platform))

    # --- folded --------------------------------------------------------------------------------

    def _folded(
        self, operands: Sequence[jax.Array], shared: Sequence[bool], run: Any
    ) -> list[jax.Array]:
        """The results of all ranks, with a leading rank axis."""
        kernel = self.work.kernel
        given = dict(zip((self.pointers[n] for n in kernel.operands), operands, strict=True))
        one = {
            self.pointers[n] for n, is_one in zip(kernel.operands, shared, strict=True) if is_one
        }
        inputs = {**given, TABLE: jnp.asarray(self.laid.table)}
        inputs[PEERS] = inputs[TABLE]  # addresses of peers are computed
        outputs = {
            name: jax.ShapeDtypeStruct((self.ranks, *t.shape), t.dtype)
            for name, t in self._made_here().items()
        }
        outputs[COUNTERS] = jax.ShapeDtypeStruct((self.ranks, self._slots), jnp.int32)
        made = run(self.launched(tuple(inputs), tuple(outputs), frozenset(one)), inputs, outputs)
        return [made[name] for name in self.result_types]

    def _made_here(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Every array that a launch makes, of one rank, results first."""
        return self.result_types | {
            name: jax.ShapeDtypeStruct(b.shape, b.dtype) for name, b in self.between.items()
        }

    @property
    def _slots(self) -> int:
        return self.laid.scheme.slots

    # --- on a mesh -----------------------------------------------------------------------------

    def _meshed(self, operands: Sequence[jax.Array], run: Any) -> list[jax.Array]:
        """One rank's results; what peers touch is made, and kept, by the handlers."""
        kernel = self.work.kernel
        given = dict(zip((self.pointers[n] for n in kernel.operands), operands, strict=True))
        made_here = self._made_here()
        met = {n: t for n, t in made_here.items() if n in self.laid.far}
        read_far = [name for name in self.laid.far if name in given]
        call = copies.Call(
            self.work.schedule.plan.name,
            self.ranks,
            (),
            self._slots,
            far=tuple(self._far_code(name, read_far, list(met)) for name in self.laid.far),
        )
        peers = jax.ShapeDtypeStruct((len(self.laid.far) * self.ranks, 2), jnp.int32)
        sources = [given[name] for name in read_far]
        place = copies.place(self.work.axis_names)
        (*buffers, addresses), counters = copies.start(call, place, sources, [*met.values(), peers])
        table = jnp.asarray(self.laid.table)[lax.axis_index(self.work.axis_names)][None]
        inputs = {**given, TABLE: table, PEERS: addresses, COUNTERS: counters}
        inputs |= dict(zip(met, buffers, strict=True))
        outputs = {n: t for n, t in made_here.items() if n not in met}
        if not outputs:
            outputs[TOKEN] = jax.ShapeDtypeStruct((1,), jnp.int32)
        launched = self.launched(tuple(inputs), tuple(outputs), frozenset())
        made = {**inputs, **run(launched, inputs, outputs)}
        after = [made[name] for name in outputs if name not in self.result_types]
        results = [made[name] for name in self.result_types]
        return copies.join(results, counters, [*sources, *after, *buffers])

    def _far_code(self, name: str, read: Sequence[str], met: Sequence[str]) -> int:
        """Which array of the handler a parameter is: an operand, or -1 - a result."""
        if name == COUNTERS:
            return -1 - (len(met) + 1)
        return read.index(name) if name in read else -1 - list(met).index(name)

    def behind(
        self, operands: Sequence[jax.Array], arrived: Mapping[str, jax.Array], flags: jax.Array
    ) -> list[jax.Array]:
        """One rank's results, behind flags that something outside the kernel raises."""
        kernel = self.work.kernel
        given = dict(zip((self.pointers[n] for n in kernel.operands), operands, strict=True))
        table = jnp.asarray(self.laid.table)[lax.axis_index(self.work.axis_names)][None]
        inputs = {**given, TABLE: table, PEERS: table, COUNTERS: flags, **arrived}
        outputs = self.result_types
        launched = self.launched(tuple(inputs), tuple(outputs), frozenset())
        made = triton_call.launch(launched, inputs, outputs)
        return [made[name] for name in outputs]

    # --- the text ------------------------------------------------------------------------------

    def scheme(
        self, inputs: Sequence[str], outputs: Sequence[str], shared: frozenset[str]
    ) -> Scheme:
        """The scheme, with its parameters in the order in which they are passed."""
        arrays = tuple(
            replace(a, size=0) if a.name in shared else a for a in self.laid.scheme.arrays
        )
        return replace(self.laid.scheme, parameters=(*inputs, *outputs), arrays=arrays)

    def text(
        self, inputs: Sequence[str], outputs: Sequence[str], shared: frozenset[str] = frozenset()
    ) -> str:
        """The rewritten kernel's module."""
        source = self.work.kernel.triton_body.source
        return rewrite.rewrite(source, self.scheme(inputs, outputs, shared))

    def launched(
        self, inputs: Sequence[str], outputs: Sequence[str], shared: frozenset[str]
    ) -> Launched:
        """The rewritten kernel, as it is launched."""
        body, kernel = self.work.kernel.triton_body, self.work.kernel
        text = self.text(inputs, outputs, shared)
        scheme = self.laid.scheme
        return Launched(
            name=f"{body.source.name}{rewrite.SUFFIX}",
            path=module.save(body.source.name, text),
            given=triton_call.globals_of(body.function),
            arguments=tuple(body.arguments.items()),
            grid=scheme.programs * (self.ranks if scheme.folded else 1),
            num_warps=body.num_warps,
            num_stages=body.num_stages,
            zeroed=COUNTERS,
            order=(*inputs, *outputs),
            label=f"fused_{kernel.name}",
        )
