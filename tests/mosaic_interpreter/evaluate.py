"""Evaluates the text of a kernel for one warpgroup."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jax._src import source_info_util
from jax.extend import core

from tests.mosaic_interpreter import arithmetic
from tests.mosaic_interpreter.machine import Warpgroup

Handler = Callable[["Evaluator", Any, list[Any]], Sequence[Any]]
HANDLERS: dict[Any, Handler] = {}
"""What operations do that are more than a function of values; see ``operations.py``."""


def handles(*primitives: Any) -> Callable[[Handler], Handler]:
    """Registers a handler for primitives; those that this JAX has not are None."""

    def register(handler: Handler) -> Handler:
        HANDLERS.update({p: handler for p in primitives if p is not None})
        return handler

    return register


class Evaluator:
    """Runs jaxprs with the values of one warpgroup.

    Attributes:
      warpgroup: whose.
    """

    def __init__(self, warpgroup: Warpgroup):
        self.warpgroup = warpgroup

    def run(self, jaxpr: Any, arguments: Sequence[Any]) -> list[Any]:
        """Results of a jaxpr on values, references and barriers; constants may be given too."""
        names = [*jaxpr.constvars, *jaxpr.invars]
        if len(arguments) < len(names):
            arguments = [*jaxpr.consts, *arguments]
        values = dict(zip(names, arguments, strict=True))

        def read(var: Any) -> Any:
            if isinstance(var, core.Literal):
                return arithmetic.plain(var.val, var.aval)
            return values[var]

        for eqn in jaxpr.eqns:
            given = [read(var) for var in eqn.invars]
            handler = HANDLERS.get(eqn.primitive)
            found = handler(self, eqn, given) if handler else arithmetic.evaluate(eqn, given)
            values.update(zip(eqn.outvars, found, strict=True))
        return [read(var) for var in jaxpr.outvars]

    def words(self, eqn: Any, what: str) -> str:
        """An access in words: what, by whom, at which source line."""
        return f"{what} by {self.warpgroup.name} at {source_info_util.summarize(eqn.source_info)}"
