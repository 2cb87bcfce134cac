"""How the Hopper matrix product is cut into tiles: knobs, their limits, and tuned choices."""

import dataclasses
import functools
import json
import math
from importlib import resources
from typing import Any, Literal, Self

import jax
import jax.numpy as jnp

from syncopate_jax.errors import InputError, UnsupportedError
from syncopate_jax.kernel.tiles import fewest_workers
from syncopate_jax.pallas_kernels.matmul_mosaic_gpu_beside import least_steps

CLUSTER_AXES = ("cluster_m", "cluster_n")  # names of a launch's axes of CTAs
TUNED_FILE = "matmul_mosaic_gpu_configs.json"
SWIZZLE_BYTES = 128  # the widest TMA swizzle
STORE_COLUMNS = (16, 32, 64)  # of 2 bytes: one swizzle of 32, 64 or 128 bytes
WGMMA_ROWS = 64  # rows of one wgmma instruction
WGMMA_COLUMNS = 256  # columns of the widest one
COPY_BYTES = 16  # the TMA unit's unit of length, strides and alignment
HOPPER_SHARED_MEMORY = 227 * 1024  # bytes that one block can have on compute capability 9.0
REGISTERS = 512  # 32-bit registers an SM has for each thread of a warpgroup's 128
OVERLAP_REGISTERS = 208  # accumulator and pending output that fit beside the loop's own state
BARRIER_BYTES = 1024  # generous: mbarriers and alignment


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    """What a device offers one kernel: its SM count, and shared memory for one block in bytes."""

    sms: int
    shared_memory: int

    @classmethod
    def of(
        cls, device: jax.Device, *, sms: int | None = None, shared_memory: int | None = None
    ) -> Self:
        """The limits of a device, or those given.

        Raises:
          InputError: the device does not say how many SMs it has, and ``sms`` is not given.
        """
        sms = sms or getattr(device, "core_count", None)
        if sms is None:
            raise InputError(
                f"matmul_mosaic_gpu: device {device.device_kind!r} does not say how many "
                "multiprocessors it has; pass num_sms"
            )
        # Where a program is lowered without the device, the size that Mosaic GPU assumes too.
        reported = getattr(device, "shared_memory_per_block_optin", HOPPER_SHARED_MEMORY)
        return cls(sms, shared_memory or reported)


