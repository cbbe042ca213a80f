"""What a report takes from a FindDB, a benchmark's and a tuning's JSON; bad ones are refused with one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from helpers.commands.cli_runner import FORWARD, run, run_json, use_own_folders
from helpers.commands.report_page import DEPTHWISE, H200, POINTWISE
from helpers.finddb.finddb_entries import DEVICE, rival, row, scope, verdict

from miofind.bench.ceilings import Ceilings
from miofind.errors import DatabaseError, InvalidOptionError
from miofind.finddb import Store, write_release
from miofind.report.finddb_source import MIN_TRIALS, read_finddb, search_curve
from miofind.report.results import AGAINST_CUDNN, AGAINST_ONE_PASS, AGAINST_TORCH, OWN_AGAINST_CUDNN
from miofind.report.sources import read_source

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
BENCH_ROW: dict[str, Any] = {
    "suite": "resnet50",
    "layer": "conv1",
    "network_config": POINTWISE.network_config,
    "solution": 'ConvCudnn:{"engine":1}',
    "time_ms": 0.5,
    "ratio": 1.5,
    "floor_ms": 0.25,
    "message": "",
}


@pytest.fixture(autouse=True)
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_own_folders(tmp_path, monkeypatch)


def written(path: Path, value: object) -> str:
    path.write_text(json.dumps(value), encoding="utf-8")
    return str(path)


def bench_file(path: Path, *changes: dict[str, Any], **fields: Any) -> str:
    rows = [BENCH_ROW | change for change in changes or ({},)]
    return written(path, {"gpu": H200, "versions": {"torch": "2.11"}, "rows": rows} | fields)


def test_a_finddb_gives_the_best_row_of_each_problem(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    rows = [
        row("ConvCudnn", time_ms=3.0, library="cudnn"),
        row("ConvDirectNaive", '{"threads":256}', time_ms=2.0, library="plain"),
        row("ConvIm2colGemm", time_ms=1.0, library="cublas", contended=True),
    ]
    with Store(path) as store:
        store.record(DEVICE, POINTWISE.network_config, rows, scope=scope())
        store.record(DEVICE, "conv2d-of-another-release", [row()], scope=scope())
        store.record(DEVICE, DEPTHWISE.network_config, [row(status="crashed", time_ms=None)], scope=scope())
    content = read_source(str(path))
    (found,) = content.results
    assert (found.solver_id, found.library, found.time_ms, found.device) == ("ConvIm2colGemm", "cublas", 1.0, H200)
    assert found.ratios == {AGAINST_CUDNN: 3.0, OWN_AGAINST_CUDNN: 1.5}
    assert found.marks == ("contended",)
    assert found.floor_fraction(None) is None
    assert [note.split(" ", 1)[1][:29] for note in content.notes] == [
        "problems are left out: this r",
        "problems are left out: nothin",
    ]


def test_a_release_compares_no_own_kernels(tmp_path: Path) -> None:
    """It leaves out solvers whose kernels changed: ConvDirectTiled alone stood for them in 511 shipped problems."""
    rows = [row("ConvCudnn", time_ms=1.0, library="cudnn"), row("ConvDirectTiled", time_ms=9.0, library="plain")]
    with Store(tmp_path / "a.db") as store:
        store.record(DEVICE, POINTWISE.network_config, rows, scope=scope())
        write_release([store], tmp_path / "b.db")
    assert read_finddb(tmp_path / "a.db").results[0].ratios.keys() == {AGAINST_CUDNN, OWN_AGAINST_CUDNN}
    assert read_finddb(tmp_path / "b.db").results[0].ratios.keys() == {AGAINST_CUDNN}


def test_a_tie_is_marked(tmp_path: Path) -> None:
    with Store(tmp_path / "a.db") as store:
        told = verdict("ConvA:{}", "ConvC:{}")
        store.record(DEVICE, POINTWISE.network_config, [row("ConvA"), row("ConvC")], scope=scope(), verdict=told)
    (found,) = read_finddb(tmp_path / "a.db").results
    assert found.marks == ("tie",)


def test_a_search_is_known_at_the_end_of_each_batch() -> None:
    """Rows of one batch have one time: their order is not known."""
    times = [5.0, 4.0, 6.0, 3.0] * (MIN_TRIALS // 4) + [1.0]
    stamps = [f"2026-01-01T00:00:{index // 8:02d}.000000Z" for index in range(len(times))]
    rows = [
        row(config=f'{{"a":{index}}}', time_ms=time, created_at=stamp)
        for index, (time, stamp) in enumerate(zip(times, stamps, strict=True))
    ]
    curve = search_curve(rows, 7)
    assert curve is not None
    assert (curve.place, curve.trials, curve.best_ms) == (7, (8, 16, 17), (3.0, 3.0, 1.0))
    assert search_curve(rows[: MIN_TRIALS - 1], 0) is None
    again = [*rows, row(config='{"a":0}', time_ms=0.5, created_at="2026-01-01T00:01:00.000000Z")]
    assert search_curve(again, 7) == curve, "a configuration that is measured again is no trial"
    beside = [*rows, rival(time_ms=0.5, created_at="2026-01-01T00:01:00.000000Z")]
    assert search_curve(beside, 7) == curve, "nor is another library's time"


def test_a_benchmark_gives_its_rows(tmp_path: Path) -> None:
    failed = {"network_config": DEPTHWISE.network_config, "solution": None, "time_ms": None, "message": "nothing"}
    fused = {"network_config": f"{POINTWISE.network_config}-e.bias", "time_ms": 2.0, "one_pass_ms": 3.0}
    content = read_source(bench_file(tmp_path / "a.json", {}, failed, fused | {"solution": "ConvCudnn+Pointwise:{}"}))
    first, second, third = content.results
    assert (third.ratios, third.library) == ({AGAINST_TORCH: 1.5, AGAINST_ONE_PASS: 1.5}, "cudnn")
    assert (first.layer, first.solver_id, first.config) == ("resnet50 conv1", "ConvCudnn", "engine=1")
    assert (first.library, first.ratios, first.floor_fraction(None)) == ("cudnn", {AGAINST_TORCH: 1.5}, 0.5)
    assert (second.solver_id, second.time_ms, second.marks, second.message) == ("", None, ("failed",), "nothing")
    assert (content.kind, content.versions) == ("benchmark", {"torch": "2.11"})
    assert content.ceilings == {}


def test_ceilings_that_a_benchmark_measured_count(tmp_path: Path) -> None:
    told = {"copy_bytes_per_s": 1e12, "flops_per_s": {"float16": 1e14}}
    content = read_source(bench_file(tmp_path / "a.json", gpu="GeForce", ceilings=told))
    assert content.ceilings == {"GeForce": Ceilings(copy_bytes_per_s=1e12, flops_per_s={"float16": 1e14})}


def test_a_tuning_is_a_source(tmp_path: Path) -> None:
    printed = run("tune", *FORWARD, "--device", "cpu", "--in-process", "--json").stdout
    content = read_source(written(tmp_path / "a.json", json.loads(printed)))
    (found,) = content.results
    assert content.kind == "tuning"
    assert found.solver_id.startswith("ConvCpu")
    assert found.time_ms is not None


def test_all_kept_benchmarks_can_be_read() -> None:
    kept = [
        path for path in RESULTS.glob("*.json") if json.loads(path.read_text())["command"].startswith("miofind bench")
    ]
    assert kept
    for path in kept:
        assert all(one.floor_ms is not None for one in read_source(str(path)).results), path.name


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("", "it is no FindDB, and no JSON"),
        ("[1]", "it is no FindDB and no JSON of"),
        ("[" * 100_000, "no JSON"),
        ('{"rows": 1}', "it is no FindDB and no JSON of"),
        ('{"rows": [1]}', "it is no FindDB and no JSON of"),
        ('{"rows": []}', "it holds no problem to show"),
        ('{"rows": [{}]}', "entry 1: it has no time_ms"),
        ('{"rows": [{"time_ms": NaN}]}', "NaN is no number"),
        ('{"rows": [{"time_ms": 1}]}', "entry 1: it has no network_config"),
        ('{"rows": [{"time_ms": 1, "network_config": "x"}]}', "entry 1: 'x' is not a network_config"),
        ('{"rows": [{"time_ms": 1e999, "network_config": "x"}]}', "entry 1: "),
        ('{"results": [{"best": 1, "network_config": "x"}]}', "entry 1: best='1' is no object"),
        ('{"rows": [{}], "ceilings": {}}', "its ceilings have no copy_bytes_per_s"),
    ],
)
def test_bad_json_is_refused_with_one_line(tmp_path: Path, content: str, told: str) -> None:
    path = tmp_path / "a.json"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(InvalidOptionError) as raised:
        read_source(str(path))
    assert told in str(raised.value)
    assert str(raised.value).startswith(str(path))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("field", ["time_ms", "ratio", "floor_ms"])
@pytest.mark.parametrize("value", ["1", -1, 0, True, 1e400, 10**400, 1e308, 5e-324, [1]])
def test_figures_must_be_positive_numbers(tmp_path: Path, field: str, value: object) -> None:
    text = json.dumps({"rows": [BENCH_ROW | {field: value}]}).replace("Infinity", "1e400")
    (tmp_path / "a.json").write_text(text, encoding="utf-8")
    with pytest.raises(InvalidOptionError, match=f"entry 1: {field}="):
        read_source(str(tmp_path / "a.json"))


def test_what_is_not_there_is_refused(tmp_path: Path) -> None:
    for name in (str(tmp_path / "none"), str(tmp_path), "a\0b"):
        with pytest.raises(InvalidOptionError, match="it cannot be read"):
            read_source(name)
    with pytest.raises(DatabaseError, match="there is no FindDB"):
        read_finddb(tmp_path / "none.db")


def test_the_command_writes_the_page_and_the_picture(tmp_path: Path) -> None:
    pytest.importorskip("altair")
    pytest.importorskip("vl_convert")
    source, output, image = bench_file(tmp_path / "a.json"), str(tmp_path / "a.html"), str(tmp_path / "a.svg")
    told = run_json("report", source, "--output", output, "--image", image, "--title", "one <title>")
    assert told["problems"] == 1
    assert (told["output"], told["image"]) == (output, image)
    text = Path(output).read_text(encoding="utf-8")
    assert "<h1>one &lt;title&gt;</h1>" in text
    assert Path(image).read_text(encoding="utf-8").startswith("<svg")
    assert "1 problems" in run("report", source, "--output", output).stdout


def test_the_users_finddb_is_the_source_where_none_is_named(tmp_path: Path) -> None:
    pytest.importorskip("altair")
    pytest.importorskip("vl_convert")
    output = str(tmp_path / "a.html")
    assert "there is no FindDB at" in run("report", "--output", output, code=4).stderr
    run("find", *FORWARD, "--device", "cpu")
    assert run_json("report", "--output", output)["sources"][0]["source"] == str(tmp_path / "finddb.db")
    assert run_json("report", "--db", str(tmp_path / "finddb.db"), "--output", output)["problems"] == 1


def test_what_cannot_be_written_is_refused_and_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("miofind.cli.report.require_libraries", lambda: None)
    monkeypatch.setattr("miofind.cli.report.page", lambda contents, title: "a page")
    monkeypatch.chdir(tmp_path)
    source = bench_file(Path("a.json"))
    with Store("a.db") as store:
        store.record(DEVICE, POINTWISE.network_config, [row()], scope=scope())
    before = sorted(path.name for path in tmp_path.iterdir())
    for target, told in (
        ("none/a.html", "there is no folder none"),
        (".", "is a directory"),
        ("-", "name one instead of -"),
        ("a.json", "which would be lost"),
        ("a.db", "which would be lost"),
        ("b" * 300, "cannot be a path"),
    ):
        assert told in run("report", source, "--output", target, code=2).stderr
    assert "is no SVG" in run("report", source, "--image", "a.png", code=2).stderr
    assert "there is no file c.json" in run("report", "c.json", "--output", "a.html", code=2).stderr
    assert "name what to write" in run("report", source, code=2).stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_a_missing_extra_is_one_line_with_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "altair", None)
    source = bench_file(tmp_path / "a.json")
    told = run("report", source, "--output", str(tmp_path / "a.html"), code=3).stderr
    assert told.startswith("error: altair is not installed, and `miofind report` draws with it: ")
    assert "`pip install -e '.[report]'` in its clone, `pip install 'FILE.whl[report]'` for its wheel" in told
    assert told.count("\n") == 1
