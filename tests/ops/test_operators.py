"""Every operator and its gradients against float64, unfused."""

from __future__ import annotations

import numpy as np
import pytest

from tests.ops import cases
from tests.ops.cases import CASES, Case

TOLERANCE = {"float32": 2e-6, "bfloat16": 1.5e-2, "float16": 2e-3}
RANKS = (1, 2, 3, 4, 6, 8)


def fits(case: Case, ranks: int, b: int, m: int, k: int, n: int) -> bool:
    """Whether shard_map can cut the arrays as the case says, and the exchange divides."""
    sizes = {"x": (b, m, k), "w": (k, n), "out": (b, m, n)}
    cuts = ((case.x, sizes["x"]), (case.w, sizes["w"]), (case.out, sizes["out"]))
    return all(d is None or shape[d] % ranks == 0 for d, shape in cuts)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_equals_float64(case: Case, ranks: int) -> None:
    x, w, ct = cases.operands(2, 24, 48, 72)
    fn = cases.sharded(case, cases.ranks_mesh(ranks), backend="xla")
    for found, wanted in zip(
        cases.value_and_gradients(fn, x, w, ct), cases.exact(x, w, ct), strict=True
    ):
        assert cases.error(found, wanted) < TOLERANCE["float32"]


@pytest.mark.parametrize("ranks", (3, 4))
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_check_vma_makes_no_difference(case: Case, ranks: int) -> None:
    x, w, ct = cases.operands(1, 24, 48, 72)
    mesh = cases.ranks_mesh(ranks)
    checked, unchecked = (
        cases.value_and_gradients(cases.sharded(case, mesh, check_vma=c), x, w, ct)
        for c in (True, False)
    )
    for a, b in zip(checked, unchecked, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
