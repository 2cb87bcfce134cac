"""Ranks and peers on meshes of several axes."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from jax import lax
from jax import numpy as jnp

from syncopate_jax.backends.peers import peer_id
from syncopate_jax.errors import InputError
from syncopate_jax.runtime import mesh

P = jax.P


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("axes", [("x",), ("y",), ("x", "y"), ("y", "x")])
def test_a_peer_is_the_device_whose_axis_index_is_its_rank(axes, traced):
    sizes = {"x": 2, "y": 3}
    grid = jax.sharding.Mesh(np.array(jax.devices()[:6]).reshape(2, 3), ("x", "y"))

    def body():
        assert mesh.ranks(axes) == np.prod([sizes[name] for name in axes])
        here = jnp.stack([lax.axis_index(name) for name in ("x", "y")])
        mine = lax.axis_index(axes)
        peers = [peer_id(axes, r + 0 * mine if traced else r) for r in range(mesh.ranks(axes))]
        assert all(tuple(peer) == axes for peer in peers)
        table = jnp.stack([jnp.stack([jnp.asarray(p[n]) for n in axes]) for p in peers])
        return mine[None], here[None], table[None]

    out = P(("x", "y"))
    mine, here, table = jax.jit(
        jax.shard_map(body, mesh=grid, in_specs=(), out_specs=(out,) * 3, check_vma=False)
    )()
    for rank, (x, y), peers in zip(mine, here, table, strict=True):
        coordinates = [{"x": x, "y": y}[name] for name in axes]
        np.testing.assert_array_equal(peers[rank], coordinates)


def test_a_local_kernel_has_no_peers():
    with pytest.raises(InputError, match=r"peer_id needs at least one mesh axis; a local kernel"):
        peer_id((), 0)


def test_the_platform_is_that_of_the_mesh_not_of_this_host():
    device = jax.sharding.AbstractDevice("TPU v5 lite", 1, "tpu")
    abstract = jax.sharding.AbstractMesh((4,), ("x",), abstract_device=device)
    seen = []

    def body(x):
        seen.append(mesh.platform())
        return x

    x = jax.ShapeDtypeStruct((4,), "float32", sharding=jax.NamedSharding(abstract, P("x")))
    jax.eval_shape(jax.shard_map(body, mesh=abstract, in_specs=P("x"), out_specs=P("x")), x)
    assert seen == ["tpu"]
    assert mesh.platform() == "cpu"
