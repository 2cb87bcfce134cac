"""Words and phrases of a plan's text form (grammar: ``text.py``): names, ranks, operations."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable

from syncopate_jax.ir.comm import P2P, Operation

_WORD = re.compile(r"[^\W\d][\w.+-]*")


def op_text(op: Operation) -> str:
    """An operation as its line has it, without its place."""
    if isinstance(op, P2P):
        known = op.rank in (op.src_rank, op.dst_rank)
        verb = op.direction if known else "move"
        src_rank = f"r{op.src_rank} " if verb in ("pull", "move") else ""
        dst_rank = f"r{op.dst_rank} " if verb in ("push", "move") else ""
        body = f"{verb} {src_rank}{op.src} -> {dst_rank}{op.dst}"
    else:
        body = f"{op.kind} {op.src} -> {op.dst} over {ranks_text(op.ranks)}"
        body += f" split {op.split_axis}" if op.split_axis != -1 else ""
        body += f" concat {op.concat_axis}" if op.concat_axis != -1 else ""
    parts = [body]
    if op.reduce != "none":
        parts.append(op.reduce)
    if op.deps:
        parts.append("after " + " ".join(map(str, op.deps)))
    parts.append(f"on {word(op.channel)}")
    if op.origin:
        parts.append(f"# {_free(op.origin)}")
    return " ".join(parts)


def ranks_text(ranks: Iterable[int]) -> str:
    """``0:4,7`` for 0, 1, 2, 3, 7: runs of rising ranks as half-open ranges."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1]:
            runs[-1][1] = rank + 1
        else:
            runs.append([rank, rank + 1])
    return ",".join(str(lo) if hi == lo + 1 else f"{lo}:{hi}" for lo, hi in runs) or "none"


def word(name: str) -> str:
    """``name``, as a JSON string where it is not a plain word."""
    return name if _WORD.fullmatch(name) else json.dumps(name)


def _free(text: str) -> str:
    """Text up to the end of a line; as a JSON string where that would not read back the same."""
    plain = text.isprintable() and text == text.strip() and not text.startswith('"')
    return text if plain else json.dumps(text)
