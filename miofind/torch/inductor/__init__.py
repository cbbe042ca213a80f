"""torch.compile with miofind: options for Inductor, and the backend "miofind"."""

from __future__ import annotations

from typing import Any


def inductor_options(**options: Any) -> dict[str, Any]:
    """Options with which torch.compile puts miofind's fused convolutions into its graphs.

    `torch.compile(model, options=miofind.torch.inductor_options())`. A pass over Inductor's graphs replaces a
    convolution, or a linear layer in 16 bits, and the point-wise steps after it by one operator where the FindDB
    answers the fused problem. Forward, those are batch norm in inference, the sum with a tensor and an activation. In
    training: the same as far as nothing between them is kept for backward; a batch norm's statistics, of results in
    float16 and bfloat16; an activation's derivative and the sum of gradients at a branch with the gradient of the
    input; and the bias gradient with that of the weights. Convolutions of dynamic shapes stay. What else the pass does,
    such as turning graphs to channels last, docs/pytorch.md tells under "What is put in".

    With `torch.backends.cudnn.benchmark`, or `enable("find")`, missing answers are measured while a graph is compiled,
    all of a graph at once as by `miofind.find_many`, the likeliest candidates of each; else `missing` of the pass, the
    option's value, has the problems that lack one. For inference with weights that stay, fold batch norms first:
    compile what `miofind.torch.fuse` gives, or set `torch._inductor.config.freezing = True` (as an option of
    torch.compile it does nothing in PyTorch 2.13); else their scale and bias are computed from their statistics in each
    call. Calls that are not replaced come to miofind
    where `enable()` is in force.

    A second pass, over the joint graph of forward and backward, has derivatives taken where nothing need be kept for
    them, and gradients of upsamplings gathered.

    Args:
        options: further ones of Inductor, as of `torch.compile(options=...)`. Passes of your own in the places of these
            (`post_grad_custom_pre_pass`, `joint_custom_post_pass`), given here or configured, run before them.

    Raises:
        NoSolutionError: as a graph is compiled, with `enable("error")`, where the FindDB has no answer.
    """
    from torch._inductor import config

    from miofind.torch.inductor.graph_pass import ConvolutionPass
    from miofind.torch.inductor.joint_pass import JointPass

    own = {"joint_custom_post_pass": JointPass, "post_grad_custom_pre_pass": ConvolutionPass}
    before = {name: options.pop(name, getattr(config, name)) for name in own}
    return {name: made(before[name]) for name, made in own.items()} | options


def backend(graph: Any, inputs: Any, *, mode: str | None = None, options: dict[str, Any] | None = None) -> Any:
    """Inductor with `inductor_options`; the backend "miofind" of torch.compile.

    Args:
        graph: a torch.fx.GraphModule, and `inputs`, its example inputs, as backends are given them.
        mode, options: of Inductor, as of torch.compile; of what both name the options count.
    """
    from torch._inductor import list_mode_options
    from torch._inductor.compile_fx import compile_fx

    of_mode = list_mode_options(mode) if mode else {}
    return compile_fx(graph, inputs, config_patches=inductor_options(**{**of_mode, **(options or {})}))
