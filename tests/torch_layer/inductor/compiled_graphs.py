"""Functions compiled up to Inductor's graphs: decomposed and passed over, then run as they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx


def convolution_pass() -> Any:
    """A new pass. torch.compile, which its module imports, takes 1.6 s: here, so that reading test files takes none."""
    from miofind.torch.inductor.graph_pass import ConvolutionPass

    return ConvolutionPass()


class Compiled:
    """A function under torch.compile, whose graphs are run without code generation.

    Args:
        has_pass: whether the pass is run over its graphs.
        options: of torch.compile.
    """

    def __init__(self, model: Callable[..., Any], *, has_pass: bool = True, **options: Any) -> None:
        from torch._dynamo.backends.common import aot_autograd
        from torch._inductor.decomposition import select_decomp_table

        self.graphs: list[fx.GraphModule] = []
        self.convolution_pass = convolution_pass()
        self._has_pass = has_pass
        each = {"fw_compiler": self._passed, "decompositions": select_decomp_table()}
        torch._dynamo.reset()
        backend = aot_autograd(keep_inference_input_mutations=True, **each)  # as Inductor has them
        self._run = torch.compile(model, backend=backend, **options)

    def __call__(self, *inputs: Any) -> Any:
        return self._run(*inputs)

    def _passed(self, graph: fx.GraphModule, inputs: Any) -> Any:
        from torch._functorch.aot_autograd import make_boxed_func

        if self._has_pass:
            _note_strides(graph.graph)
            self.convolution_pass(graph.graph)
            graph.recompile()
        self.graphs.append(graph)
        return make_boxed_func(graph.forward)

    @property
    def texts(self) -> list[str]:
        """The epilogues of what was put in."""
        return [problem.epilogue.text for problem in self.convolution_pass.replaced]

    def count(self, target: Any) -> int:
        """The steps of all graphs that call something."""
        return sum(node.target is target for graph in self.graphs for node in graph.graph.nodes)


def _note_strides(graph: fx.Graph) -> None:
    """Note the strides of what a graph returns with it, as Inductor does before it runs passes."""
    (output,) = graph.find_nodes(op="output")
    values = [node.meta.get("val") if isinstance(node, fx.Node) else None for node in output.args[0]]
    noted = [value.stride() if isinstance(value, torch.Tensor) else None for value in values]
    output.meta["original_output_strides"] = noted
