"""Files that are damaged, endless, special or cannot be written: one error, and what was there stays."""

from __future__ import annotations

import hashlib
import io
import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest
from cli_runner import FORWARD, run_json, use_own_folders

import miofind
from miofind.compiler import BinaryCache
from miofind.errors import DatabaseError, InvalidOptionError, InvalidProblemError, SolutionFileError
from miofind.files import replacing
from miofind.finddb import Store, shipped_paths, write_release
from miofind.solver import solver_by_id
from miofind.suites import load_csv, load_lines
from miofind.suites.find_db_text import load_find_db

PROBLEM = miofind.ProblemDescription.convolution(x=(1, 4, 6, 5), w=(2, 4, 3, 3))
HEADER = "n,c,h,w,k,fy,fx"


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "solution.json"
    with miofind.Handle("cpu", database=tmp_path / "finddb.db") as handle:
        miofind.find_solutions(PROBLEM, handle=handle)[0].save(path)
    return path


def load(path: Path) -> miofind.Solution:
    with miofind.Handle("cpu", database=":memory:") as handle:
        return miofind.Solution.load(path, handle)


def rewrite(path: Path, **values: Any) -> None:
    """Other values in a saved solution, as if it had been saved with them."""
    document = json.loads(path.read_text())
    document["solution"] |= values
    text = json.dumps(document["solution"], sort_keys=True, separators=(",", ":"))
    document["sha256"] = hashlib.sha256(text.encode()).hexdigest()
    path.write_text(json.dumps(document))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("time_ms", float("nan")),
        ("time_ms", -1.0),
        ("max_error", "small"),
        ("source", "rumour"),
        ("source", ["measured"]),
        ("max_error", float("inf")),
    ],
)
def test_a_saved_solution_with_impossible_figures_is_refused(saved: Path, field: str, value: Any) -> None:
    rewrite(saved, **{field: value})
    with pytest.raises(SolutionFileError, match=field):
        load(saved)


def test_a_saved_solution_of_a_solver_for_other_problems_is_refused(saved: Path) -> None:
    """Whatever its configuration says: a solver need not know how to read one for a problem that it does not serve."""
    channels_last = miofind.ProblemDescription.convolution(
        x=(2, 64, 9, 9), w=(64, 64, 3, 3), layout="NHWC", dtype="float16"
    )
    solver, device = solver_by_id("ConvImplicitGemmWgmma"), miofind.Device.virtual("90a")
    config = dict(solver.default_configs(channels_last, device)[0])
    deep = miofind.ProblemDescription.convolution(x=(1, 16, 4, 4, 4), w=(16, 16, 3, 3, 3), dtype="float16")
    rewrite(saved, network_config=deep.network_config, solver_id=solver.id, config=config)
    with pytest.raises(SolutionFileError, match="ConvImplicitGemmWgmma does not serve its problem here"):
        load(saved)


def test_a_saved_solution_follows_links_and_the_users_mask(saved: Path, tmp_path: Path) -> None:
    link = tmp_path / "link.json"
    link.symlink_to(saved)
    load(saved).save(link)
    assert link.is_symlink()
    plain = tmp_path / "plain"
    plain.touch()
    assert saved.stat().st_mode == plain.stat().st_mode
    load(saved)


def test_what_is_no_regular_file_is_written_not_replaced(saved: Path, tmp_path: Path) -> None:
    pipe, read = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()))
    reader.start()
    load(saved).save(pipe)
    reader.join(timeout=10)
    assert pipe.is_fifo()
    assert json.loads(read[0])["format"] == "miofind-solution"


def test_links_in_a_loop_are_not_replaced(saved: Path, tmp_path: Path) -> None:
    """A release or an export took the place of one of them."""
    one, other = tmp_path / "one", tmp_path / "other"
    one.symlink_to(other)
    other.symlink_to(one)
    with pytest.raises(SolutionFileError, match="symbolic links"):
        load(saved).save(one)
    with Store(tmp_path / "finddb.db") as store, pytest.raises(DatabaseError, match="symbolic links"):
        write_release([store], one)
    assert one.is_symlink()
    assert other.is_symlink()


