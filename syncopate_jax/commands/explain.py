"""``syncopate explain``: which backend an operator would take, why, and what it would cost."""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from syncopate_jax.commands.command import (
    DONE,
    Command,
    add_json_flag,
    integers,
    print_json,
)
from syncopate_jax.commands.progress import Progress
from syncopate_jax.commands.simulate import read_topology
from syncopate_jax.errors import InputError
from syncopate_jax.ir.arguments import largest_divisor
from syncopate_jax.registry import backends, operators

if TYPE_CHECKING:
    from syncopate_jax.check.simulate import Comparison
    from syncopate_jax.ir.topology import Topology
    from syncopate_jax.ops.spec import Contraction

SPLITS = (1, 2, 4, 8)
# What JAX calls the devices of a topology, and the types that were measured.
DEVICE_KINDS = {"h200": "NVIDIA H200", "h200_measured": "NVIDIA H200"}
MEASURED_DTYPES = ("bfloat16", "float16")
MEASURED_TARGET = "mosaic_gpu"  # what auto takes where no target is given; with one it takes xla


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("operator", metavar="OPERATOR", help="such as all_gather_matmul")
    parser.add_argument("--ranks", type=int, default=8, help="ranks along the axis (8)")
    parser.add_argument(
        "--shape", required=True, metavar="M,K,N", help="the whole problem, over all ranks"
    )
    parser.add_argument("--dtype", default="bfloat16", help="of the operands (bfloat16)")
    parser.add_argument("--result-dtype", metavar="DTYPE", help="of the result (as the operands)")
    parser.add_argument("--topology", default="h200", metavar="T", help="as for simulate (h200)")
    parser.add_argument(
        "--target", default="mosaic_gpu", help="mosaic_gpu (Hopper), triton or tpu (mosaic_gpu)"
    )
    add_json_flag(parser, units="names that end in _us: microseconds")


def run(args: argparse.Namespace) -> int:
    m, k, n = _shape(args.shape)
    if args.ranks < 1:
        raise InputError(f"--ranks must be at least 1, found {args.ranks}")
    spec, lhs, rhs = _local(args.operator, m, k, n, args.ranks)
    topology = read_topology(args.topology, args.ranks)
    with Progress(f"explain {args.operator}"):
        from syncopate_jax.ops.operands import DTYPES

        args.result_dtype = args.result_dtype or args.dtype
        for flag, dtype in (("--dtype", args.dtype), ("--result-dtype", args.result_dtype)):
            if dtype not in DTYPES:
                raise InputError(
                    f"explain {args.operator}: {flag} {dtype!r} is none that operators take; "
                    f"needs one of {', '.join(DTYPES)}"
                )
        auto = _auto(spec, lhs, rhs, args)
        verdicts = _verdicts(spec, lhs, rhs, args)
        forecast = _forecast(spec, lhs, rhs, topology, args)
    if args.json:
        print_json(_json(args, verdicts, auto, forecast))
    else:
        _report(args, verdicts, auto, forecast)
    return DONE


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a backend can do it; ``reason`` is why not, or empty.

    ``gradients`` is why these are not fused too, or empty.
    """

    backend: str
    reason: str
    gradients: str = ""


@dataclass(frozen=True, slots=True)
class Forecast:
    """Predicted times by split, or ``missing``: why there are none."""

    times: dict[int, Comparison]
    missing: str = ""

    @property
    def best(self) -> int | None:
        """The split of the shortest fused time."""
        return min(self.times, key=lambda split: (self.times[split].fused, split), default=None)


def _shape(text: str) -> tuple[int, int, int]:
    found = integers("--shape", text, least=1, example="8192,4096,4096")
    if len(found) != 3:
        raise InputError(f"--shape {text!r}: needs three integers M,K,N")
    m, k, n = found
    return m, k, n


def _local(
    operator: str, m: int, k: int, n: int, ranks: int
) -> tuple[Contraction, tuple[int, ...], tuple[int, ...]]:
    """The contraction and one rank's operand shapes, in the operator's usual tensor parallelism."""
    spec: Contraction = operators.get(operator)
    adds = spec.kind in ("reduce_scatter", "all_reduce")
    # The letters of which a rank has a share, of x and of w.
    of_x = "k" if adds else spec.gather
    of_w = "k" if adds else "n" if spec.kind == "all_gather" else ""
    sizes = {"b": 1, "m": m, "k": k, "n": n}
    shared = {letter: sizes[letter] for letter in sizes if letter in of_x + of_w + spec.scatter}
    for letter, size in shared.items():
        if size % ranks:
            fits = largest_divisor(math.gcd(*shared.values()), ranks)
            raise InputError(
                f"explain {operator}: {letter.upper()} = {size} is not a multiple of "
                f"the {ranks} ranks that share it; pad it to {-(-size // ranks) * ranks}, or take "
                f"--ranks that divide it, such as {fits}"
            )
    lhs = tuple(sizes[x] // (ranks if x in of_x else 1) for x in spec.lhs)
    rhs = tuple(sizes[x] // (ranks if x in of_w else 1) for x in spec.rhs)
    return spec, lhs, rhs


def _auto(
    spec: Contraction, lhs: tuple[int, ...], rhs: tuple[int, ...], args: argparse.Namespace
) -> str:
    """What ``backend="auto"`` takes on GPUs of the topology; checks the target by the way."""
    from syncopate_jax.ops import fused
    from syncopate_jax.options import Options
    from syncopate_jax.tune import measured

    fused.choose_backend(spec, Options(target=args.target))
    kind = DEVICE_KINDS.get(args.topology.partition(":")[0], "")
    dtypes = {args.dtype, args.result_dtype}
    if not dtypes <= set(MEASURED_DTYPES) or args.target != MEASURED_TARGET:
        return "xla"
    return measured.choose(fused.problem(spec, args.ranks, lhs, rhs), kind).backend


def _verdicts(
    spec: Contraction, lhs: tuple[int, ...], rhs: tuple[int, ...], args: argparse.Namespace
) -> list[Verdict]:
    """What every registered backend says to this operator on the target."""
    import jax.numpy as jnp

    from syncopate_jax.errors import SyncopateError
    from syncopate_jax.ops import fused, gradients
    from syncopate_jax.ops.blocked import block
    from syncopate_jax.options import Launch, Options
    from syncopate_jax.runtime.device import HOPPER_CORES

    layout = block(spec, lhs, rhs, args.ranks)
    found = []
    for name in backends.names():
        launch = Launch(sms=HOPPER_CORES)
        options = Options(backend=name, target=args.target, launch=launch)
        try:
            fused.choose_backend(spec, options)
            if name != "xla":
                fused.check_digits(spec.kind, args.dtype, args.result_dtype)
            fused.build(spec.kind, layout, args.dtype, args.result_dtype, ("ranks",), options)
        except SyncopateError as error:
            found.append(Verdict(name, str(error).rpartition(f"\n  {name}: ")[2]))
        else:
            dtypes = (jnp.dtype(args.dtype), jnp.dtype(args.result_dtype))
            said = gradients.remark(spec, (lhs, rhs), args.ranks, dtypes, ("ranks",), options)
            found.append(Verdict(name, "", said.replace(f"\n  {name}: ", " ")))
    return found


def _forecast(
    spec: Contraction,
    lhs: tuple[int, ...],
    rhs: tuple[int, ...],
    topology: Topology,
    args: argparse.Namespace,
) -> Forecast:
    """What the operator's usual plan would take, if the topology has the links that it uses."""
    from syncopate_jax.ops.prediction import predict
    from syncopate_jax.options import Options

    try:
        return Forecast(
            {
                split: predict(spec, lhs, rhs, topology, Options(split=split), dtype=args.dtype)
                for split in SPLITS
            }
        )
    except InputError as error:
        return Forecast({}, str(error))


