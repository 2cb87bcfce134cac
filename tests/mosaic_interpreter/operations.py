"""What a kernel's operations on memory do, and what they make known to whom."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax._src.pallas import primitives
from jax._src.pallas.mosaic_gpu import core as gpu_core
from jax._src.pallas.mosaic_gpu import primitives as gpu_primitives
from jax._src.state import indexing
from jax._src.state import primitives as state_primitives

from tests.mosaic_interpreter import arithmetic, inline
from tests.mosaic_interpreter.evaluate import Evaluator, handles
from tests.mosaic_interpreter.machine import By, load_actor
from tests.mosaic_interpreter.memory import Barrier, Buffer, Remote
from tests.mosaic_interpreter.regions import Region
from tests.mosaic_interpreter.views import Knowledge, learn


def _optional(name: str) -> Any:
    """A primitive that one of the versions lacks."""
    return getattr(gpu_primitives, name, None)


def place(ev: Evaluator, ref: Any, transforms: Sequence[Any]) -> tuple[Buffer, Region]:
    """The buffer, on whichever device, and the part of it that a reference names."""
    peers = [t for t in transforms if isinstance(t, gpu_core.PeerMemRef)]
    for peer in peers:
        ref = Remote(_device(ev, peer.device_id, peer.device_id_type), ref.key)
    buffer = ev.warpgroup.buffer(ref)
    rest = [t for t in transforms if not isinstance(t, gpu_core.PeerMemRef)]
    return buffer, Region.of(buffer.array.shape, rest)


def _device(ev: Evaluator, address: Any, kind: Any) -> int:
    if kind is primitives.DeviceIdType.LOGICAL:
        return int(address)
    return ev.warpgroup.machine.grid.device(address, of=ev.warpgroup.device.number)


def _inside(ev: Evaluator, eqn: Any, what: str, ref: Any, leaves: Sequence[Any]) -> Any:
    """Buffer, region and words of what the warpgroup's threads load or store."""
    buffer, region = place(ev, ref, jax.tree.unflatten(eqn.params["tree"], leaves))
    words = ev.words(eqn, what)
    if not region.inside:
        raise IndexError(f"{words} is outside of {buffer.name} {buffer.array.shape}: {region}")
    return buffer, region, words


@handles(state_primitives.get_p, gpu_primitives.load_p)
def get(ev: Evaluator, eqn: Any, given: list[Any]) -> Sequence[Any]:
    ref, *leaves = given
    found = ev.warpgroup.load(*_inside(ev, eqn, "a load", ref, leaves))
    return [arithmetic.plain(found, eqn.outvars[0].aval)]


@handles(state_primitives.swap_p, _optional("store_p"))
def swap(ev: Evaluator, eqn: Any, given: list[Any]) -> Sequence[Any]:
    """A store; what was there before is taken by none of the kernels."""
    ref, value, *leaves = given
    buffer, region, words = _inside(ev, eqn, "a store", ref, leaves)
    before = region.read(buffer.array)
    ev.warpgroup.store(buffer, region, value, words)
    return [arithmetic.plain(before, var.aval) for var in eqn.outvars]


# --- barriers


def _barrier(array: np.ndarray, tree: Any, leaves: Sequence[Any]) -> Barrier:
    """The barrier that a reference names; a slice names the one it starts at."""
    transforms = () if tree is None else jax.tree.unflatten(tree, leaves)
    at = [
        int(index.start if isinstance(index, indexing.Slice) else index)
        for transform in transforms
        for index in transform.indices
    ]
    found: Barrier = array[tuple(at) + (0,) * (array.ndim - len(at))]
    return found


def _arrive(ev: Evaluator, barrier: Barrier, what: Knowledge) -> None:
    barrier.arrive(what)
    ev.warpgroup.machine.turns.give_way()


@handles(gpu_primitives.barrier_arrive_p)
def barrier_arrive(ev: Evaluator, eqn: Any, given: list[Any]) -> Sequence[Any]:
    array, *leaves = given
    if eqn.params.get("has_user_predicate", False):
        *leaves, predicate = leaves
        if not predicate:
            return []
    barrier = _barrier(array, eqn.params["transforms_treedef"], leaves)
    _arrive(ev, barrier, ev.warpgroup.knowledge.copy())
    return []


@handles(gpu_primitives.barrier_wait_p)
def barrier_wait(ev: Evaluator, eqn: Any, given: list[Any]) -> Sequence[Any]:
    array, *leaves = given
    wg, barrier = ev.warpgroup, _barrier(array, eqn.params["transforms_treedef"], leaves)
    phase = barrier.seen.get(wg.name, 0) + 1
    wg.machine.turns.wait(
        lambda: len(barrier.phases) >= phase,
        lambda: ev.words(
            eqn,
            f"{barrier.name}, phase {phase}, {barrier.arrived} of {barrier.arrivals} arrived: wait",
        ),
    )
    wg.knowledge.learn(barrier.observe(wg.name))
    return []


