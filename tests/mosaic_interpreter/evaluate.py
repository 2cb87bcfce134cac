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


Operands = list[tuple[Any, tuple[Any] | None]]
"""Variables, or literals with their values."""
Text = tuple[list[Any], list[tuple[Any, Handler | None, Operands]], Operands]
"""Variables of the arguments, operations with their handlers, and results."""


def _operands(atoms: Sequence[Any]) -> Operands:
    return [
        (atom, (arithmetic.plain(atom.val, atom.aval),) if isinstance(atom, core.Literal) else None)
        for atom in atoms
    ]


class Evaluator:
    """Runs jaxprs with the values of one warpgroup.

    Attributes:
      warpgroup: whose.
    """

    def __init__(self, warpgroup: Warpgroup):
        self.warpgroup = warpgroup

    def run(self, jaxpr: Any, arguments: Sequence[Any]) -> list[Any]:
        """Results of a jaxpr on values, references and barriers; constants may be given too."""
        names, steps, results = self._text(jaxpr)
        if len(arguments) < len(names):
            arguments = [*jaxpr.consts, *arguments]
        values = dict(zip(names, arguments, strict=True))
        for eqn, handler, operands in steps:
            given = [values[var] if literal is None else literal[0] for var, literal in operands]
            found = handler(self, eqn, given) if handler else arithmetic.evaluate(eqn, given)
            values.update(zip(eqn.outvars, found, strict=True))
        return [values[var] if literal is None else literal[0] for var, literal in results]

    def _text(self, jaxpr: Any) -> Text:
        """A jaxpr with handlers looked up and literals converted, once a launch."""
        texts = self.warpgroup.machine.texts
        if id(jaxpr) not in texts:
            steps = [(e, HANDLERS.get(e.primitive), _operands(e.invars)) for e in jaxpr.eqns]
            names = [*jaxpr.constvars, *jaxpr.invars]
            texts[id(jaxpr)] = names, steps, _operands(jaxpr.outvars)
        return texts[id(jaxpr)]

    def words(self, eqn: Any, what: str) -> str:
        """An access in words: what, by whom, at which source line."""
        return f"{what} by {self.warpgroup.name} at {source_info_util.summarize(eqn.source_info)}"
