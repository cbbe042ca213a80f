"""What requests ask of every solver without its code, and the index that keeps it beside the bytecode.

A look-up asks all solvers for their ids, versions and libraries, a find for what their keys serve, and both few of them
for more. To import them all takes longer than the rest of a look-up. So discovery leaves an index: as bytecode is, it
is valid while the sources have the sizes and times of modification that it names, is kept in `__pycache__`, and is done
without where that cannot be written.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import logging
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from miofind.core.problem import DataType, Direction, Layout
from miofind.device.device import Library, Place
from miofind.files import write_whole
from miofind.solver.solver import KernelKey, Reach, Solver, is_own_module

logger = logging.getLogger(__name__)

_PACKAGE = Path(__file__).resolve().parents[1]
_FOLDERS = ("core", "device", "libraries", "solver", "solvers")
"""Of the package, whose modules decide what the index says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SolverFacts:
    """What a request asks of a solver before any row of it.

    Attributes:
        module: that names it in SOLVERS.
        library: who supplies the code.
        names: what `only` and `exclude` know it by.
        composed_names: what they know its composed form by.
        keys, directions, is_for_large: what it serves.
        least_reach: how far errors reach of each configuration at least.
    """

    id: str
    module: str
    version: int
    library: Library
    is_dynamic: bool
    names: frozenset[str]
    composed_names: frozenset[str]
    keys: tuple[KernelKey, ...]
    directions: frozenset[Direction]
    is_for_large: bool
    least_reach: Reach

    @staticmethod
    def of(solver: Solver, composed: Solver) -> SolverFacts:
        """The facts of a solver and of its composed form."""
        return SolverFacts(
            id=solver.id,
            module=type(solver).__module__,
            version=solver.version,
            library=solver.library,
            is_dynamic=solver.is_dynamic,
            names=solver.names,
            composed_names=composed.names,
            keys=solver.keys,
            directions=solver.directions,
            is_for_large=solver.is_for_large,
            least_reach=solver.least_reach,
        )

    @property
    def is_own(self) -> bool:
        """Whether the solver is miofind's."""
        return is_own_module(self.module)


def read_index(sources: str) -> dict[str, SolverFacts]:
    """Facts of miofind's own solvers by id, in the order of discovery; empty where no index of these sources is kept.

    Args:
        sources: their `fingerprint`.
    """
    try:
        kept = json.loads(_index_path().read_text(encoding="utf-8"))
        if not sources or kept["sources"] != sources:
            return {}
        return {each["id"]: _facts_from(each) for each in kept["solvers"]}
    except (OSError, ValueError, LookupError, TypeError, AttributeError, NotImplementedError) as error:
        logger.debug("no index of solvers is kept: %s", error)
        return {}


def write_index(sources: str, facts: Iterable[SolverFacts]) -> None:
    """Keep facts of miofind's own solvers where Python keeps bytecode, or nowhere where it keeps none.

    Args:
        sources: the `fingerprint` of before they were imported.
    """
    if sys.dont_write_bytecode or not sources:
        return
    listed = [
        {field.name: getattr(each, field.name) for field in fields(each)}
        | {"names": sorted(each.names), "composed_names": sorted(each.composed_names)}
        | {"keys": [_written(key) for key in each.keys], "directions": sorted(each.directions)}
        for each in facts
    ]
    try:
        path = _index_path()
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps({"sources": sources, "solvers": listed}).encode())
    except (OSError, NotImplementedError) as error:
        logger.debug("the index of solvers is not kept: %s", error)


def fingerprint() -> str:
    """Hash of the paths, sizes and times of modification of the modules that decide what the index says.

    It is "" where these are no files.
    """
    digest = hashlib.sha256(f"{_PACKAGE} {sys.version}".encode())
    try:
        for folder in _FOLDERS:
            for line in sorted(_modules(os.path.join(_PACKAGE, folder))):
                digest.update(line.encode())
    except OSError as error:
        logger.debug("solvers have no index: %s", error)
        return ""
    return digest.hexdigest()


def _facts_from(kept: Mapping[str, object]) -> SolverFacts:
    """Facts as the index has them.

    Raises:
        KeyError, TypeError, ValueError: they are none.
    """
    names, composed_names, keys, directions = (kept[n] for n in ("names", "composed_names", "keys", "directions"))
    if not (isinstance(names, list) and isinstance(composed_names, list)):
        raise TypeError("names are lists")
    if not (isinstance(keys, list) and isinstance(directions, list)):
        raise TypeError("keys and directions are lists")
    version, module, least_reach = kept["version"], kept["module"], kept["least_reach"]
    if type(version) is not int or type(least_reach) is not int:
        raise TypeError("a version and a reach are whole numbers")
    if not isinstance(module, str) or not is_own_module(module):
        raise ValueError(f"{module} is no module of a solver of miofind")
    return SolverFacts(
        id=str(kept["id"]),
        module=module,
        version=version,
        library=Library(str(kept["library"])),
        is_dynamic=bool(kept["is_dynamic"]),
        names=frozenset(names),
        composed_names=frozenset(composed_names),
        keys=tuple(map(_key_from, keys)),
        directions=frozenset(map(Direction, directions)),
        is_for_large=bool(kept["is_for_large"]),
        least_reach=Reach(least_reach),
    )


def _written(key: KernelKey) -> dict[str, object]:
    """A key as the index has it."""
    return {
        "place": key.place,
        "library": key.library,
        "dtypes": sorted(key.dtypes),
        "layouts": sorted(key.layouts),
        "min_sm": key.min_sm,
        "archs": key.archs,
        "operand_dtypes": {name: sorted(dtypes) for name, dtypes in key.operand_dtypes.items()},
        "accumulator": key.accumulator,
    }


def _key_from(kept: Mapping[str, Any]) -> KernelKey:
    """A key as the index has it.

    Raises:
        AttributeError, KeyError, TypeError, ValueError: it is none.
    """
    if type(kept["min_sm"]) is not int:
        raise TypeError("a compute capability is a whole number")
    return KernelKey(
        place=Place(kept["place"]),
        library=Library(kept["library"]),
        dtypes=frozenset(map(DataType, kept["dtypes"])),
        layouts=frozenset(map(Layout, kept["layouts"])),
        min_sm=kept["min_sm"],
        archs=tuple(map(str, kept["archs"])),
        operand_dtypes={name: frozenset(map(DataType, dtypes)) for name, dtypes in kept["operand_dtypes"].items()},
        accumulator=None if kept["accumulator"] is None else DataType(kept["accumulator"]),
    )


def _index_path() -> Path:
    """A file beside the bytecode of `miofind.solvers`.

    Raises:
        NotImplementedError: this Python keeps no bytecode.
    """
    bytecode = Path(importlib.util.cache_from_source(str(_PACKAGE / "solvers" / "__init__.py")))
    return bytecode.with_name(f"index.{sys.implementation.cache_tag}.json")


def _modules(folder: str) -> Iterator[str]:
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.endswith(".py"):
                status = entry.stat()
                yield f"{entry.path} {status.st_size} {status.st_mtime_ns}\n"
            elif entry.name != "__pycache__" and entry.is_dir():
                yield from _modules(entry.path)
