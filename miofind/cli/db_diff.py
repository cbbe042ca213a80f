"""`miofind db diff`: problems that changed from one FindDB to another, with how sure each change is."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict

import click

from miofind.cli.db_show import stored_config
from miofind.cli.options import FindDBFile, db_option, example, json_option, one_of
from miofind.cli.output import Sheet, print_json, print_text, ratio_text, time_text
from miofind.cli.session import verbose_option
from miofind.device.device import device_text
from miofind.errors import InvalidOptionError
from miofind.finddb import Change, ChangeKind, Comparison, Row, Store, differences, told_address, user_path
from miofind.solver.steps import config_text

_COLUMNS = (
    *("problem", "change", "after/before", "ms before", "p20..p80 before", "ms after", "p20..p80 after"),
    *("winner", "new winner", "races say"),
)
_RIGHT = ("after/before", "ms before", "ms after")
_FOLD = ("races say", "new winner", "winner", "problem")
_SPARE = ("p20..p80 before", "p20..p80 after")


@click.command("diff", epilog=example("miofind db diff before.db after.db", "miofind db diff before.db --device H200"))
@click.argument("before", metavar="A", type=FindDBFile(must_exist=True))
@click.argument("second", required=False, metavar="[B]", type=FindDBFile(must_exist=True))
@click.option("--device", "name", metavar="NAME", default="", help="Part of the name of the devices to compare.")
@db_option(may_begin=False, about="The FindDB B.")
@json_option
@verbose_option
def diff(before: str, second: str | None, name: str, database: str | None, as_json: bool) -> None:
    """List the problems that changed from A to B.

    A and B are FindDBs; B is the user's if left out. Problems that got faster, slower or another winner by more than
    1 % come first, the greatest change at the top, then new problems and those that are gone. Races of A and B say by
    how much a winner beat the other FindDB's winner: the 95 % interval of the loser's time over the winner's.
    """
    after = one_of(second, database) or user_path()
    with (
        Store(before, read_only=True) as old,
        Store(after, read_only=True) as new,
        old.one_instant(),
        new.one_instant(),
    ):
        changes = [each for each in differences(old, new) if name.casefold() in device_text(each.key.device).casefold()]
        known = {device_text(key.device) for store in (old, new) for key in store.problems()} if not changes else set()
    if name and not changes and not any(name.casefold() in device.casefold() for device in known):
        raise InvalidOptionError(f"--device {name!r} is in no device's name: they know {'; '.join(sorted(known))}")
    counts = Counter(change.kind for change in changes)
    if as_json:
        counted = {kind.value: counts[kind] for kind in ChangeKind}
        listed = [_json(change) for change in changes if _is_listed(change)]
        print_json({"before": told_address(before), "after": told_address(after), "counts": counted, "changes": listed})
        return
    _print_sheets([change for change in changes if _is_listed(change)])
    told = ", ".join(f"{counts[kind]} {kind.value}" for kind in ChangeKind)
    print_text(f"{told}; {sum(change.has_new_winner for change in changes)} with another winner")


def _is_listed(change: Change) -> bool:
    return change.kind is not ChangeKind.SAME or change.has_new_winner


def _print_sheets(changes: list[Change]) -> None:
    """Print one table a device."""
    for device in dict.fromkeys(change.key.device for change in changes):
        made = Sheet(device_text(device), _COLUMNS, right=_RIGHT, fold=_FOLD, spare=_SPARE)
        for change in changes:
            if change.key.device == device:
                made.add(*_cells(change))
        made.print()


def _cells(change: Change) -> tuple[str, ...]:
    return (
        change.key.network_config,
        _kind_text(change),
        "" if change.ratio is None else ratio_text(change.ratio),
        *_times(change.before),
        *_times(change.after),
        _name(change.before),
        _name(change.after) if change.has_new_winner or change.before is None else "",
        _races_text(change),
    )


def _kind_text(change: Change) -> str:
    """The kind of a change; ~ stands before it where the samples before and after overlap."""
    moved = change.kind in (ChangeKind.FASTER, ChangeKind.SLOWER)
    winner = ", winner" if change.has_new_winner else ""
    return f"{'~' if moved and not change.is_clear else ''}{change.kind}{winner}"


def _times(row: Row | None) -> tuple[str, str]:
    """The median, and the 20th and 80th percentiles."""
    return ("", "") if row is None else (_time(row.time_ms), f"{_time(row.p20_ms)}..{_time(row.p80_ms)}")


def _name(row: Row | None) -> str:
    return "" if row is None else f"{row.solver_id} {config_text(stored_config(row))}".rstrip()


def _races_text(change: Change) -> str:
    said = (("before", "B's", change.old_winner_after), ("after", "A's", change.new_winner_before))
    return "; ".join(
        f"{name} is {item.low:.3f}..{item.high:.3f} of {whose} winner" for name, whose, item in said if item is not None
    )


def _json(change: Change) -> dict[str, object]:
    return asdict(change.key) | {
        "change": change.kind.value,
        "new_winner": change.has_new_winner,
        "clear": change.is_clear,
        "ratio": change.ratio,
        "before": _row_json(change.before),
        "after": _row_json(change.after),
        "old_winner_after": _comparison_json(change.old_winner_after),
        "new_winner_before": _comparison_json(change.new_winner_before),
    }


def _row_json(row: Row | None) -> dict[str, object] | None:
    if row is None:
        return None
    names = ("solver_id", "time_ms", "min_ms", "p20_ms", "p80_ms", "samples", "contended", "created_at")
    return {name: getattr(row, name) for name in names} | {"config": stored_config(row)}


def _comparison_json(comparison: Comparison | None) -> dict[str, object] | None:
    return None if comparison is None else asdict(comparison)


def _time(value: float | None) -> str:
    return "-" if value is None else time_text(value)
