"""The warm start of a search: what won at the tuned problems nearest to this one, as far as the FindDB knows.

Reads texts and answers of the FindDB.
"""

from __future__ import annotations

import functools
import itertools
import logging
import math
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass

from miofind.core.network_config import ConvolutionArguments, parse_network_config
from miofind.core.problem import ProblemDescription
from miofind.errors import DatabaseError, InvalidConfigError, InvalidProblemError
from miofind.finddb import LayeredStore, Store
from miofind.solver.registry import inner_id
from miofind.solver.steps import Config

logger = logging.getLogger(__name__)

MAX_PROBLEMS = 20_000
"""Known problems that are compared at most, of each FindDB."""
_NEAREST = 8
_WINNERS = 4


@dataclass(frozen=True, slots=True, order=True)
class Distance:
    """How unlike two problems are: first what decides which kernels suit, then their sizes.

    Attributes:
        kind: how many of direction, data types, layouts, math mode, filter, strides, dilations, kind of groups (none,
            one channel each, several) and epilogue differ.
        octaves: sum over batch, channels of a group, groups and image sizes of |log2 of their ratio|.
    """

    kind: int
    octaves: float


@dataclass(frozen=True, slots=True)
class _Features:
    """What of a problem distances are made of."""

    kind: tuple[object, ...]
    sizes: tuple[int, ...]

    @staticmethod
    def of(arguments: ConvolutionArguments) -> _Features:
        (n, c, *spatial), (k, group_channels, *taps) = arguments["x"], arguments["w"]
        groups = arguments["groups"]
        grouping = "none" if groups == 1 else "one channel each" if group_channels == 1 else "several"
        return _Features(
            kind=(
                arguments["direction"],
                tuple(arguments["dtype"].values()),
                tuple(arguments["layout"].values()),
                arguments["math"],
                tuple(taps),
                arguments["stride"],
                arguments["dilation"],
                grouping,
                arguments["epilogue"],
            ),
            sizes=(n, max(1, c // groups), max(1, k // groups), groups, *spatial),
        )

    def distance(self, other: _Features) -> Distance:
        differing = sum(mine != theirs for mine, theirs in zip(self.kind, other.kind, strict=True))
        pairs = zip(self.sizes, other.sizes, strict=True)
        return Distance(differing, math.fsum(abs(math.log2(max(1, mine) / max(1, theirs))) for mine, theirs in pairs))


def distance(first: str, second: str) -> Distance:
    """The distance between two problems of equal spatial rank, by their network_config.

    Raises:
        InvalidProblemError: a text is no network_config.
        ValueError: the ranks differ.
    """
    return _Features.of(parse_network_config(first)).distance(_Features.of(parse_network_config(second)))


class WarmStart:
    """The problems that the FindDB knows on one kind of device; listed once, on first use. Threads may share it.

    Args:
        device: identity of the device.
    """

    def __init__(self, device: str) -> None:
        self._device = device
        self._lock = threading.Lock()
        self._known: dict[str, _Features] | None = None

    def add(self, network_config: str) -> None:
        """Take in a problem that was measured since."""
        with self._lock:
            if self._known is not None:
                self._known.setdefault(network_config, _Features.of(parse_network_config(network_config)))

    def winners(self, problem: ProblemDescription, database: LayeredStore) -> dict[str, tuple[Config, ...]]:
        """By solver, the configurations that were its fastest at the nearest problems, the nearest first.

        The problem itself is one of them: what won with other versions of the libraries is worth a try.
        """
        found: dict[str, dict[Config, None]] = {}
        for network_config in self._nearest(problem.network_config, database):
            for solver_id, config in self._fastest(network_config, database):
                configs = found.setdefault(solver_id, {})
                if len(configs) < _WINNERS:
                    configs[config] = None
        return {solver_id: tuple(configs) for solver_id, configs in found.items()}

    def _nearest(self, network_config: str, database: LayeredStore) -> list[str]:
        with self._lock:
            if self._known is None:
                self._known = dict(self._listed(database))
            known = list(self._known.items())
        mine = _Features.of(parse_network_config(network_config))
        alike = ((name, other) for name, other in known if len(other.sizes) == len(mine.sizes))
        ranked = sorted((mine.distance(other), name) for name, other in alike)
        return [name for _, name in ranked[:_NEAREST]]

    def _listed(self, database: LayeredStore) -> Iterator[tuple[str, _Features]]:
        for store in database.layers:
            try:
                keys = store.problems(self._device)
            except DatabaseError as error:  # a search begins without it; who needs the database says what is wrong
                logger.debug("no nearest problems from %s: %s", store.where, error)
                continue
            for key in itertools.islice(keys, MAX_PROBLEMS):
                try:
                    yield key.network_config, _Features.of(parse_network_config(key.network_config))
                except InvalidProblemError:  # of a later release: no look-up will ask for it
                    continue

    def _fastest(self, network_config: str, database: LayeredStore) -> Iterator[tuple[str, Config]]:
        """The first configuration of each solver in an answer, in whichever form."""
        answer = database.answer(self._device, network_config)
        seen: set[str] = set()
        for row in answer.rows if answer else ():
            solver_id = inner_id(row.solver_id)
            if solver_id not in seen:
                seen.add(solver_id)
                try:
                    yield solver_id, Config.from_json(row.config)
                except InvalidConfigError:
                    continue


_sharing = threading.Lock()


def shared_warm_start(database: LayeredStore, device: str) -> WarmStart:
    """Those of a kind of device that all in this process share who have the same FindDBs open."""
    with _sharing:
        return _made(tuple(store if store.in_memory else store.location for store in database.layers), device)


@functools.lru_cache(maxsize=64)
def _made(stores: tuple[str | Store, ...], device: str) -> WarmStart:
    """That of FindDBs, by where they are; one in memory has its own."""
    return WarmStart(device)


def _leave_parent() -> None:
    """Make the locks anew in a forked child: a thread of the parent may have held them."""
    global _sharing
    _sharing = threading.Lock()
    _made.cache_clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_parent)
