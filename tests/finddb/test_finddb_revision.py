"""What tells whether a FindDB may hold something else than before."""

from __future__ import annotations

from pathlib import Path

from helpers.finddb.finddb_entries import DEVICE, PROBLEM, row, scope, version_1

from miofind.finddb import MEMORY, LayeredStore, Store, write_release


def test_a_revision_is_another_after_each_write_and_the_same_wherever_it_is_read(address: str) -> None:
    seen = []
    for time_ms in (1.0, 2.0):
        with Store(address) as store:
            store.record(DEVICE, PROBLEM, [row(time_ms=time_ms)])
            seen.append(store.revision())
        if address == MEMORY:
            assert seen[-1] == ""
            continue
        with Store(address) as store:  # the log was folded into the file
            assert store.revision() == seen[-1]
            assert store.answer(DEVICE, PROBLEM) is not None
            assert store.revision() == seen[-1]
    assert address == MEMORY or seen[0] != seen[1]


def test_a_release_s_revision_follows_its_content(tmp_path: Path) -> None:
    seen = []
    for time_ms in (1.0, 0.5):
        with Store(MEMORY) as source:
            source.record(DEVICE, PROBLEM, [row(time_ms=time_ms)])
            write_release([source], tmp_path / "release.db")
        with Store(tmp_path / "release.db", read_only=True) as store:
            seen.append(store.revision())
    assert seen[0] != seen[1]


def test_an_older_file_s_revision_is_its_time_and_size(tmp_path: Path) -> None:
    with Store(version_1(tmp_path / "old.db"), read_only=True) as store:
        assert store.revision().endswith(f":{(tmp_path / 'old.db').stat().st_size}")


def test_a_server_s_revision_knows_each_problem_that_changes(finddb_url: str) -> None:
    with Store(finddb_url) as store:
        seen = []
        for name in ("p", "q", "p", "p"):
            store.record(DEVICE, name, [row()], scope=scope())
            seen.append(store.revision())
        store.clean(DEVICE, "p")
        assert len({*seen, store.revision()}) == 5


def test_the_revisions_of_layers_name_them(tmp_path: Path) -> None:
    with Store(MEMORY) as source:
        source.record(DEVICE, PROBLEM, [row()])
        write_release([source], tmp_path / "shipped.db")
    with LayeredStore(Store(tmp_path / "user.db"), [Store(tmp_path / "shipped.db", read_only=True)]) as layered:
        before = layered.revisions()
        layered.record(DEVICE, PROBLEM, [row("ConvB")])
        after = layered.revisions()
    assert before[0].endswith("user.db "), "nothing is there yet"
    assert after[0] != before[0]
    assert after[1] == before[1]
