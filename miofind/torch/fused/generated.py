"""The code that torch.fx generates of a fused graph, in which what holds submodules is looked up once in a call.

torch.fx writes `self.layer1.block.conv` at each step. `nn.Module.__getattr__` takes half a microsecond for each part of
such a path, as much as a whole step may take otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import fx


def look_up_holders_once(made: fx.GraphModule) -> None:
    """Generate a module's code anew so, as whenever it is recompiled.

    Copies of the module have it, too. Steps that its graph gets later, and all of what is unpickled, is as by torch.fx.
    """
    reads = (node for op in ("call_module", "get_attr") for node in made.graph.find_nodes(op=op))
    paths = {node.name: tuple(str(node.target).split(".")) for node in reads}
    taken = frozenset(node.name for node in made.graph.nodes)
    made.graph.on_generate_code(lambda before: _Holders(paths, taken, before))
    made.recompile()


@dataclass(frozen=True, slots=True)
class _Holders:
    """Rewrites lines of generated code.

    Attributes:
        paths: by the name of a step's result, the path of the submodule or tensor that it reads.
        taken: names of all results.
        before: what rewrites the lines first, or None.
    """

    paths: dict[str, tuple[str, ...]]
    taken: frozenset[str]
    before: Callable[[list[str]], list[str]] | None

    def __call__(self, body: list[str]) -> list[str]:
        holders: dict[tuple[str, ...], str] = {(): "self"}
        return [self._rewritten(line, holders) for line in (body if self.before is None else self.before(body))]

    def _rewritten(self, line: str, holders: dict[tuple[str, ...], str]) -> str:
        """A line that reads by the variable of what holds it, behind lines for variables that there are none of yet.

        Args:
            holders: the variables by paths.
        """
        name, equals, made = line.partition(" = ")
        path = self.paths.get(name, ())
        written = _attribute("self", path)
        rest = made.removeprefix(written)
        if not equals or len(path) < 2 or not made.startswith(written) or rest[:1] not in ("", "("):
            return line
        lines = ""
        for length in range(1, len(path)):
            holder = path[:length]
            if holder not in holders:
                held = self._variable(len(holders))
                lines += f"{held} = {_attribute(holders[holder[:-1]], holder[-1:])}\n"
                holders[holder] = held
        return f"{lines}{name} = {_attribute(holders[path[:-1]], path[-1:])}{rest}"

    def _variable(self, number: int) -> str:
        name = f"holder_{number}"
        while name in self.taken:
            name += "_"
        return name


def _attribute(owner: str, path: tuple[str, ...]) -> str:
    """An attribute of a variable, as torch.fx writes it (`_format_target` of torch/fx/graph.py)."""
    for name in path:
        owner = f"{owner}.{name}" if name.isidentifier() else f'getattr({owner}, "{name}")'
    return owner