@dataclasses.dataclass(frozen=True, slots=True)
class MatmulConfig:
    """How the product is cut; every size in elements.

    Args:
      tile_m, tile_n: the tile of one CTA.
      tile_k: depth of one pipeline stage.
      stages: operand stages in shared memory.
      warpgroups: compute warpgroups; they share the tile along ``split``.
      split: "m" gives each warpgroup a band of rows, "n" a band of columns.
      cluster_m, cluster_n: CTAs of a cluster along m and n, on neighbouring tiles; an operand block
        that several of them need is loaded once and multicast.
      group, minor: bands of the natural order, see ``NaturalOrder``; in cluster tiles.
      k_snake: cluster tiles along the order's major dimension after which K is walked in the other
        direction, so that a wave starts on blocks which the one before left in L2; 0 for never. A
        tile's direction depends on its place in the output only, never on the schedule.
      epilogue_n: columns of one output store, at most; see ``store_columns``.
      epilogue_slots: output stores in flight per warpgroup.
      overlap_epilogue: store a tile during the next tile's first k steps, where registers allow.
      in_flight: k steps of wgmma left running when a stage is released, 0 or 1.
      producer_registers: registers per thread kept by the warpgroup that loads.
    """

    tile_m: int = 128
    tile_n: int = 256
    tile_k: int = 64
    stages: int = 4
    warpgroups: int = 2
    split: Literal["m", "n"] = "m"
    cluster_m: int = 1
    cluster_n: int = 1
    group: int = 16
    minor: Literal["m", "n"] = "m"
    k_snake: int = 0
    epilogue_n: int = 64
    epilogue_slots: int = 2
    overlap_epilogue: bool = True
    in_flight: Literal[0, 1] = 1
    producer_registers: int = 40

    @property
    def part(self) -> tuple[int, int]:
        """Rows and columns of one warpgroup's part of the tile."""
        if self.split == "m":
            return self.tile_m // self.warpgroups, self.tile_n
        return self.tile_m, self.tile_n // self.warpgroups

    @property
    def cluster(self) -> int:
        """CTAs of a cluster."""
        return self.cluster_m * self.cluster_n

    @property
    def consumer_registers(self) -> int:
        """Registers per thread of a compute warpgroup, in the hardware's steps of 8.

        A launch gives all warpgroups alike, in such steps too, and no more is ever given: to ask
        for more would wait for ever.
        """
        all_warpgroups = self.warpgroups + 1
        given = REGISTERS // all_warpgroups // 8 * 8 * all_warpgroups
        return min((given - self.producer_registers) // self.warpgroups, 256) // 8 * 8

    def tiles(self, m: int, n: int) -> tuple[int, int]:
        """Cluster tiles along m and n that cover an [m, n] output."""
        return -(-m // (self.tile_m * self.cluster_m)), -(-n // (self.tile_n * self.cluster_n))

    def workers(self, m: int, n: int, sms: int) -> int:
        """Clusters to launch: as few as finish in the waves that ``sms`` SMs need.

        128 of 132 SMs are 1.7% faster where both need 12 waves, see ``experiments/local_gemm``.
        """
        return fewest_workers(math.prod(self.tiles(m, n)), max(sms // self.cluster, 1))

    def store_columns(self, out_dtype: Any) -> int:
        """Columns of one output store: ``epilogue_n``, or as many as one swizzle holds."""
        return min(self.epilogue_n, SWIZZLE_BYTES // jnp.dtype(out_dtype).itemsize)

    def stores(self, out_dtype: Any) -> int:
        """Output stores of a warpgroup's part of a tile."""
        return math.prod(self.part) // (WGMMA_ROWS * self.store_columns(out_dtype))

    def overlaps(self, out_dtype: Any, k_steps: int | None = None) -> bool:
        """Whether a tile is stored during the next one: wanted, and both fit in registers.

        It takes some k steps too; by default there are enough.
        """
        accumulator = math.prod(self.part) // 128
        pending = accumulator * jnp.dtype(out_dtype).itemsize // 4
        fits = k_steps is None or k_steps >= least_steps(self.stores(out_dtype))
        return self.overlap_epilogue and fits and accumulator + pending <= OVERLAP_REGISTERS

    def shared_memory(self, dtype: Any, out_dtype: Any, addend_dtype: Any = None) -> int:
        """Bytes of shared memory that one CTA takes."""
        stage = (self.tile_m + self.tile_n) * self.tile_k * jnp.dtype(dtype).itemsize
        store = WGMMA_ROWS * self.store_columns(out_dtype)
        stores = self.epilogue_slots * jnp.dtype(out_dtype).itemsize
        addend = 0 if addend_dtype is None else jnp.dtype(addend_dtype).itemsize
        return self.stages * stage + self.warpgroups * store * (stores + addend) + BARRIER_BYTES

    def fit(self, limit: int, dtype: Any, out_dtype: Any, addend_dtype: Any = None) -> Self:
        """The same config with as many of its stages as fit in ``limit`` bytes, at least 2.

        Raises:
          UnsupportedError: two stages do not fit.
        """
        for stages in range(self.stages, 1, -1):
            config = dataclasses.replace(self, stages=stages)
            if config.shared_memory(dtype, out_dtype, addend_dtype) <= limit:
                return config
        least = dataclasses.replace(self, stages=2).shared_memory(dtype, out_dtype, addend_dtype)
        raise UnsupportedError(
            f"matmul_mosaic_gpu: tile {self.tile_m}x{self.tile_n}x{self.tile_k} with 2 stages "
            f"takes {least} bytes of shared memory, and a block has {limit}; take a smaller tile "
            "or fewer epilogue_slots"
        )

    def problem(self) -> str | None:
        """Why no kernel can be cut this way, or None."""
        rows, columns = self.part
        down, across = (self.warpgroups, 1) if self.split == "m" else (1, self.warpgroups)
        whole = (rows * down, columns * across)
        if whole != (self.tile_m, self.tile_n) or rows % WGMMA_ROWS or columns % 8:
            return (
                f"a warpgroup's part of the {self.tile_m}x{self.tile_n} tile is {rows}x{columns}; "
                f"its rows must be a multiple of {WGMMA_ROWS} and its columns of 8, so choose "
                f"tile_m, tile_n, warpgroups and split to match"
            )
        if columns > WGMMA_COLUMNS:
            return f"a warpgroup's part has {columns} columns; wgmma has at most {WGMMA_COLUMNS}"
        if math.prod(self.part) // 128 > self.consumer_registers - 24:
            return (
                f"a {rows}x{columns} float32 accumulator takes {math.prod(self.part) // 128} of "
                f"{self.consumer_registers} registers, and 24 are needed beside it; take a smaller "
                "tile or more warpgroups"
            )
        if self.epilogue_n not in STORE_COLUMNS:
            return f"epilogue_n={self.epilogue_n} must be one of {STORE_COLUMNS}"
        if columns % self.epilogue_n:
            return (
                f"a warpgroup's part of the {self.tile_m}x{self.tile_n} tile has {columns} "
                f"columns, and {self.epilogue_n} are stored at a time (epilogue_n); take a tile "
                f"whose columns are a multiple of {self.epilogue_n * across}"
            )
        if self.stages <= self.in_flight:
            return f"stages={self.stages} must exceed in_flight={self.in_flight}"
        return None


# Tiles worth trying where nothing is tuned, widest first; see experiments/local_gemm.
CANDIDATES = (
    MatmulConfig(),
    MatmulConfig(tile_n=224, epilogue_n=32, cluster_m=2, group=8),
    MatmulConfig(tile_m=256, tile_n=192, stages=3, epilogue_slots=3, group=8),
    MatmulConfig(tile_n=192),
    MatmulConfig(tile_n=128, stages=6),
)


def estimate(config: MatmulConfig, m: int, n: int, sms: int) -> float:
    """Relative time of an [m, n] product: waves times tile area, plus what a tile's loads cost.

    The loads' weight is a fit: a tile that loads 22% less per product ran at 3% higher clock.
    """
    tiles = math.prod(config.tiles(m, n)) * config.cluster
    waves = -(-tiles // (sms // config.cluster * config.cluster))
    area = config.tile_m * config.tile_n
    loads = (config.tile_m + config.tile_n) / area * 256 / 3  # 1 for a 128x256 tile
    return (
        waves * area * (1 + 0.06 * (loads - 1)) * (1.0 if config.overlaps(jnp.bfloat16) else 1.01)
    )


def ranked(m: int, n: int, k: int, *, sms: int, device_kind: str = "") -> list[MatmulConfig]:
    """Configs to try for a product, best first: the tuned one, then candidates by estimate."""
    tuned = _tuned(device_kind).get((m, n, k))
    guesses = [config for config in CANDIDATES if config.cluster <= sms]
    guesses.sort(key=lambda config: estimate(config, m, n, sms))
    return guesses if tuned is None else [tuned, *guesses]


@functools.cache
def _tuned(device_kind: str) -> dict[tuple[int, int, int], MatmulConfig]:
    text = resources.files("syncopate_jax.pallas_kernels").joinpath(TUNED_FILE).read_text()
    entries = json.loads(text).get(device_kind, [])
    return {(e["m"], e["n"], e["k"]): MatmulConfig(**e["config"]) for e in entries}
