"""Ranks and peers on meshes of several axes."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from jax import lax
from jax import numpy as jnp

from syncopate_jax.backends.peers import barrier_id, peer_id
from syncopate_jax.errors import InputError, UnsupportedError
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


def test_each_set_of_axes_has_a_barrier_of_its_own():
    mesh_ = jax.sharding.AbstractMesh((2, 1, 3, 2), ("a", "one", "b", "c"))
    with jax.sharding.use_abstract_mesh(mesh_):
        sets = [("a",), ("b",), ("c",), ("a", "b"), ("a", "c"), ("b", "c"), ("a", "b", "c")]
        assert [barrier_id(names) for names in sets] == [1, 2, 3, 4, 5, 6, 7]
        assert barrier_id(("c", "one", "a")) == barrier_id(("a", "c"))  # the same ranks meet


def test_sets_of_axes_that_a_tpu_has_no_barriers_for():
    mesh_ = jax.sharding.AbstractMesh((2,) * 6, tuple("abcdef"))
    with jax.sharding.use_abstract_mesh(mesh_):
        assert barrier_id(("e", "f")) == 21
        with pytest.raises(
            UnsupportedError,
            match="mesh axes b, c, d, e, f of a, b, c, d, e, f: a TPU has about 32 barrier",
        ):
            barrier_id(tuple("bcdef"))
