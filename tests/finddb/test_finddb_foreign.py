"""Database files from elsewhere: what they hold is refused with one error or is text, and damages nothing."""

from __future__ import annotations

import io
import json
import random
import shutil
import sqlite3
import zlib
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from helpers.finddb.finddb_entries import (
    DEVICE,
    PROBLEM,
    VERSIONS,
    answers,
    at,
    contents,
    row,
    scope,
    unpacked,
    verdict,
)

from miofind.errors import DatabaseError
from miofind.finddb import (
    MEMORY,
    History,
    LayeredStore,
    RefusedEntryError,
    Store,
    differences,
    upgrade,
    write_release,
)
from miofind.finddb.packing import MAX_TEXT_CHARS, HistoryCodec, pack
from miofind.finddb.sqlite_file import translated
from miofind.finddb.validation import LAST_STAMP

pytestmark = pytest.mark.sampled(2)

DEEP = "[" * 200_000


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a release, and the same in the form before."""
    folder = tmp_path_factory.mktemp("sound")
    with Store(MEMORY) as store:
        measured = row("ConvA", '{"tile":1}', max_error=1e-6, p20_ms=0.9, p80_ms=1.1)
        store.record(
            DEVICE, PROBLEM, [measured], scope=scope(), environment=VERSIONS, verdict=verdict(measured.candidate)
        )
        write_release([store], folder / "release.db")
    unpacked(folder / "release.db", folder / "other.db")
    return folder


@pytest.fixture
def path(sound: Path, tmp_path: Path) -> Path:
    """A sound file, which the tests then spoil behind the store's back."""
    for name in ("release.db", "other.db"):
        shutil.copy(sound / name, tmp_path)
    return tmp_path / "other.db"


@pytest.fixture
def packed(path: Path) -> Path:
    """The same, as a release of today."""
    return path.with_name("release.db").rename(path.with_name("packed.db"))


def spoil(path: Path, statement: str, *values: object) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(statement, values)
        connection.commit()


def use_all(path: Path) -> list[str]:
    """What every way to read a file says; anything but a DatabaseError fails the test."""
    said = []
    with Store(path, read_only=True) as store, Store(MEMORY) as target:
        for use in (
            lambda: [tuple(answer.rows) for answer in answers(store)],
            lambda: [list(answer.rows.columns("time_ms", "config")) for answer in answers(store)],
            lambda: [answer.covers(scope()) for answer in answers(store)],
            lambda: contents(store),
            lambda: store.stats(),
            lambda: store.release(),
            lambda: store.export_jsonl(io.StringIO()),
            lambda: target.merge(store),
            lambda: write_release([store], path.with_name("release.db")),
            lambda: differences(store, target),
        ):
            try:
                use()
            except DatabaseError as error:
                said.append(str(error))
        said += store.check()
        assert target.check() == ()
    return said


IMPOSSIBLE_ROWS = {
    "time that is no number": ("time_ms", "NaN"),
    "endless time": ("time_ms", "1e999"),
    "endless time by name": ("time_ms", "-Infinity"),
    "time below zero": ("time_ms", "-1.0"),
    "no time": ("time_ms", "null"),
    "time as text": ("time_ms", '"1.0"'),
    "workspace below zero": ("workspace_bytes", "-1"),
    "workspace beyond all memory": ("workspace_bytes", "1" + "0" * 30),
    "workspace of too many digits": ("workspace_bytes", "1" * 10_000),
    "workspace as fraction": ("workspace_bytes", "0.5"),
    "config as object": ("config", "{}"),
    "config as depth": ("config", DEEP),
    "solver as list": ("solver_id", "[]"),
    "determinism as number": ("deterministic", "1"),
}


@pytest.mark.parametrize(("name", "value"), IMPOSSIBLE_ROWS.values(), ids=IMPOSSIBLE_ROWS)
def test_an_answer_of_impossible_rows_is_refused(path, name, value):
    spoil(path, "UPDATE answer SET payload = ?", impossible_answer(path, name, value))
    with Store(path, read_only=True) as store:
        assert_rows_are_refused(store, name)
        assert any("run `miofind db upgrade`" in finding for finding in store.check())


