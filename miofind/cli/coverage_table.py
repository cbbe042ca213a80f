"""Coverage as `miofind doctor` shows it: two lines a device, and a table of the suites that are answered by half."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping

from miofind.cli.coverage import DeviceCoverage, SuiteCoverage, Variant
from miofind.cli.output import Sheet, count_text, print_text
from miofind.core.problem import Direction, Layout
from miofind.device.device import device_text

_LAYOUTS = ("NCHW", "NHWC")
_COLUMNS = ("suite", "batch", "layers", *_LAYOUTS, "types")

_Counts = Mapping[tuple[str, str], int]
"""Layers answered by layout and direction."""


def show_device(held: DeviceCoverage) -> None:
    """Print the number of a device's problems, and how many of those asked are answered."""
    types = ", ".join(f"{name} {count}" for name, count in held.types.items())
    print_text(f"  {device_text(held.device)}: {count_text(held.problems, 'problem')} ({types})")
    sample = "" if held.asked == held.problems else f"; a sample of {held.asked}, --all asks all"
    print_text(f"    finds answered without measuring: {held.answered} of {held.asked}{sample}")


def show_suites(held: DeviceCoverage) -> None:
    """Print the number of answered layers of each suite."""
    made = Sheet("", _COLUMNS, right=_COLUMNS[1:5])
    in_part = []
    for suite in held.suites:
        before: tuple[str, ...] = ()
        for head, cells in _rows(suite):
            made.add(*(head if head != before else [""] * len(head)), *cells)
            before = head
        if not before:
            in_part.append(f"{suite.suite} {max(suite.answered.values())}/{suite.layers}")
    if len(made):
        what = "answered" if held.asked == held.problems else "known"
        print_text(f"  Distinct layers {what}: forward/data/weights, or one number for all")
        made.print()
    if in_part:
        print_text(f"  Less than half of the distinct layers: {', '.join(in_part)}; --json counts all")


def _rows(suite: SuiteCoverage) -> Iterator[tuple[tuple[str, ...], tuple[str, ...]]]:
    """The head and the counts of each row: one or more rows for each batch with half of its layers answered.

    Types with equal counts share a row.
    """
    batches: dict[int | None, dict[str, dict[tuple[str, str], int]]] = defaultdict(lambda: defaultdict(dict))
    for variant, count in suite.answered.items():
        batches[variant.batch][variant.type][_plain_layout(variant), variant.direction] = count
    for batch in sorted(batches, key=lambda batch: batch or 0):
        by_type = batches[batch]
        if 2 * max(count for counts in by_type.values() for count in counts.values()) < suite.layers:
            continue
        rows: dict[tuple[str, ...], list[str]] = defaultdict(list)
        for name in sorted(by_type):
            rows[tuple(_cell(by_type[name], layout) for layout in _LAYOUTS)].append(name)
        head = (suite.suite, "own" if batch is None else str(batch), str(suite.layers))
        for cells, names in rows.items():
            yield head, (*cells, ", ".join(names))


def _plain_layout(variant: Variant) -> str:
    """NHWC stands for channels last in any number of dimensions; a mixture stays as it is."""
    try:
        return _LAYOUTS[Layout(variant.layout).channels_last]
    except ValueError:
        return variant.layout


def _cell(counts: _Counts, layout: str) -> str:
    numbers = [counts.get((layout, direction.value), 0) for direction in Direction]
    return str(numbers[0]) if len(set(numbers)) == 1 else "/".join(map(str, numbers))
