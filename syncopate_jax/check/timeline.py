"""Drawing a timeline: SVG with nothing but this file, PNG through matplotlib (extra ``viz``)."""

from __future__ import annotations

import importlib.util
import math
from html import escape
from pathlib import Path

from syncopate_jax.check.lanes import Lane, Picture, lay_out
from syncopate_jax.check.timing import Timeline
from syncopate_jax.errors import InputError, UnsupportedError

# Sizes in pixels of the SVG; the PNG keeps their proportions.
_WIDTH, _LEFT, _RIGHT, _TOP, _BOTTOM = 1200, 120, 24, 72, 46
_TILE_LANE, _OP_LANE, _GAP, _RANK_GAP = 34, 12, 3, 10
_LEGEND_LINE, _LEGEND_COLUMNS, _LEGEND_MOST = 18, 4, 16
_TITLE, _GUIDE, _GUIDE_LINE = 24, 42, 15  # where the title and the lines that explain it stand
_INK, _PALE_INK, _GRID, _FAINT = "#222222", "#666666", "#dddddd", 0.35


def draw(timeline: Timeline, path: str | Path, *, max_ranks: int = 16) -> None:
    """Draws ``timeline`` to a ``.svg`` or ``.png`` file, ranks beyond ``max_ranks`` left out.

    Raises InputError for another suffix, UnsupportedError for PNG without matplotlib.
    """
    check_picture(path)
    picture = lay_out(timeline, max_ranks)
    if Path(path).suffix.lower() == ".svg":
        Path(path).write_text(svg(picture), encoding="utf-8")
    else:
        _draw_png(picture, Path(path))


def check_picture(path: str | Path) -> None:
    """Raises as ``draw`` would for this name, before any work is done."""
    suffix = Path(path).suffix.lower()
    if suffix not in (".svg", ".png"):
        raise InputError(f"picture {path}: needs a name that ends in .svg or .png")
    if not Path(path).parent.is_dir():
        raise InputError(f"picture {path}: there is no folder {Path(path).parent}; make it first")
    if suffix == ".png" and importlib.util.find_spec("matplotlib") is None:
        raise UnsupportedError(
            f"picture {path}: PNG needs matplotlib: pip install matplotlib; or ask for an .svg, "
            f"which needs nothing"
        )


def svg(picture: Picture) -> str:
    """The picture as the text of an SVG document; each bar names itself in a tool tip."""
    tops, bottom = _lane_tops(picture.lanes)
    scale = (_WIDTH - _LEFT - _RIGHT) / (picture.makespan or 1.0)
    legend = picture.legend(_LEGEND_MOST)
    height = bottom + _BOTTOM + _LEGEND_LINE * -(-len(legend) // _LEGEND_COLUMNS)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" '
        f'viewBox="0 0 {_WIDTH} {height}" font-family="sans-serif" font-size="11" fill="{_INK}">',
        f'<rect width="{_WIDTH}" height="{height}" fill="white"/>',
        f'<text x="{_LEFT}" y="{_TITLE}" font-size="15">{escape(picture.title)}</text>',
    ]
    for line, words in enumerate(picture.guide):
        y = _GUIDE + line * _GUIDE_LINE
        parts.append(f'<text x="{_LEFT}" y="{y}" fill="{_PALE_INK}">{escape(words)}</text>')
    parts += _svg_axis(picture.makespan, scale, bottom)
    parts += _svg_lanes(picture.lanes, tops)
    parts += _svg_bars(picture, tops, scale)
    parts += _svg_legend(legend, bottom + _BOTTOM)
    return "\n".join([*parts, "</svg>", ""])


def ticks(span: float) -> list[float]:
    """Round positions, in microseconds, from 0 to ``span`` seconds; at most 11."""
    if span <= 0:
        return [0.0]
    rough = span * 1e6 / 10
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * k for k in (1, 2, 5, 10) if power * k >= rough * (1 - 1e-9))
    return [i * step for i in range(int(span * 1e6 / step * (1 + 1e-12)) + 1)]


def _lane_height(lane: Lane) -> int:
    return _OP_LANE if lane.channel >= 0 else _TILE_LANE


def _has_edge(height: float, width: float) -> bool:
    """White edges part neighbours; thin rows and short bars (in pixels) would be all edge."""
    return height > 3 and width > 3


def _lane_tops(lanes: tuple[Lane, ...]) -> tuple[list[int], int]:
    """Upper edge of each lane, in pixels, and the lower edge of all."""
    tops, y, rank = [], _TOP, lanes[0].rank if lanes else 0
    for lane in lanes:
        y += _RANK_GAP if lane.rank != rank else 0
        rank = lane.rank
        tops.append(y)
        y += _lane_height(lane) + _GAP
    return tops, y


def _svg_axis(span: float, scale: float, bottom: int) -> list[str]:
    parts = []
    for tick in ticks(span):
        x = _LEFT + tick * 1e-6 * scale
        parts.append(
            f'<path d="M{x:.2f} {_TOP}V{bottom + 4}" stroke="{_GRID}"/>'
            f'<text x="{x:.2f}" y="{bottom + 17}" text-anchor="middle">{tick:g}</text>'
        )
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    parts.append(f'<text x="{middle:.0f}" y="{bottom + 32}" text-anchor="middle">time (us)</text>')
    return parts


def _svg_lanes(lanes: tuple[Lane, ...], tops: list[int]) -> list[str]:
    width = _WIDTH - _LEFT - _RIGHT
    parts = []
    for lane, top in zip(lanes, tops, strict=True):
        height = _lane_height(lane)
        parts.append(
            f'<rect x="{_LEFT}" y="{top}" width="{width}" height="{height}" fill="#f6f6f6"/>'
            f'<text x="{_LEFT - 8}" y="{top + height / 2 + 4:g}" text-anchor="end">'
            f"{escape(lane.label)}</text>"
        )
    return parts