@pytest.mark.parametrize(("name", "value"), IMPOSSIBLE_ROWS.values(), ids=IMPOSSIBLE_ROWS)
def test_a_packed_answer_of_impossible_rows_is_refused(packed, name, value):
    text = impossible_answer(packed, name, value)
    repack(packed, lambda _: text + "\n\n[]")
    with Store(packed, read_only=True) as store:
        assert_rows_are_refused(store, name)
    assert use_all(packed)


@pytest.mark.parametrize(
    ("name", "value"),
    [("p20_ms", "1e999"), ("max_error", "-1.0"), ("samples", "-7"), ("status", '"lies"'), ("dropped_samples", "1] [1")],
)
def test_whole_rows_are_within_their_bounds(packed, name, value):
    text = impossible_answer(packed, name, value)
    repack(packed, lambda _: text + "\n\n[]")
    with Store(packed, read_only=True) as store, pytest.raises(DatabaseError, match="check the database"):
        store.answer(DEVICE, PROBLEM).rows[0]


def impossible_answer(path: Path, name: str, value: str) -> str:
    """The text of the file's answer with a value of its one row replaced."""
    with Store(path, read_only=True) as store:
        (found,) = store.answer(DEVICE, PROBLEM).rows
    fields = [getattr(found, field) for field in found.__dataclass_fields__]
    fields[list(found.__dataclass_fields__).index(name)] = "HERE"
    return "[]\n" + json.dumps(fields).replace('"HERE"', value)


def assert_rows_are_refused(store: Store, name: str) -> None:
    rows = store.answer(DEVICE, PROBLEM).rows
    for read in (lambda: rows[0], lambda: list(rows.columns("time_ms", name)), lambda: tuple(rows)):
        with pytest.raises(DatabaseError, match="check the database"):
            read()


def repack(path: Path, change: Callable[[str], str]) -> None:
    """Put another text in the place of the one that a release of one problem holds."""
    with closing(sqlite3.connect(path)) as connection:
        (dictionary,) = connection.execute("SELECT value FROM meta WHERE key = 'dictionary'").fetchone()
        (payload,) = connection.execute("SELECT payload FROM answer").fetchone()
    text = change(HistoryCodec(dictionary).unpack(DEVICE, PROBLEM, payload))
    spoil(path, "UPDATE answer SET payload = ?", pack(DEVICE, PROBLEM, text))


def compress(path: Path) -> str:
    """Make a release one of an earlier miofind, which compressed its texts with a dictionary: this."""
    with closing(sqlite3.connect(path)) as connection:
        payloads = dict(connection.execute("SELECT problem_id, payload FROM answer"))
        texts = {number: zlib.decompress(payload[4:], wbits=-15) for number, payload in payloads.items()}
        dictionary = next(iter(texts.values()))
        for number, text in texts.items():
            packer = zlib.compressobj(level=9, wbits=-15, zdict=dictionary)
            payload = payloads[number][:4] + packer.compress(text) + packer.flush()
            connection.execute("UPDATE answer SET payload = ? WHERE problem_id = ?", (payload, number))
        connection.execute("UPDATE meta SET value = ? WHERE key = 'dictionary'", (dictionary.decode(),))
        connection.commit()
    return dictionary.decode()


def deflated(size_bytes: int) -> bytes:
    """That many zeros, in a thousandth of the room."""
    packer = zlib.compressobj(wbits=-15)
    return packer.compress(bytes(size_bytes)) + packer.flush()


