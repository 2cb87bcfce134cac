"""The README's tables of two GPUs: made from rows, and those that stand there are the files'."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from experiments.common import results
from experiments.two_gpus import tables

FILE = "experiments/results/two_gpus_h200.json"


def test_the_readme_has_the_tables_of_the_files() -> None:
    text = (results.ROOT / "experiments/two_gpus/README.md").read_text()
    made = tables.main(str(results.ROOT / FILE))
    parts = made.split("\n\n")
    assert len(parts) == 3
    assert [part for part in parts if part not in text] == []


def row(operator: str, m: int, ours: float, **more: float) -> dict[str, Any]:
    """A row of ``speed`` in which XLA takes 120 microseconds and its product 100."""
    times = {"xla": 120.0, "gemm": 100.0, "exchange": 110.0, "new": ours, **more}
    found: dict[str, Any] = {"stage": "speed", "operator": operator, "name": "llama3-8b/x", "m": m}
    found |= {"k": 64, "n": 64, "best": "new", "median_us": times}
    return found | {"gap_closed": (120 - ours) / 20}


def aims(path: Path, rows: list[dict[str, Any]]) -> dict[str, list[str]]:
    path.write_text(json.dumps({"rows": rows}))
    return {aim: found for aim, *found in tables.aim_rows(tables.read(path))}


def test_an_aim_is_missed_alone_and_reached_in_a_program(tmp_path: Path) -> None:
    many = {"8 x xla": 960.0, "8 x gemm": 800.0, "8 x exchange": 400.0, "8 x new": 816.0}
    rows = [row(name, 4096, 104) for name in tables.BARS]
    rows[-1] = row("matmul_all_to_all", 4096, 130, **many) | {"best_inside": "new"}
    rows.append(row("all_gather_matmul", 512, 125, **many) | {"best_inside": "new"})
    flagged = {"written": 130.0, "partitioned": 105.0, "gemm": 120.0}
    rows.append({**rows[0], "stage": "flagged", "median_us": flagged})
    rows.append({**rows[0], "stage": "torch", "median_us": {"nccl": 103.0, "gemm": 100.0}})
    rows[0]["median_us"]["jax 8"] = 103.0
    found = aims(tmp_path / "rows.json", rows)
    missed_alone = "missed alone, reached in a program"
    bound = "at most 1.05 of the larger of product and exchange"
    assert found["all_gather_matmul: at most 1.03 of the product"] == ["1.040", "1.040", "missed"]
    assert found["matmul_all_reduce: at most 1.10 of the product"][2] == "reached"
    assert found[f"all_to_all_matmul: {bound}"] == ["0.945", "0.945", "reached"]
    assert found[f"matmul_all_to_all: {bound}"] == ["1.182", "1.020", missed_alone]
    assert found["80% of the gap closed: matmul_all_to_all"] == ["0%", "90%", missed_alone]
    shape = "on every large shape"
    assert found[f"faster than XLA {shape} (5 of 5 compared)"][0] == "0.923 at least"
    assert found[f"faster than XLA with flags {shape} (1 of 5 compared)"][0] == "1.010 at least"
    assert found[f"faster than PyTorch {shape} (1 of 5 compared)"] == [
        "0.990 at least",
        "",
        "missed",
    ]
    assert found["small problems faster than XLA (1)"] == [
        "0.96 to 0.96", "1.18 to 1.18", missed_alone,
    ]  # fmt: skip
