"""Progress: silent when work is short, on stderr when it lasts."""

from __future__ import annotations

import time

import pytest

from syncopate_jax.commands.progress import Progress


def test_short_work_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress("short"):
        pass
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("", "")


def test_long_work_tells_how_far_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress("long", first_after=0.01, then_every=0.01) as progress:
        deadline = time.monotonic() + 30
        seen = ""
        while "25%" not in seen and time.monotonic() < deadline:
            progress(1, 4)
            time.sleep(0.02)
            seen += capsys.readouterr().err
    assert seen.splitlines()[0].startswith("long: 0 s")
    assert "long: 0 s, 25% …" in seen


def test_an_error_passes_through() -> None:
    with pytest.raises(KeyError), Progress("broken"):
        raise KeyError