@handles(_optional("barrier_arrive_and_wait_p"))
def barrier_arrive_and_wait(ev: Evaluator, eqn: Any, given: list[Any]) -> Sequence[Any]:
    barrier_arrive(ev, eqn, given)
    return barrier_wait(ev, eqn, given)


# --- counters


@handles(primitives.get_global_p)
def get_global(ev: Evaluator, eqn: Any, given: list[Any]) -> Sequence[Any]:
    """Counters are the same for all CTAs that run the same line, and at zero."""
    del given
    return [Remote(ev.warpgroup.device.number, ("global", id(eqn)))]


def _index(transforms: Sequence[Any]) -> tuple[int, ...]:
    found = [i for t in transforms for i in t.indices]
    return tuple(int(i.start if isinstance(i, indexing.Slice) else i) for i in found)


@handles(primitives.semaphore_signal_p, gpu_primitives.semaphore_signal_p)
def semaphore_signal(ev: Evaluator, eqn: Any, given: list[Any]) -> Sequence[Any]:
    """A release by one thread: of what it knows, and of its warpgroup's stores if published."""
    ref, transforms, units, address, *_ = jax.tree.unflatten(eqn.params["args_tree"], given)
    if address is not None:
        ref = Remote(_device(ev, address, eqn.params["device_id_type"]), ref.key)
    wg = ev.warpgroup
    words = ev.words(eqn, f"a signal to counter {list(_index(transforms))}")
    wg.machine.check_counter(ref.device, wg.knowledge.generic, words)
    wg.counter(ref, _index(transforms)).signal(int(units), wg.released())
    wg.machine.turns.give_way()
    return []


@handles(primitives.semaphore_wait_p, gpu_primitives.semaphore_wait_p)
def semaphore_wait(ev: Evaluator, eqn: Any, given: list[Any]) -> Sequence[Any]:
    """An acquire, for the warpgroup's own loads and stores; the copy unit needs a fence after."""
    ref, transforms, count, decrement = jax.tree.unflatten(eqn.params["args_tree"], given)
    wg = ev.warpgroup
    counter = wg.counter(ref, _index(transforms))
    wg.machine.turns.give_way()
    wg.machine.turns.wait(
        lambda: counter.value >= count,
        lambda: ev.words(eqn, f"{counter.name} to reach {count}, it is {counter.value}: wait"),
    )
    learn(wg.knowledge.generic, counter.acquire(int(count), bool(decrement)))
    return []


@handles(primitives.semaphore_read_p)
def semaphore_read(ev: Evaluator, eqn: Any, given: list[Any]) -> Sequence[Any]:
    ref, transforms, *_ = jax.tree.unflatten(eqn.params["args_tree"], given)
    ev.warpgroup.machine.turns.give_way()
    return [ev.warpgroup.counter(ref, _index(transforms)).value]


@handles(gpu_primitives.inline_mgpu_p)
def inline_mgpu(ev: Evaluator, eqn: Any, given: list[Any]) -> Sequence[Any]:
    """Text that the kernel gives the compiler itself; ``inline.py`` says what it means."""
    count = eqn.params["pytree_args"].num_leaves
    transforms = jax.tree.unflatten(eqn.params["pytree_ref_transforms"], given[count:])
    found = [
        value if chain is None else place(ev, value, chain)
        for value, chain in zip(given[:count], transforms, strict=True)
    ]
    return inline.meaning(eqn.params["mgpu_fn"])(ev.warpgroup, found)


# --- the copy unit and the tensor cores


@handles(gpu_primitives.copy_gmem_to_smem_p)
def copy_gmem_to_smem(ev: Evaluator, eqn: Any, given: list[Any]) -> Sequence[Any]:
    """The data is there at once, but known to be only to who waits for the barrier."""
    params, wg = eqn.params, ev.warpgroup
    if not params["has_barrier"] or params.get("has_user_predicate", False):
        raise NotImplementedError(ev.words(eqn, "a copy without a barrier or with a predicate"))
    (src, dst, barriers), leaves = given[:3], given[3:]
    trees = params["src_transforms_treedef"], params["dst_transforms_treedef"]
    first, second = trees[0].num_leaves, trees[0].num_leaves + trees[1].num_leaves
    source, taken = place(ev, src, jax.tree.unflatten(trees[0], leaves[:first]))
    target, put = place(ev, dst, jax.tree.unflatten(trees[1], leaves[first:second]))
    barrier = _barrier(barriers, params["barrier_transforms_treedef"], leaves[second:])
    barrier.loads += 1
    known = wg.knowledge
    by = By(load_actor(barrier), barrier.loads, ev.words(eqn, "a copy to shared memory"))
    wg.machine.write(target, put, wg.machine.read(source, taken, by, known.gmem), by, known.smem)
    brought = known.copy()
    brought.complete(by.actor, by.count)
    _arrive(ev, barrier, brought)
    return []