@pytest.mark.parametrize(
    "change",
    [
        lambda payload: b"",
        lambda payload: payload[: len(payload) // 2],
        lambda payload: payload[:-1],
        lambda payload: payload + b"x",
        lambda payload: payload + payload,
        lambda payload: random.Random(0).randbytes(1000),
        lambda payload: zlib.compress(b"[]\n\n[]"),
        lambda payload: "[]\n\n[]",
        lambda payload: 7,
        lambda payload: deflated(1000),
        lambda payload: deflated(MAX_TEXT_CHARS + 1),
        lambda payload: deflated(1 << 30),
    ],
    ids=["empty", "half", "cut", "more", "twice", "noise", "header", "text", "number", "zeros", "long", "bomb"],
)
def test_a_damaged_packed_answer_is_refused(packed, change):
    with closing(sqlite3.connect(packed)) as connection:
        (payload,) = connection.execute("SELECT payload FROM answer").fetchone()
    spoil(packed, "UPDATE answer SET payload = ?", change(payload))
    said = use_all(packed)
    assert len(said) >= 7
    assert all("check the database" in line or "cannot be read" in line for line in said)
    with Store(packed, read_only=True) as store, pytest.raises(DatabaseError, match="holds an entry that cannot be"):
        store.answer(DEVICE, PROBLEM)


def test_a_packed_problem_whose_answer_is_gone_is_damage(packed):
    spoil(packed, "DELETE FROM answer")
    with Store(packed, read_only=True) as store, pytest.raises(DatabaseError, match="holds an entry that cannot be"):
        list(store.histories())


def test_no_flipped_bit_of_a_packed_answer_goes_unnoticed(packed):
    with closing(sqlite3.connect(packed)) as connection:
        (payload,) = connection.execute("SELECT payload FROM answer").fetchone()
    for bit in random.Random(0).sample(range(8 * len(payload)), 100):
        flipped = bytearray(payload)
        flipped[bit // 8] ^= 1 << bit % 8
        spoil(packed, "UPDATE answer SET payload = ?", bytes(flipped))
        with Store(packed, read_only=True) as store, pytest.raises(DatabaseError, match="cannot be read"):
            store.answer(DEVICE, PROBLEM)


def test_what_is_no_longer_the_release_it_says_is_not_merged(packed):
    spoil(packed, "DELETE FROM answer WHERE ? = ''", "")
    spoil(packed, "DELETE FROM problem WHERE ? = ''", "")
    with Store(packed, read_only=True) as store, Store(MEMORY) as target:
        with pytest.raises(DatabaseError, match="it was altered"):
            target.merge(store)
        with pytest.raises(DatabaseError, match="it was altered"):
            write_release([store], packed.with_name("again.db"))


def test_a_message_of_sqlite_that_is_no_text_is_damage(packed):
    with pytest.raises(DatabaseError, match="is damaged: restore it"), translated("x.db"):
        b"\xff".decode()


def test_a_text_that_is_none_is_damage(packed):
    spoil(packed, "UPDATE problem SET network_config = CAST(? AS TEXT)", b"conv2d-\xff")
    with Store(packed, read_only=True) as store, pytest.raises(DatabaseError, match="is damaged: restore it"):
        store.problems()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "[]\n\n",
        "[]\n\n{",
        "[]\n\n7",
        "[]\n\n[7]",
        '[]\n\n["verdict"]',
        '[]\n\n[["A:{}",["A:{}"],[],0,"p","",""]]',
        '[]\n\n[["A:{}",7,[],0,"p","","",""]]',
        '[]\n\n[["A:{}",["A:{}"],[7],0,"p","","",""]]',
        '[]\n\n[["A:{}",["B:{}"],[],0,"p","","",""]]',
        '[]\n\n[["A:{}",["A:{}"],[],"many","p","","",""]]',
        '[]\n\n[["A:{}",["A:{}"],[],0,"p","","",[]]]',
        '[[{},{"a":NaN},null,"search",true,"",""]]\n\n[]',
        '[[{},{},null,"all",true,"",""]]\n\n[]',
        "[]\n\n" + DEEP,
        DEEP + "\n\n[]",
        "[]\n[]\n\n[]",
        "[]\n" + DEEP + "\n\n[]",
        "\n" * MAX_TEXT_CHARS,
    ],
    ids=lambda text: repr(text)[:40],
)
def test_a_packed_text_that_is_none_is_refused(packed, text):
    repack(packed, lambda _: text)
    assert use_all(packed)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda text: text.replace('"ok","",', '"cut_off","",'), "has the hash"),
        (lambda text: text.replace("0.9,", "0.8,"), "has the hash"),
        (lambda text: text.replace('"ConvA"', '"ConvB"'), "has the hash"),
        (lambda text: text.replace('{"ConvA":1}', '{"ConvA":2}'), "has the hash"),
        (lambda text: text.replace(",30,", ",40,"), "has the hash"),
        (lambda text: text.replace(',""]', ',"0123"]'), "it was altered or damaged"),
        (lambda text: text.replace("1.0,null", "1.00,null"), "not the one that its rows give"),
        (lambda text: text.replace("\n\n[", "\n\n ["), "not the one that its rows give"),
    ],
    ids=["status", "statistic", "solver", "scope", "verdict", "id", "number", "space"],
)
def test_check_finds_an_altered_packed_answer(packed, change, said):
    def altered(text: str) -> str:
        assert change(text) != text
        return change(text)

    repack(packed, altered)
    with Store(packed, read_only=True) as store:
        assert store.answer(DEVICE, PROBLEM) is not None
        assert said in store.check()[0]


