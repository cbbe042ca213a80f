"""How much FindDBs hold: problems by device and data type, and how many layers of each suite."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from miofind.errors import InvalidProblemError
from miofind.finddb import ProblemKey
from miofind.network_config import parse_network_config
from miofind.suites import load_suite, suite_names

Layer = tuple[object, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceCoverage:
    """What is held for one device.

    Attributes:
        problems: how many.
        dtypes: problems by data type.
        suites: layers held by suite, in any batch, type, layout and direction.
    """

    device: str
    problems: int
    dtypes: dict[str, int]
    suites: dict[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    """What coverage needs of a problem."""

    layer: Layer
    dtype: str


def suite_layers() -> dict[str, set[Layer]]:
    """The distinct layers of each shipped suite."""
    return {name: {_entry(row.problem.network_config).layer for row in load_suite(name).rows} for name in suite_names()}


def coverage(keys: Iterable[ProblemKey], suites: dict[str, set[Layer]]) -> list[DeviceCoverage]:
    """What is held for each device, the most first."""
    dtypes: dict[str, Counter[str]] = {}
    layers: dict[str, set[Layer]] = {}
    for key in keys:
        entry = _entry(key.network_config)
        dtypes.setdefault(key.device, Counter())[entry.dtype] += 1
        layers.setdefault(key.device, set()).add(entry.layer)
    found = [
        DeviceCoverage(
            device=device,
            problems=counts.total(),
            dtypes=dict(counts.most_common()),
            suites={name: len(wanted & layers[device]) for name, wanted in suites.items()},
        )
        for device, counts in dtypes.items()
    ]
    return sorted(found, key=lambda c: (-c.problems, c.device))


def _entry(network_config: str) -> _Entry:
    try:
        values = parse_network_config(network_config)
    except InvalidProblemError:
        return _Entry(layer=(network_config,), dtype="unreadable")
    shapes = (values["x"][1:], values["w"], values["padding"], values["stride"], values["dilation"], values["groups"])
    return _Entry(layer=shapes, dtype="/".join(dict.fromkeys(values["dtype"].values())))
