"""Prints what every kernel took, as a table, at the end of a run."""

from __future__ import annotations

from typing import Any

import pytest


def pytest_terminal_summary(terminalreporter: Any) -> None:
    reports = [
        report
        for outcome in ("passed", "failed")
        for report in terminalreporter.stats.get(outcome, [])
        if getattr(report, "when", "") == "call"
    ]
    rows = sorted(value for r in reports for key, value in r.user_properties if key == "kernel")
    if rows:
        terminalreporter.section("kernels")
        heads = ("operator", "backend", "ranks", "registers", "spilled", "shared memory", "compile")
        for row in (heads, *rows):
            terminalreporter.line("{:12} {:15} {:>5} {:>9} {:>7} {:>13} {:>7}".format(*row))


@pytest.fixture(autouse=True)
def _plugin_speaks(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.aot import hopper

    for name, value in hopper.SETTINGS.items():
        monkeypatch.setenv(name, value)
