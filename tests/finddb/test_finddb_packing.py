"""What a release packs comes out as it went in, in the same bytes however it came, and reads as in any other file."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import finddb_entries as made
import pytest
from finddb_entries import DEVICE, PROBLEM, VERSIONS, contents, row, scope, unpacked, verdict
from hypothesis import given, settings
from hypothesis import strategies as st

from miofind.finddb import MEMORY, History, ProblemKey, RefusedEntryError, Store, differences, packing, write_release
from miofind.finddb.packing import DICTIONARY_CHARS, Packing, dictionary_of, text_of
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


def stored(*found: History) -> list[History]:
    """The histories as a store gives them out."""
    with Store(MEMORY) as store:
        store.add(found)
        return contents(store)


@settings(max_examples=60, deadline=None)
@given(found=st.lists(histories, max_size=3))
def test_what_is_unpacked_is_what_was_packed(found):
    before = stored(*found)
    packed = Packing(dictionary_of(map(text_of, before)))
    for history in before:
        key = ProblemKey(device=history.device, network_config=history.network_config)
        payload = packed.pack(history.device, history.network_config, text_of(history))
        assert replace(packed.history(key, payload), environments=history.environments) == history
        assert packed.unpack(history.device, history.network_config, payload) == text_of(history)
        unnamed = packed.history_without_ids(key, payload)
        assert {entry.id for entry in (*unnamed.rows, *unnamed.scopes, *unnamed.verdicts)} <= {""}


@given(found=st.lists(st.text("ab,0.1\n", max_size=30), max_size=5), seed=st.integers(0, 9))
def test_a_dictionary_depends_on_no_order(found, seed):
    again = random.Random(seed).sample(found, len(found))
    assert dictionary_of(again) == dictionary_of(found)


def test_a_dictionary_is_short_and_ends_in_what_is_most_common():
    alike = [f"seldom, {number // 2:0200}" for number in range(1000)] + ["often, again and again"] * 200
    dictionary = dictionary_of(alike)
    assert len(dictionary) <= DICTIONARY_CHARS
    assert dictionary.endswith("often, again and again")


def test_a_dictionary_takes_what_fits_beside_what_does_not():
    assert dictionary_of(["x" * 100_000, "y" * 10] * 2) == "y" * 10


def test_pieces_that_are_much_alike_leave_room_for_others():
    common = "".join(f"Solver{number:04}," for number in range(100))
    alike = [common[:start] + common[start + 11 :] for start in range(0, len(common), 11)]
    others = [random.Random(seed).randbytes(30).hex() for seed in range(100)]
    dictionary = dictionary_of([*alike, *alike, *others, *others])
    assert all(other in dictionary for other in others)


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


def test_a_release_is_several_times_smaller(both):
    release, plain = both
    assert release.stats().file_bytes < plain.stats().file_bytes / 2
