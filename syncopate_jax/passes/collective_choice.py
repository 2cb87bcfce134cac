"""Which template a collective gets, and whether a plan does what the collective does."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from syncopate_jax.check.ends import difference
from syncopate_jax.errors import InputError, UnsupportedError
from syncopate_jax.ir.arguments import one_of
from syncopate_jax.ir.comm import COLLECTIVES, Collective
from syncopate_jax.ir.plan import Plan
from syncopate_jax.registry import USUAL_TEMPLATES, templates

Choice = str | tuple[str, Mapping[str, Any]]
Choose = Mapping[str, Choice] | Callable[[str, int, int], Choice]

ONE_AXIS = "all_to_all_blocks"  # the usual one where an all_to_all splits and joins one axis


def check_choose(where: str, choose: Any) -> None:
    """Raises InputError unless ``choose`` is None, a function, or a mapping by kinds."""
    if choose is None or callable(choose):
        return
    if not isinstance(choose, Mapping):
        raise InputError(f"{where}: choose must be a mapping or a function, found {choose!r}")
    for kind in choose:
        one_of(where, "choose: kind", kind, COLLECTIVES)


def named_choice(where: str, kind: str, choice: Any) -> tuple[str, Mapping[str, Any]]:
    """``choice`` as a name and further arguments; raises InputError where it is none."""
    name, extra = choice if isinstance(choice, tuple) and len(choice) == 2 else (choice, {})
    named = isinstance(extra, Mapping) and all(isinstance(key, str) for key in extra)
    if not isinstance(name, str) or not named:
        raise InputError(
            f"{where}: choose gives {choice!r} for {kind}; it needs the name of a template, or a "
            f"pair of that and a mapping of its arguments"
        )
    return name, extra


def default_template(part: Collective) -> str:
    """The template of a collective for which none is chosen."""
    one_axis = part.kind == "all_to_all" and part.split_axis == part.concat_axis
    return ONE_AXIS if one_axis else USUAL_TEMPLATES[part.kind]


def from_template(head: Collective, name: str, arguments: Mapping[str, Any]) -> Plan:
    """The plan of template ``name``; raises UnsupportedError unless it takes ``arguments``."""
    return call_maker(head, name, templates.get(name), **arguments)


def call_maker(
    head: Collective, name: str, maker: Callable[..., Plan], /, *args: Any, **arguments: Any
) -> Plan:
    """What ``maker`` makes; raises UnsupportedError unless it takes these arguments."""
    signature = inspect.signature(maker)
    taken = signature.parameters
    try:
        signature.bind(*args, **arguments)
    except TypeError as error:
        unknown = [repr(key) for key in arguments if key not in taken]
        missing = f"{error}; it takes {', '.join(taken)}"
        reason = f"it has no argument {', '.join(unknown)}" if unknown else missing
        raise UnsupportedError(
            f"template {name} does not fit {head.kind} over {head.ranks}: {reason}"
        ) from error
    return maker(*args, **arguments)


def check_same_ends(
    head: Collective, name: str, plan: Plan, arguments: Mapping[str, Any], extra: Mapping[str, Any]
) -> None:
    """Raises UnsupportedError unless ``plan`` begins and ends with what the collective does.

    Another kind's template may take the same arguments, and further arguments may change what
    its own template does.
    """
    if head.kind == "all_to_all":
        usual = from_template(head, default_template(head), arguments)
    else:
        alike = {"produced": False} | dict(arguments)
        usual = from_template(head, "collective", {"kind": head.kind} | alike)
    if apart := difference(plan, usual, "that needs"):
        given = f" with {dict(extra)}" if extra else ""
        raise UnsupportedError(
            f"template {name}{given} does not do what {head.kind} over {head.ranks} does: {apart} "
            f"(ranks and tensors as the template has them); use {default_template(head)} without "
            f"such arguments"
        )
    if head.kind == "all_reduce" and head.src.meets(head.dst) and _adds_to_results(plan):
        raise UnsupportedError(
            f"template {name} adds contributions to results as they arrive, {head.kind} over "
            f"{head.ranks} has both in {head.src.tensor}; use {default_template(head)}, or another "
            f"tensor for the result"
        )


def _adds_to_results(plan: Plan) -> bool:
    """Whether an all-reduce still sends contributions while others are added to results."""
    c = plan.columns
    return bool(((c.reduce != 0) & (c.src_tensor == 0) & (c.dst_tensor == 1)).any())
