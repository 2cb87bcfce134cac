"""Registries: discovery on the first look-up, and what they refuse."""

from __future__ import annotations

import pytest

from syncopate_jax.errors import InputError
from syncopate_jax.registry import Registry, backends, importers, operators, templates


def test_templates_are_found_in_their_package() -> None:
    assert "all_gather_ring" in templates.names()
    assert templates.get("all_gather_ring").__module__ == "syncopate_jax.plans.all_gather_ring"


def test_each_extension_point_has_a_package() -> None:
    registries = (templates, importers, backends, operators)
    packages = [registry.package.removeprefix("syncopate_jax.") for registry in registries]
    assert packages == ["plans", "importers", "backends", "ops"]


def test_unknown_names_list_the_known_ones() -> None:
    known = ", ".join(templates.names())
    with pytest.raises(InputError, match=f"no plan template is called 'ring'; known: {known}"):
        templates.get("ring")
    known = ", ".join(backends.names())
    with pytest.raises(InputError, match=rf"no backend is called \['xla'\]; known: {known}"):
        backends.get(["xla"])  # type: ignore[arg-type]


def test_a_name_has_one_owner() -> None:
    registry: Registry[object] = Registry("thing", "syncopate_jax.plans")
    first = object()
    registry.register("a")(first)
    registry.register("a")(first)
    with pytest.raises(InputError, match="thing 'a' is registered twice; give one another name"):
        registry.register("a")(object())
    assert registry.get("a") is first
