"""Runs Gluon kernels on the CPU: partitions are threads, barriers and copies as on a Hopper GPU.

Nothing is done before it must be: a product reads its operands when it is waited for, a store its
tile when that is, and a load lands at a random moment before its barrier opens. A stage that is
written too early, or read too late, gives wrong values; partitions that wait for each other are an
error, as is a barrier's turn that is two ahead. Test tool only: float32, and what kernels use here.
"""

from __future__ import annotations

import random
import threading
import types
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from triton.runtime.jit import JITFunction

PATIENCE = 20  # seconds in which a barrier must open


class Tensor:
    """A value, with the methods that kernels call on it."""

    def __init__(self, array: np.ndarray):
        self.array, self.shape = array, array.shape

    def to(self, dtype: Any) -> Tensor:
        return self

    def reshape(self, shape: Any) -> Tensor:
        return Tensor(self.array.reshape(shape))

    def permute(self, order: Any) -> Tensor:
        return Tensor(self.array.transpose(order))

    def split(self) -> tuple[Tensor, Tensor]:
        return Tensor(self.array[..., 0].copy()), Tensor(self.array[..., 1].copy())


class Shared:
    """Shared memory or a part of it, not a number before it is written."""

    def __init__(self, array: np.ndarray):
        self.array, self.shape, self.layout = array, array.shape, None
        self.dtype = types.SimpleNamespace(primitive_bitwidth=8 * array.itemsize)

    def index(self, at: int) -> Shared:
        assert 0 <= at < len(self.array)
        return Shared(self.array[at])

    def slice(self, start: int, length: int, dim: int) -> Shared:
        return Shared(self.array[(slice(None),) * dim + (slice(start, start + length),)])

    def _reinterpret(self, dtype: Any, shape: Any, layout: Any) -> Shared:
        """Columns of a stage, which is in blocks of columns; here they need not lie together."""
        rows, width = shape
        assert rows == self.shape[0] and width <= self.shape[1]
        return Shared(self.array[:, :width])

    def store(self, value: Tensor) -> None:
        self.array[...] = value.array


class Barrier:
    """Opens for a turn once so many have arrived and all expected bytes have landed."""

    def __init__(self, changed: threading.Condition):
        self.changed, self.turn, self.loads = changed, 0, []  # type: ignore[var-annotated]
        self.count = self.left = self.bytes = 0

    def arrive(self, expected: int = 0) -> None:
        with self.changed:
            assert self.left > 0, "arrives at a barrier whose turn is not over"
            self.left, self.bytes = self.left - 1, self.bytes + expected
            self._open()

    def land(self, load: Callable[[], int]) -> None:
        with self.changed:
            self.loads.append(load)
            self._open()

    def _open(self) -> None:
        """Loads land when the barrier opens, in any order."""
        if self.left or (not self.loads and self.bytes):
            return
        random.shuffle(self.loads)
        landed = [load() for load in self.loads]
        self.loads, self.bytes = [], self.bytes - sum(landed)
        if self.bytes == 0:
            self.left, self.turn = self.count, self.turn ^ 1
            self.changed.notify_all()

    def wait(self, turn: int) -> None:
        with self.changed:
            opened = self.changed.wait_for(lambda: self.turn != turn, PATIENCE)
            assert opened, "a barrier does not open"


class Barriers(list[Barrier]):
    def index(self, at: int) -> Barrier:
        return self[at]


class Blocks:
    """A tensor descriptor: past the edges loads give zeros and stores do nothing."""

    def __init__(self, array: np.ndarray, shape: Any, block: Any):
        assert array.shape == tuple(shape)
        self.array, self.block = array, tuple(block)

    def _cut(self, at: Any) -> tuple[Any, tuple[int, ...]]:
        where = tuple(slice(a, a + b) for a, b in zip(at, self.block, strict=True))
        return where, self.array[where].shape

    def load(self, at: Any, into: np.ndarray) -> int:
        where, found = self._cut(at)
        into[...] = 0
        into[tuple(map(slice, found))] = self.array[where]
        return into.nbytes

    def store(self, at: Any, value: np.ndarray) -> None:
        where, found = self._cut(at)
        self.array[where] = value[tuple(map(slice, found))]


class Partition(threading.local):
    """What a thread has under way: products and stores, the oldest first."""

    def __init__(self) -> None:
        self.program, self.products, self.stores = 0, [], []  # type: ignore[var-annotated]