@pytest.mark.parametrize(
    ("statement", "value"),
    [
        ("DELETE FROM meta WHERE key = 'dictionary' AND ? = ''", ""),
        ("UPDATE meta SET value = ? WHERE key = 'dictionary'", b"bytes"),
        ("UPDATE meta SET value = ? WHERE key = 'dictionary'", "x" * 100_000),
        ("UPDATE meta SET value = ? WHERE key = 'dictionary'", "\xe9"),
    ],
    ids=["missing", "bytes", "long", "not ASCII"],
)
def test_a_release_without_its_dictionary_is_not_used(packed, statement, value):
    spoil(packed, statement, value)
    for read_only in (True, False):
        with Store(packed, read_only=read_only) as store, pytest.raises(DatabaseError, match="check the database"):
            store.answer(DEVICE, PROBLEM)
    assert use_all(packed)


def test_a_wrong_dictionary_shows(packed, tmp_path):
    with Store(MEMORY) as store:
        for number in range(5):
            store.record(DEVICE, f"{PROBLEM}-{number}", [row("ConvA", created_at=at(number))], scope=scope())
        write_release([store], tmp_path / "many.db")
    path = tmp_path / "many.db"
    dictionary = compress(path)
    assert '"ConvA"' in dictionary
    assert not use_all(path)
    for wrong in ("", dictionary[::-1], dictionary.replace("ConvA", "ConvB")):
        spoil(path, "UPDATE meta SET value = ? WHERE key = 'dictionary'", wrong)
        assert use_all(path)


def test_tables_of_another_kind_are_no_release(path, packed):
    spoil(path, "UPDATE meta SET value = '3' WHERE key = 'schema_version'")
    spoil(packed, "UPDATE meta SET value = '2' WHERE key = 'schema_version'")
    assert use_all(path)
    assert use_all(packed)
    spoil(path, "INSERT INTO meta VALUES ('dictionary', '')")
    assert use_all(path)


@pytest.mark.parametrize(
    "payload",
    [
        "",
        "[" * 100_000,
        "{}",
        "[[1]]",
        '[[{},{},null,"all",true,"",""]]',
        '[[[],{},null,"search",true,"",""]]',
        '[[{},{},"many","search",true,"",""]]',
        '[[{},{},null,["search"],true,"",""]]',
        "[]\n[]",
        "[]\n" + "[" * 100_000,
        "[]\n{}",
        "[]\n7",
        b"\xff\xfe",
        7,
        None,
    ],
    ids=lambda payload: str(payload)[:30],
)
def test_an_answer_that_is_none_is_refused(path, payload):
    if payload is None:
        spoil(path, "DELETE FROM answer")
    else:
        spoil(path, "UPDATE answer SET payload = ?", payload)
    assert use_all(path)


@pytest.mark.parametrize(
    ("table", "column", "value"),
    [
        ("measurement", "config", DEEP),
        ("measurement", "config", '{"a":' * 5000),
        ("measurement", "config", '{"../../x":"/etc/passwd"}\n'),
        ("measurement", "config", b"\xff"),
        ("measurement", "time_ms", float("inf")),
        ("measurement", "time_ms", -1.0),
        ("measurement", "time_ms", "soon"),
        ("measurement", "max_error", b"\x00"),
        ("measurement", "workspace_bytes", 1e300),
        ("measurement", "workspace_bytes", "none"),
        ("measurement", "samples", None),
        ("measurement", "solver_id", "\x1b[2J"),
        ("measurement", "solver_id", "x" * 1_000_000),
        ("measurement", "source_hash", "../../../etc/passwd\0"),
        ("measurement", "contended", "often"),
        ("measurement", "status", "fine"),
        ("measurement", "created_at", "9999"),
        ("scope", "solvers", DEEP),
        ("scope", "solvers", "[1]"),
        ("scope", "solvers", '{"A":[]}'),
        ("scope", "filters", "7"),
        ("scope", "solvers", '{"ConvA":1e400}'),
        ("scope", "filters", '{"a":NaN}'),
        ("scope", "filters", '{"a":[-Infinity]}'),
        ("scope", "effort", "all"),
        ("scope", "workspace_limit_bytes", "much"),
        ("verdict", "ties", DEEP),
        ("verdict", "ties", "7"),
        ("verdict", "comparisons", '[{"candidate":"A:{}","low":NaN,"high":1}]'),
        ("verdict", "comparisons", '[{"candidate":{},"low":1,"high":1}]'),
        ("verdict", "winner", "x" * 1_000_000),
        ("verdict", "blocks", "many"),
        ("environment", "versions", DEEP),
        ("environment", "versions", '{"path":"/home/ann"}'),
        ("environment", "versions", "[]"),
        ("environment", "versions", '{"a":NaN}'),
        ("environment", "versions", '{"a":1e400}'),
        ("environment", "versions", '{"a":1}'),
        ("problem", "network_config", "x" * 1_000_000),
        ("problem", "network_config", "\0"),
        ("device", "identity", ""),
        ("meta", "value", "1000000000000"),
        ("meta", "value", b"2"),
    ],
    ids=lambda value: str(value)[:25],
)
def test_impossible_entries_are_findings(path, table, column, value):
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA foreign_keys=OFF")
        try:
            connection.execute(f"UPDATE {table} SET {column} = ?", (value,))
        except sqlite3.IntegrityError:
            connection.executescript(f"ALTER TABLE {table} DROP COLUMN {column}; ALTER TABLE {table} ADD {column}")
            connection.execute(f"UPDATE {table} SET {column} = ?", (value,))
        connection.commit()
    assert use_all(path)


