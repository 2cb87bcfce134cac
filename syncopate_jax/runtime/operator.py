"""Operators: a compiled kernel and plan, called on local arrays inside ``jax.shard_map``."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp

from syncopate_jax.backends.buffers import Buffers, place_buffers, result_tensor
from syncopate_jax.backends.interface import (
    Backend,
    Emitted,
    KeepsGathered,
    Work,
    interpret_settings,
    is_wide,
    narrower,
)
from syncopate_jax.check.same_bits import ends_alike
from syncopate_jax.errors import InputError, MeshError, UnsupportedError
from syncopate_jax.runtime import custom_call, mesh
from syncopate_jax.runtime.given_arrays import as_jax


@dataclass(frozen=True, slots=True, eq=False)
class Operator:
    """A fused operator; call it with one rank's operands.

    It has no derivative of its own: wrap the call in ``jax.custom_vjp`` to give it one.

    Attributes:
      work: kernel, schedule and axis map.
      backend: the realisation that was chosen.
      target: what the kernel is written in.
      passed_over: why not, of each backend of the target that ``auto`` asked before this one.
    """

    work: Work
    backend: Backend
    target: str
    passed_over: Mapping[str, str] = field(default_factory=dict)

    def __repr__(self) -> str:
        plan = self.work.schedule.plan
        passed = "".join(f"\n  not {name}: {why}" for name, why in self.passed_over.items())
        return (
            f"Operator({self.name}: {plan.name} over {plan.num_ranks} ranks of "
            f"{self.work.axis_names}, backend {self.backend.name}, target {self.target}{passed})"
        )

    def __call__(self, *operands: jax.Array) -> list[jax.Array]:
        """One rank's results, one a result of the local kernel.

        Args:
          *operands: in the kernel's order. One bound to a plan tensor is what the rank holds of
            it at the start; a bound result is what the plan's goals leave on the rank. JAX takes
            it to vary along the axis unless ``same_on_every_rank``.

        Raises:
          InputError: a bound operand has another shape or dtype than the plan says, or the plan is
            for another number of ranks.
          MeshError: outside ``jax.shard_map``, or where that leaves axes to the compiler and a
            kernel would be launched.
        """
        work, name = self.work, self.name
        mesh.require_bound(work.axis_names, caller=name, launches=self._launches)
        self._check_folding()
        self._check_ranks()
        arrays = self._checked(operands)
        interpret = interpret_settings.get()
        emitted = self.backend.emit(work, self.target)
        return list(
            custom_call.fused_call(
                functools.partial(emitted, interpret=interpret),
                *custom_call.vary_alike(arrays, work.axis_names),
                out_types=self.result_types(),
                axis_names=work.axis_names,
                name=name,
                invariant_over=work.axis_names if self.same_on_every_rank() else (),
                key=(self, interpret),
                narrow=self._is_kernel,
                launches=self._launches,
                fold=functools.partial(self._fold, emitted) if self.backend.folds else None,
            )
        )

    def _fold(
        self, emitted: Emitted, size: int, batched: Sequence[bool], *operands: jax.Array
    ) -> tuple[jax.Array, ...]:
        """The results of all ranks, from operands with a leading rank axis or shared ones."""
        moved = {b.operand for b in self.work.axis_map.bindings}
        shared = [
            not has and name not in moved
            for name, has in zip(self.work.kernel.operands, batched, strict=True)
        ]
        spread = [
            x if has or one else jnp.broadcast_to(x, (size, *x.shape))
            for x, has, one in zip(operands, batched, shared, strict=True)
        ]
        types = [jax.ShapeDtypeStruct((size, *t.shape), t.dtype) for t in self.result_types()]
        return custom_call.fused_call(
            functools.partial(emitted, interpret=interpret_settings.get(), shared=shared),
            *spread,
            out_types=types,
            axis_names=(),
            name=f"{self.name}_folded",
            key=(self, tuple(shared), interpret_settings.get()),
            narrow=self._is_kernel,
        )

    @property
    def _is_kernel(self) -> bool:
        """Whether it is a kernel of its own; ``xla`` runs what the user wrote in plain JAX."""
        return self.backend.name != "xla"

    @property
    def _launches(self) -> bool:
        """Whether it launches a kernel: ``xla`` too does where the local kernel is all it has."""
        return self._is_kernel or self.work.kernel.reference is None

    def _check_folding(self) -> None:
        """Raises MeshError unless a GPU's kernel was compiled for where its ranks are."""
        axes = ", ".join(map(repr, self.work.axis_names))
        if not self._is_kernel or self.target not in ("mosaic_gpu", "triton"):
            return
        folded = mesh.is_folded(self.work.axis_names)
        if folded and not self.work.launch.folded:
            raise MeshError(
                f"{self.name}: axis {axes} is folded here, all its ranks share one device, and "
                f"the operator was compiled for a device a rank: give compile a "
                f"launch=Launch(folded=True)"
            )
        if self.work.launch.folded and not folded:
            raise MeshError(
                f"{self.name} was compiled for folded ranks, and axis {axes} is not folded here: "
                f"call it inside syncopate_jax.runtime.folded.fold, or leave folded out of launch"
            )

    def keeping(self) -> Operator:
        """This operator, which also returns what was gathered of each bound operand.

        Those arrays stand behind the results, in the order of the axis map, with the plan tensor's
        dimensions.

        Raises:
          UnsupportedError: the backend gathers into no array of its own.
        """
        if not isinstance(self.backend, KeepsGathered):
            raise UnsupportedError(
                f"{self.name}: backend {self.backend.name} does not give back what it gathered; "
                f"use backend 'xla'"
            )
        return replace(self, work=replace(self.work, keep=True))

    @property
    def name(self) -> str:
        """Shown in programs, profiles and messages."""
        return f"syncopate_{self.work.schedule.plan.name}_{self.work.kernel.name}"

    def operand_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the bound operands on a rank."""
        places = self._places()
        return {
            b.operand: places.items[b.tensor, "input"].shape
            for b in self.work.axis_map.bindings
            if b.operand in self.work.kernel.operands
        }

    def result_types(self) -> list[jax.ShapeDtypeStruct]:
        """Shape and dtype on a rank of every result, and of what is kept."""
        kernel, places = self.work.kernel, self._places()
        bound = {b.operand: b for b in self.work.axis_map.bindings}
        types = []
        for name, out in zip(kernel.results, kernel.out_shape, strict=True):
            shape = out.shape
            if name in bound:
                tensor = result_tensor(places.plan, bound[name])
                shape = places.items[tensor, "result"].shape
            types.append(jax.ShapeDtypeStruct(shape, out.dtype))
        for b in self.work.axis_map.bindings if self.work.keep else ():
            if b.operand in kernel.operands:
                seen = places.items[b.tensor, "gathered"].shape
                dtype = jnp.dtype(places.plan.tensor(b.tensor).dtype)
                types.append(jax.ShapeDtypeStruct(seen, dtype))
        return types

    def same_on_every_rank(self) -> bool:
        """Whether all ranks get the same bits in every result, so that ``out_specs=P()`` takes it.

        So it is where each result is bound, all ranks have the same goals, and what they have of a
        sum was added up on one rank and copied from there, as ``all_reduce_two_shot`` does. Where
        every rank adds for itself, as in ``all_reduce_one_shot``, each adds in an order of its own,
        and a sum of floating-point numbers depends on that: such results vary along the axis for
        JAX. Take another plan, or copy one rank's result to all if they must be one value.
        """
        work, plan = self.work, self.work.schedule.plan
        bound = {b.operand: b for b in work.axis_map.bindings}
        if not all(name in bound for name in work.kernel.results):
            return False
        return ends_alike(plan, {result_tensor(plan, bound[name]) for name in work.kernel.results})

    def _places(self) -> Buffers:
        work = self.work
        return place_buffers(work.schedule.plan, work.axis_map, work.kernel.results)

    def _check_ranks(self) -> None:
        wanted, found = self.work.schedule.plan.num_ranks, mesh.ranks(self.work.axis_names)
        if wanted != found:
            raise InputError(
                f"{self.name}: the plan is for {wanted} ranks, mesh axis "
                f"{', '.join(self.work.axis_names)} has {found}; make the plan for {found}"
            )

    def _checked(self, operands: Sequence[jax.Array]) -> list[jax.Array]:
        """The operands as JAX takes them; raises InputError where they do not fit."""
        kernel = self.work.kernel
        if len(operands) != len(kernel.operands):
            raise InputError(
                f"{self.name}: kernel {kernel.name} has {len(kernel.operands)} operands "
                f"{kernel.operands}, found {len(operands)}"
            )
        shapes, plan = self.operand_shapes(), self.work.schedule.plan
        dtypes = {b.operand: plan.tensor(b.tensor).dtype for b in self.work.axis_map.bindings}
        named = zip(kernel.operands, operands, strict=True)
        arrays = [as_jax(self.name, f"operand {name}", x) for name, x in named]
        for name, spec, x in zip(kernel.operands, kernel.in_specs, arrays, strict=True):
            if name not in shapes:
                kernel.check_blocks(name, spec, tuple(x.shape))
                kernel.check_reach(name, tuple(x.shape))
            if self._is_kernel and self.target != "triton" and is_wide(x.dtype):
                raise UnsupportedError(f"{self.name}: {narrower(f'operand {name}', x.dtype)}")
            if name in shapes and tuple(x.shape) != shapes[name]:
                raise InputError(
                    f"{self.name}: operand {name} is {tuple(x.shape)} on each rank, the plan has "
                    f"{shapes[name]} there"
                )
            if name in dtypes and str(x.dtype) != dtypes[name]:
                raise InputError(
                    f"{self.name}: operand {name} is {x.dtype}, the plan's tensor is "
                    f"{dtypes[name]}; make the plan with dtype={str(x.dtype)!r}"
                )
        return arrays