def _report(
    args: argparse.Namespace, verdicts: list[Verdict], auto: str, forecast: Forecast
) -> None:
    dtype = args.dtype + (f" to {args.result_dtype}" if args.result_dtype != args.dtype else "")
    print(f"{args.operator}, {args.ranks} ranks, M,K,N = {args.shape} over all ranks, {dtype}")
    print(f"\nbackends, for target {args.target}:")
    for verdict in verdicts:
        print(f"  {verdict.backend:<15} {verdict.reason or 'can do it'}")
        if verdict.gradients:
            print(f"{'':<18}of its gradients: {verdict.gradients}")
    why = "no measurement says that another is faster" if auto == "xla" else "measured so"
    if args.target != MEASURED_TARGET:
        why = f"with target {args.target!r} none was measured; leave it out for what was"
    print(f"\nbackend 'auto' takes {auto} for this shape on {args.topology}: {why}")
    if forecast.missing:
        print(f"\nno prediction on {args.topology}: {forecast.missing}")
        return
    print(f"\npredicted on {args.topology}, for a kernel that reaches the topology's rates:")
    for split, one in forecast.times.items():
        mark = "  <- best" if split == forecast.best else ""
        print(
            f"  split {split}: unfused {one.unfused * 1e6:8.1f} us   "
            f"fused {one.fused * 1e6:8.1f} us   bound {one.bound * 1e6:8.1f} us{mark}"
        )


def _json(
    args: argparse.Namespace, verdicts: list[Verdict], auto: str, forecast: Forecast
) -> dict[str, Any]:
    return {
        "operator": args.operator,
        "ranks": args.ranks,
        "shape": args.shape,
        "dtype": args.dtype,
        "result_dtype": args.result_dtype,
        "target": args.target,
        "auto": auto,
        "backends": {
            v.backend: {"can": not v.reason, "reason": v.reason, "gradients": v.gradients}
            for v in verdicts
        },
        "best_split": forecast.best,
        "no_prediction": forecast.missing,
        "predicted_us": {
            str(split): {
                "unfused": one.unfused * 1e6,
                "fused": one.fused * 1e6,
                "bound": one.bound * 1e6,
            }
            for split, one in forecast.times.items()
        },
    }


COMMAND = Command(
    "explain", "say which backend an operator would take, why, and its cost", configure, run
)
