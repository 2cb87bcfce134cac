"""Runs the importers' conformance suite."""

from __future__ import annotations

from tests.conformance.importer import ImporterConformance


class TestImporters(ImporterConformance):
    """Every importer of files, with each of its fixtures."""
