"""Runs the conformance suite of interface ``local_kernel`` on all that there is."""

from __future__ import annotations

from tests.conformance.local_kernel import LocalKernelConformance


class TestLocalKernels(LocalKernelConformance):
    """The suite; see its module."""
