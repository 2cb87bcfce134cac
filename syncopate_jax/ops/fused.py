"""Realising a contraction with an exchange: choosing the backend, and building its operator."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp

from syncopate_jax import compiler
from syncopate_jax.check.verify import check
from syncopate_jax.errors import InputError, UnsupportedError
from syncopate_jax.ir.plan import Plan
from syncopate_jax.kernel.blocks import LANES
from syncopate_jax.kernel.local import PallasKernel
from syncopate_jax.ops.blocked import Blocked, block
from syncopate_jax.ops.exchange_plan import float32_options, plan_for, sublanes
from syncopate_jax.ops.spec import Call, Contraction
from syncopate_jax.options import Options
from syncopate_jax.pallas_kernels import contraction_mosaic_gpu, contraction_triton, matmul_tpu
from syncopate_jax.pallas_kernels.matmul_tpu import split_groups
from syncopate_jax.registry import backends, templates
from syncopate_jax.runtime import custom_call, device, mesh
from syncopate_jax.runtime.operator import Operator
from syncopate_jax.tune import measured

MOST_WHOLE = 4  # times the largest tile that a reduced letter may be without being cut
LARGEST_TILE = {"m": 256, "n": 256, "k": 512}  # of a TPU's kernel; those of GPUs choose their own

FREE = Options()  # as users give it who leave every choice to us

# Tiles that run together share blocks in a GPU's L2 if they are near in both dimensions.
ORDER = {"tpu": "natural", "mosaic_gpu": "grouped", "triton": "grouped"}
TARGETS = tuple(ORDER)


def choose_backend(spec: Contraction, options: Options) -> str:
    """The backend to use: as asked, or for ``auto`` what is known to be fastest, else ``xla``.

    Options are checked whichever backend it is, so that what runs on one runs on all.
    """
    _check_options(options)
    if spec.kind == "none" or options.backend == "auto":
        return "xla"
    return options.backend


def choose(call: Call, lhs: jax.Array, rhs: jax.Array) -> Options:
    """The call's options with the backend chosen: for ``auto`` what was measured to be fastest.

    Where a knob is set by hand, or nothing like it was measured on this kind of device, that is
    ``xla``.
    """
    spec, axis_names, options = call.spec, call.axis_names, call.options
    backend = choose_backend(spec, options)
    if backend == "xla":
        check_plan(call, lhs, rhs)
    if spec.kind == "none" or options != FREE:
        return options.using(backend=backend)
    device_kind = device.kind()
    dtypes = (lhs.dtype, rhs.dtype, call.out_dtype)
    half = all(jnp.dtype(t).itemsize == 2 for t in dtypes)
    xla = options.using(backend="xla")
    if device_kind is None or not half or mesh.is_folded(axis_names):
        return xla
    ranks = mesh.ranks(axis_names)
    if ranks != mesh.size() or jax.process_count() > 1:
        return xla
    found = measured.choose(problem(spec, ranks, lhs.shape, rhs.shape), device_kind)
    if found.backend == "xla":
        return xla
    chosen = options.using(
        backend=found.backend, split=found.split, launch=found.launch, target="mosaic_gpu"
    )
    layout = block(spec, lhs.shape, rhs.shape, ranks)
    try:
        build(spec.kind, layout, str(lhs.dtype), str(call.out_dtype), axis_names, chosen)
    except UnsupportedError:  # such as a backend that is compiled here, without a compiler
        return xla
    return chosen


def problem(
    spec: Contraction, ranks: int, lhs: tuple[int, ...], rhs: tuple[int, ...]
) -> measured.Problem:
    """The product of one rank with operands of shapes ``lhs`` and ``rhs``, once exchanged."""
    sizes = {
        "lhs": dict(zip(spec.lhs, lhs, strict=True)),
        "rhs": dict(zip(spec.rhs, rhs, strict=True)),
    }
    if spec.place != "out":
        changed = sizes[spec.place]
        if spec.gather:
            changed[spec.gather] *= ranks
        if spec.scatter:
            changed[spec.scatter] //= ranks
    every = sizes["rhs"] | sizes["lhs"]
    return measured.Problem(
        f"{spec.lhs},{spec.rhs}",
        spec.kind,
        spec.place,
        spec.gather,
        spec.scatter,
        ranks,
        every.get("b", 1) * every["m"],
        every["k"],
        every["n"],
    )


def _check_options(options: Options) -> None:
    """Raises InputError for names and letters that nothing is registered under."""
    if options.backend != "auto":
        backends.get(options.backend)
    if options.target is not None and options.target not in TARGETS:
        known = ", ".join(TARGETS)
        raise InputError(
            f"target: no local kernel is written for {options.target!r}; known: {known}"
        )
    if isinstance(options.plan, str):
        if options.plan not in (names := templates.names()):
            raise InputError(
                f"plan: no plan template is called {options.plan!r}; known: {', '.join(names)}; a "
                f"plan in a file is read by syncopate_jax.ir.serial.load"
            )
    elif options.plan is not None and not isinstance(options.plan, Plan):
        raise InputError(
            f"plan: needs a Plan, the name of a plan template or None, found {options.plan!r}"
        )
    unknown = set(options.tile_sizes) - set(matmul_tpu.MATRIX_LETTERS)
    if unknown:
        known = ", ".join(sorted(matmul_tpu.MATRIX_LETTERS))
        raise InputError(f"tiles: {sorted(unknown)} are no letters; known: {known}")


def check_plan(call: Call, lhs: jax.Array, rhs: jax.Array) -> None:
    """Refuses a plan that no fused backend would take, where ``xla`` runs and uses none.

    What a plan must do is the same for every target and all tiles. Of empty operands nothing is
    moved, by any plan.

    Raises:
      InputError: the plan does not do what the operator's exchange does.
      PlanError: it does not verify.
    """
    spec, asked = call.spec, Options(plan=call.options.plan, split=call.options.split)
    if asked.plan is None or spec.kind == "none" or 0 in (*lhs.shape, *rhs.shape):
        return
    layout = block(spec, lhs.shape, rhs.shape, mesh.ranks(call.axis_names))
    _, _, plan = prepare(spec.kind, layout, str(lhs.dtype), str(call.out_dtype), asked)
    check(plan)


def contract(call: Call, lhs: jax.Array, rhs: jax.Array) -> jax.Array:
    """The contraction of local arrays as one fused call."""
    operator, layout = _prepared(call, lhs, rhs)
    operands = (x.reshape(layout.operand_shape(p)) for p, x in (("lhs", lhs), ("rhs", rhs)))
    (out,) = operator(*operands)
    out = out.astype(call.out_dtype)  # where hops carried the sum in float32
    if call.spec.kind != "all_reduce":  # one rank's share of a sum over one rank looks like the sum
        out, _ = custom_call.vary_alike((out, lhs))
    return out.reshape(layout.result)


def contract_and_keep(call: Call, lhs: jax.Array, rhs: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The same, and the operand that it exchanged."""
    spec = call.spec
    operator, layout = _prepared(call, lhs, rhs)
    operands = (x.reshape(layout.operand_shape(p)) for p, x in (("lhs", lhs), ("rhs", rhs)))
    out, kept = operator.keeping()(*operands)
    letters = layout.exchanged.replace("(", "").replace(")", "").replace("S", "")
    order = letters.replace("G", "").replace(spec.gather, f"G{spec.gather}")
    kept = kept.reshape([layout.extents[letter] for letter in letters])
    kept = kept.transpose([letters.index(letter) for letter in order])
    sizes = {x: n * (layout.ranks if x == spec.gather else 1) for x, n in layout.sizes}
    kept = kept.reshape([sizes[letter] for letter in spec.exchanged])
    out, kept, _ = custom_call.vary_alike((out, kept, lhs))
    return out.reshape(layout.result), kept