@pytest.mark.parametrize(
    ("statement", "use"),
    [
        ("UPDATE device SET identity = X'FF00'", Store.problems),
        ("UPDATE device SET identity = X'FF00'", Store.stats),
        ("UPDATE problem SET network_config = X'FF00'", Store.problems),
        ("UPDATE measurement SET status = X'FF00'", Store.stats),
        ("INSERT INTO recheck VALUES ('a', X'FF00', 'why', '')", Store.rechecks),
    ],
)
def test_names_that_are_no_texts_are_not_read(path, statement, use):
    """SQLite keeps them in columns of texts; sorted, counted or printed, they were called a defect of miofind."""
    spoil(path, statement)
    with Store(path, read_only=True) as store:
        with pytest.raises(DatabaseError, match=r"an entry that cannot be read .* is no text"):
            use(store)
        assert store.check() or use is Store.rechecks


NO_TIMES = ("9999-12-31T23:59:59.999999Z", "2199-02-31T00:00:00.000000Z", "9999", "soon", "", float("inf"), 2**63 - 1)


@pytest.mark.parametrize("value", [LAST_STAMP, *NO_TIMES], ids=repr)
@pytest.mark.parametrize("table", ["measurement", "scope"])
def test_an_impossible_time_stops_no_recording(path, table, value):
    """Nothing later than the first could be stored, and nobody made sense of the others: no row came in any more."""
    spoil(path, f"UPDATE {table} SET created_at = ?", value)
    with Store(path) as store:
        for name in ("New", "Newer"):
            assert name in {row.solver_id for row in store.record(DEVICE, PROBLEM, [row(name)]).rows}


@pytest.mark.parametrize("value", [b"\xff", *NO_TIMES], ids=repr)
def test_an_impossible_time_of_a_verdict_stops_no_other_problem(path, value):
    spoil(path, "UPDATE verdict SET created_at = ?", value)
    with Store(path) as store:
        with pytest.raises(DatabaseError, match="holds an entry that cannot be read"):
            store.record(DEVICE, PROBLEM, [row("New")])
        assert store.record(DEVICE, "another problem", [row("New")])


@pytest.mark.parametrize("field", ["id", "created_at", "winner", "ties", "comparisons", "protocol", "blocks"])
@pytest.mark.parametrize(
    "value", ["NaN", "-Infinity", "1e999", "[NaN]", '{"a":NaN}', "[" * 900 + "]" * 900, "9" * 4000, '"\\ud800"', "true"]
)
def test_a_verdict_of_impossible_values_is_refused(path, field, value):
    with Store(path, read_only=True) as store:
        file = io.StringIO()
        store.export_jsonl(file)
    *lines, last = file.getvalue().splitlines()
    spoilt = json.dumps(json.loads(last) | {field: "HERE"}).replace('"HERE"', value)
    with Store(MEMORY) as target:
        with pytest.raises(DatabaseError, match=rf"^line {len(lines) + 1}: "):
            target.import_jsonl(io.StringIO("\n".join([*lines, spoilt])))
        assert target.problems() == ()


