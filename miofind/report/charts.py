"""The charts of a report, drawn by Altair: as Vega-Lite specifications for the page, and as a picture.

A specification names its data and holds none: the page puts in what its filters leave.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from miofind.errors import MissingLibraryError
from miofind.report.tables import LIBRARIES, OTHER
from miofind.suites import PROBLEM_CLASSES

_GREY = "#8a8f98"
_COLORS = ("#3b7ddd", "#e8871e", "#2ca58d", "#a062d6", _GREY)
_INTENSITY = "operations a byte of least traffic (FLOP/B)"
_TFLOPS = "TFLOP/s of direct arithmetic"
_BUNDLE = "window.vegaEmbed = vegaEmbed;"
_LONG_NUMBER = re.compile(r"(\d\.\d)\d+")  # of a picture's coordinates, in pixels


def _library(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MissingLibraryError(
            f"{name} is not installed, and `miofind report` draws with it: install miofind's extra report: "
            "`pip install -e '.[report]'` in its clone, `pip install 'FILE.whl[report]'` for its wheel"
        ) from error


def require_libraries() -> None:
    """Do nothing where the extra `report` is installed.

    Raises:
        MissingLibraryError: it is not.
    """
    for name in ("altair", "vl_convert"):
        _library(name)


@functools.cache
def javascript() -> str:
    """The code that draws specifications in a browser: Vega, Vega-Lite and vega-embed.

    Raises:
        MissingLibraryError: the extra `report` is not installed.
    """
    code: str = _library("vl_convert").javascript_bundle(_BUNDLE)
    return code


def specifications(libraries: Iterable[str]) -> dict[str, dict[str, Any]]:
    """The page's charts by name.

    Their data are "rows", "roofs" and "marked"; "ticks" and "means"; "curves" and
    "median".

    Args:
        libraries: of the rows.

    Raises:
        MissingLibraryError: the extra `report` is not installed.
    """
    alt = _library("altair")
    made = {"roofline": _roofline(alt, libraries), "ratios": _ratios(alt), "searches": _searches(alt)}
    return {name: chart.to_dict() for name, chart in made.items()}


def picture(points: Sequence[Mapping[str, object]], roofs: Sequence[Mapping[str, object]]) -> str:
    """The rooflines side by side, one panel an arithmetic, as SVG.

    Args:
        points: with the fields "arithmetic", "intensity", "tflops" and "library".
        roofs: points of the roofs.

    Raises:
        MissingLibraryError: the extra `report` is not installed.
    """
    alt, converter = _library("altair"), _library("vl_convert")
    panels = [_panel(alt, name, points, roofs) for name in sorted({str(point["arithmetic"]) for point in points})]
    chart = alt.concat(*panels, columns=2, spacing=24).configure(background="white", aria=False)
    chart = chart.configure_axis(gridOpacity=0.5, titleFontWeight="normal").configure_title(anchor="start")
    chart = chart.configure_legend(orient="top", title=None, symbolStrokeWidth=7, symbolOpacity=1, labelFontSize=12)
    text: str = converter.vegalite_to_svg(chart.to_dict())
    return _LONG_NUMBER.sub(r"\1", text)


def _panel(
    alt: Any, arithmetic: str, points: Sequence[Mapping[str, object]], roofs: Sequence[Mapping[str, object]]
) -> Any:
    """One arithmetic's roofline with its data in it.

    The dots of a library are one path, of a line with a gap after each dot: a circle each would take 30 times the room.
    """
    own = [point for point in points if point["arithmetic"] == arithmetic]
    gaps = [{**point, "tflops": None} for point in own]
    values = [{**dot, "order": at} for at, dot in enumerate(itertools.chain(*zip(own, gaps, strict=True)))]
    dots = alt.Chart(alt.Data(values=values)).mark_line(
        strokeCap="round", strokeWidth=3.5, opacity=0.7, invalid="break-paths-show-domains"
    )
    lines = alt.Chart(alt.Data(values=[roof for roof in roofs if roof["arithmetic"] == arithmetic]))
    layers = (
        lines.mark_line(color="#5b6470", strokeWidth=1.5).encode(**_places(alt), detail="roof:N"),
        dots.encode(**_places(alt), order="order:Q", color=_library_color(alt, (str(dot["library"]) for dot in own))),
    )
    return alt.layer(*layers).properties(width=400, height=230, title=f"{arithmetic} ({len(own)} problems)")


def _places(alt: Any) -> dict[str, Any]:
    scale, axis = alt.Scale(type="log", nice=False, padding=20), alt.Axis(format="~r", tickCount=6)
    return {
        "x": alt.X("intensity:Q", title=_INTENSITY, scale=scale, axis=axis),
        "y": alt.Y("tflops:Q", title=_TFLOPS, scale=scale, axis=axis),
    }


def _library_color(alt: Any, libraries: Iterable[str]) -> Any:
    """The colour of each library, those alone that occur in the legend."""
    known = set(libraries)
    shown = {name: color for name, color in zip((*LIBRARIES.values(), OTHER), _COLORS, strict=True) if name in known}
    return alt.Color("library:N", title=None, scale=alt.Scale(domain=list(shown), range=list(shown.values())))


def _tooltips(alt: Any, ratios: str = "compared") -> list[Any]:
    """What the pointer is told of a problem; `ratios` is the field with all of its ratios."""
    shown = {
        "network_config": "problem",
        "layer": "layer",
        "solver": "solver",
        "config": "configuration",
        "time": "time",
        "rate": "rate",
        "of_floor": "of the floor",
        ratios: "ratios",
        "marks": "marks",
        "source": "source",
    }
    return [alt.Tooltip(f"{name}:N", title=title) for name, title in shown.items()]


def _roofline(alt: Any, libraries: Iterable[str]) -> Any:
    roofs = alt.Chart(alt.NamedData("roofs")).encode(**_places(alt), detail="roof:N")
    labels = [
        roofs.transform_filter(f"isValid(datum.{side})")
        .mark_text(align="right", dy=dy, style=style)
        .encode(text=f"{side}:N")
        for side, dy in (("above", -8), ("below", 10))
        for style in ("halo", "label")
    ]
    points = alt.Chart(alt.NamedData("rows")).mark_circle(size=34, opacity=0.6)
    points = points.encode(**_places(alt), color=_library_color(alt, libraries), tooltip=_tooltips(alt))
    marked = alt.Chart(alt.NamedData("marked")).mark_point(size=180, strokeWidth=2.5, color="#e5484d")
    layers = (
        roofs.mark_line(strokeWidth=1.5, color=_GREY),
        points.add_params(alt.selection_interval(bind="scales", zoom="wheel![event.shiftKey]")),
        *labels,
        marked.encode(**_places(alt)),
    )
    return alt.layer(*layers).properties(width="container", height=460)


def _ratios(alt: Any) -> Any:
    """A tick a problem, the geometric mean of each class as a point with its value."""
    scale = alt.Scale(type="log", nice=False, padding=16)
    beside = {
        "y": alt.Y("class:N", title=None, sort=[*PROBLEM_CLASSES, "all"]),
        "yOffset": alt.YOffset("compared:N"),
        "color": alt.Color("compared:N", title=None, scale=alt.Scale(range=list(_COLORS))),
    }
    ticks = alt.Chart(alt.NamedData("ticks")).mark_tick(thickness=1, opacity=0.4, height=14)
    ticks = ticks.encode(
        x=alt.X("ratio:Q", title="ratio of times: above 1, the second named is faster", scale=scale),
        tooltip=[alt.Tooltip("compared:N"), alt.Tooltip("ratio:Q", format=".3f"), *_tooltips(alt, "told")],
        **beside,
    )
    shown = {"class:N": "class", "compared:N": "compared", "count:Q": "problems"}
    figures = {"mean:Q": "geometric mean", "least:Q": "least"}
    means = alt.Chart(alt.NamedData("means")).encode(x=alt.X("mean:Q", scale=scale), **beside)
    points = means.mark_point(filled=True, size=80, opacity=1, style="mean").encode(
        tooltip=[
            *(alt.Tooltip(field, title=title) for field, title in shown.items()),
            *(alt.Tooltip(field, title=title, format=".3f") for field, title in figures.items()),
        ]
    )
    texts = means.encode(text="text:N")
    halo, labels = (texts.mark_text(align="left", dx=8, fontWeight="bold", style=style) for style in ("halo", "label"))
    one = alt.Chart(alt.Data(values=[{"at": 1}])).mark_rule(strokeDash=[4, 3], color=_GREY).encode(x="at:Q")
    return alt.layer(one, ticks, points, halo, labels).properties(width="container", height=alt.Step(22))


def _searches(alt: Any) -> Any:
    places = {
        "x": alt.X("trials:Q", title="configurations tried", scale=alt.Scale(type="log", nice=False, padding=8)),
        "y": alt.Y("behind:Q", title="best so far / best of all", scale=alt.Scale(type="log", nice=False, padding=8)),
    }
    curves = alt.Chart(alt.NamedData("curves")).encode(**places, detail="row:N")
    lines = curves.mark_line(interpolate="step-after", strokeWidth=1, opacity=0.35, color=_COLORS[0])
    points = curves.mark_circle(size=30, opacity=0.35, color=_COLORS[0]).encode(
        tooltip=[
            alt.Tooltip("network_config:N", title="problem"),
            alt.Tooltip("trials:Q", title="configurations tried"),
            alt.Tooltip("best_ms:Q", title="best so far, ms", format=".4~r"),
            alt.Tooltip("behind:Q", title="of the best of all", format=".3f"),
        ]
    )
    median = alt.Chart(alt.NamedData("median")).mark_line(
        interpolate="step-after", strokeWidth=3, color=_COLORS[1], tooltip="median of the searches"
    )
    return alt.layer(lines, points, median.encode(**places)).properties(width="container", height=300)
