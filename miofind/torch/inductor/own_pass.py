"""What passes over Inductor's graphs have in common: others that run before them, and a name for what they do."""

from __future__ import annotations

import functools
import hashlib
from abc import abstractmethod
from pathlib import Path
from typing import Any

from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass

import miofind


class OwnPass(CustomGraphPass):
    """A pass of miofind's; one may be used for any number of graphs.

    Args:
        before: a pass of the user's in the same place, or several, or None: they are run first, but none of miofind's.
    """

    def __init__(self, before: Any = None) -> None:
        given = before if isinstance(before, (list, tuple)) else () if before is None else (before,)
        self._before = [each for each in given if not isinstance(each, OwnPass)]

    def __call__(self, graph: fx.Graph) -> None:
        for each in self._before:
            each(graph)
        self.rewrite(graph)

    @abstractmethod
    def rewrite(self, graph: fx.Graph) -> None:
        """Change a graph."""

    def state(self) -> str:
        """What a rewritten graph depends on beside the graph and this package."""
        return ""

    def uuid(self) -> Any:
        """Changes with this package, the state and the passes before it; None, which keeps no graphs, if one has none.

        So Inductor's caches know which graphs are of this pass.
        """
        others = [each.uuid() if isinstance(each, CustomGraphPass) else None for each in self._before]
        if None in others:
            return None
        return hashlib.sha256(f"{_sources()} {self.state()} {others}".encode()).hexdigest()


@functools.cache
def _sources() -> str:
    """The version and the sources of this package that say what is put into graphs."""
    hashed, package = hashlib.sha256(miofind.__version__.encode()), Path(__file__).parents[2]
    for path in sorted((*package.glob("torch/**/*.py"), *package.glob("core/*.py"))):
        hashed.update(path.read_bytes())
    return hashed.hexdigest()