def _prepared(call: Call, lhs: jax.Array, rhs: jax.Array) -> tuple[Operator, Blocked]:
    """The operator of a contraction of local arrays, and the layout of its operands."""
    spec, axis_names, out_dtype = call.spec, call.axis_names, call.out_dtype
    ranks = mesh.ranks(axis_names)
    if 0 in (*lhs.shape, *rhs.shape):
        raise UnsupportedError(
            f"a fused {spec.kind} of empty operands {lhs.shape} and {rhs.shape} has nothing to "
            f"compute; use backend 'xla'"
        )
    check_digits(spec.kind, str(lhs.dtype), str(out_dtype))
    # Part of what the operator is remembered by: the same axis may be folded here and not there.
    folded = call.options.launched.using(folded=mesh.is_folded(axis_names))
    options = call.options.using(launch=folded)
    layout = block(spec, lhs.shape, rhs.shape, ranks)
    return build(spec.kind, layout, str(lhs.dtype), str(out_dtype), axis_names, options)


def check_digits(kind: str, *dtypes: str) -> None:
    """Raises UnsupportedError for dtypes of more digits than fused kernels add in."""
    if "float64" in dtypes:
        raise UnsupportedError(
            f"a fused {kind} adds in float32, which would lose half of float64's digits; use "
            f"backend 'xla'"
        )


