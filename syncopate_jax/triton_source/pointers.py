"""Names that hold addresses, and how a loop changes the names it carries."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from syncopate_jax.kernel.annotated import assigned
from syncopate_jax.kernel.calls import Calls

VALUES = ("tl.load", "tl.dot", "tl.atomic_add", "tl.load_tensor_descriptor")


def addresses(block: Iterable[ast.stmt], pointer: str, calls: Calls) -> set[str]:
    """``pointer`` and the names of ``block`` that are computed from it and are addresses too."""
    return _computed(block, {pointer}, calls)


def _computed(block: Iterable[ast.stmt], known: set[str], calls: Calls) -> set[str]:
    found = set(known)
    for statement in block:
        for node in ast.walk(statement):
            for target, value in _given(node):
                if _is_address(value, found, calls):
                    found |= assigned([target])
    return found


def _given(node: ast.AST) -> list[tuple[ast.expr, ast.expr]]:
    """Targets of an assignment and what each is given."""
    if isinstance(node, ast.AugAssign | ast.AnnAssign) and node.value is not None:
        return [(node.target, node.value)]
    if not isinstance(node, ast.Assign):
        return []
    found: list[tuple[ast.expr, ast.expr]] = []
    for target in node.targets:
        if (
            isinstance(target, ast.Tuple)
            and isinstance(node.value, ast.Tuple)
            and len(target.elts) == len(node.value.elts)
        ):
            found += zip(target.elts, node.value.elts, strict=True)
        else:
            found.append((target, node.value))
    return found


def _is_address(node: ast.expr, known: set[str], calls: Calls) -> bool:
    if isinstance(node, ast.Name):
        return node.id in known
    parts: list[ast.expr] = []
    if isinstance(node, ast.BinOp):
        parts = [node.left, node.right]
    elif isinstance(node, ast.IfExp):
        parts = [node.body, node.orelse]
    elif isinstance(node, ast.Tuple):
        parts = node.elts
    elif isinstance(node, ast.Call) and calls.name(node) not in VALUES:
        parts = [*node.args, *(keyword.value for keyword in node.keywords)]
    if not any(_is_address(part, known, calls) for part in parts):
        return False
    if isinstance(node, ast.Call) and (helper := calls.helper(node)) is not None:
        return _returns_address(node, *helper, known, calls)
    return True


def _returns_address(
    call: ast.Call, inside: Calls, helper: ast.FunctionDef, known: set[str], calls: Calls
) -> bool:
    """Whether a helper that is given addresses returns one; not what it loads from there."""
    names = [arg.arg for arg in (*helper.args.posonlyargs, *helper.args.args)]
    given = dict(zip(names, call.args, strict=False))
    given |= {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}
    if len(call.args) + len(call.keywords) > len(given):
        return True  # by * or **, where which is which is not known
    own = {name for name, value in given.items() if _is_address(value, known, calls)}
    found = _computed(helper.body, own, inside)
    returned = [node.value for node in ast.walk(helper) if isinstance(node, ast.Return)]
    return any(_is_address(value, found, inside) for value in returned if value is not None)


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
