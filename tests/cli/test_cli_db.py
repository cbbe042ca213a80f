"""`miofind db`: show, count, move, check and prune FindDBs."""

from __future__ import annotations

import json
import sqlite3
from dataclasses import replace
from pathlib import Path

import pytest
from helpers.commands.cli_runner import FORWARD, TINY, run, run_json, use_own_folders
from helpers.finddb.finddb_entries import older_answers, version_1

from miofind.device.device import Device
from miofind.driver.line import parse_driver_line
from miofind.finddb import Comparison, Row, Store, Verdict
from miofind.solver.steps import Config

pytestmark = pytest.mark.sampled(2)

PROBLEM = parse_driver_line(" ".join(FORWARD))[0]


@pytest.fixture(autouse=True)
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_own_folders(tmp_path, monkeypatch)


@pytest.fixture
def filled(tmp_path: Path) -> Path:
    run("find", *TINY, "-F", "0", "--device", "cpu")
    return tmp_path / "finddb.db"


def altered(path: Path, **values: object) -> None:
    """A row added to the FindDB with some fields changed."""
    device = Device.cpu().identity
    with Store(path) as store:
        history = store.history(device, PROBLEM.network_config)
        assert history is not None
        row = next(row for row in history.rows if row.solver_id == "ConvCpuIm2colGemm")
        fields = {name: getattr(row, name) for name in Row.__slots__} | {"created_at": "", "id": ""} | values
        store.record(device, PROBLEM.network_config, [Row(**fields)])