def build(
    kind: str,
    layout: Blocked,
    dtype: str,
    out_dtype: str,
    axis_names: tuple[str, ...],
    options: Options,
) -> tuple[Operator, Blocked]:
    """The operator of a blocked contraction, and the layout of its operands; memoised."""
    target = options.target or usual_target(options.backend)
    # Devices differ in what is filled in here, so it is part of what the operator is remembered by.
    launch = compiler.on_device(options.launched, target, layout.ranks)
    return remembered(
        kind, layout, dtype, out_dtype, axis_names, options.using(target=target, launch=launch)
    )


@functools.lru_cache(maxsize=512)
def remembered(
    kind: str,
    layout: Blocked,
    dtype: str,
    out_dtype: str,
    axis_names: tuple[str, ...],
    options: Options,
) -> tuple[Operator, Blocked]:
    """As ``build``, with ``target`` and ``launch`` filled in."""
    target = str(options.target)
    layout, kernel, plan = prepare(kind, layout, dtype, out_dtype, options, target=target)
    operator = compiler.compile(
        kernel,
        plan,
        {plan.tensors[0].name: layout.place},
        axis_name=axis_names,
        backend=options.backend,
        target=target,
        order=options.order or ORDER[target],
        launch=options.launched,
    )
    return operator, layout


def usual_target(backend: str) -> str:
    """What the kernels of a backend are usually written in."""
    return "tpu" if backend == "auto" else str(backends.get(backend).targets[0])


