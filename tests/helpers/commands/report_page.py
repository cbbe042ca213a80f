"""Reads pages of `miofind report` as a browser does, without one, and makes sources for them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from html.parser import HTMLParser
from typing import Any

from miofind import ProblemDescription
from miofind.report.results import ProblemResult, SourceContent

POINTWISE = ProblemDescription.convolution(x=(4, 8, 9, 9), w=(8, 8, 1, 1), dtype="float16", layout="NHWC")
DEPTHWISE = ProblemDescription.convolution(x=(4, 8, 9, 9), w=(8, 1, 3, 3), groups=8, direction="backward_data")
H200 = "NVIDIA H200"


def result(problem: ProblemDescription = POINTWISE, **fields: Any) -> ProblemResult:
    values = {"device": H200, "solver_id": "ConvA", "library": "plain", "time_ms": 0.5, "floor_ms": 0.1} | fields
    return ProblemResult(problem=problem, **values)


def content(*results: ProblemResult, **fields: Any) -> SourceContent:
    return SourceContent(**{"name": "a.db", "kind": "FindDB", "results": results} | fields)


class Page(HTMLParser):
    """A page's elements, texts and data."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, Mapping[str, str | None]]] = []
        self.texts: dict[str, str] = {}
        self._inside: list[str] = []
        self._script = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._inside.append(tag)
        if tag == "script":
            self._script = dict(attrs).get("id") or "code"

    def handle_endtag(self, tag: str) -> None:
        if tag in self._inside:
            while self._inside.pop() != tag:
                pass

    def handle_data(self, data: str) -> None:
        place = self._inside[-1] if self._inside else ""
        place = self._script if place == "script" else place
        self.texts[place] = self.texts.get(place, "") + data

    @property
    def data(self) -> dict[str, Any]:
        """What the page's code reads."""
        read: dict[str, Any] = json.loads(self.texts["data"])
        return read

    def column(self, name: str) -> list[Any]:
        """A column of its rows."""
        values = self.data["rows"][name]
        return values if isinstance(values, list) else [values["names"][at] for at in values["at"]]
