"""What a release packs comes out as it went in, in the same bytes however it came, and reads as in any other file."""

from __future__ import annotations

import sqlite3
import zlib
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from helpers.finddb import finddb_entries as made
from helpers.finddb.finddb_entries import DEVICE, PROBLEM, VERSIONS, contents, row, scope, unpacked, verdict
from hypothesis import given, settings
from hypothesis import strategies as st

from miofind.finddb import MEMORY, History, ProblemKey, RefusedEntryError, Store, differences, packing, write_release
from miofind.finddb.packing import HistoryCodec, pack, text_of
from miofind.finddb.values import canonical_json

texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=20)
names = st.text('aB9:{}"\\|/\u00e9\u2028\U0001f600 ', min_size=1, max_size=10).filter(str.isprintable)

rows = st.builds(
    replace,
    made.rows,
    status=st.sampled_from(["ok", "cut_off"]),
    solver_id=st.one_of(st.just("ConvA"), names),
    config=st.one_of(st.just("{}"), st.dictionaries(texts, texts, max_size=2).map(canonical_json)),
    library=st.one_of(st.just("plain"), names),
    message=texts,
    p20_ms=st.one_of(st.none(), st.floats(0, 1e300)),
    samples=st.integers(0, 2**63 - 1),
)

histories = st.builds(
    replace,
    made.histories,
    rows=st.lists(rows, max_size=6).map(tuple),
    scopes=st.lists(
        st.builds(replace, made.scopes, filters=st.dictionaries(names, st.one_of(st.none(), texts), max_size=2)),
        max_size=4,
    ).map(tuple),
)


def payloads(release: str | Path) -> list[bytes]:
    with closing(sqlite3.connect(release)) as connection:
        return [payload for (payload,) in connection.execute("SELECT payload FROM answer")]


def stored(*found: History) -> list[History]:
    """The histories as a store gives them out."""
    with Store(MEMORY) as store:
        store.add(found)
        return contents(store)


@settings(max_examples=60)
@given(found=st.lists(histories, max_size=3))
def test_what_is_unpacked_is_what_was_packed(found):
    before = stored(*found)
    packed = HistoryCodec("")
    for history in before:
        key = ProblemKey(device=history.device, network_config=history.network_config)
        payload = pack(history.device, history.network_config, text_of(history))
        assert replace(packed.history(key, payload), environments=history.environments) == history
        assert packed.unpack(history.device, history.network_config, payload) == text_of(history)
        unnamed = packed.history_without_ids(key, payload)
        assert {entry.id for entry in (*unnamed.rows, *unnamed.scopes, *unnamed.verdicts)} <= {""}


@pytest.mark.parametrize("dictionary", ["", "of earlier releases, "])
def test_a_compressed_text_of_an_earlier_release_is_read(dictionary):
    text = "of earlier releases, of earlier releases\n\n[]"
    packer = zlib.compressobj(level=9, wbits=-15, zdict=dictionary.encode())
    checksum = pack(DEVICE, PROBLEM, text)[:4]
    payload = checksum + packer.compress(text.encode()) + packer.flush()
    assert HistoryCodec(dictionary).unpack(DEVICE, PROBLEM, payload) == text


def test_a_release_stores_texts_plain(both):
    release, plain = both
    stored_texts = [payload[4:] for payload in payloads(release.path)]
    for history in plain.histories():
        assert any(text_of(history).encode() in text for text in stored_texts)


def test_a_text_without_end_is_not_packed(tmp_path, monkeypatch):
    monkeypatch.setattr(packing, "MAX_TEXT_CHARS", 100)
    with Store(MEMORY) as store:
        store.record(DEVICE, PROBLEM, [row()])
        with pytest.raises(RefusedEntryError, match=f"{PROBLEM} takes .* room for 100"):
            write_release([store], tmp_path / "release.db")
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def both(tmp_path: Path):
    """A release, and what it holds in a file of the ordinary kind."""
    with Store(MEMORY) as store:
        for number in range(30):
            store.record(
                DEVICE,
                f"{PROBLEM}-{number:02}",
                [row(name, time_ms=number + 1.5, max_error=1e-6) for name in ("ConvA", "ConvB", "ConvC")],
                scope=scope("ConvA", "ConvB", "ConvC"),
                environment=VERSIONS,
                verdict=verdict("ConvA:{}", "ConvC:{}") if number % 3 else None,
            )
        store.record("cpu|2||", PROBLEM, [row(status="cut_off")])
        write_release([store], tmp_path / "release.db")
    plain = unpacked(tmp_path / "release.db", tmp_path / "plain.db")
    with Store(tmp_path / "release.db", read_only=True) as one, Store(plain, read_only=True) as two:
        yield one, two


def test_a_release_reads_as_any_other_file(both, tmp_path):
    release, plain = both
    for device in (None, DEVICE, "unknown"):
        assert list(release.histories(device)) == list(plain.histories(device))
        assert list(release.rows(device)) == list(plain.rows(device))
        assert release.problems(device) == plain.problems(device)
    for key in (*plain.problems(), ProblemKey(device=DEVICE, network_config="unknown")):
        assert release.history(key.device, key.network_config) == plain.history(key.device, key.network_config)
    assert replace(release.stats(), file_bytes=0) == replace(plain.stats(), file_bytes=0)
    assert release.release() == plain.release()
    assert release.check() == plain.check() == ()
    assert release.rechecks() == plain.rechecks() == ()
    assert {change.kind.value for change in differences(plain, release)} == {"same"}
    with (tmp_path / "1").open("w") as one, (tmp_path / "2").open("w") as two:
        assert release.export_jsonl(one) == plain.export_jsonl(two)
    assert (tmp_path / "1").read_bytes() == (tmp_path / "2").read_bytes()


def test_a_releases_answers_are_those_of_any_other_file_but_for_ids(both):
    for key in both[1].problems():
        packed, answer = (store.answer(key.device, key.network_config) for store in both)
        assert list(packed.rows) == [replace(row, id="") for row in answer.rows]
        assert packed.scopes == tuple(replace(scope, id="") for scope in answer.scopes)
        assert list(packed.rows.columns("time_ms", "config")) == list(answer.rows.columns("time_ms", "config"))


def test_a_release_is_smaller(both):
    release, plain = both
    assert release.stats().file_bytes < plain.stats().file_bytes


def test_a_further_release_differs_in_what_is_new_alone(both, tmp_path):
    release, _ = both
    with Store(MEMORY) as store:
        store.merge(release)
        store.record(DEVICE, f"{PROBLEM}-00-new", [row("ConvA", time_ms=0.5)], scope=scope("ConvA"))
        write_release([store], tmp_path / "next.db")
    before, after = payloads(release.path), payloads(tmp_path / "next.db")
    assert set(before) < set(after)
    assert len(after) == len(before) + 1
