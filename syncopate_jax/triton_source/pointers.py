"""Names that hold addresses, and how a loop changes the names it carries."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from syncopate_jax.kernel.annotated import assigned

VALUES = ("tl.load", "tl.dot", "tl.atomic_add", "tl.load_tensor_descriptor")


def addresses(block: Iterable[ast.stmt], pointer: str) -> set[str]:
    """``pointer`` and the names of ``block`` that are computed from it and are addresses too."""
    found = {pointer}
    for statement in block:
        for node in ast.walk(statement):
            if isinstance(node, ast.Assign) and _is_address(node.value, found):
                found |= assigned(node.targets)
            elif isinstance(node, ast.AugAssign) and _is_address(node.value, found):
                found |= assigned([node.target])
    return found


def _is_address(node: ast.expr, known: set[str]) -> bool:
    if isinstance(node, ast.Name):
        return node.id in known
    if isinstance(node, ast.BinOp):
        return _is_address(node.left, known) or _is_address(node.right, known)
    if isinstance(node, ast.IfExp):
        return _is_address(node.body, known) or _is_address(node.orelse, known)
    if isinstance(node, ast.Call) and ast.unparse(node.func) not in VALUES:
        return any(_is_address(arg, known) for arg in node.args)
    return False


@dataclass(frozen=True, slots=True)
class Advance:
    """A name that a loop raises by the same amount at every step.

    Attributes:
      amount: source of what is added.
    """

    name: str
    amount: str


def advances(loop: ast.For) -> tuple[Advance, ...]:
    """The names that ``loop`` raises, or lowers, by what does not change inside it."""
    changed = assigned([loop])
    found = []
    for statement in loop.body:
        step = _step(statement)
        if step is None or _times_assigned(loop.body, step.name) != 1:
            continue
        uses = {n.id for n in ast.walk(ast.parse(step.amount)) if isinstance(n, ast.Name)}
        if not uses & changed:
            found.append(step)
    return tuple(found)


def _step(statement: ast.stmt) -> Advance | None:
    """``x += y``, ``x -= y``, ``x = x + y`` and ``x = x - y``."""
    if isinstance(statement, ast.AugAssign) and isinstance(statement.target, ast.Name):
        return _signed(statement.target.id, statement.op, statement.value)
    if (
        isinstance(statement, ast.Assign)
        and len(statement.targets) == 1
        and isinstance(target := statement.targets[0], ast.Name)
        and isinstance(statement.value, ast.BinOp)
        and ast.unparse(statement.value.left) == target.id
    ):
        return _signed(target.id, statement.value.op, statement.value.right)
    return None


def _signed(name: str, op: ast.operator, value: ast.expr) -> Advance | None:
    if isinstance(op, ast.Add):
        return Advance(name, ast.unparse(value))
    return Advance(name, f"-({ast.unparse(value)})") if isinstance(op, ast.Sub) else None


def _times_assigned(block: Sequence[ast.stmt], name: str) -> int:
    nodes = (node for statement in block for node in ast.walk(statement))
    stores = sum(
        isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store) and n.id == name for n in nodes
    )
    return stores


def carried(loop: ast.For, before: Iterable[ast.stmt], params: Iterable[str]) -> set[str]:
    """Names that ``loop`` assigns and that are defined before it."""
    return assigned(loop.body) & (assigned(list(before)) | set(params))


def needed_for(wanted: Iterable[ast.expr], block: Sequence[ast.stmt]) -> list[ast.stmt]:
    """The statements of ``block`` that ``wanted`` follows from, in order."""
    names = {n.id for node in wanted for n in ast.walk(node) if isinstance(n, ast.Name)}
    kept: list[ast.stmt] = []
    for statement in reversed(block):
        if assigned([statement]) & names:
            kept.insert(0, statement)
            names |= {n.id for n in ast.walk(statement) if isinstance(n, ast.Name)}
    return kept
