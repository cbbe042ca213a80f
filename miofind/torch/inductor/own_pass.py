"""What passes over Inductor's graphs have in common: others that run before them, and a name for what they do."""

from __future__ import annotations

import functools
import hashlib
import logging
import warnings
from abc import abstractmethod
from pathlib import Path
from typing import Any

from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass

import miofind
from miofind.errors import MiofindError, described
from miofind.torch.inductor.graphs import copy_of, put_back

logger = logging.getLogger(__name__)


class OwnPass(CustomGraphPass):
    """A pass of miofind's; one may be used for any number of graphs.

    Args:
        before: a pass of the user's in the same place, or several, or None: they are run first, but none of miofind's.
    """

    def __init__(self, before: Any = None) -> None:
        given = before if isinstance(before, (list, tuple)) else () if before is None else (before,)
        self._before = [each for each in given if not isinstance(each, OwnPass)]

    def __call__(self, graph: fx.Graph) -> None:
        """Run the passes before it and this one; a graph in which it fails stays as those left it, with a warning.

        Raises:
            MiofindError: what the user asked to be told of, such as answers that a FindDB lacks.
        """
        for each in self._before:
            each(graph)
        before = copy_of(graph)
        try:
            self.rewrite(graph)
        except MiofindError:
            raise
        except Exception as error:
            put_back(graph, before)
            told = f"{type(self).__name__} failed, and a graph stays as torch.compile has it: {described(error)}"
            warnings.warn(f"{told}. Please report this", RuntimeWarning, stacklevel=2)
            logger.debug("%s failed", type(self).__name__, exc_info=error)

    @abstractmethod
    def rewrite(self, graph: fx.Graph) -> None:
        """Change a graph. What it raises costs the graph what it changes, not the user the compilation."""

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