def prepare(
    kind: str,
    layout: Blocked,
    dtype: str,
    out_dtype: str,
    options: Options,
    *,
    target: str = "tpu",
    largest: Mapping[str, int] = LARGEST_TILE,
) -> tuple[Blocked, PallasKernel, Plan]:
    """Layout, local kernel and plan of a contraction, as ``target`` has them.

    Kernel and plan are of float32, whatever ``out_dtype``, where the plan adds over several hops.

    Args:
      kind: of the exchange.
      layout: of operands and result, blocked.
      dtype: of the operands.
      out_dtype: of the result.
      largest: elements of a tile at most, by letter; of target ``tpu`` alone.
    """
    moved = out_dtype if layout.place == "out" else dtype
    asked = options.tile_sizes
    make: Callable[..., PallasKernel]
    if target == "tpu":
        if kind == "all_reduce" and layout.scatter < 0:
            asked = tiles_to_share(layout, largest, sublanes(moved)) | asked
        rows = sublanes(dtype)
        tiles = choose_tiles(layout, largest, asked, rows)
        if tiles.get(layout.split, 0) % rows and layout.split not in lanes(layout):
            layout = layout.ungrouped()  # so that a tile is all of a dimension, if of a block
        make = functools.partial(matmul_tpu.matmul, tiles=tiles)
    elif target == "mosaic_gpu":  # tiles of a fixed size, cut by the edge
        adds = kind in ("reduce_scatter", "all_reduce")
        workers = tile_executors(options, target, layout.ranks)
        tiles, config = contraction_mosaic_gpu.choose_config(
            layout.out, layout.extents, asked, out_dtype, adds, workers=workers
        )
        make = functools.partial(contraction_mosaic_gpu.contraction, config=config)
    else:
        layout = layout.ungrouped()  # every letter is a dimension of its own
        workers = tile_executors(options, target, layout.ranks)
        tiles = contraction_triton.choose_tiles(layout.out, layout.extents, asked, workers=workers)
        make = functools.partial(contraction_triton.contraction, tiles=tiles)
    if layout.split in tiles and layout.extents[layout.split] % tiles[layout.split]:
        layout = layout.ungrouped()
    plan = plan_for(kind, layout, moved, tiles, options)
    if wide := float32_options(plan, options):
        return prepare(kind, layout, dtype, "float32", wide, target=target, largest=largest)
    letters = (layout.lhs, layout.rhs, layout.out)
    return layout, make(*letters, layout.extents, dtype=dtype, out_dtype=out_dtype), plan


def tile_executors(options: Options, target: str, ranks: int) -> int:
    """CTAs of a rank that compute tiles: a Hopper GPU's where no GPU is known."""
    launch = compiler.on_device(options.launched, target, ranks)
    if launch.sms is None:
        launch = launch.using(sms=device.HOPPER_CORES)
    most = launch.ctas(ranks)
    if options.backend != "auto" and target in (found := backends.get(options.backend)).targets:
        most = found.workers(launch, ranks)
    return max(most, 1)


def tiles_to_share(layout: Blocked, largest: Mapping[str, int], rows: int) -> dict[str, int]:
    """A tile of ``m``, a multiple of ``rows``, of which there is one for each rank if possible.

    Nothing is said of rows that are not such a multiple, nor where ``b`` is enough for all ranks.
    """
    m, ranks = layout.extents["m"], layout.ranks
    if m % rows or layout.extents.get("b", 1) >= ranks:
        return {}
    most = max(largest["m"] // rows, 1)
    return {"m": min(-(-m // (ranks * rows)), most) * rows}


def lanes(layout: Blocked) -> set[str]:
    """The letters along which elements lie side by side in an operand or the result."""
    return {split_groups(letters)[-1][-1] for letters in (layout.lhs, layout.rhs, layout.out)}


def choose_tiles(
    layout: Blocked, largest: Mapping[str, int], asked: Mapping[str, int], rows: int
) -> dict[str, int]:
    """Tile size of each matrix letter: as asked, else the whole extent if up to ``largest``.

    Else a divisor of the extent that fills registers of a TPU: a multiple of its 128 lanes, or of
    its ``rows``. A letter that has none near ``largest`` is cut raggedly if it is not reduced,
    and else not at all, or, where it is far too long for that, by any that divides it.
    """
    tiles = {}
    for letter, most in largest.items():
        extent = layout.extents[letter]
        unit = LANES if letter in lanes(layout) else rows
        size = min(asked.get(letter, most), extent)
        reduced = letter not in layout.out
        divisors = [d for d in range(size, 0, -1) if extent % d == 0]
        filling = (d for d in divisors if d == extent or most % unit or d % unit == 0)
        filled = next(filling, 0)
        if letter in asked:
            tiles[letter] = divisors[0] if reduced else size
        elif filled >= size // 2 or (reduced and filled):
            tiles[letter] = filled
        elif not reduced:
            tiles[letter] = size
        else:
            tiles[letter] = extent if extent <= MOST_WHOLE * most else divisors[0]
    return tiles
