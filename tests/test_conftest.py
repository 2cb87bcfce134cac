"""What conftest promises: settings that JAX sees and the user may override, skips that say why."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import conftest

pytest_plugins = ["pytester"]


def test_settings_are_made_where_the_user_made_none() -> None:
    environ: dict[str, str] = {}
    conftest.prepare(environ)
    assert environ == {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        "NPROC": "16",
        "JAX_PLATFORMS": "cpu",
    }


def test_settings_of_the_user_are_kept() -> None:
    environ = {"XLA_FLAGS": "--xla_a=1", "NPROC": "4", "JAX_PLATFORMS": "cuda,cpu"}
    conftest.prepare(environ)
    assert environ["XLA_FLAGS"] == "--xla_a=1 --xla_force_host_platform_device_count=8"
    assert (environ["NPROC"], environ["JAX_PLATFORMS"]) == ("4", "cuda,cpu")
    before = dict(environ)
    conftest.prepare(environ)
    assert environ == before


@pytest.mark.parametrize(
    ("mark", "gpus", "needed"),
    [
        (pytest.mark.gpu, 0, 1),
        (pytest.mark.gpu, 1, None),
        (pytest.mark.multigpu, 1, 2),
        (pytest.mark.multigpu(4), 3, 4),
        (pytest.mark.multigpu(n=4), 3, 4),
        (pytest.mark.multigpu(4), 4, None),
    ],
)
def test_a_skip_says_what_is_missing(
    request: pytest.FixtureRequest, mark: pytest.MarkDecorator, gpus: int, needed: int | None
) -> None:
    item = pytest.Function.from_parent(request.node.parent, name="probe", callobj=lambda: None)
    item.add_marker(mark)
    expected = needed and f"probe needs {needed} CUDA GPU(s), found {gpus} (JAX_PLATFORMS=cpu)"
    reason = conftest.skip_reason(item, gpus, "cpu")
    assert (reason or "").endswith(expected or "") and bool(reason) == bool(expected)


PROBES = """
import time
import jax, pytest

def test_devices(): assert len(jax.devices()) == 8

@pytest.mark.multigpu(64)
def test_wants_gpus(): assert False

@pytest.mark.timeout(3)
def test_hangs(): time.sleep(60)

@pytest.mark.unheard_of
def test_stray_mark(): assert True
"""


@pytest.mark.slow
def test_a_run_skips_by_name_and_ends_a_hang(pytester: pytest.Pytester) -> None:
    root = Path(__file__).parents[1]
    pytester.makepyprojecttoml((root / "pyproject.toml").read_text())
    tests = pytester.mkdir("tests")
    (tests / "conftest.py").write_text(Path(conftest.__file__).read_text())
    (tests / "test_probes.py").write_text(PROBES)

    refused = pytester.runpytest_subprocess()
    refused.stdout.fnmatch_lines(["*'unheard_of' not found in `markers`*"])
    (tests / "test_probes.py").write_text(PROBES.replace("@pytest.mark.unheard_of", ""))
    result = pytester.runpytest_subprocess("-n", "1")
    result.stdout.fnmatch_lines(
        ["jax *", "*test_wants_gpus needs 64 CUDA GPU(s), found 0 (JAX_PLATFORMS=cpu)*"]
    )
    result.assert_outcomes(passed=2, skipped=1, failed=1)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
