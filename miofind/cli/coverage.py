"""FindDB coverage: problems by device and type, and layers of each suite by variant.

A problem that some solvers were measured for answers a find of these solvers, but no find of all: it counts as known,
not as answered. Of many problems a sample is asked.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Set
from contextlib import suppress
from dataclasses import dataclass

from miofind.core.network_config import ConvolutionArguments, parse_network_config
from miofind.core.problem import ProblemDescription
from miofind.errors import InvalidProblemError
from miofind.find.lookup.records import is_answered
from miofind.find.row_check import device_of
from miofind.finddb import ProblemKey
from miofind.options import FindOptions
from miofind.runtime.handle import Handle
from miofind.suites import load_suite, suite_names

_UNREADABLE = "unreadable"


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A form of a suite's layers: batch, element type, layout and direction.

    Attributes:
        batch: what the suite's n is multiplied by; None for a suite whose rows have batches of their own.
        type: element type of all tensors, "tf32" for float32 with that arithmetic.
    """

    batch: int | None
    type: str
    layout: str
    direction: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SuiteCoverage:
    """Coverage of a suite: the number of its distinct layers, and of those answered by variant."""

    suite: str
    layers: int
    answered: Mapping[Variant, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceCoverage:
    """Coverage of one device.

    Attributes:
        problems: number of problems measured, by all solvers or some.
        asked: number of problems that a find was tried of: all, or a sample.
        answered: number of asked problems that have an answer.
        types: number of problems by type.
        suites: coverage of each suite with an answered layer; a layer that was not asked counts as answered.
    """

    device: str
    problems: int
    asked: int
    answered: int
    types: Mapping[str, int]
    suites: tuple[SuiteCoverage, ...]


class SuiteLayers:
    """The distinct layers of one shipped suite, with their batch where the suite sets it."""

    def __init__(self, name: str) -> None:
        suite = load_suite(name)
        rows = [parse_network_config(row.problem.flattened.network_config) for row in suite.rows]
        self.name = name
        self._samples = rows[0]["x"][0] if suite.is_scalable else None
        self._layers = {self._layer(row) for row in rows}

    def __len__(self) -> int:
        return len(self._layers)

    def covered(self, problems: Iterable[ConvolutionArguments]) -> SuiteCoverage:
        """The number of layers among the problems, by variant."""
        found: dict[Variant, set[object]] = defaultdict(set)
        for problem in problems:
            layer, n = self._layer(problem), problem["x"][0]
            if layer in self._layers and n % (self._samples or 1) == 0:
                batch = None if self._samples is None else n // self._samples
                layout = _joined(problem["layout"])
                variant = Variant(batch=batch, type=_type(problem), layout=layout, direction=problem["direction"])
                found[variant].add(layer)
        counts = {variant: len(layers) for variant, layers in found.items()}
        return SuiteCoverage(suite=self.name, layers=len(self), answered=counts)

    def _layer(self, problem: ConvolutionArguments) -> object:
        x = problem["x"] if self._samples is None else problem["x"][1:]
        return (x, *(problem[name] for name in ("w", "padding", "stride", "dilation", "groups", "epilogue")))


def suite_layers() -> list[SuiteLayers]:
    """The layers of all shipped suites."""
    return [SuiteLayers(name) for name in suite_names()]


def coverage(
    keys: Iterable[ProblemKey],
    suites: Iterable[SuiteLayers],
    answered: Callable[[str, Set[str]], Set[str]] = lambda device, network_configs: network_configs,
    sample: int | None = None,
) -> list[DeviceCoverage]:
    """Coverage of each device, the one with most problems first.

    Args:
        keys: the problems that were measured; several FindDBs may name one.
        answered: a function of a device and network_configs; it returns those that a find is answered for.
        sample: greatest number of problems of a device to ask; None for all.
    """
    by_device: dict[str, set[str]] = defaultdict(set)
    for key in keys:
        by_device[key.device].add(key.network_config)
    found = []
    for device, known in by_device.items():
        asked = _sample(known, sample)
        unanswered = asked - answered(device, asked)
        found.append(_of_device(device, known, suites, asked, unanswered))
    return sorted(found, key=lambda c: (-c.problems, c.device))


def _sample(network_configs: Set[str], most: int | None) -> Set[str]:
    """At most `most` network_configs, evenly spread over their order, and the same each time."""
    if most is None or len(network_configs) <= most:
        return network_configs
    return set(sorted(network_configs)[:: -(-len(network_configs) // most)])


def answered_finds(device: str, network_configs: Set[str]) -> Set[str]:
    """The network_configs for which the FindDBs in force answer a find without options; the device need not be here."""
    known = device_of(device)
    if known is None:
        return frozenset()
    with Handle(known) as handle:
        return {text for text in network_configs if _is_answered(text, handle)}


def _is_answered(network_config: str, handle: Handle) -> bool:
    with suppress(InvalidProblemError):
        problem = ProblemDescription.from_network_config(network_config)
        return is_answered(problem.flattened, FindOptions(), handle)
    return False


def _of_device(
    device: str, network_configs: Set[str], suites: Iterable[SuiteLayers], asked: Set[str], unanswered: Set[str]
) -> DeviceCoverage:
    problems, found = [], []
    for text in network_configs:
        try:
            problems.append(parse_network_config(text))
        except InvalidProblemError:
            continue
        if text not in unanswered:
            found.append(problems[-1])
    types = Counter(map(_type, problems))
    types[_UNREADABLE] = len(network_configs) - len(problems)
    covered = [suite.covered(found) for suite in suites]
    return DeviceCoverage(
        device=device,
        problems=len(network_configs),
        asked=len(asked),
        answered=len(asked) - len(unanswered),
        types={name: count for name, count in types.most_common() if count},
        suites=tuple(suite for suite in covered if suite.answered),
    )


def _type(problem: ConvolutionArguments) -> str:
    return _joined(problem["dtype"]) if problem["math"] == "ieee" else problem["math"]


def _joined(of_tensors: Mapping[str, str]) -> str:
    """One name where x, w and y have the same, else all three."""
    return "/".join(of_tensors.values() if len(set(of_tensors.values())) > 1 else [of_tensors["x"]])