def test_path_names_user_and_shipped(tmp_path: Path, filled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MIOFIND_SYSTEM_DB", str(filled))
    named = run("db", "path", "--db", str(filled)).stdout.splitlines()
    assert named == [str(filled), f"{filled}  (shipped)"]
    assert run_json("db", "path") == {"user": str(filled), "shipped": [str(filled)]}


def test_stats(filled: Path) -> None:
    printed = run_json("db", "stats")
    assert printed["problems"] == 3
    assert printed["by_device"] == {Device.cpu().identity: 3}
    text = run("db", "stats").stdout
    assert f"{filled}: 3 problems" in text
    assert "ConvCpuDirect" in text


def test_show_lists_problems_with_their_best(filled: Path) -> None:
    assert PROBLEM.network_config in run("db", "show").stdout
    listed = {item["network_config"]: item["best"] for item in run_json("db", "show")["problems"]}
    assert listed[PROBLEM.network_config]["time_ms"] > 0
    assert len(listed) == 3


def test_show_tells_all_of_one_problem(filled: Path) -> None:
    altered(filled, status="crashed", time_ms=None, message="it fell over\nin the second line", config='{"a":1}')
    assert "it fell over" not in run("db", "show", *FORWARD).stdout
    text = run("db", "show", *FORWARD, "--all").stdout
    assert "ConvCpuIm2colGemm a=1: it fell over" in text
    assert "find of " in text
    printed = run_json("db", "show", PROBLEM.network_config, "--all")["problems"]
    assert "crashed" in {row["status"] for row in printed[0]["rows"]}
    assert printed[0]["scopes"][0]["effort"] == "defaults"


def test_another_library_s_time_is_shown_beside_an_answer_and_found_sound(filled: Path) -> None:
    asked = ("find", "conv", *FORWARD[1:], "--device", "cpu", "--json")
    found = json.loads(run(*asked).stdout)
    own = {"solver_id": "PyTorch", "solver_version": 0, "status": "rival", "algorithm": "", "library": ""}
    for time_ms in (0.5, 0.25):
        told = f"{time_ms} times the time of ConvCpuDirect:{{}}"
        altered(filled, **own, source_hash="", config='{"torch":"2.11.0"}', time_ms=time_ms, message=told)
    text = run("db", "show", *FORWARD).stdout
    assert "rival" in text
    assert "PyTorch torch=2.11.0: 0.25 times the time of ConvCpuDirect" in text
    assert "0.5 times" not in text, "the newest will do"
    assert "0.5 times" in run("db", "show", *FORWARD, "--all").stdout
    (printed,) = run_json("db", "show", PROBLEM.network_config)["problems"]
    assert [row["time_ms"] for row in printed["rows"] if row["solver_id"] == "PyTorch"] == [0.25]
    listed = {item["network_config"]: item["best"] for item in run_json("db", "show")["problems"]}
    assert listed[PROBLEM.network_config]["solver_id"] != "PyTorch"
    assert run("db", "check").stdout
    assert json.loads(run(*asked).stdout) == found, "it counts as no candidate"


def test_a_terminal_of_80_columns_gets_whole_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Configurations and problems broke into columns of one letter."""
    config = Config({f"knob_{i}": 1000 + i for i in range(12)}).json
    row = Row(solver_id="ConvA", solver_version=1, config=config, status="ok", time_ms=0.5)
    for name, time_ms in (("before.db", 0.5), ("after.db", 0.4)):
        with Store(tmp_path / name) as store:
            store.record("NVIDIA H200|132|9.0|", PROBLEM.network_config, [replace(row, time_ms=time_ms)])
    before, after = str(tmp_path / "before.db"), str(tmp_path / "after.db")
    commands = (("show",), ("show", PROBLEM.network_config), ("diff", before, after))
    for command in commands:
        database = () if command[0] == "diff" else ("--db", before)
        for columns in ("80", "200"):
            monkeypatch.setenv("COLUMNS", columns)
            text = run("db", *command, *database).stdout
            assert max(len(line) for line in text.splitlines() if str(tmp_path) not in line) <= int(columns)
            assert PROBLEM.network_config in text
            assert "NVIDIA H200, 132 SMs, sm_90" in text
            assert all(f"knob_{i}={1000 + i}" in text.split() for i in range(12))


def test_show_what_is_unknown(filled: Path) -> None:
    assert "has nothing of conv2d-forward-n100" in run("db", "show", "conv", "-F", "1", code=2).stderr


def test_export_import_and_merge(filled: Path, tmp_path: Path) -> None:
    exported = tmp_path / "export.jsonl"
    lines = run_json("db", "export", str(exported))["lines"]
    assert lines == len(exported.read_text(encoding="utf-8").splitlines())
    assert run("db", "export", "-").stdout == exported.read_text(encoding="utf-8")
    imported, merged = str(tmp_path / "imported.db"), str(tmp_path / "merged.db")
    added = run_json("db", "import", str(exported), "--db", imported)["added"]
    assert run_json("db", "merge", str(filled), imported, "--db", merged)["added"] == added > 0
    assert run_json("db", "merge", imported, "--db", merged)["added"] == 0
    assert run("db", "export", "-", "--db", merged).stdout == exported.read_text(encoding="utf-8")
    piped = run("db", "import", "-", "--db", str(tmp_path / "piped.db"), input=exported.read_text(encoding="utf-8"))
    assert f"{added} measurements, finds and verdicts were new" in piped.stdout


def test_an_export_that_fails_leaves_the_file_there_was(filled: Path, tmp_path: Path) -> None:
    target = tmp_path / "export.jsonl"
    target.write_text("earlier", encoding="utf-8")
    run("db", "export", str(target), "--db", str(tmp_path / "missing.db"), code=2)
    assert target.read_text(encoding="utf-8") == "earlier"
    assert "missing" in run("db", "export", str(tmp_path / "missing" / "export.jsonl"), code=2).stderr
    assert "--json and -" in run("db", "export", "-", "--json", code=2).stderr


def test_an_import_of_something_else_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "other.jsonl"
    file.write_text('{"a": 1}\n', encoding="utf-8")
    assert "line 1" in run("db", "import", str(file), code=4).stderr


def test_a_sound_finddb(filled: Path) -> None:
    printed = run_json("db", "check")
    assert printed["sound"]
    assert printed["rows_checked"] == run_json("db", "stats")["rows"]
    assert f"{filled}: sound" in run("db", "check", str(filled)).stdout


@pytest.mark.parametrize(
    ("values", "finding"),
    [
        ({"solver_id": "ConvNone"}, "solver 'ConvNone' is not registered"),
        ({"config": '{"chunk_mib":3,"pixels_inner":true}'}, "chunk_mib=3 must be one of"),
        ({"config": "{}"}, "must have the parameters"),
        ({"workspace_bytes": 12345}, "it says 12345 bytes of workspace, ConvCpuIm2colGemm needs"),
        ({"algorithm": "winograd"}, "it says winograd, plain; ConvCpuIm2colGemm is im2col_gemm"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_check_compares_rows_with_the_solvers(filled: Path, values: dict[str, object], finding: str) -> None:
    altered(filled, **values)
    printed = run_json("db", "check", code=1)
    assert len(printed["findings"]) == 1
    assert finding in printed["findings"][0]
    assert finding in run("db", "check", code=1).stdout


def test_rows_of_other_releases_are_void_not_wrong(filled: Path) -> None:
    altered(filled, solver_version=99, config='{"later":1}')
    printed = run_json("db", "check")
    assert (printed["sound"], printed["rows_void"]) == (True, 1)


def test_a_problem_that_cannot_be_read_is_found(filled: Path) -> None:
    with Store(filled) as store:
        store.record(
            Device.cpu().identity,
            "conv9d-forward",
            [Row(solver_id="A", solver_version=1, config="{}", status="crashed")],
        )
    assert "'conv9d-forward' is not a network_config" in run("db", "check", code=1).stdout


def test_other_devices_are_checked_by_what_their_identity_says(filled: Path) -> None:
    row = Row(
        solver_id="ConvDirectNaive", solver_version=1, config='{"accumulate":"float16"}', status="ok", time_ms=1.0
    )
    from miofind.find.lookup.validity import solver_hash
    from miofind.solver.registry import Registry

    naive = Registry.default()["ConvDirectNaive"]
    fields = {name: getattr(row, name) for name in Row.__slots__} | {
        "solver_version": naive.version,
        "source_hash": solver_hash(naive),
        "algorithm": naive.algorithm.value,
        "library": naive.library.value,
    }
    with Store(filled) as store:
        store.record("NVIDIA H200|132|9.0|", PROBLEM.network_config, [Row(**fields)])
    assert "accumulate='float16' must be one of" in run("db", "check", code=1).stdout


@pytest.mark.parametrize("command", ["stats", "show", "check", "export out.jsonl", "prune", "import -", "upgrade"])
def test_a_damaged_finddb_is_an_error_of_the_database(command: str, tmp_path: Path) -> None:
    (tmp_path / "finddb.db").write_bytes(b"no database" * 1000)
    result = run("db", *command.split(), code=4, input='{"format": "miofind-finddb", "schema_version": 1}\n')
    assert result.stderr.startswith("error: ")
    assert result.stdout == ""


@pytest.mark.parametrize("command", ["stats", "show --all", "export out.jsonl", "diff finddb.db finddb.db"])
def test_a_device_that_is_no_text_is_an_error_of_the_database(
    command: str, filled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Commands failed over it one by one, as if miofind were at fault."""
    monkeypatch.chdir(tmp_path)
    with sqlite3.connect(filled) as connection:
        connection.execute("UPDATE device SET identity = X'FF00'")
    connection.close()
    assert "holds an entry that cannot be read" in run("db", *command.split(), code=4).stderr


def test_a_torn_page_is_found(filled: Path) -> None:
    with sqlite3.connect(filled) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        connection.execute("PRAGMA journal_mode=DELETE")
    connection.close()
    content = bytearray(filled.read_bytes())
    content[8192 : 8192 + 2048] = bytes(2048)
    filled.write_bytes(content)
    result = run("db", "check", code=None)
    assert result.exit_code in (1, 4)


def test_code_of_rows_without_kernels_says_so(filled: Path) -> None:
    result = run("db", "code", str(filled))
    assert result.stdout == ""
    assert result.stderr == f"no kernels: {filled} has no usable rows of a GPU\n"
    result = run("db", "code", str(filled), "--json")
    assert json.loads(result.stdout) == []
    assert result.stderr.startswith("no kernels: ")


def test_code_of_a_solver_is_that_of_its_composed_form_too(filled: Path) -> None:
    result = run("db", "code", str(filled), "--solver", "ConvGemm1x1")
    assert result.stderr == (
        f"no kernels: {filled} has no usable rows of a GPU of ConvGemm1x1, ConvGemm1x1+Pointwise\n"
    )


def test_prune(filled: Path) -> None:
    run("find", *FORWARD, "--device", "cpu", "--enforce", "db_update")
    before = run_json("db", "stats")["rows"]
    removed = run_json("db", "prune")
    assert removed["removed"] > 0
    assert removed["rows"] == before - removed["removed"]
    assert run_json("db", "prune", "--what", "other_devices", "--device", "cpu")["removed"] == 0
    assert "0 measurements removed" in run("db", "prune", "--what", "failed").stdout


def test_prune_makes_no_finddb(tmp_path: Path) -> None:
    run("db", "prune", code=4)
    assert not (tmp_path / "finddb.db").exists()


def test_show_tells_how_the_last_race_ended(filled: Path) -> None:
    winner, tied, behind = "ConvCpuDirect:{}", 'ConvA:{"tile":1}', "ConvB:{}"
    compared = (Comparison(candidate=behind, low=1.02, high=1.05), Comparison(candidate=tied, low=0.99, high=1.004))
    ruling = Verdict(winner=winner, ties=(winner, tied), comparisons=compared, blocks=30, protocol="cuda-2")
    measured = {"status": "ok", "samples": 41, "dropped_samples": 4, "time_ms": 9.0}  # busy machines cut off
    altered(filled, contended=True, config='{"a":1}', **measured)
    with Store(filled) as store:
        store.record(Device.cpu().identity, PROBLEM.network_config, verdict=ruling)
    text = run("db", "show", *FORWARD, "--all").stdout  # of a solver three are answers, and the new row is slow
    assert "race of 30 rounds at 20" in text
    assert "ConvCpuDirect won" in text
    assert text.index("ConvA tile=1: 0.990..1.004 of its time, a tie") < text.index("ConvB: 1.020..1.050 of its time\n")
    assert "ok, contended" in text
    assert "41 (-4)" in text
    (printed,) = run_json("db", "show", PROBLEM.network_config)["problems"]
    assert printed["verdict"]["ties"] == [winner, tied]
    assert printed["verdict"]["comparisons"][0] == {"candidate": behind, "low": 1.02, "high": 1.05}
    assert f"{run_json('db', 'stats')['verdicts']} verdicts" in run("db", "stats").stdout


def test_upgrade(tmp_path: Path) -> None:
    old = version_1(tmp_path / "old.db")
    assert "run `miofind db upgrade`" in run("db", "prune", "--db", str(old), code=4).stderr
    assert "run `miofind db upgrade`" in run("db", "merge", str(old), "--db", str(old), code=4).stderr
    assert "schema version 1" in run("db", "check", str(old), code=1).stderr
    done = run_json("db", "upgrade", "--db", str(old))
    assert (done["from_version"], done["to_version"]) == (1, 2)
    assert Path(done["backup"]).is_file()
    assert "has schema version 2 already" in run("db", "upgrade", "--db", str(old)).stdout
    assert run_json("db", "prune", "--db", str(old))["removed"] == 1
    assert "does not exist" in run("db", "upgrade", code=4).stderr
    again = version_1(tmp_path / "again.db")
    assert "the file as it was: " in run("db", "upgrade", "--db", str(again)).stdout
    older = older_answers(tmp_path / "older.db")
    assert "run `miofind db upgrade`" in run("db", "check", str(older), code=1).stdout
    text = run("db", "upgrade", "--db", str(older)).stdout
    assert "schema version" not in text
    assert "1 answer derived anew from measurements" in text
    assert "the stored answer is not" not in run("db", "check", str(older), code=1).stdout


def test_release_takes_what_may_ship(filled: Path, tmp_path: Path) -> None:
    altered(filled, contended=True, time_ms=1e-6)
    altered(filled, workspace_bytes=12345, contended=False)
    altered(filled, solver_version=99)
    out = tmp_path / "out.db"
    printed = run_json("db", "release", str(filled), str(filled), str(out))
    assert printed["left_out"] == {"contended": 1, "doubted": 0, "of other releases": 1, "unsound": 1}
    assert printed["problems"] == {Device.cpu().identity: 3}
    assert run_json("db", "check", str(out))["sound"]
    text = run("db", "release", str(filled), str(tmp_path / "again.db"))
    assert printed["content_hash"][:16] in text.stdout
    assert "it says 12345 bytes of workspace" in text.stderr
    assert (tmp_path / "again.db").read_bytes() == out.read_bytes()
    assert [path.suffix for path in sorted(tmp_path.iterdir()) if "out" in path.name] == [".db"]
    for command in (("prune",), ("upgrade",), ("merge", str(filled))):
        assert "is a release, which is only read" in run("db", *command, "--db", str(out), code=4).stderr
    assert run_json("db", "merge", str(out), "--db", str(tmp_path / "own.db"))["added"] > 0


def test_release_refuses_what_it_cannot_make(tmp_path: Path) -> None:
    old = version_1(tmp_path / "old.db")
    command = ("db", "release", str(old), str(tmp_path / "out.db"), "--device", "H200")
    assert "no row of the sources may ship" in run(*command, code=4).stderr
    assert not (tmp_path / "out.db").exists()
    assert "there is no FindDB" in run("db", "release", "missing.db", str(tmp_path / "out.db"), code=2).stderr
    assert "SOURCE" in run("db", "release", str(old), code=2).stderr


def test_a_release_is_of_one_kind_of_device(filled: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.db"
    with Store(filled) as store:
        (device, *_) = {key.device for key in store.problems()}
        for history in tuple(store.histories()):
            rows = [replace(row, id="", created_at="") for row in history.rows]
            store.record("NVIDIA B1|148|10.0|", history.network_config, rows)
    told = run("db", "release", str(filled), str(out), code=2).stderr
    assert "NVIDIA B1, 148 SMs, sm_100" in told
    assert "choose by --device" in told
    for part, refused in (("B300", "is in no device's name"), ("s", "is in several devices' names")):
        assert refused in run("db", "release", str(filled), str(out), "--device", part, code=2).stderr
    assert not out.exists()
    name = device.partition("|")[0]
    assert list(run_json("db", "release", str(filled), str(out), "--device", name)["problems"]) == [device]


def test_release_does_not_replace_a_finddb(filled: Path, tmp_path: Path) -> None:
    """Without OUT the last source was taken for it, and its rows were lost."""
    own, before = tmp_path / "own.db", filled.read_bytes()
    run("db", "merge", str(filled), "--db", str(own))
    for names in ((filled, own), (own, own)):
        told = run("db", "release", *map(str, names), code=2).stderr
        assert "own.db is a FindDB and no release, so its rows would be lost: name another file" in told
    assert run_json("db", "stats", "--db", str(own))["problems"] == 3
    assert filled.read_bytes() == before
    out = tmp_path / "out.db"
    for _ in range(2):
        run("db", "release", str(own), str(out))
    assert run_json("db", "check", str(out))["sound"]


def test_export_does_not_replace_a_database(filled: Path, tmp_path: Path) -> None:
    """FILE was taken for the FindDB to export, and another's lines replaced it."""
    own = tmp_path / "own.db"
    run("db", "merge", str(filled), "--db", str(own))
    assert "own.db is a database, not an export: name another file" in run("db", "export", str(own), code=2).stderr
    assert run_json("db", "stats", "--db", str(own))["problems"] == 3


def test_diff_lists_what_changed(filled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = tmp_path / "other.db"
    run("db", "merge", str(filled), "--db", str(other))
    assert "0 faster, 0 slower, 3 same" in run("db", "diff", str(filled), str(other)).stdout
    with Store(other) as store:
        device = Device.cpu().identity
        best = store.answer(device, PROBLEM.network_config).rows[0]
        fast = Row(solver_id="ConvFast", solver_version=1, config="{}", status="ok", time_ms=best.time_ms / 4)
        compared = (Comparison(candidate=best.candidate, low=3.9, high=4.2),)
        ruling = Verdict(winner="ConvFast:{}", ties=("ConvFast:{}",), comparisons=compared, blocks=30, protocol="p")
        store.record(device, PROBLEM.network_config, [fast], verdict=ruling)
        store.record(device, "conv9d-new", [fast])
    text = run("db", "diff", str(filled), str(other)).stdout
    assert "1 faster, 0 slower, 2 same, 1 new, 0 gone; 1 with another winner" in text
    assert "before is 3.900..4.200 of B's winner" in text
    assert text.index("faster, winner") < text.index("conv9d-new")
    printed = run_json("db", "diff", str(filled), str(other))
    assert [change["change"] for change in printed["changes"]] == ["faster", "new"]
    assert printed["changes"][0]["old_winner_after"] == {"candidate": best.candidate, "low": 3.9, "high": 4.2}
    assert printed["changes"][0]["ratio"] == 0.25
    assert printed["changes"][1]["before"] is None
    assert run_json("db", "diff", str(other), str(filled))["counts"]["gone"] == 1
    monkeypatch.setenv("MIOFIND_DB", str(other))
    assert run_json("db", "diff", str(filled))["counts"] == printed["counts"], "B is the user's if left out"
    named = run_json("db", "diff", str(other), "--db", str(filled), "--device", Device.cpu().name)
    assert named["counts"]["gone"] == 1
    assert run_json("db", "diff", str(other), str(other), "--device", Device.cpu().name)["counts"]["same"] == 4
    told = run("db", "diff", str(filled), "--device", "B300", code=2).stderr
    assert "'B300' is in no device's name: they know" in told
    assert "name the FindDB once" in run("db", "diff", str(filled), str(other), "--db", str(other), code=2).stderr


def test_reading_leaves_nothing_beside_a_finddb(filled: Path, tmp_path: Path) -> None:
    """A connection that only reads leaves an empty log and its index behind."""
    folder = tmp_path / "sources"
    folder.mkdir()
    source = folder / "source.db"
    run("db", "merge", str(filled), "--db", str(source))
    before = source.read_bytes()
    for command in (("merge", str(source)), ("diff", str(source), str(source)), ("stats", "--db", str(source))):
        run("db", *command)
        assert [path.name for path in folder.iterdir()] == ["source.db"]
    assert source.read_bytes() == before
    with Store(source) as writing:
        writing.add(())
        run("db", "stats", "--db", str(source))
        assert (folder / "source.db-wal").exists(), "who writes keeps its log"
        writing.queue_recheck("D", "P", "why")
    with Store(source, read_only=True) as store:
        assert [note.reason for note in store.rechecks()] == ["why"]


@pytest.mark.parametrize("config", ["[" * 100_000, "{", "\x1b[2J", '{"a":{"b":{"c":[1]}}}', '{"%s":"../../x"}'])
def test_a_configuration_that_is_none_is_shown_as_text(filled: Path, config: str) -> None:
    with sqlite3.connect(filled) as connection:
        connection.execute("UPDATE measurement SET config = ?", (config,))
    connection.close()
    with Store(filled) as store:
        store.rebuild()
    for command in (["show"], ["show", *FORWARD, "--all"], ["diff", str(filled), str(filled)], ["stats"]):
        assert "\x1b" not in run("db", *command).stdout
        run_json("db", *command)
    assert run("db", "check", code=1).stdout


def test_export_lines_are_json(filled: Path) -> None:
    for line in run("db", "export", "-").stdout.splitlines():
        assert isinstance(json.loads(line), dict)


def test_a_finddb_that_is_cut_off_is_a_finding(filled: Path, tmp_path: Path) -> None:
    """It was 4 where flipped bytes were 1, and --json printed nothing."""
    cut = tmp_path / "cut.db"
    cut.write_bytes(filled.read_bytes()[:20_000])
    found = run_json("db", "check", str(cut), code=1)
    assert not found["sound"]
    assert "it is damaged" in found["findings"][0]
    assert f"{cut}: 1 finding; 0 rows checked" in run("db", "check", str(cut), code=1).stdout
    (tmp_path / "text.db").write_text("no database" * 1000, encoding="utf-8")
    run("db", "check", str(tmp_path / "text.db"), code=4)


def test_one_of_a_kind_is_counted_as_one(tmp_path: Path) -> None:
    """It was "1 problems", and `db null-test` called the device cpu-1."""
    run("find", *FORWARD, "--device", "cpu", "--only", "ConvCpuDirect")
    own = tmp_path / "finddb.db"
    assert f"1 problem in {own}" in run("db", "show").stdout
    assert f"{own}: 1 problem, 1 measurement, 1 find, " in run("db", "stats").stdout
    assert "; 1 row checked against" in run("db", "check").stdout
    assert ": 1 problem, 1 row\n" in run("db", "release", str(own), str(tmp_path / "out.db")).stdout
    told = run("db", "null-test", *FORWARD, "--pairs", "1", "--device", "cpu", code=None).stdout
    assert f"{Device.cpu().name}, protocol cpu-" in told
