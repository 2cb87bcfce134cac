"""Advice as a text table, and its curve as a picture (extra ``viz``)."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from syncopate_jax.advice.advise import Advice
from syncopate_jax.errors import InputError, UnsupportedError

_BAR = 30  # characters of the longest bar


def table(advice: Advice) -> str:
    """Every layer's best plan at every degree, then the curve: all layers together."""
    lines = [f"{advice.tokens} tokens a group on {advice.topology}, microseconds a layer:"]
    head = ("degree", "layer", "plan", "split", "compute", "communication", "predicted")
    rows: list[tuple[str, ...]] = [head]
    for choice in advice.choices:
        rows.append(
            (
                str(choice.degree),
                choice.layer,
                choice.plan + ("" if choice.fused else ", not fused"),
                str(choice.split),
                *(
                    f"{seconds * 1e6:.1f}"
                    for seconds in (choice.compute, choice.communication, choice.seconds)
                ),
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (
            f"{cell:<{width}}" if at in (1, 2) else f"{cell:>{width}}"
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        lines.append("  " + "  ".join(cells))
    lines.append("")
    longest = max(map(advice.seconds, advice.degrees))
    for degree in advice.degrees:
        seconds = advice.seconds(degree)
        bar = "#" * max(1, round(_BAR * seconds / longest)) if longest else ""
        mark = "  <- best" if degree == advice.best else ""
        lines.append(
            f"  degree {degree:>3}: {seconds * 1e6:>10.1f} us  "
            f"{advice.efficiency(degree):>4.0%} of the ranks' rate  {bar}{mark}"
        )
    return "\n".join(lines)


def check_picture(path: str | Path) -> None:
    """Raises as ``draw`` would for this name, before any work is done."""
    suffix = Path(path).suffix.lower()
    if suffix not in (".svg", ".png"):
        raise InputError(f"picture {path}: needs a name that ends in .svg or .png")
    if not Path(path).parent.is_dir():
        raise InputError(f"picture {path}: there is no folder {Path(path).parent}; make it first")
    if importlib.util.find_spec("matplotlib") is None:
        raise UnsupportedError(
            f"picture {path}: needs matplotlib: pip install matplotlib; the table needs nothing"
        )


def draw(advice: Advice, path: str | Path, title: str = "") -> None:
    """Draws predicted seconds by degree, stacked by layer, beside what perfect scaling would give.

    Raises InputError for a suffix other than .svg and .png, UnsupportedError without matplotlib.
    """
    check_picture(path)
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.add_subplot()
    places = range(len(advice.degrees))
    below = [0.0] * len(advice.degrees)
    for layer in dict.fromkeys(choice.layer for choice in advice.choices):
        height = [
            choice.seconds * 1e6
            for degree in advice.degrees
            for choice in advice.at(degree)
            if choice.layer == layer
        ]
        axes.bar(places, height, bottom=below, label=layer, width=0.6)
        below = [a + b for a, b in zip(below, height, strict=True)]
    ideal = [sum(choice.compute for choice in advice.at(degree)) * 1e6 for degree in advice.degrees]
    axes.plot(places, ideal, "k--o", markersize=4, label="computation alone")
    axes.set_xticks(list(places), [str(degree) for degree in advice.degrees])
    axes.set_xlabel("tensor-parallel degree")
    axes.set_ylabel("predicted time of a layer, us")
    axes.set_title(title or f"{advice.tokens} tokens a group on {advice.topology}")
    axes.legend(frameon=False)
    svg = Path(path).suffix.lower() == ".svg"
    canvas = FigureCanvasSVG(figure) if svg else FigureCanvasAgg(figure)
    canvas.print_figure(path, dpi=150)
