"""Runs the conformance suite of interface ``backend`` on all that there is."""

from __future__ import annotations

from tests.conformance.backend import BackendConformance


class TestBackends(BackendConformance):
    """The suite; see its module."""
