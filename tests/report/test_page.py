"""The page of a report: one file that needs no network, with every result in it, whatever a source says."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from helpers.commands.report_page import DEPTHWISE, H200, POINTWISE, Page, content, result

from miofind import ProblemDescription
from miofind.bench.ceilings import Ceilings, known_ceilings
from miofind.report.results import AGAINST_TORCH, SearchCurve

pytest.importorskip("altair", reason="pip install -e '.[report]'")
pytest.importorskip("vl_convert", reason="pip install -e '.[report]'")

from miofind.report.page import in_script, page, picture

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(1)>{{data}}&\x1b[2J\u202e"
CEILINGS = known_ceilings(H200)


def test_every_result_is_in_the_page() -> None:
    made = Page(page([content(result(), result(DEPTHWISE, time_ms=None, solver_id=""))], "a title"))
    assert made.texts["h1"] == "a title"
    assert made.column("solver") == ["ConvA", ""]
    assert made.column("class") == ["1x1", "depthwise"]
    assert made.column("direction") == ["forward", "data"]
    assert made.column("library") == ["miofind", "none"]
    assert made.column("time_ms") == [0.5, None]
    assert made.column("floor") == [0.2, None]
    assert made.column("tflops")[0] == pytest.approx(POINTWISE.flops / 0.5e9, rel=1e-4)
    assert made.column("intensity")[0] == pytest.approx(POINTWISE.flops / POINTWISE.bytes, rel=1e-4)


def test_a_rate_beyond_all_floats_is_none() -> None:
    made = Page(page([content(result(time_ms=5e-324))], "a"))
    assert made.column("tflops") == [None]
    assert "<svg" in picture([content(result(time_ms=5e-324))])


def test_the_whole_network_config_can_be_put_together() -> None:
    """The page holds it in parts, most of which are those of many problems."""
    mixed = ProblemDescription.convolution(
        x=(2, 4, 6, 6), w=(8, 4, 3, 3), padding=1, layout={"x": "NHWC", "w": "NCHW", "y": "NHWC"}, dtype="float32"
    )
    tf32 = ProblemDescription.convolution(x=(2, 4, 6), w=(8, 4, 3), math="tf32", direction="backward_weights")
    fused = ProblemDescription.convolution(
        x=(2, 4, 6, 6), w=(8, 4, 3, 3), dtype="float16", epilogue="float32.bias.residual.relu"
    )
    problems = [POINTWISE, DEPTHWISE, mixed, tf32, fused]
    made = Page(page([content(*map(result, problems))], "a"))
    parts = zip(*map(made.column, ("prefix", "long_direction", "problem", "suffix")), strict=True)
    assert [f"{a}-{b}-{c}{d}" for a, b, c, d in parts] == [problem.network_config for problem in problems]
    assert made.column("epilogue") == ["", "", "", "", "float32.bias.residual.relu"]
    assert made.column("problem")[-1] == "n2-c4-i6x6-k8-f3x3"


def test_nothing_is_fetched() -> None:
    made = Page(page([content(result())], "a"))
    assert [element for element, attributes in made.elements if {"src", "href"} & attributes.keys()] == []
    (policy,) = (a["content"] for _, a in made.elements if a.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None
    assert policy.startswith("default-src 'none'")
    assert [element for element, _ in made.elements].count("script") == 3
    assert not re.search(r"url\(|@import", made.texts["style"])


def test_what_a_source_says_is_text() -> None:
    fields = {"solver_id": HOSTILE, "config": HOSTILE, "layer": HOSTILE, "message": HOSTILE, "device": HOSTILE}
    source = content(
        result(**fields, library=HOSTILE, marks=(HOSTILE,)), name=HOSTILE, notes=(HOSTILE,), versions={HOSTILE: HOSTILE}
    )
    made = Page(page([source], HOSTILE))
    plain = Page(page([content(result(device="GeForce"))], "a"))
    tags = [element for element, _ in made.elements if element != "em"]
    assert tags == [element for element, _ in plain.elements]
    assert made.column("solver")[0].startswith("</script><script>alert(1)")
    assert "\x1b" not in made.texts["data"]
    assert "\u202e" not in made.texts["h1"]
    assert made.column("library") == ["other"]


def test_data_cannot_end_their_script() -> None:
    text = in_script({"a": "</script><!--&"})
    assert not {"<", ">", "&"} & set(text)
    assert json.loads(text) == {"a": "</script><!--&"}


def test_a_page_of_26000_problems_stays_below_10_mb() -> None:
    config = "blocks=2 cluster=1x1x1 consumers=1 depth_bytes=128 rows=1 splits=1 stages=3 swapped=1 tile_n="
    problems = [
        ProblemDescription.convolution(
            x=(32, 8 * c, 112, 112), w=(256, 8 * c, 7, 7), padding=3, stride=2, dtype="bfloat16", layout="NHWC"
        )
        for c in range(1, 261)
    ]
    results = [
        result(problem, config=f"{config}{number}", time_ms=math.pi * (number + 1), ratios={AGAINST_TORCH: 1.23456})
        for number in range(100)
        for problem in problems
    ]
    text = page([content(*results)], "many")
    assert len(results) == 26_000
    assert len(text.encode()) < 6e6
    assert len(Page(text).column("problem")) == 26_000


def test_roofs_are_of_the_arithmetic_that_there_is() -> None:
    assert CEILINGS is not None
    made = Page(page([content(result())], "a"))
    roofs = made.data["roofs"]
    assert {point["arithmetic"] for point in roofs} == {"float16"}
    heights = [point["tflops"] for point in roofs]
    assert heights[-1] == heights[-2] == pytest.approx(CEILINGS.flops_per_s["float16"] / 1e12)
    slope = roofs[0]["tflops"] / roofs[0]["intensity"]
    assert slope == pytest.approx(CEILINGS.copy_bytes_per_s / 1e12, rel=1e-3)
    assert roofs[0]["intensity"] < POINTWISE.flops / POINTWISE.bytes < roofs[-1]["intensity"]
    assert "float16 744 TFLOP/s, 4.2 TB/s" in roofs[-1].values()


def test_roofs_of_other_gpus_come_from_a_benchmark() -> None:
    unknown = content(result(device="GeForce", floor_ms=None))
    made = Page(page([unknown], "a"))
    assert made.data["roofs"] == []
    assert made.column("floor") == [None]
    assert "No roof and no floor of GeForce" in made.texts["li"]
    ceilings = Ceilings(copy_bytes_per_s=1e12, flops_per_s={"float16": 1e14})
    made = Page(page([unknown, content(result(device="GeForce"), ceilings={"GeForce": ceilings})], "a"))
    assert made.column("floor") == [pytest.approx(2 * (ceilings.floor_ms(POINTWISE) or 0), rel=1e-4), 0.2]
    assert {point["arithmetic"] for point in made.data["roofs"]} == {"float16"}
    assert "No roof" not in made.texts["li"]


def test_ratios_and_searches_go_with_their_rows() -> None:
    first = content(result(ratios={AGAINST_TORCH: 1.5}), result(DEPTHWISE))
    curve = SearchCurve(place=0, trials=(8, 20), best_ms=(2.0, 1.0))
    made = Page(page([first, content(result(), curves=(curve,), name="b.db")], "a"))
    assert made.data["rows"]["ratios"] == {AGAINST_TORCH: [1.5, None, None]}
    assert made.data["curves"] == [{"row": 2, "trials": [8, 20], "best_ms": [2.0, 1.0]}]


def test_charts_name_their_data_as_the_code_does() -> None:
    made = Page(page([content(result())], "a"))
    named = set(re.findall(r'"name":"(\w+)"', json.dumps(made.data["charts"], separators=(",", ":"))))
    code = made.texts["code"]
    data = {"rows", "roofs", "marked", "ticks", "means", "curves", "median"}
    assert data <= named
    assert [name for name in data if not re.search(rf"\b{name}\b", code)] == []
    assert made.data["charts"].keys() == {"roofline", "ratios", "searches"}
    assert {name for _, attributes in made.elements if (name := attributes.get("id"))} >= made.data["charts"].keys()


def test_the_documents_picture_is_small() -> None:
    path = Path(__file__).parents[2] / "docs" / "images" / "roofline.svg"
    assert path.stat().st_size < 200_000
    words = "".join(ElementTree.fromstring(path.read_text(encoding="utf-8")).itertext())
    assert [name for name in ("float16", "bfloat16", "tf32", "float32") if f"{name} (" not in words] == []


def test_a_picture_has_a_panel_an_arithmetic() -> None:
    text = picture([content(result(), result(DEPTHWISE))])
    words = "".join(ElementTree.fromstring(text).itertext())
    assert "float16 (1 problems)" in words
    assert "float32 (1 problems)" in words
    assert "miofind" in words
