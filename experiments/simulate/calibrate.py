"""Fits the figures of a machine to what was measured of products, exchanges and links alone.

From the repository's root, without a GPU; writes ``syncopate_jax/ir/h200_measured.json``::

  python -m experiments.simulate.calibrate

No time of a fused operator is looked at. Robust least squares of the logarithms: a row that the
host or a hot device made slow counts little.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Sequence

import numpy as np
from scipy.optimize import least_squares

from experiments.common import results
from experiments.simulate import measured
from experiments.simulate.measured import Bare
from syncopate_jax.ir import machine
from syncopate_jax.ir.machine import Machine

TARGET = results.ROOT / "syncopate_jax" / "ir" / "h200_measured.json"
# Where the search begins: datasheets, and the order of magnitude of the rest.
GUESS = Machine(
    name="H200s, measured",
    multiprocessors=132,
    tile_m=128,
    tile_n=256,
    step_seconds=1e-8,
    tile_seconds=1e-6,
    sustained_flops=650e12,
    link_bandwidth=400e9,
    copy_engine_latency=2e-5,
    copy_unit_cta_bandwidth=40e9,
    copy_unit_bandwidth=250e9,
    load_store_cta_bandwidth=6e9,
    load_store_bandwidth=40e9,
    call_seconds=1e-5,
    copier_seconds=1e-5,
    collective_seconds=2e-5,
    collective_bandwidth=250e9,
    all_reduce_bandwidth=250e9,
    all_to_all_bandwidth=250e9,
    rearrange_bandwidth=2e12,
    host_product=1e-4,
    host_exchange=1.5e-4,
    between_seconds=5e-6,
    block_seconds=4e-4,
)
FIXED = ("name", "multiprocessors", "tile_m", "tile_n")
FITTED = tuple(f.name for f in dataclasses.fields(Machine) if f.name not in FIXED)
# Relative error beyond which a row counts less and less.
SCALE = 0.03


def fit(rows: Sequence[Bare]) -> Machine:
    """The machine that explains ``rows`` best; figures that they say nothing of stay guessed."""

    def made(logs: np.ndarray) -> Machine:
        values = (float(v) for v in np.exp(logs))
        return dataclasses.replace(GUESS, **dict(zip(FITTED, values, strict=True)))

    def errors(logs: np.ndarray) -> np.ndarray:
        found = made(logs)
        return np.log([row.predicted(found) / row.seconds for row in rows])

    logs = np.log([getattr(GUESS, name) for name in FITTED])
    for loss in ("soft_l1", "cauchy"):  # the second has many valleys, and needs a start near one
        logs = least_squares(errors, logs, loss=loss, f_scale=SCALE).x
    # As it is written, so that who reads the file predicts the same.
    return machine.from_dict(machine.to_dict(made(logs)))


def main(target: pathlib.Path = TARGET) -> Machine:
    rows, _ = measured.read()
    found = fit(rows)
    machine.save(found, target)
    return found


if __name__ == "__main__":
    for name, value in dataclasses.asdict(main()).items():
        print(f"{name:<25} {value}")