def run(kernel: Any, programs: int, arrays: Mapping[str, np.ndarray], **sizes: int) -> None:
    """All programs of a kernel, one after the other, on arrays by parameter, in place."""
    for program in range(programs):
        here = Partition()
        here.program = program
        _function(kernel, _Language(here, program).names)(
            **{name: _pointer(array) for name, array in arrays.items()}, **sizes
        )


def _pointer(array: np.ndarray) -> Any:
    return types.SimpleNamespace(array=array, dtype=types.SimpleNamespace(element_ty=array.dtype))


def _function(kernel: Any, names: Mapping[str, Any]) -> Callable[..., Any]:
    """The kernel's Python function, and those it calls, over the names given."""
    found: dict[str, Any] = dict(kernel.fn.__globals__)
    for name, value in list(found.items()):
        if isinstance(value, JITFunction):
            found[name] = types.FunctionType(value.fn.__code__, found, name)
        elif type(value).__name__ == "constexpr":
            found[name] = value.value
    found |= names
    return types.FunctionType(kernel.fn.__code__, found, kernel.fn.__name__)


class _Language:
    """What a kernel calls of Gluon, in one program."""

    def __init__(self, here: Partition, program: int):
        self.here, self.program, self.changed = here, program, threading.Condition()
        layout = types.SimpleNamespace(get_default_for=lambda shape, dtype: None)
        language = types.SimpleNamespace(
            NVMMASharedLayout=layout,
            NVMMADistributedLayout=lambda *_: None,
            int64="barriers",
            float32=np.float32,
            program_id=lambda axis: program,
            minimum=min,
            where=lambda yes, left, right: left if yes else right,
            static_range=range,
            to_tensor=lambda value: value,
            zeros=lambda shape, dtype, layout: Tensor(np.zeros(shape, dtype)),
            allocate_shared_memory=self.allocate,
            warp_specialize=self.specialize,
        )
        mbarrier = types.SimpleNamespace(
            MBarrierLayout=lambda: None,
            init=self.init,
            wait=lambda barrier, turn: barrier.wait(turn),
            expect=lambda barrier, size: barrier.arrive(size),
            arrive=lambda barrier, pred=True: barrier.arrive() if pred else None,
        )
        tma = types.SimpleNamespace(
            make_tensor_descriptor=lambda pointer, shape, strides, block, layout: Blocks(
                pointer.array, shape, block
            ),
            store_wait=lambda left: self.finish(here.stores, left),
        )
        hopper = types.SimpleNamespace(
            fence_async_shared=lambda: None,
            warpgroup_mma=self.multiply,
            warpgroup_mma_wait=self.multiplied,
        )
        self.names = {
            "gl": language,
            "mbarrier": mbarrier,
            "tma": tma,
            "hopper": hopper,
            "load_block": lambda blocks, at, barrier, into: barrier.land(
                lambda: blocks.load(at, into.array)
            ),
            "store_block": lambda blocks, at, source: here.stores.append(
                lambda: blocks.store(at, source.array)
            ),
        }

    def allocate(self, dtype: Any, shape: Any, layout: Any) -> Any:
        if dtype == "barriers":
            return Barriers(Barrier(self.changed) for _ in range(shape[0]))
        return Shared(np.full(shape, np.nan, dtype))

    @staticmethod
    def init(barrier: Barrier, count: int) -> None:
        barrier.count = barrier.left = count

    @staticmethod
    def finish(pending: list[Callable[[], None]], left: int) -> None:
        while len(pending) > left:
            pending.pop(0)()

    def multiply(
        self, x: Shared, w: Shared, total: Tensor, use_acc: bool = True, is_async: bool = False
    ) -> Tensor:
        assert is_async

        def product() -> None:
            total.array[...] = x.array @ w.array + (total.array if use_acc else 0)

        self.here.products.append(product)
        return total

    def multiplied(self, left: int, deps: list[Tensor]) -> Tensor:
        self.finish(self.here.products, left)
        return deps[0]

    def specialize(self, parts: Any, warps: list[int], registers: list[int]) -> None:
        assert len(warps) == len(registers) == len(parts) - 1
        failed: list[BaseException] = []

        def whole(function: Callable[..., None], arguments: Any) -> None:
            try:
                function(*arguments)
                assert not self.here.products and not self.here.stores
            except BaseException as error:  # handed to the thread that joins
                failed.append(error)

        threads = [threading.Thread(target=whole, args=part, daemon=True) for part in parts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failed:
            raise failed[0]
