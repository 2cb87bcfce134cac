"""The demo's layer: a tensor-parallel SwiGLU feed-forward layer, fused, unfused and in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from syncopate_jax.check.simulate import Comparison
from syncopate_jax.ir.presets import h200_nvlink
from syncopate_jax.ops import all_gather_matmul, matmul_reduce_scatter
from syncopate_jax.ops.prediction import predict
from syncopate_jax.options import Options
from syncopate_jax.registry import operators

AXIS = "tp"
Arrays = tuple[np.ndarray, ...]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the demo found.

    Attributes:
      errors: per quantity the relative error of the fused and of the unfused layer.
      words: the plans in words.
    """

    errors: dict[str, tuple[float, float]]
    words: list[str]

    def worst_ratio(self) -> float:
        """The largest ratio of a fused error to the unfused one."""
        floor = float(np.finfo(np.float32).eps)
        return max(fused / max(unfused, floor) for fused, unfused in self.errors.values())


def layer(
    x: jax.Array, w_in: jax.Array, w_out: jax.Array, *, backend: str, split: int
) -> jax.Array:
    """One rank's part: x [T/W, H], w_in [H, 2F/W] (gate beside up), w_out [F/W, H] -> [T/W, H]."""
    both = all_gather_matmul(x, w_in, axis_name=AXIS, backend=backend, split=split)
    gate, up = jnp.split(both, 2, axis=-1)
    inner = jax.nn.silu(gate) * up
    return matmul_reduce_scatter(inner, w_out, axis_name=AXIS, backend=backend, split=split)


def run(
    ranks: int, tokens: int, hidden: int, ffn: int, split: int, backend: str, seed: int
) -> Outcome:
    """Forward and backward, fused and unfused, against float64."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((tokens, hidden))
    w_in = rng.standard_normal((hidden, 2 * ffn)) / np.sqrt(hidden)
    w_out = rng.standard_normal((ffn, hidden)) / np.sqrt(ffn)
    ct = rng.standard_normal((tokens, hidden))
    arrays = tuple(a.astype(np.float32) for a in (x, w_in, w_out, ct))
    wanted = in_float64(ranks, *(a.astype(np.float64) for a in arrays))
    names = ("output", "gradient of x", "gradient of w_in", "gradient of w_out")
    found = [_on_devices(ranks, split, chosen)(*arrays) for chosen in (backend, "xla")]
    errors = {
        name: (_error(found[0][i], wanted[i]), _error(found[1][i], wanted[i]))
        for i, name in enumerate(names)
    }
    return Outcome(errors, describe(ranks, tokens, hidden, split))


def _on_devices(ranks: int, split: int, backend: str) -> Callable[..., Arrays]:
    mesh = jax.make_mesh((ranks,), (AXIS,), (AxisType.Auto,), devices=jax.devices()[:ranks])
    fn = jax.shard_map(
        lambda x, w_in, w_out: layer(x, w_in, w_out, backend=backend, split=split),
        mesh=mesh,
        in_specs=(P(AXIS, None), P(None, AXIS), P(AXIS, None)),
        out_specs=P(AXIS, None),
    )

    @jax.jit
    def forward_and_backward(
        x: jax.Array, w_in: jax.Array, w_out: jax.Array, ct: jax.Array
    ) -> tuple[jax.Array, ...]:
        y, transpose = jax.vjp(fn, x, w_in, w_out)
        return y, *transpose(ct)

    return lambda *arrays: tuple(np.asarray(a) for a in forward_and_backward(*arrays))


def in_float64(
    ranks: int, x: np.ndarray, w_in: np.ndarray, w_out: np.ndarray, ct: np.ndarray
) -> Arrays:
    """Output and gradients by hand; each rank's columns of ``w_in`` are its gate, then its up."""
    both = (x @ w_in).reshape(len(x), ranks, 2, -1)
    gate, up = both[:, :, 0], both[:, :, 1]
    sigmoid = 1 / (1 + np.exp(-gate))
    inner = (gate * sigmoid * up).reshape(len(x), -1)
    d_inner = (ct @ w_out.T).reshape(gate.shape)
    d_gate = d_inner * up * (sigmoid + gate * sigmoid * (1 - sigmoid))
    d_both = np.stack([d_gate, d_inner * gate * sigmoid], axis=2).reshape(len(x), -1)
    return inner @ w_out, d_both @ w_in.T, x.T @ d_both, inner.T @ ct


def predicted(ranks: int, tokens: int, hidden: int, ffn: int, split: int) -> dict[str, Comparison]:
    """Predicted times of the layer's two operators on a node of H200s."""
    topology, options = h200_nvlink(ranks), Options(split=split)
    gather = operators.get("all_gather_matmul")
    scatter = operators.get("matmul_reduce_scatter")
    return {
        "all_gather_matmul": predict(
            gather, (1, tokens // ranks, hidden), (hidden, 2 * ffn // ranks), topology, options
        ),
        "matmul_reduce_scatter": predict(
            scatter, (1, tokens, ffn // ranks), (ffn // ranks, hidden), topology, options
        ),
    }


def describe(ranks: int, tokens: int, hidden: int, split: int) -> list[str]:
    """What the two plans do, in words."""
    rows, pieces = tokens // ranks, f", in {split} pieces" if split > 1 else ""
    if ranks == 1:
        return ["There is one device, so nothing moves: the layer is two matrix products."]
    parts = f"{ranks - 1} parts from the others are" if ranks > 2 else "part from the other is"
    return [
        "The layer is two matrix products. Each device has its share of the tokens and of the "
        "weights, so data must move before the first product and after the second.",
        f"Before (all_gather_matmul, plan all_gather_swizzle): every device sends its {rows} rows "
        f"of x{pieces} to its neighbour first, then to the next, until all {ranks} have them. "
        f"Meanwhile it multiplies: its own rows first, then each share as it arrives.",
        f"After (matmul_reduce_scatter, plan reduce_scatter_direct): every device has a part of "
        f"the sum for all tokens. It computes its neighbour's {rows} rows first and sends them "
        f"({rows}x{hidden}{pieces}) as soon as they are done, then the next device's. Its own rows "
        f"come last; by then the {parts} there, to be added in float32.",
    ]


def _error(found: np.ndarray, wanted: np.ndarray) -> float:
    return float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))
