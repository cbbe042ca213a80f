"""Functions compiled up to Inductor's graphs: decomposed and passed over, then run as they are."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

from torch import fx
from torch._guards import TracingContext


def convolution_pass() -> Any:
    """A new pass. torch.compile, which its module imports, takes 1.6 s: here, so that reading test files takes none."""
    from miofind.torch.inductor.graph_pass import ConvolutionPass

    return ConvolutionPass()


class Compiled:
    """A function under torch.compile, whose graphs are run without code generation.

    Args:
        has_pass: whether the pass is run over its graphs.
        recomputes: whether the backward pass computes once more what is cheap, as Inductor has it.
        options: of torch.compile.
    """

    def __init__(
        self, model: Callable[..., Any], *, has_pass: bool = True, recomputes: bool = False, **options: Any
    ) -> None:
        from torch._dynamo.backends.common import aot_autograd

        with warnings.catch_warnings():  # of what its modules import
            warnings.simplefilter("ignore")
            import torch._inductor.lowering  # poolings are decomposed by its rules
        from torch._inductor.decomposition import select_decomp_table

        self.graphs: list[fx.GraphModule] = []
        self.convolution_pass = convolution_pass()
        self._has_pass = has_pass
        each: dict[str, Any] = {"fw_compiler": self._passed, "decompositions": select_decomp_table()}
        each["partition_fn"] = functools.partial(self._parted, recomputes)
        torch._dynamo.reset()
        backend = aot_autograd(keep_inference_input_mutations=True, **each)  # as Inductor has them
        self._run = torch.compile(model, backend=backend, **options)

    def __call__(self, *inputs: Any) -> Any:
        return self._run(*inputs)

    def _parted(self, recomputes: bool, joint: fx.GraphModule, inputs: Any, **options: Any) -> Any:
        from torch._functorch import partitioners
        from torch._inductor.fx_passes.joint_graph import constant_fold_uniform_value

        from miofind.torch.inductor.joint_pass import JointPass

        if self._has_pass:
            constant_fold_uniform_value(joint)  # as Inductor does before custom passes
            JointPass()(joint.graph)
            joint.graph.lint()
            joint.recompile()
        part = partitioners.min_cut_rematerialization_partition if recomputes else partitioners.default_partition
        return part(joint, inputs, **options)

    def _passed(self, graph: fx.GraphModule, inputs: Any) -> Any:
        from torch._functorch.aot_autograd import make_boxed_func

        if self._has_pass:
            _note_outputs(graph)
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


def _note_outputs(graph: fx.GraphModule) -> None:
    """Note the strides of what a graph returns, and what of that is a user's, as Inductor does before passes."""
    with warnings.catch_warnings():  # of what its module imports
        warnings.simplefilter("ignore")
        from torch._inductor.compile_fx import record_original_output_strides

    record_original_output_strides(graph)
    (output,) = graph.graph.find_nodes(op="output")
    given = range(len(output.args[0]))
    if not any(str(node.target).startswith("tangents") for node in graph.graph.find_nodes(op="placeholder")):
        metadata = TracingContext.get().fw_metadata
        first = metadata.num_mutated_inp_runtime_indices
        given = range(first, first + metadata.num_outputs)
    output.meta["user_visible_output_idxs"] = [i for i in given if isinstance(output.args[0][i], fx.Node)]
