"""A check of every element of a large matrix product against float32, without computing it."""

import jax
import jax.numpy as jnp

MEAN_LIMIT, MAX_LIMIT = 3e-3, 1.5e-2  # of a row's size; rounding to bfloat16 gives 1.7e-3 and 7e-3


@jax.jit
def projected_error(y: jax.Array, x: jax.Array, w: jax.Array, signs: jax.Array) -> jax.Array:
    """Root mean square and largest error of the rows of ``y @ signs``, relative to their size.

    ``x @ (w @ signs)`` in float32 costs two passes over the operands, and any element of y that is
    wrong by more than rounding shows in its row (Freivalds' check), because signs are random.
    """
    wide = jnp.sum(w.astype(jnp.float32) * signs, axis=1)
    truth = jnp.sum(x.astype(jnp.float32) * wide, axis=1)
    error = jnp.sum(y.astype(jnp.float32) * signs, axis=1) - truth
    size = jnp.sqrt(jnp.mean(truth * truth))
    return jnp.stack([jnp.sqrt(jnp.mean(error * error)), jnp.max(jnp.abs(error))]) / size


def checked_error(name: str, y: jax.Array, x: jax.Array, w: jax.Array) -> list[float]:
    """``projected_error`` with fresh signs.

    Raises:
      ValueError: the product is wrong by more than rounding to 16 bits explains.
    """
    signs = jax.random.rademacher(jax.random.key(y.shape[1]), (y.shape[1],), jnp.float32)
    mean, largest = (float(value) for value in projected_error(y, x, w, signs))
    if not (mean <= MEAN_LIMIT and largest <= MAX_LIMIT):
        raise ValueError(
            f"{name}: rows are wrong by {mean:.2e} (root mean square) and {largest:.2e} (largest) "
            f"of their size; at most {MEAN_LIMIT:.1e} and {MAX_LIMIT:.1e} is rounding"
        )
    return [mean, largest]
