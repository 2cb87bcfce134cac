"""Runs the conformance suite of interface ``operator`` on all that there is."""

from __future__ import annotations

from tests.conformance.operator import OperatorConformance


class TestOperators(OperatorConformance):
    """The suite; see its module."""
