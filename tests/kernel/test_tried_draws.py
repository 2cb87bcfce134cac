"""Orders of a reduction that only some values tell apart, and bodies made at random."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

from syncopate_jax.errors import UnsupportedError
from syncopate_jax.kernel import accumulation, traced_body
from tests.kernel.reducing import ARRIVAL, COUNT, check, first, last, later, zero


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "rule",
    [
        lambda old, new: jnp.clip(old + new, -448.0, 448.0),
        lambda old, new: jnp.minimum(old + new, np.float32(60000)).astype(old.dtype),
        lambda old, new: jnp.where(jnp.abs(new) > 100, new, old),
        lambda old, new: jnp.where(jnp.abs(new) < 1e-6, new, old),
        lambda old, new: jnp.where(old > jnp.asarray(3e4, old.dtype), old, old + new),
    ],
)
def test_bounds_that_few_values_reach(rule: Callable[[Any, Any], Any], dtype: str) -> None:
    def body(x: Any, y: Any, a: Any, b: Any) -> None:
        zero(a)
        a[...] = rule(a[...], x[...])
        last(lambda: y.__setitem__(..., a[...]))

    with pytest.raises(UnsupportedError, match=r"on random blocks \(around"):
        check(body, dtype)


def test_bounds_of_whole_numbers() -> None:
    def body(x: Any, y: Any, a: Any, b: Any) -> None:
        zero(a)
        a[...] = jnp.minimum(a[...] + x[...], 1000)
        last(lambda: y.__setitem__(..., a[...]))

    with pytest.raises(UnsupportedError, match=r"on random blocks \(around 1000\)"):
        check(body, "int32")


def test_what_is_no_bound_of_values() -> None:
    """Guards, and what stands for infinity, are not drawn: an online softmax overflows there."""

    def softmax(x: Any, y: Any, a: Any, b: Any) -> None:
        first(lambda: a.__setitem__(..., jnp.full_like(a, -1e30)))
        zero(b)
        top = jnp.maximum(a[...], x[...])
        b[...] = b[...] * jnp.exp(a[...] - top) + jnp.exp(x[...] - top)
        a[...] = top
        last(lambda: y.__setitem__(..., a[...] + jnp.log(b[...] + 1e-30) * 448))

    check(softmax)


# --- bodies made at random ---------------------------------------------------------------

Rule = Callable[[Any, Any, Any], Any]
LEAVES: list[tuple[str, Rule]] = [
    ("kept", lambda m, old, new: old),
    ("new", lambda m, old, new: new),
    ("half", lambda m, old, new: new * 0 + 0.5),
]
NODES: list[tuple[str, Callable[..., Any]]] = [
    ("add", lambda m, a, b: a + b),
    ("mul", lambda m, a, b: a * b),
    ("max", lambda m, a, b: m.maximum(a, b)),
    ("min", lambda m, a, b: m.minimum(a, b)),
    ("where", lambda m, a, b: m.where(a > b, a, b + 1)),
]


def rule(rng: np.random.Generator, depth: int) -> tuple[str, Rule]:
    """What a step makes of what is kept and of its block, for NumPy or JAX as ``m``."""
    if depth == 0:
        return LEAVES[rng.integers(len(LEAVES))]
    name, node = NODES[rng.integers(len(NODES))]
    (left, a), (right, b) = (rule(rng, int(rng.integers(depth))) for _ in range(2))
    made = lambda m, old, new: node(m, a(m, old, new), b(m, old, new))  # noqa: E731
    return f"{name}({left}, {right})", made


def folded(update: Rule, blocks: Sequence[np.ndarray], stored: bool) -> np.ndarray:
    kept = np.zeros((2, 2))
    for at, block in enumerate(blocks):
        kept = block if stored and at == 0 else np.asarray(update(np, kept, block))
    return kept


def same(update: Rule, stored: bool, rng: np.random.Generator) -> bool:
    """Whether blocks that are few values, of any sign or alike give the same in both orders."""
    for turn in range(40):
        blocks = list(rng.standard_normal((COUNT, 2, 2)))
        if turn % 3 == 1:
            blocks = list(rng.integers(-1, 2, (COUNT, 2, 2)).astype(float))
        if turn % 3 == 2:
            blocks = [np.abs(block) + 0.5 for block in blocks]
        if turn % 2 == 1:
            blocks = [block * 10 for block in blocks]
        ways = [folded(update, [blocks[k] for k in order], stored) for order in ORDERS]
        if not np.allclose(*ways, rtol=1e-8, atol=1e-11):
            return False
    return True


ORDERS = (range(COUNT), ARRIVAL)


@pytest.mark.parametrize("seed", range(3))
def test_bodies_made_at_random(seed: int) -> None:
    """What is taken gives the same on other blocks than those that were tried, and the reverse."""
    rng = np.random.default_rng(seed)
    taken = refused = 0
    for _ in range(12):
        text, update = rule(rng, int(rng.integers(1, 4)))
        stored = bool(rng.integers(2))

        def body(
            x: Any, y: Any, a: Any, b: Any, update: Any = update, stored: Any = stored
        ) -> None:
            def step() -> None:
                a[...] = update(jnp, a[...], x[...])

            if stored:
                first(lambda: a.__setitem__(..., x[...]))
                later(step)
            else:
                zero(a)
                step()
            last(lambda: y.__setitem__(..., a[...]))

        try:
            check(body)
        except UnsupportedError as error:
            refused += 1
            assert not same(update, stored, rng), (text, stored, str(error))
        else:
            taken += 1
            assert same(update, stored, rng), (text, stored)
    assert taken and refused, (taken, refused)


def statement(rng: np.random.Generator) -> tuple[str, Callable[..., None]]:
    """One line of a body, under a condition or none, on some of y, a and b."""
    to, by = rng.integers(3, size=2)
    kinds: list[tuple[str, Callable[[Any, Any, Any], Any]]] = [
        ("start", lambda kept, x, other: jnp.zeros_like(kept)),
        ("add", lambda kept, x, other: kept + x),
        ("add", lambda kept, x, other: kept - 2 * x),
        ("max", lambda kept, x, other: jnp.maximum(x, kept)),
        ("from", lambda kept, x, other: 1 + other),
        ("add from", lambda kept, x, other: kept + other),
    ]
    kind, made = kinds[rng.integers(len(kinds))]
    wheres = ["first"] * 6 if kind == "start" else ["last"] * 3 if "from" in kind else []
    where = [*wheres, "always", "always", "last", "data"][rng.integers(4 + len(wheres))]

    before = rng.random() < 0.3

    def line(x: Any, *refs: Any) -> None:
        early = made(refs[to][...], x[...], refs[by][...])

        def store() -> None:
            now = early if before else made(refs[to][...], x[...], refs[by][...])
            refs[to][...] = now

        conditions = {"first": first, "last": last, "data": pl.when(x[0, 0] > 0)}
        conditions.get(where, lambda run: run())(store)

    return f"{where}: {'yab'[to]} {kind} {'yab'[by]}{' before' * before}", line


def test_what_is_seen_to_be_a_sum_is_found_to_be_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is read of bodies made at random agrees with what they give."""
    answers = []

    def reads(*given: Any, **named: Any) -> bool:
        answers.append(accumulation.accumulates(*given, **named))
        return False  # so that it is tried too

    monkeypatch.setattr(traced_body, "accumulates", reads)
    rng = np.random.default_rng(11)
    seen = 0
    for _ in range(40):
        lines = [statement(rng) for _ in range(rng.integers(1, 4))]
        if rng.random() < 0.9:  # as most bodies begin and end
            lines = [("first: all start", lambda x, *refs: [zero(ref) for ref in refs]), *lines]

        def body(*refs: Any, lines: Any = lines) -> None:
            for _, line in lines:
                line(*refs)

        answers.clear()
        try:
            check(body)
        except UnsupportedError as error:
            assert not any(answers), ([text for text, _ in lines], str(error))
        else:
            seen += any(answers)
    assert seen > 2
