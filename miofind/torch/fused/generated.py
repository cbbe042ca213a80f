"""The code that torch.fx generates of a fused graph, in which submodules are found at less cost to the host.

`self.layer1` asks `nn.Module.__getattr__`, which takes half a microsecond for each part of a submodule's path, in each
call; `self._modules['layer1']` finds the same.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx


def find_submodules_quickly(graph: fx.Graph) -> None:
    """Have the code that is generated of a graph from now on find the submodules that it calls in dictionaries.

    Steps that the graph gets later are generated as torch.fx does.
    """
    calls = graph.find_nodes(op="call_module")
    quick = _QuickPaths({node.name: _paths(str(node.target)) for node in calls})
    graph.on_generate_code(lambda _: quick)


@dataclass(frozen=True, slots=True)
class _QuickPaths:
    """Rewrites lines of generated code.

    Attributes:
        paths: by the name of a step's result, how torch.fx writes the submodule that it calls, and how this does.
    """

    paths: dict[str, tuple[str, str]]

    def __call__(self, body: list[str]) -> list[str]:
        return [self._rewritten(line) for line in body]

    def _rewritten(self, line: str) -> str:
        name, equals, made = line.partition(" = ")
        written, quick = self.paths.get(name, ("", ""))
        if not equals or not written or not made.startswith(f"{written}("):
            return line
        return f"{name} = {quick}{made.removeprefix(written)}"


def _paths(target: str) -> tuple[str, str]:
    written = quick = "self"
    for name in target.split("."):
        written = f"{written}.{name}" if name.isidentifier() else f'getattr({written}, "{name}")'
        quick += f"._modules[{name!r}]"
    return written, quick
