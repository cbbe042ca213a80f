"""Commands on a FindDB that is on a server do what they do on a file."""

from __future__ import annotations

import re
from pathlib import Path

import psycopg
import pytest
from helpers.commands.cli_runner import FORWARD, TINY, run, run_json, use_own_folders

from miofind.cli import db_mirror
from miofind.finddb import Store

URL = "postgresql://ann:s3cret@127.0.0.1:1/results"
HERE = ("--device", "cpu", "--exclude", "ConvCpuDirect")


@pytest.fixture(autouse=True)
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_own_folders(tmp_path, monkeypatch)


@pytest.fixture
def filled(tmp_path: Path) -> Path:
    run("find", *FORWARD, "--device", "cpu")
    return tmp_path / "finddb.db"


def test_a_file_goes_to_a_server_and_comes_back(tmp_path: Path, filled: Path, finddb_url: str) -> None:
    first, second, third = (str(tmp_path / name) for name in ("a.jsonl", "b.jsonl", "c.jsonl"))
    added = run_json("db", "merge", "--db", finddb_url, str(filled))["added"]
    assert added > 0
    assert run_json("db", "merge", "--db", finddb_url, str(filled))["added"] == 0
    run("db", "export", first)
    run("db", "export", second, "--db", finddb_url)
    assert Path(first).read_text() == Path(second).read_text()
    run("db", "merge", "--db", str(tmp_path / "new.db"), finddb_url)
    run("db", "export", third, "--db", str(tmp_path / "new.db"))
    assert Path(first).read_text() == Path(third).read_text()
    assert run_json("db", "import", first, "--db", finddb_url)["added"] == 0


def test_a_server_is_shown_checked_compared_and_released(tmp_path: Path, filled: Path, finddb_url: str) -> None:
    run("db", "merge", "--db", finddb_url, str(filled))
    named = finddb_url.partition("?")[0].replace("postgres@", "")
    for command in ("stats", "show", "check"):
        of_file, of_server = run_json("db", command), run_json("db", command, "--db", finddb_url)
        assert of_server["database"] == named
        others = {name: of_server[name] for name in ("database", "file_bytes") if name in of_server}
        assert of_server == of_file | others
    assert named in run("db", "stats", "--db", finddb_url).stdout
    assert "0 faster, 0 slower, 1 same, 0 new, 0 gone" in run("db", "diff", str(filled), finddb_url).stdout
    assert run_json("db", "diff", str(filled), finddb_url)["after"] == named
    releases = [
        run_json("db", "release", source, str(tmp_path / f"release{number}.db"))["content_hash"]
        for number, source in enumerate((str(filled), finddb_url))
    ]
    assert releases[0] == releases[1]
    assert run_json("db", "prune", "--db", finddb_url, "--device", "cpu")["database"] == named
    upgraded = run_json("db", "upgrade", "--db", finddb_url)
    assert (upgraded["from_version"], upgraded["answers"], upgraded["backup"]) == (upgraded["to_version"], 0, None)
    assert "already" in run("db", "upgrade", "--db", finddb_url).stdout


def test_an_empty_database_gets_its_tables(postgres_url: str) -> None:
    assert "there is no FindDB at postgresql:///" in run("db", "stats", "--db", postgres_url, code=4).stderr
    assert "is now 0" in run("db", "upgrade", "--db", postgres_url).stdout
    assert run_json("db", "stats", "--db", postgres_url)["problems"] == 0


def test_a_mirror_follows_until_it_is_interrupted(
    tmp_path: Path, filled: Path, finddb_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = str(tmp_path / "mirror.db")
    with Store(finddb_url) as store, Store(filled) as source:
        store.open()

        def rename(name: str, to: str) -> None:
            with psycopg.connect(finddb_url) as connection:
                connection.execute(f"ALTER TABLE {name} RENAME TO {to}")

        def sleep(seconds: float) -> None:
            assert seconds == 60
            step = next(steps, None)
            if step is None:
                raise KeyboardInterrupt
            step()

        steps = iter([lambda: store.merge(source), lambda: rename("change", "x"), lambda: rename("x", "change")])
        monkeypatch.setattr(db_mirror.time, "sleep", sleep)
        result = run("db", "mirror", finddb_url, target, "--every", "60", code=130)
    assert result.stderr.count("Tried again in 60 s") == 1
    told = [line.partition(": ")[2] for line in result.stdout.splitlines()]
    assert told[:2] == ["0 problems, all were read", "1 problem, 1 of them new or changed, 0 more gone"]
    # What is seen may be read again while any transaction on the server is open that is older than it.
    assert re.fullmatch(r"1 problem, [01] of them new or changed, 0 more gone", told[2])
    assert len(told) == 3
    monkeypatch.setenv("MIOFIND_SYSTEM_DB", target)
    monkeypatch.setenv("MIOFIND_DB", ":memory:")
    assert run("run", *FORWARD, "--device", "cpu").stdout
    assert "a mirror is of a server" in run("db", "mirror", target, str(tmp_path / "other.db"), code=2).stderr
    assert "mirrors a server" in run("db", "merge", "--db", target, str(filled), code=4).stderr


def test_finds_and_tunings_use_a_server(monkeypatch: pytest.MonkeyPatch, finddb_url: str) -> None:
    monkeypatch.setenv("MIOFIND_DB", finddb_url)
    run("tune", *FORWARD, *HERE, "--dry-run")
    with Store(finddb_url) as store:
        assert store.problems() == ()
        run("tune", *TINY, "-F", "0", *HERE)
        assert len(store.problems()) == 3
        before = store.stats().rows
        assert "measured" in run("find", *FORWARD, *HERE, "--json").stdout
        assert store.stats().rows == before
    told = run("doctor").stdout
    assert finddb_url.partition("?")[0].replace("postgres@", "") in told
    assert finddb_url not in told


@pytest.mark.parametrize("command", [("db", "stats"), ("doctor",), ("tune", *FORWARD, *HERE), ("db", "path")], ids=str)
def test_a_server_that_is_gone_is_told_without_its_password(
    monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    monkeypatch.setenv("MIOFIND_DB", URL)
    result = run(*command, code=None)
    assert result.exit_code == (0 if command[0] == "doctor" or command[1] == "path" else 4)
    assert ("cannot be reached" in result.stdout + result.stderr) != (command[1:] == ("path",))
    assert "s3cret" not in result.stdout + result.stderr
