"""Runs the conformance suite of plan templates on all that are registered."""

from __future__ import annotations

from pathlib import Path

from syncopate_jax import plans
from syncopate_jax.registry import templates
from tests.conformance.template import TemplateConformance


class TestTemplates(TemplateConformance):
    """The suite; see its module."""


def test_the_registry_knows_the_templates_of_the_package() -> None:
    files = {path.stem for path in Path(plans.__path__[0]).glob("*.py")}
    helpers = {"__init__", "gathering", "hierarchy", "reducing"}  # what several templates share
    assert set(templates.names()) == files - helpers
