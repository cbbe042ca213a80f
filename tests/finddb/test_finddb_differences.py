"""What changed from one FindDB to another."""

from __future__ import annotations

import pytest
from helpers.finddb.finddb_entries import DEVICE, row, verdict

from miofind.finddb import MEMORY, Change, ChangeKind, Comparison, ProblemKey, Store, Verdict, differences


@pytest.fixture
def stores():
    with Store(MEMORY) as before, Store(MEMORY) as after:
        yield before, after


def changes(stores) -> dict[str, Change]:
    return {change.key.network_config: change for change in differences(*stores)}


def put(store: Store, problem: str, solver_id: str, time_ms: float, **fields) -> None:
    store.record(DEVICE, problem, [row(solver_id, time_ms=time_ms, **fields)])


def test_problems_by_what_became_of_them(stores):
    before, after = stores
    for name, was, became in (
        ("faster", 2.0, 1.0),
        ("slower", 1.0, 1.2),
        ("same", 1.0, 1.009),
        ("same too", 1.009, 1.0),
    ):
        put(before, name, "A", was)
        put(after, name, "A", became)
    put(before, "gone", "A", 1.0)
    put(after, "new", "A", 1.0)
    put(before, "failed", "A", 1.0, status="crashed")
    found = changes(stores)
    assert list(found) == ["faster", "slower", "same", "same too", "gone", "new"]
    assert [change.kind for change in found.values()] == ["faster", "slower", "same", "same", "gone", "new"]
    assert found["faster"].ratio == 0.5
    assert found["new"].ratio is None
    assert not any(change.has_new_winner for change in found.values())


def test_a_change_is_clear_where_the_samples_lie_apart(stores):
    before, after = stores
    put(before, "apart", "A", 2.0, p20_ms=1.9, p80_ms=2.1)
    put(after, "apart", "A", 1.0, p20_ms=0.9, p80_ms=1.8)
    put(before, "overlapping", "A", 2.0, p20_ms=1.7, p80_ms=2.1)
    put(after, "overlapping", "A", 1.0, p20_ms=0.9, p80_ms=1.8)
    found = changes(stores)
    assert found["apart"].is_clear
    assert not found["overlapping"].is_clear
    assert found["overlapping"].kind is ChangeKind.FASTER


def race(winner: str, loser: str, low: float) -> Verdict:
    compared = (Comparison(candidate=f"{loser}:{{}}", low=low, high=low + 0.1),)
    return Verdict(winner=f"{winner}:{{}}", ties=(f"{winner}:{{}}",), comparisons=compared, blocks=30, protocol="p")


def test_races_tell_how_winners_stand(stores):
    before, after = stores
    before.record(DEVICE, "p", [row("A", time_ms=1.0), row("B", time_ms=1.3)], verdict=race("A", "B", 1.25))
    after.record(DEVICE, "p", [row("A", time_ms=1.4), row("B", time_ms=1.1)], verdict=race("B", "A", 1.2))
    change = changes(stores)["p"]
    assert change.has_new_winner
    assert change.kind is ChangeKind.SLOWER
    assert change.old_winner_after == Comparison(candidate="A:{}", low=1.2, high=1.3)
    assert change.new_winner_before == Comparison(candidate="B:{}", low=1.25, high=1.35)


def test_a_race_of_others_tells_nothing(stores):
    before, after = stores
    before.record(DEVICE, "p", [row("A", time_ms=1.0)], verdict=race("C", "B", 1.25))
    after.record(DEVICE, "p", [row("B", time_ms=1.0)], verdict=verdict("B:{}", low=1.1, high=1.2))
    change = changes(stores)["p"]
    assert change.kind is ChangeKind.SAME
    assert change.has_new_winner
    assert (change.old_winner_after, change.new_winner_before) == (None, None)


def test_another_configuration_is_another_winner_and_devices_are_apart(stores):
    before, after = stores
    before.record(DEVICE, "p", [row("A", '{"tile":1}')])
    after.record(DEVICE, "p", [row("A", '{"tile":2}')])
    after.record("cpu|2||", "p", [row("A")])
    first, second = differences(before, after)
    assert (first.key, first.has_new_winner) == (ProblemKey(device=DEVICE, network_config="p"), True)
    assert (second.key.device, second.kind) == ("cpu|2||", ChangeKind.NEW)
