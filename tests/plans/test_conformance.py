"""Runs the conformance suite of plan templates on all that are registered."""

from __future__ import annotations

from syncopate_jax.registry import templates
from tests.conformance.template import TemplateConformance


class TestTemplates(TemplateConformance):
    """The suite; see its module."""


def test_the_registry_knows_the_templates_of_the_package() -> None:
    assert templates.names() == (
        "all_gather_double_ring",
        "all_gather_mesh",
        "all_gather_ring",
        "all_gather_swizzle",
        "all_reduce_one_shot",
        "all_reduce_two_shot",
        "all_to_all_blocks",
        "all_to_all_waves",
        "broadcast",
        "collective",
        "reduce_scatter_direct",
        "reduce_scatter_ring",
    )