@pytest.mark.parametrize("name", ["missing/solution.json", "x" * 300, "nul\0"])
def test_a_path_that_cannot_be_written_is_named(saved: Path, tmp_path: Path, name: str) -> None:
    with pytest.raises(SolutionFileError, match="cannot be written"):
        load(saved).save(tmp_path / name)


READERS = {"--csv": load_csv, "--lines": load_lines, "--fdb": load_find_db}
needs_zero = pytest.mark.skipif(not Path("/dev/zero").exists(), reason="needs /dev/zero")


@needs_zero
@pytest.mark.parametrize("flag", READERS)
def test_an_endless_file_of_problems_is_refused(flag: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was read until memory ended."""
    monkeypatch.setattr("miofind.suites.text.MAX_FILE_BYTES", 2 << 20)
    with pytest.raises(InvalidOptionError, match="/dev/zero has more than 2 MiB"):
        READERS[flag]("/dev/zero")


@pytest.mark.parametrize("flag", READERS)
def test_a_line_that_does_not_end_is_refused(flag: str, tmp_path: Path) -> None:
    file = tmp_path / "problems.txt"
    file.write_text(f"{HEADER}\n" + "conv " * 60_000, encoding="utf-8")
    with pytest.raises(InvalidOptionError, match=r"problems.txt, line 2 has 300000 characters, more than 262144"):
        READERS[flag](file)


def test_problems_come_through_pipes_and_stdin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_own_folders(tmp_path, monkeypatch)
    line = " ".join(FORWARD)
    os.mkfifo(tmp_path / "pipe")
    writer = threading.Thread(target=(tmp_path / "pipe").write_text, args=(f"{line}\n",))
    writer.start()
    asked = ("tune", "--device", "cpu", "--dry-run", "--db", ":memory:")
    piped = run_json(*asked, "--lines", str(tmp_path / "pipe"))
    writer.join()
    assert piped == run_json(*asked, "--lines", "-", input=f"{line}\n")
    assert piped["forecasts"][0]["problems"] == 1


@needs_zero
def test_an_endless_file_is_no_saved_solution(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("miofind.solution_file.MAX_FILE_BYTES", 1000)
    with pytest.raises(SolutionFileError, match="larger than 1000 bytes"):
        load(Path("/dev/zero"))


def test_a_replacement_that_fails_leaves_the_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("before")

    def fail() -> None:
        with replacing(path) as target:
            target.write("after")
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        (f"{HEADER}\n1,2,3,4,5,1,{'1' * 5000}\n", "line 2, column fx"),
        (f"{HEADER}\n1,2,3,4,5,1,{'1' * 200_000}\n", "line 2: it is no line of a table"),
        (f'{HEADER}\n1,2,3,4,5,1,"1\n', "it is no line of a table"),
        (f"{HEADER}\n1,2,3,4,5,1,-\n", "column fx: '-' must be"),
    ],
    ids=["digits", "field", "quote", "minus"],
)
def test_a_bad_table_names_the_line(tmp_path: Path, rows: str, told: str) -> None:
    path = tmp_path / "table.csv"
    path.write_text(rows)
    with pytest.raises(InvalidProblemError, match=told) as caught:
        load_csv(path)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("version", [0, -5])
def test_an_export_has_a_version(version: int) -> None:
    lines = io.StringIO(json.dumps({"format": "miofind-finddb", "schema_version": version}))
    with Store(":memory:") as store, pytest.raises(DatabaseError, match="does not name the format"):
        store.import_jsonl(lines)


def test_an_import_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "export.jsonl"
    path.write_text("{}\n")
    with Store(":memory:") as store, path.open() as lines, pytest.raises(DatabaseError, match=r"export\.jsonl, line 1"):
        store.import_jsonl(lines)


def test_the_folders_of_unknown_users_are_refused() -> None:
    with pytest.raises(DatabaseError, match="MIOFIND_SYSTEM_DB='~no_such_user'"):
        shipped_paths({"MIOFIND_SYSTEM_DB": "~no_such_user"})


def test_a_cache_of_an_unknown_user_keeps_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MIOFIND_CACHE_DIR", "~no_such_user/cache")
    assert BinaryCache().directory is None
    assert list(tmp_path.iterdir()) == []