@handles(gpu_primitives.copy_smem_to_gmem_p)
def copy_smem_to_gmem(ev: Evaluator, eqn: Any, given: list[Any]) -> Sequence[Any]:
    """The data is there at once, but known to have been read, or to be there, only after a wait."""
    params, wg = eqn.params, ev.warpgroup
    if params["has_user_predicate"] or params["reduction_op"] or not params["commit_group"]:
        raise NotImplementedError(ev.words(eqn, "a copy with a predicate, reduction or group"))
    (src, dst), leaves = given[:2], given[2:]
    trees = params["src_transforms_treedef"], params["dst_transforms_treedef"]
    first = trees[0].num_leaves
    source, taken = place(ev, src, jax.tree.unflatten(trees[0], leaves[:first]))
    target, put = place(ev, dst, jax.tree.unflatten(trees[1], leaves[first:]))
    wg.counts["store"] += 1
    count, words = wg.counts["store"], ev.words(eqn, "a copy to GMEM")
    reads, writes = (By(wg.actor(kind), count, words) for kind in ("store read", "store"))
    value = wg.machine.read(source, taken, reads, wg.knowledge.smem)
    wg.machine.write(target, put, value, writes, wg.knowledge.gmem)
    return []


@handles(gpu_primitives.wait_smem_to_gmem_p)
def wait_smem_to_gmem(ev: Evaluator, eqn: Any, given: list[Any]) -> Sequence[Any]:
    del given
    wg = ev.warpgroup
    done = max(wg.counts["store"] - eqn.params["n"], 0)
    wg.counts["stores read"] = max(wg.counts["stores read"], done)
    wg.knowledge.complete(wg.actor("store read"), done)
    if not eqn.params["wait_read_only"]:
        wg.knowledge.complete(wg.actor("store"), done)
    return []


@handles(gpu_primitives.commit_smem_p)
def commit_smem(ev: Evaluator, eqn: Any, given: list[Any]) -> Sequence[Any]:
    del eqn, given
    learn(ev.warpgroup.knowledge.smem, ev.warpgroup.knowledge.generic)
    return []


@handles(gpu_primitives.wgmma_ref_p)
def wgmma(ev: Evaluator, eqn: Any, given: list[Any]) -> Sequence[Any]:
    """The accumulator has the product at once, but shared memory is read until a wait."""
    params, wg = eqn.params, ev.warpgroup
    empty = jax.tree.structure([])
    names = ("acc_transforms_tree", "a_transforms_tree", "b_transforms_tree")
    trees = jax.tree_util.treedef_tuple([params[name] or empty for name in names])
    (acc, a, b), leaves = given[:3], given[3:]
    acc_transforms, *ab = jax.tree.unflatten(trees, leaves)
    wg.counts["product"] += 1
    words = ev.words(eqn, "a product of tensor cores")
    operands = []
    for ref, transforms in zip((a, b), ab, strict=True):
        if not isinstance(ref, Buffer):
            raise NotImplementedError(f"{words}: an operand in registers")
        buffer, region = place(ev, ref, transforms)
        by = By(wg.actor("product"), wg.counts["product"], words)
        value = wg.machine.read(buffer, region, by, wg.knowledge.smem)
        operands.append(value.astype(np.float32))
    region = Region.of(acc.array.shape, acc_transforms)
    region.write(acc.array, region.read(acc.array) + operands[0] @ operands[1])
    return []


def _products_done(ev: Evaluator, left: int) -> None:
    wg = ev.warpgroup
    wg.knowledge.complete(wg.actor("product"), max(wg.counts["product"] - left, 0))


@handles(gpu_primitives.wgmma_wait_p)
def wgmma_wait(ev: Evaluator, eqn: Any, given: list[Any]) -> Sequence[Any]:
    del given
    _products_done(ev, eqn.params["n"])
    return []


@handles(gpu_primitives.wgmma_accumulator_deref_p)
def wgmma_accumulator_deref(ev: Evaluator, eqn: Any, given: list[Any]) -> Sequence[Any]:
    if eqn.params["wait_n"] is not None:
        _products_done(ev, eqn.params["wait_n"])
    return [given[0].array.copy()]


@handles(gpu_primitives.set_max_registers_p, gpu_primitives.commit_group_p)
def nothing(ev: Evaluator, eqn: Any, given: list[Any]) -> Sequence[Any]:
    """Nothing that can be seen here."""
    del ev, eqn, given
    return []
