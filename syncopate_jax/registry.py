"""Named extension points, filled by the files of one package each.

The registry imports the modules of its package on the first look-up, and each module registers what
it defines: a template, importer, backend or operator is found wherever in the package its file is.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from typing import Any

from syncopate_jax.errors import InputError


class Registry[T]:
    """Objects by name, discovered in one package.

    Attributes:
      kind: what is registered, in words, for messages.
      package: dotted package whose modules register themselves on import.
    """

    def __init__(self, kind: str, package: str):
        self.kind = kind
        self.package = package
        self._items: dict[str, T] = {}
        self._loaded = False

    def register(self, name: str) -> Callable[[T], T]:
        """Decorator that files an object under ``name``; a second owner of a name is an error."""

        def add(item: T) -> T:
            if self._items.get(name, item) is not item:
                raise InputError(f"{self.kind} {name!r} is registered twice; give one another name")
            self._items[name] = item
            return item

        return add

    def names(self) -> tuple[str, ...]:
        """Every registered name, sorted."""
        self._load()
        return tuple(sorted(self._items))

    def get(self, name: str) -> T:
        """The object called ``name``; raises InputError that lists the known names."""
        self._load()
        try:
            return self._items[name]
        except (KeyError, TypeError):  # TypeError: it cannot be a key
            known = ", ".join(sorted(self._items)) or "none"
            raise InputError(f"no {self.kind} is called {name!r}; known: {known}") from None

    def _load(self) -> None:
        if self._loaded:
            return
        package = importlib.import_module(self.package)
        for module in sorted(found.name for found in pkgutil.iter_modules(package.__path__)):
            importlib.import_module(f"{self.package}.{module}")
        self._loaded = True


templates: Registry[Callable[..., Any]] = Registry("plan template", "syncopate_jax.plans")
USUAL_TEMPLATES = {
    "all_gather": "all_gather_swizzle",
    "reduce_scatter": "reduce_scatter_direct",
    "all_reduce": "all_reduce_two_shot",
    "all_to_all": "all_to_all_waves",
    "broadcast": "broadcast",
}
"""The template of each kind of collective for which none is chosen."""

importers: Registry[Any] = Registry("importer", "syncopate_jax.importers")
backends: Registry[Any] = Registry("backend", "syncopate_jax.backends")
# What each does if nothing but its arrays and its mesh axis is given: an ``ops.spec.Contraction``.
operators: Registry[Any] = Registry("operator", "syncopate_jax.ops")
