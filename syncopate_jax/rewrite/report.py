"""What a rewrite did to a program: the pairs it replaced, and what it left with the reason."""

from __future__ import annotations

from dataclasses import dataclass

from syncopate_jax.ops.spec import Contraction

ON_AUTO_AXES = "its mesh axes are auto ones; overlap(…, auto_axes=True) has their partitioner ask"
"""Why a dot outside ``shard_map`` is left: it may need no collective at all."""


@dataclass(frozen=True, slots=True)
class Replaced:
    """A collective and a dot that became one operator.

    Attributes:
      collective: name of the collective in the traced program.
      spec: the operator, by letters.
      axis_names: mesh axes it communicates over.
      source: where the collective was written, ``file:line (function)``.
      dot_source: where the dot was written.
      readers: the other operations that read what the collective moved, by name: the operator
        keeps it for them.
      gradients: what there is to say of those of a fused backend's operator; empty: it has fused
        ones, or they move nothing.
      equals: where equal collectives were written, whose readers read this one's result.
    """

    collective: str
    spec: Contraction
    axis_names: tuple[str, ...]
    source: str
    dot_source: str
    readers: tuple[str, ...] = ()
    gradients: str = ""
    equals: tuple[str, ...] = ()

    def __str__(self) -> str:
        axes, spec = ",".join(self.axis_names), self.spec
        letters = f"{spec.lhs},{spec.rhs}->{spec.out}"
        moved = "".join(f", {w} {x}" for w, x in _moves(spec))
        kept = f", kept for {', '.join(self.readers)}" if self.readers else ""
        equals = f" (and at {', '.join(self.equals)})" if self.equals else ""
        return (
            f"{self.collective} over {axes} at {self.source}{equals}, "
            f"with the dot at {self.dot_source}: "
            f"{spec.kind} of {spec.place} in {letters}{moved}{kept}"
            f"{_remark(self.gradients)}"
        )


@dataclass(frozen=True, slots=True)
class Left:
    """A collective that stayed as it was.

    Attributes:
      collective: its name in the traced program.
      reason: why, in a sentence.
      source: where it was written, ``file:line (function)``.
    """

    collective: str
    reason: str
    source: str

    def __str__(self) -> str:
        return f"{self.collective} at {self.source}: {self.reason}"


@dataclass(frozen=True, slots=True)
class Asked:
    """A dot on auto mesh axes, for which the partitioner asks when shardings are settled.

    Attributes:
      formula: the dot, as in ``jnp.einsum``.
      source: where it was written, ``file:line (function)``.
      gradients: as of what was replaced, as far as dtypes tell.
    """

    formula: str
    source: str
    gradients: str = ""

    def __str__(self) -> str:
        return f"the dot {self.formula} at {self.source}{_remark(self.gradients)}"


@dataclass(frozen=True, slots=True)
class Report:
    """Every collective inside the program's ``shard_map`` bodies, in program order.

    And the dots outside these: on explicit mesh axes those that imply a collective, on auto axes
    all that the partitioner is made to ask for. Dots on auto axes that are left come last in its
    text, in one line.
    """

    replaced: tuple[Replaced, ...]
    left: tuple[Left, ...]
    asked: tuple[Asked, ...] = ()

    def __str__(self) -> str:
        lines = [f"replaced {len(self.replaced)}, left {len(self.left)}"]
        lines += [f"  replaced: {item}" for item in self.replaced]
        lines += [f"  left: {item}" for item in self.left if item.reason != ON_AUTO_AXES]
        lines += [f"  the partitioner asks for: {item}" for item in self.asked]
        on_auto_axes = [item for item in self.left if item.reason == ON_AUTO_AXES]
        if len(on_auto_axes) > 1:
            places = ", ".join(dict.fromkeys(item.source for item in on_auto_axes))
            lines.append(
                f"  left: {len(on_auto_axes)} dots outside shard_map, at {places}, each because "
                f"{ON_AUTO_AXES}"
            )
        else:
            lines += [f"  left: {item}" for item in on_auto_axes]
        return "\n".join(lines)


def _remark(gradients: str) -> str:
    return f"; of its gradients: {gradients}" if gradients else ""


def _moves(spec: Contraction) -> list[tuple[str, str]]:
    return [(w, x) for w, x in (("gather", spec.gather), ("scatter", spec.scatter)) if x]
