"""The matrix products of a transformer layer that tensor parallelism cuts, by model."""

from __future__ import annotations

from dataclasses import dataclass

from syncopate_jax.errors import InputError
from syncopate_jax.ir.arguments import integer


@dataclass(frozen=True, slots=True)
class Layer:
    """``y[tokens, n] = x[tokens, k] @ w[k, n]``.

    Attributes:
      name: for tables.
      k, n: extents of the whole weight.
      gathers: True: w is cut by columns, and x, cut by tokens, is gathered before; False: w is cut
        by rows, and the partial results are scattered by tokens after.
    """

    name: str
    k: int
    n: int
    gathers: bool

    def __post_init__(self) -> None:
        for what in ("k", "n"):
            integer(f"layer {self.name}", what, getattr(self, what), 1)

    @property
    def cut(self) -> int:
        """The extent that ranks share."""
        return self.n if self.gathers else self.k


@dataclass(frozen=True, slots=True)
class Model:
    """Sizes of a transformer with grouped-query attention and a gated feed-forward layer.

    Attributes:
      hidden: width of the residual stream, and of all query heads together.
      inner: width of the feed-forward layer.
      keys: width of all key heads together; that of the value heads is the same.
    """

    hidden: int
    inner: int
    keys: int


# As published with the models (their config.json).
MODELS = {
    "llama3-8b": Model(4096, 14336, 1024),
    "llama3-70b": Model(8192, 28672, 1024),
    "llama3-405b": Model(16384, 53248, 1024),
    "qwen2-72b": Model(8192, 29568, 1024),
}


def model_layers(name: str) -> tuple[Layer, ...]:
    """The four products of one layer of a model; raises InputError that lists the known models.

    Queries, keys and values are one product, gate and up another.
    """
    if name not in MODELS:
        raise InputError(f"no model is called {name!r}; known: {', '.join(sorted(MODELS))}")
    model = MODELS[name]
    return (
        Layer("qkv", model.hidden, model.hidden + 2 * model.keys, True),
        Layer("attention_out", model.hidden, model.hidden, False),
        Layer("feed_forward_in", model.hidden, 2 * model.inner, True),
        Layer("feed_forward_out", model.inner, model.hidden, False),
    )
