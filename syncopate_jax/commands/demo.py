"""``syncopate demo``: a tensor-parallel feed-forward layer through the fused operators."""

from __future__ import annotations

import argparse
import os
import textwrap
import time
from typing import TYPE_CHECKING, Any

from syncopate_jax.commands.command import DONE, NO, Command, add_json_flag, print_json
from syncopate_jax.commands.progress import Progress
from syncopate_jax.errors import InputError
from syncopate_jax.ir.arguments import integer

if TYPE_CHECKING:
    from syncopate_jax.commands.feed_forward import Outcome

# Llama-3-8B: the proportions of the layer that runs, and the layer whose time is predicted.
HIDDEN, FFN, TOKENS = 4096, 14336, 8192
SCALE = 8
# How much larger than the unfused layer's error the fused one's may be.
ALLOWED = 2.0

PICTURE = (
    "time runs to the right; each device has a tall lane for the tiles it computes and a thin one",
    "for the chunks it sends. A colour is a chunk: a tile has that of the chunk it needed (grey:",
    "none). Colour without a gap in the tall lanes: the transfers are hidden. White: a wait.",
)


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=int, default=8, help="tensor-parallel degree (8)")
    parser.add_argument("--tokens", type=int, default=128, help="rows of the activations (128)")
    parser.add_argument("--hidden", type=int, default=HIDDEN // SCALE, help="model width")
    parser.add_argument("--ffn", type=int, default=FFN // SCALE, help="width of the inner layer")
    parser.add_argument("--split", type=int, default=1, help="pieces each chunk is cut into (1)")
    parser.add_argument("--backend", default="remote_dma", help="how chunks are moved (remote_dma)")
    parser.add_argument("--seed", type=int, default=0, help="of the random values (0)")
    parser.add_argument(
        "--picture",
        metavar="FILE",
        default="syncopate_demo.svg",
        help="where the predicted timeline is drawn, .svg or .png (syncopate_demo.svg)",
    )
    add_json_flag(parser)


def run(args: argparse.Namespace) -> int:
    for name in ("ranks", "tokens", "hidden", "ffn", "split"):
        if getattr(args, name) < 1:
            raise InputError(f"--{name} must be at least 1, found {getattr(args, name)}")
    integer("demo", "seed", args.seed, 0)
    for name in ("tokens", "hidden", "ffn"):
        if getattr(args, name) % args.ranks:
            raise InputError(
                f"--{name} {getattr(args, name)} is not a multiple of --ranks {args.ranks}; "
                f"each rank owns an equal share of it"
            )
    simulate_devices(args.ranks)
    from syncopate_jax.check.timeline import check_picture, draw
    from syncopate_jax.commands import feed_forward

    check_picture(args.picture)
    require_devices_of(args.backend)
    started = time.perf_counter()
    with Progress("demo: the fused layer runs interpreted, on simulated devices"):
        outcome = feed_forward.run(
            args.ranks, args.tokens, args.hidden, args.ffn, args.split, args.backend, args.seed
        )
    with Progress("demo: predicting the real layer's time"):
        ranks = 8
        predicted = feed_forward.predicted(ranks, TOKENS, HIDDEN, FFN, max(args.split, 2))
        draw(predicted["all_gather_matmul"].timeline, args.picture)
    seconds = time.perf_counter() - started
    right = outcome.worst_ratio() <= ALLOWED
    if args.json:
        print_json(_json(args, outcome, predicted, right, seconds))
    else:
        _report(args, outcome, predicted, right, seconds)
    return DONE if right else NO


def simulate_devices(count: int) -> None:
    """Asks JAX for ``count`` CPU devices; must come before JAX starts.

    Raises InputError when JAX has already started with fewer.
    """
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    # XLA sizes its thread pool from it; interpreted kernels of all devices wait for each other.
    os.environ.setdefault("NPROC", str(2 * max(count, 8)))
    flags = os.environ.get("XLA_FLAGS", "")
    if "xla_force_host_platform_device_count" not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count={count}".strip()
    import jax

    if len(jax.devices()) < count:
        raise InputError(
            f"--ranks {count}: JAX has {len(jax.devices())} devices; "
            f"set XLA_FLAGS=--xla_force_host_platform_device_count={count}"
        )


def require_devices_of(backend: str) -> None:
    """Raises InputError for a backend of GPUs where JAX has CPU devices."""
    import jax

    from syncopate_jax.ops.fused import usual_target

    of_gpus = backend not in ("auto", "xla") and usual_target(backend) != "tpu"
    if of_gpus and jax.default_backend() == "cpu":
        raise InputError(
            f"--backend {backend} needs GPUs, and the devices here are simulated on the CPU; leave "
            f"it out, or give --backend xla; where each rank has a GPU, set JAX_PLATFORMS=cuda"
        )


def _report(
    args: argparse.Namespace,
    outcome: Outcome,
    predicted: dict[str, Any],
    right: bool,
    seconds: float,
) -> None:
    print(
        f"SwiGLU feed-forward layer, tensor parallel over {args.ranks} simulated devices: "
        f"{args.tokens} tokens, hidden {args.hidden}, inner {args.ffn}, backend {args.backend}"
    )
    print("\nrelative error against float64 (fused operators | unfused layer):")
    for name, (fused, unfused) in outcome.errors.items():
        print(f"  {name:<22} {fused:.2e} | {unfused:.2e}")
    print(f"  -> {'the same' if right else 'WORSE: this is a bug, please report it'}")
    print("\nthe plans, in words:")
    for paragraph in outcome.words:
        print(textwrap.fill(paragraph, 98, initial_indent="  ", subsequent_indent="  "))
    print(
        f"\npredicted on 8x H200 (NVLink), forward, bfloat16: {TOKENS} tokens, hidden {HIDDEN}, "
        f"inner {FFN}"
    )
    for name, one in predicted.items():
        print(
            f"  {name:<22} unfused {one.unfused * 1e6:7.1f} us   fused {one.fused * 1e6:7.1f} us   "
            f"{one.speedup:.2f}x   (bound {one.bound * 1e6:.1f} us)"
        )
    print(f"\ntimeline of the fused all_gather_matmul, as predicted: {args.picture}")
    for line in PICTURE:
        print(f"  {line}")
    print(f"done in {seconds:.1f} s")


def _json(
    args: argparse.Namespace,
    outcome: Outcome,
    predicted: dict[str, Any],
    right: bool,
    seconds: float,
) -> dict[str, Any]:
    return {
        "ranks": args.ranks,
        "shape": {"tokens": args.tokens, "hidden": args.hidden, "ffn": args.ffn},
        "backend": args.backend,
        "right": right,
        "errors": {
            name: {"fused": fused, "unfused": unfused}
            for name, (fused, unfused) in outcome.errors.items()
        },
        "plans": outcome.words,
        "predicted_us": {
            name: {
                "unfused": one.unfused * 1e6,
                "fused": one.fused * 1e6,
                "bound": one.bound * 1e6,
            }
            for name, one in predicted.items()
        },
        "picture": args.picture,
        "seconds": seconds,
    }


COMMAND = Command(
    "demo",
    "run a tensor-parallel feed-forward layer through the fused operators, and check it",
    configure,
    run,
)
