"""``syncopate doctor``: what this machine can run, what is missing, and how to get it."""

from __future__ import annotations

import argparse
import platform
from collections.abc import Sequence
from dataclasses import asdict
from importlib import metadata

from syncopate_jax.commands.command import DONE, NO, Command, add_json_flag, print_json
from syncopate_jax.commands.probes import Probe, probe_all
from syncopate_jax.commands.progress import Progress

# Without these nothing but plans and their checks works.
CORE = ("jax", "jaxlib", "JAX devices")

# What the package can do, and the probes that must be ok for it.
ABILITIES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("plans: build, verify, simulate, draw as SVG", ()),
    ("backend xla, and operators on simulated devices", CORE),
    ("target mosaic_gpu: fused Pallas kernels", (*CORE, "GPU")),
    ("target triton with folded ranks: fused Triton kernels", (*CORE, "GPU", "Triton")),
    ("target triton on a mesh", (*CORE, "GPU", "Triton", "C++ compiler")),
    ("backend copy_engine on GPUs", (*CORE, "GPU", "C++ compiler")),
    ("backend copy_engine's copies on CPU devices", (*CORE, "C++ compiler")),
    ("kernels compiled ahead of time", (*CORE, "JAX's CUDA plugin", "nvcc")),
    ("pictures as PNG", ("matplotlib",)),
)


def configure(parser: argparse.ArgumentParser) -> None:
    add_json_flag(parser)


def run(args: argparse.Namespace) -> int:
    with Progress("doctor"):
        probes = probe_all()
    healthy = all(probe.ok for probe in probes if probe.name in CORE)
    if args.json:
        print_json(
            {
                "healthy": healthy,
                "version": metadata.version("syncopate-jax"),
                "python": platform.python_version(),
                "machine": f"{platform.system()} {platform.machine()}",
                "probes": [asdict(probe) for probe in probes],
                "abilities": [
                    {"name": name, "available": not lacking, "lacking": list(lacking)}
                    for name, lacking in abilities(probes)
                ],
            }
        )
    else:
        _report(probes, healthy)
    return DONE if healthy else NO


def abilities(probes: Sequence[Probe]) -> list[tuple[str, tuple[str, ...]]]:
    """Each ability and the probes it lacks."""
    bad = {probe.name for probe in probes if not probe.ok}
    return [(name, tuple(need for need in needs if need in bad)) for name, needs in ABILITIES]


def _report(probes: Sequence[Probe], healthy: bool) -> None:
    print(
        f"syncopate-jax {metadata.version('syncopate-jax')}, Python {platform.python_version()}, "
        f"{platform.system()} {platform.machine()}"
    )
    width = max(len(probe.name) for probe in probes)
    for probe in probes:
        print(f"{'ok' if probe.ok else 'missing':<8} {probe.name:<{width}}  {probe.found}")
        if probe.fix:
            print(f"{'':<8} {'':<{width}}  -> {probe.fix}")
    print("what this machine can run:")
    for name, lacking in abilities(probes):
        print(f"{'no' if lacking else 'yes':<8} {name}{_lacks(lacking)}")
    if not healthy:
        print("the core is broken: only plans and their checks work until JAX does")


def _lacks(lacking: tuple[str, ...]) -> str:
    return f" (lacks {', '.join(lacking)})" if lacking else ""


COMMAND = Command("doctor", "say what this machine can run and what is missing", configure, run)
