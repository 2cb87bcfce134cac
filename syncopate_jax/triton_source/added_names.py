"""Which names a rewritten kernel may not take: those of the kernel that it is made of."""

from __future__ import annotations

import ast
from collections.abc import Iterable

from syncopate_jax.kernel.annotated import Annotated, assigned
from syncopate_jax.triton_source.scheme import Scheme

OWN = ("sync", "table_ptr", "peers_ptr", "counters_ptr")
"""Names that every rewritten kernel has."""
IMPORTED = {"tl": "triton.language", "triton": "triton"}


def taken(source: Annotated) -> frozenset[str]:
    """Every name in a kernel's text, and its own."""
    names = {node.id for node in ast.walk(source.function) if isinstance(node, ast.Name)}
    return frozenset(names | set(source.parameters) | {source.name})


def clash(source: Annotated, scheme: Scheme, added: Iterable[str]) -> str | None:
    """A name of the kernel that means something else in the rewritten one, which assigns ``added``.

    None where there is none.
    """
    names, arrays = taken(source), scheme.parameters
    pointers = {access.pointer for access in source.accesses}
    new = {*OWN, *added}
    new |= {name for name in arrays if name not in pointers or arrays.count(name) > 1}
    own = assigned([source.function]) | set(source.parameters)
    for name, meant in IMPORTED.items():
        found = getattr(source.calls.value(ast.Name(name)), "__name__", meant)
        if name in own or found != meant:
            new.add(name)
    return min(new & names, default=None)