def deep(depth: int) -> list:
    value = []
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    "value", [float("nan"), 10**5000, deep(10_000), object(), b"x", {1}], ids=lambda v: str(type(v))
)
@pytest.mark.parametrize("field", ["id", "created_at"])
@pytest.mark.parametrize(
    "entry", [row(created_at=at(1)), scope(created_at=at(1)), verdict(created_at=at(1))], ids=lambda e: type(e).__name__
)
def test_what_cannot_be_written_in_a_message_is_refused_with_one(entry, field, value):
    history = {"rows": (), "scopes": (), "verdicts": ()} | {
        f"{type(entry).__name__.lower()}s": (replace(entry, **{field: value}),)
    }
    with Store(MEMORY) as store, pytest.raises(RefusedEntryError, match=rf"^{field}="):
        store.add([History(device=DEVICE, network_config=PROBLEM, **history)])


@pytest.mark.parametrize("table", ["answer", "measurement", "meta", "problem"])
def test_texts_without_end_are_not_read(path, table):
    column = {"answer": "payload", "measurement": "message", "meta": "value", "problem": "network_config"}[table]
    spoil(path, f"UPDATE {table} SET {column} = cast(zeroblob(40000000) AS TEXT)")
    said = use_all(path)
    assert any("more than 16 MiB" in line for line in said)


ENDLESS = "WITH RECURSIVE r(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM r) SELECT n AS problem_id, '' AS payload FROM r"


@pytest.mark.parametrize(
    "statement",
    [
        f"DROP TABLE answer; CREATE VIEW answer AS {ENDLESS}",
        "CREATE TRIGGER t AFTER INSERT ON measurement BEGIN DELETE FROM measurement; END",
        "CREATE VIRTUAL TABLE extra USING fts5(x)",
    ],
    ids=["view", "trigger", "virtual table"],
)
def test_a_file_with_code_in_it_is_not_used(path, statement):
    with closing(sqlite3.connect(path)) as connection:
        try:
            connection.executescript(statement)
        except sqlite3.OperationalError as error:
            pytest.skip(str(error))
    before = path.read_bytes()
    for read_only in (True, False):
        with Store(path, read_only=read_only) as store, pytest.raises(DatabaseError, match="do not trust it"):
            store.answer(DEVICE, PROBLEM)
    with pytest.raises(DatabaseError, match="do not trust it"):
        upgrade(path)
    assert path.read_bytes() == before


def test_what_a_bad_file_offers_does_not_reach_the_users(path, tmp_path, caplog):
    spoil(path, "UPDATE measurement SET time_ms = 1e-9")
    spoil(path, "UPDATE scope SET solvers = ?", DEEP)
    with LayeredStore(Store(tmp_path / "user.db"), [Store(path, read_only=True)]) as layered:
        answer = layered.record(DEVICE, PROBLEM, [row("Mine")])
        assert [row.solver_id for row in answer.rows] == ["Mine"]
        assert layered.user.check() == ()
    assert len(caplog.records) == 1


@pytest.mark.parametrize(
    "name", ["../../etc/passwd", "~/x", "C:\\x", "/dev/null", "a\\b", "%s%n", "$(rm -rf x)", "';--"]
)
def test_names_like_paths_are_names(tmp_path, name):
    before = sorted(tmp_path.iterdir())
    with Store(MEMORY) as store:
        config = json.dumps({name: name}, separators=(",", ":"))
        measured = row(name, config, algorithm=name, source_hash=name, kernel_hash=name, protocol=name)
        store.record(name, name, [measured], verdict=verdict(f"{name}:{config}"))
        (found,) = store.answer(name, name).rows
        assert (found.solver_id, found.config, found.source_hash) == (name, config, name)
        assert store.history(name, name).verdicts[0].winner == found.candidate
        assert store.check() == ()
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("columns", ["a", "key", "value", "key, a"])
def test_a_database_with_another_table_of_that_name_is_told_as_something_else(tmp_path: Path, columns: str) -> None:
    with closing(sqlite3.connect(tmp_path / "other.db")) as connection:
        connection.execute(f"CREATE TABLE meta ({columns})")
    with (
        Store(tmp_path / "other.db", read_only=True) as store,
        pytest.raises(DatabaseError, match="is a database of something else, not a FindDB: name another file"),
    ):
        store.answer(DEVICE, PROBLEM)
