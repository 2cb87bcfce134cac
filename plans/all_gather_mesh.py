"""All-gather on a 2-D mesh: along one mesh axis, then what has arrived along the other."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from syncopate_jax.errors import InputError
from syncopate_jax.ir.argument_types import checked
from syncopate_jax.ir.arguments import integer, one_of, origin_text
from syncopate_jax.ir.comm import DEFAULT_CHANNEL
from syncopate_jax.ir.moves import MODES, Array, relay
from syncopate_jax.ir.plan import Plan
from syncopate_jax.ir.shards import cut_shards
from syncopate_jax.plans.gathering import gather_plan, square_divisor
from syncopate_jax.registry import templates

NAME = "all_gather_mesh"


@templates.register(NAME)
@checked
def all_gather_mesh(
    num_ranks: int,
    shape: Sequence[int],
    *,
    mesh: tuple[int, int] | None = None,
    first: str = "columns",
    dtype: str = "bfloat16",
    axis: int = 0,
    split: int = 1,
    split_axis: int | None = None,
    shards: Sequence[int] | None = None,
    mode: str = "push",
    produced: bool = False,
    tensor: str = "x",
    name: str | None = None,
    channel: str = DEFAULT_CHANNEL,
    second_channel: str | None = None,
) -> Plan:
    """Every rank ends with the whole of a tensor that is sharded along ``axis``.

    Rank ``i * mesh[1] + j`` sits at row i and column j. In the first phase each rank exchanges its
    shard with the ranks of its row (``first="columns"``: across columns) or of its column
    (``"rows"``); in the second it exchanges all that with the other line, each chunk as it comes.

    Args:
      shape: extents of the whole tensor, in elements.
      mesh: rows and columns; the squarest that gives ``num_ranks`` if None.
      first: what is exchanged across first: ``columns`` or ``rows``.
      split: pieces a shard, cut along ``split_axis`` (``axis`` if None).
      shards: extent of each rank's shard, may be 0; as equal as can be if None.
      mode: ``push`` lists each operation on its sender, ``pull`` on its receiver.
      produced: whether shards come from compute tiles, which operations on them then wait for.
      second_channel: port of the second phase; ``channel`` if None.

    Raises:
      InputError: an argument is out of range, or ``mesh`` has another number of ranks.
    """
    where = name or NAME
    cut = cut_shards(where, num_ranks, shape, axis, shards, split, split_axis, hops=num_ranks - 1)
    ranks = cut.num_ranks
    rows, columns = _mesh(where, ranks, mesh)
    across = one_of(where, "first", first, ("columns", "rows")) == 0
    sign = 1 if one_of(where, "mode", mode, MODES) == 0 else -1
    row, column = np.divmod(np.arange(ranks)[:, None], columns)
    near, far = (columns, rows) if across else (rows, columns)
    a, b = (column, row) if across else (row, column)  # places along first and second axis

    def at(a: Array, b: Array) -> Array:
        a, b = a % near, b % far
        return b * columns + a if across else a * columns + b

    offset = sign * np.arange(1, near)
    # Second phase: own shard to every other line, then the shard that came first, and so on.
    back, line = np.repeat(np.arange(near), far - 1), np.tile(np.arange(1, far), near)
    owner = at(a - sign * back, b)
    channels = tuple(dict.fromkeys((channel, second_channel or channel)))
    phase = np.concatenate((np.zeros(near - 1, np.int64), np.ones(near * (far - 1), np.int64)))
    moves = relay(
        where,
        mode,
        cut,
        np.concatenate((at(a + offset, b), at(a, b + sign * line)), axis=1),
        np.concatenate((at(a + 0 * offset, b), owner), axis=1),
        prev_rank=np.concatenate((at(a + 0 * offset, b), owner), axis=1)[..., None],
        prev_step=np.concatenate((0 * offset - 1, back - 1))[None, :, None],
        channel=phase * (len(channels) - 1),
        produced=produced & np.concatenate((offset != 0, back == 0)),
    )
    origin = origin_text(
        NAME,
        num_ranks=ranks,
        mesh=(rows, columns),
        first=first,
        axis=axis,
        split=split,
        split_axis=split_axis,
        mode=mode,
    )
    return gather_plan(where, cut, moves.columns(), tensor, dtype, produced, channels, origin)


def _mesh(where: str, ranks: int, mesh: tuple[int, int] | None) -> tuple[int, int]:
    if mesh is None:
        rows = square_divisor(ranks)
        return rows, ranks // rows
    if len(mesh) != 2:
        raise InputError(f"{where}: mesh {tuple(mesh)} has {len(mesh)} axes, needs 2")
    rows, columns = (integer(where, f"mesh[{i}]", extent, 1) for i, extent in enumerate(mesh))
    if rows * columns != ranks:
        raise InputError(
            f"{where}: mesh {rows} x {columns} has {rows * columns} ranks, needs {ranks}"
        )
    return rows, columns
