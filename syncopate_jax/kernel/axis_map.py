"""Axis maps: which operand of the local kernel a communicated tensor is, dimension by dimension.

The kernel is written as if for one device, so its operand holds what the plan leaves on (or takes
from) one rank: on rank r, operand coordinates start at the corner of that rank's goal box when the
kernel reads the tensor, and of its produced box when it writes it.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass

from syncopate_jax.errors import InputError, UnsupportedError
from syncopate_jax.ir.plan import Plan
from syncopate_jax.kernel.access import AnyAccess


@dataclass(frozen=True, slots=True)
class Binding:
    """Plan tensor ``tensor`` is operand ``operand``; its dimension i is operand dimension dims[i].

    With ``dims`` empty they have the same dimensions in the same order.
    """

    tensor: str
    operand: str
    dims: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class AxisMap:
    """The bindings of one operator, at most one a plan tensor."""

    bindings: tuple[Binding, ...]

    @classmethod
    def of(cls, given: Mapping[str, str | tuple[str, tuple[int, ...]]] | AxisMap) -> AxisMap:
        """From ``{tensor: operand}`` or ``{tensor: (operand, dims)}``, else InputError."""
        if isinstance(given, AxisMap):
            return given
        try:
            pairs = [(t, (o, ()) if isinstance(o, str) else o) for t, o in given.items()]
            found = [Binding(t, o, tuple(map(operator.index, dims))) for t, (o, dims) in pairs]
            if not all(isinstance(name, str) for b in found for name in (b.tensor, b.operand)):
                raise TypeError
            return cls(tuple(found))
        except (AttributeError, TypeError, ValueError) as error:
            raise InputError(
                "axis map: needs {tensor: operand} or {tensor: (operand, dimensions)}, found "
                f"{given!r}"
            ) from error

    def check(self, plan: Plan, accesses: Mapping[str, AnyAccess]) -> None:
        """Raises InputError when a binding names a tensor, operand or dimension that is missing.

        Also when two tensors are bound to one operand.
        """
        operands = [binding.operand for binding in self.bindings]
        for binding in self.bindings:
            tensor = plan.tensor(binding.tensor)
            if binding.operand not in accesses:
                known = ", ".join(sorted(accesses))
                raise InputError(
                    f"axis map: tensor {binding.tensor} is bound to operand {binding.operand!r}; "
                    f"the kernel's operands are {known}"
                )
            if operands.count(binding.operand) > 1:
                raise InputError(
                    f"axis map: {operands.count(binding.operand)} tensors are bound to operand "
                    f"{binding.operand!r}; it can be one"
                )
            dims = self.dims(binding, len(tensor.shape))
            operand_ndim = len(accesses[binding.operand].shape)
            if len(dims) != len(tensor.shape) or sorted(dims) != list(range(operand_ndim)):
                raise InputError(
                    f"axis map: dims {dims} of tensor {binding.tensor} {tensor.shape} must name "
                    f"each of the {operand_ndim} dimensions of operand {binding.operand} once"
                )

    def require_in_order(self) -> None:
        """Raises UnsupportedError where a binding turns dimensions round: no backend does."""
        for binding in self.bindings:
            if binding.dims and binding.dims != tuple(range(len(binding.dims))):
                raise UnsupportedError(
                    f"tensor {binding.tensor} is bound with dims {binding.dims}; a copy keeps the "
                    f"order of dimensions: give the plan the operand's order"
                )

    @staticmethod
    def dims(binding: Binding, ndim: int) -> tuple[int, ...]:
        """``binding.dims`` with the default filled in."""
        return binding.dims or tuple(range(ndim))