def _svg_bars(picture: Picture, tops: list[int], scale: float) -> list[str]:
    parts = []
    for bar in picture.bars:
        lane = picture.lanes[bar.lane]
        height = _lane_height(lane) / lane.rows
        top = tops[bar.lane] + bar.row * height
        x, width = _LEFT + bar.start * scale, (bar.busy - bar.start) * scale
        colour = picture.colour(bar.chunk)
        edge = ' stroke="white" stroke-width="0.5"' if _has_edge(height, width) else ""
        times = f"{bar.start * 1e6:.2f} to {bar.finish * 1e6:.2f} us"
        tail = ""
        if bar.finish > bar.busy:
            tail = (
                f'<rect x="{x + width:.2f}" y="{top + height / 3:.2f}" '
                f'width="{(bar.finish - bar.busy) * scale:.2f}" height="{height / 3:.2f}" '
                f'opacity="{_FAINT}"/>'
            )
        parts.append(
            f'<g fill="{colour}"><title>{escape(bar.text)}: {times}</title>'
            f'<rect x="{x:.2f}" y="{top:.2f}" width="{width:.2f}" height="{height:.2f}"{edge}/>'
            f"{tail}</g>"
        )
    return parts


def _svg_legend(legend: list[tuple[str, str]], top: int) -> list[str]:
    parts = []
    column = (_WIDTH - _LEFT - _RIGHT) / _LEGEND_COLUMNS
    for i, (colour, words) in enumerate(legend):
        line, place = divmod(i, _LEGEND_COLUMNS)
        x, y = _LEFT + place * column, top + line * _LEGEND_LINE
        parts.append(
            f'<rect x="{x:.0f}" y="{y - 9}" width="10" height="10" fill="{colour}"/>'
            f'<text x="{x + 15:.0f}" y="{y}">{escape(words)}</text>'
        )
    return parts


def _draw_png(picture: Picture, path: Path) -> None:
    # Imported late, and without pyplot: no display, no global figure.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.collections import PolyCollection
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    tops, bottom = _lane_tops(picture.lanes)
    legend = picture.legend(_LEGEND_MOST)
    lines = -(-len(legend) // _LEGEND_COLUMNS)
    height = bottom + _BOTTOM + _LEGEND_LINE * lines
    figure = Figure(figsize=(_WIDTH / 100, height / 100), dpi=150)
    FigureCanvasAgg(figure)
    axes = figure.add_axes(
        (
            _LEFT / _WIDTH,
            1 - bottom / height,
            1 - (_LEFT + _RIGHT) / _WIDTH,
            (bottom - _TOP) / height,
        )
    )
    solid: list[list[tuple[float, float]]] = []
    faint: list[list[tuple[float, float]]] = []
    solid_colours, faint_colours, edges = [], [], []
    scale = (_WIDTH - _LEFT - _RIGHT) / (picture.makespan or 1.0)
    for bar in picture.bars:
        lane = picture.lanes[bar.lane]
        rows = _lane_height(lane) / lane.rows
        top = tops[bar.lane] + bar.row * rows
        solid.append(_rectangle(bar.start, bar.busy, top, rows))
        solid_colours.append(picture.colour(bar.chunk))
        edges.append(0.3 if _has_edge(rows, (bar.busy - bar.start) * scale) else 0.0)
        if bar.finish > bar.busy:
            faint.append(_rectangle(bar.busy, bar.finish, top + rows / 3, rows / 3))
            faint_colours.append(picture.colour(bar.chunk))
    for lane, top in zip(picture.lanes, tops, strict=True):
        axes.axhspan(top, top + _lane_height(lane), color="#f6f6f6", zorder=0)
    axes.add_collection(PolyCollection(faint, facecolors=faint_colours, alpha=_FAINT, zorder=2))
    axes.add_collection(
        PolyCollection(
            solid, facecolors=solid_colours, edgecolors="white", linewidths=edges, zorder=3
        )
    )
    axes.set_xlim(0, picture.makespan * 1e6 or 1.0)
    axes.set_ylim(max(bottom, _TOP + 1), _TOP)
    axes.set_xticks(ticks(picture.makespan))
    middles = [t + _lane_height(lane) / 2 for lane, t in zip(picture.lanes, tops, strict=True)]
    axes.set_yticks(middles, [lane.label for lane in picture.lanes], fontsize=7)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labelsize=8)
    axes.grid(axis="x", color=_GRID, linewidth=0.6, zorder=1)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.set_xlabel("time (us)", fontsize=8)
    left = _LEFT / _WIDTH
    figure.text(left, 1 - _TITLE / height, picture.title, fontsize=10)
    for line, words in enumerate(picture.guide):
        y = 1 - (_GUIDE + line * _GUIDE_LINE) / height
        figure.text(left, y, words, fontsize=7, color=_PALE_INK)
    handles = [Patch(facecolor=colour, label=words) for colour, words in legend]
    if handles:
        figure.legend(
            handles=handles,
            loc="lower left",
            bbox_to_anchor=(left, 0.0),
            ncols=_LEGEND_COLUMNS,
            fontsize=7,
            frameon=False,
        )
    figure.savefig(path)


def _rectangle(start: float, stop: float, top: float, height: float) -> list[tuple[float, float]]:
    a, b = start * 1e6, stop * 1e6
    return [(a, top), (b, top), (b, top + height), (a, top + height)]
