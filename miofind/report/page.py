"""The HTML page of a report: everything it needs is in it, and nothing that a source says becomes markup or code."""

from __future__ import annotations

import html
import importlib.resources
import json
import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

import miofind
from miofind.report import charts, tables
from miofind.report.results import SourceContent
from miofind.text.printable import printable, printable_name

_TEMPLATE = "page.html"
_SLOT = re.compile(r"\{\{(\w+)\}\}")


def page(sources: Sequence[SourceContent], title: str) -> str:
    """The whole page.

    Raises:
        MissingLibraryError: the extra `report` is not installed.
    """
    content = {
        "rows": tables.columns(sources),
        "curves": tables.curves(sources),
        "roofs": tables.roof_points(sources),
        "charts": charts.specifications(tables.libraries(sources)),
    }
    slots = {
        "title": html.escape(printable(title)),
        "about": _about(sources),
        "style": _file("page.css"),
        "library": charts.javascript(),
        "code": _file("page.js"),
        "data": in_script(content),
    }
    return filled(_file(_TEMPLATE), slots)


def filled(template: str, slots: Mapping[str, str]) -> str:
    """The template with each {{name}} replaced; what is put in is looked at no more."""
    return _SLOT.sub(lambda slot: slots[slot[1]], template)


def in_script(value: object) -> str:
    """JSON that cannot end the script element that it stands in."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _about(sources: Sequence[SourceContent]) -> str:
    """Where the figures are from, as HTML."""
    items = [_source_item(source) for source in sources]
    known = tables.ceilings_of(sources)
    devices = dict.fromkeys(result.device for source in sources for result in source.results)
    items += [
        f"<li>No roof and no floor of {html.escape(printable_name(device))}: its ceilings are not known. "
        "Name the JSON of a <code>miofind bench</code> on it as one more source.</li>"
        for device in devices
        if device not in known
    ]
    made = f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC by miofind {miofind.__version__}"
    return f"<ul>{''.join(items)}</ul><p>Made {html.escape(made)}.</p>"


def _source_item(source: SourceContent) -> str:
    devices = ", ".join(dict.fromkeys(result.device for result in source.results))
    versions = ", ".join(f"{name} {version}" for name, version in source.versions.items())
    told = f" {source.kind} of {devices}: {len(source.results)} problems{f'; {versions}' if versions else ''}"
    notes = "".join(f" <em>{html.escape(printable(note))}.</em>" for note in source.notes)
    return f"<li><code>{html.escape(printable(source.name))}</code>{html.escape(printable(told))}.{notes}</li>"


def _file(name: str) -> str:
    return (importlib.resources.files("miofind") / "report" / name).read_text(encoding="utf-8")


def picture(sources: Sequence[SourceContent]) -> str:
    """The rooflines alone as SVG, for a document.

    Raises:
        MissingLibraryError: the extra `report` is not installed.
    """
    return charts.picture(tables.points(sources), tables.roof_points(sources))
