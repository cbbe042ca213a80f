"""A pass over Inductor's graphs that puts `miofind::convolution...` where a FindDB answers the fused problem.

Forward: convolution, batch norm in inference (as steps of channels), an addition, an activation; in training the
statistics of a batch norm (`batch_statistics`). Backward: the gradient
of the input with what is added to it and relu's mask, and the bias gradient beside that of the weights. Whatever is not
known exactly, has sizes that are not numbers, or no answer stays as it is, and is Inductor's.
"""

from __future__ import annotations

import functools
import hashlib
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass

import miofind
from miofind.core.problem import ProblemDescription
from miofind.runtime.solution import Solution
from miofind.solver.registry import Registry
from miofind.torch.answers import answer, compile_ahead, fastest, find_missing, planner_of
from miofind.torch.batch_statistics import gather_vectors, put_statistics
from miofind.torch.calls import Unserved
from miofind.torch.decompositions import activation_of
from miofind.torch.flags import Flags, state
from miofind.torch.fused_calls import BackwardData, BackwardWeights, Call, Forward
from miofind.torch.graph_writing import Writing, spelt, values_of
from miofind.torch.group_statistics import split_group_statistics
from miofind.torch.ops import OPERATORS
from miofind.torch.override import current
from miofind.torch.plans import Planner
from miofind.torch.unfused import Nonlinearity
from miofind.torch.weights_in_graphs import keep_weights

aten, prims = torch.ops.aten, torch.ops.prims
_CONVERSION = prims.convert_element_type.default
_ARGUMENTS = {operator: kind for kind, operator in OPERATORS.items()}


_TURNED = "miofind_turned_to_channels_last"
"""What is noted with a node that the lowering runs channels last, whatever it was traced with."""

_CONVOLUTIONS = (aten.convolution.default, aten.convolution_backward.default)


class ConvolutionPass(CustomGraphPass):
    """The pass; one may be used for any number of graphs.

    Attributes:
        replaced: the problems that it has put in, in order.
        missing: those that it would have put in, had a FindDB an answer.
    """

    def __init__(self) -> None:
        self.replaced: list[ProblemDescription] = []
        self.missing: list[ProblemDescription] = []

    def __call__(self, graph: fx.Graph) -> None:
        _constrain_layouts()
        is_better_last = _is_better_last(graph)
        _prepare(graph, is_better_last)
        writing = Writing(graph, self._serves, is_better_last)
        _replace(writing)
        self.replaced += writing.put_in
        for node in list(graph.nodes):
            if node.target in _ARGUMENTS:
                _state_layout(node)
        if _trains(graph):
            _turn_saved(graph)
            gather_vectors(graph)
        else:
            keep_weights(graph, _memory_formats(graph))
        split_group_statistics(graph)
        graph.lint()

    def _serves(self, problem: ProblemDescription, device: Any) -> bool:
        """Whether a FindDB answers a problem; notes what lacks an answer."""
        planner, flags = _asked(device)
        found = answer(problem, device, flags, planner)
        if not found.is_served and found.part.is_missing:
            self.missing.append(problem)
        return found.is_served

    def uuid(self) -> Any:
        """Changes with this package, the solvers, PyTorch's switches and the FindDBs, on which graphs depend."""
        hashed = hashlib.sha256()
        for path in sorted(Path(__file__).parent.glob("*.py")):
            hashed.update(path.read_bytes())
        solvers = ",".join(f"{name}:{solver.version}" for name, solver in sorted(Registry.default().items()))
        hashed.update(f"{miofind.__version__} {solvers} {state()} {_database_state()}".encode())
        return hashed.hexdigest()


def _database_state() -> str:
    """What changes when the settings or the FindDBs in force do: times and sizes of their files."""
    told = []
    for device in ("cuda", "cpu") if torch.cuda.is_available() else ("cpu",):
        planner = planner_of(current(device))
        told.append(repr(replace(planner.settings, handle=None, background=False)))
        try:
            handle = planner.handle_of(torch.device(device))
        except Unserved as reason:
            told.append(str(reason))
            continue
        for layer in handle.database.layers:
            told.append(layer.where)
            for path in () if layer.path is None else (layer.path, Path(f"{layer.path}-wal")):
                told += [f"{path.stat().st_mtime_ns}:{path.stat().st_size}"] if path.exists() else []
    return " ".join(told)


def _is_plain(node: fx.Node, transposed: Any) -> bool:
    """Whether a convolution is not transposed, and all sizes that it has are numbers."""
    values = [each.meta.get("val") for each in node.all_input_nodes]
    return not transposed and all(
        isinstance(value, torch.Tensor) and all(isinstance(size, int) for size in (*value.shape, *value.stride()))
        for value in values
    )


@functools.cache
def _constrain_layouts() -> None:
    """Have Inductor give the operators their tensors in the memory format that they were put in with.

    Operators of a pass have no strides recorded: without this their inputs come in any order, and are copied.
    """
    from torch._inductor import lowering

    for overload in OPERATORS.values():
        if overload not in lowering.lowerings:
            lowering.make_fallback(overload, layout_constraint=_constrained, warn=False)


def _constrained(node: fx.Node, *arguments: Any, **named: Any) -> Any:
    """The arguments of an operator of the pass in its memory format; of others as they were traced."""
    from torch._inductor import ir, lowering

    last = named.get("channels_last")
    if node.meta.get(_TURNED):
        last = named["channels_last"] = True
    if last is None:
        return lowering.constrain_to_fx_strides(node, *arguments, **named)

    def required(value: Any) -> Any:
        if not isinstance(value, ir.IRNode) or len(value.get_size()) < 3:
            return value
        value.realize()  # else what else uses it computes it once more
        if not last or len(value.get_size()) == 3:
            return ir.ExternKernel.require_contiguous(value)
        is_2d = len(value.get_size()) == 4
        kernel = ir.ExternKernel
        return kernel.require_channels_last(value) if is_2d else kernel.require_channels_last_3d(value)

    return tuple(required(value) for value in arguments), named


def _state_layout(node: fx.Node) -> None:
    """Have an operator that the network itself calls name the memory format that it was traced with.

    Then what computes its tensors writes them so. A group norm's result is traced in another format than its input,
    and the operator would copy it.
    """
    call = _ARGUMENTS[node.target](*node.args, **node.kwargs)
    if call.channels_last is not None or not _is_plain(node, transposed=False):
        return
    values = values_of(call)
    if values.x.dim() == 3:  # whose memory format strides alone leave open
        return
    with values.x.fake_mode:
        _write(node, call._replace(channels_last=values.layout().channels_last))


def _turn_saved(graph: fx.Graph) -> None:
    """Have what operators read channels last, and backward once more, be computed so.

    Inductor knows its own convolutions to want that; what else a graph returns it computes in the memory format that it
    was traced with, and the operators would copy it.
    """
    (output,) = (node for node in graph.nodes if node.op == "output")
    readers = (*_CONVOLUTIONS, *OPERATORS.values(), output.target)
    for node in output.all_input_nodes:
        value = node.meta.get("val")
        if node.target is not _CONVERSION or value.dim() != 4 or not value.is_contiguous():
            continue
        is_read_last = any(user.kwargs.get("channels_last") for user in node.users if user.target in _ARGUMENTS)
        if is_read_last and all(user.target in readers for user in node.users):
            with value.fake_mode:
                node.meta["val"] = value.contiguous(memory_format=torch.channels_last)


def _memory_formats(graph: fx.Graph) -> dict[fx.Node, bool]:
    """The forward operators whose memory format is known as they are lowered, and whether that is channels last."""
    known = {}
    for node in graph.nodes:
        if node.target is OPERATORS[Forward] and len(node.args) > 1 and _is_plain(node, transposed=False):
            last = True if node.meta.get(_TURNED) else node.kwargs.get("channels_last")
            known.update({} if last is None else {node: last})
    return known


def _trains(graph: fx.Graph) -> bool:
    """Whether a graph is one of training: its weights change from call to call."""
    names = [str(node.target) for node in graph.nodes if node.op == "placeholder"]
    return any(name.startswith(("primals", "tangents")) for name in names)


def _is_better_last(graph: fx.Graph) -> bool:
    """Whether Inductor would turn this graph's 2-D convolutions to channels last, the operators' ones among them."""
    from torch._inductor.graph import GraphLowering

    read = SimpleNamespace(graph=_with_convolutions(graph))
    try:
        return bool(GraphLowering.decide_layout_opt(read, is_inference=not _trains(graph)))
    except (AttributeError, TypeError, KeyError):  # it is Inductor's own, and may change
        return False


def _with_convolutions(graph: fx.Graph) -> fx.Graph:
    """The graph, or a copy in which PyTorch's own convolutions stand where it has operators."""
    if not any(node.target is OPERATORS[Forward] for node in graph.nodes):
        return graph
    copied = _copied(graph)
    for node in list(copied.nodes):
        if node.target is OPERATORS[Forward]:
            _as_convolution(copied, node)
    return copied


def _copied(graph: fx.Graph) -> fx.Graph:
    copied = fx.Graph()
    copied.output(copied.graph_copy(graph, {}))
    return copied


def _as_convolution(graph: fx.Graph, node: fx.Node) -> None:
    """Put PyTorch's own convolution where the operator is, without what follows it."""
    call = Forward(*node.args, **node.kwargs)
    plain = (False, [0] * len(call.stride))
    with graph.inserting_before(node):
        made = graph.call_function(
            aten.convolution.default,
            (call.x, call.w, call.bias, call.stride, call.padding, call.dilation, *plain, call.groups),
        )
    made.meta = dict(node.meta)
    node.replace_all_uses_with(made)
    graph.erase_node(node)


def _asked(device: Any) -> tuple[Planner, Flags]:
    """What decides about problems on a device, and PyTorch's switches for it.

    A graph waits for its kernels: what is put in stays.
    """
    settings = replace(planner_of(current(device.type)).settings, background=False)
    return Planner(settings), Flags.of(state(), on_gpu=device.type == "cuda")


def _measures(device: Any) -> bool:
    """Whether misses on a device are measured."""
    planner, flags = _asked(device)
    return planner.settings.measures(flags)


def _prepare(graph: fx.Graph, is_better_last: bool) -> None:
    """Find all that a graph lacks answers to at once, where misses are measured, and compile all that it will launch.

    A copy of the graph tells what.
    """
    convolutions = (*_CONVOLUTIONS, OPERATORS[Forward])
    read = (node.args[0].meta.get("val") for node in graph.nodes if node.target in convolutions)
    devices = {value.device for value in read if isinstance(value, torch.Tensor)}
    lacking: dict[Any, list[ProblemDescription]] = {device: [] for device in devices if _measures(device)}

    def is_missing(problem: ProblemDescription, device: Any) -> bool:
        if device in lacking:
            lacking[device].append(problem)
        return device in lacking

    if lacking:
        _replace(Writing(_copied(graph), is_missing, is_better_last))
    for device, problems in lacking.items():
        planner, flags = _asked(device)
        find_missing(problems, device, flags, planner)
    on_gpu: dict[Any, list[Solution]] = {device: [] for device in devices if device.type == "cuda"}

    def is_answered(problem: ProblemDescription, device: Any) -> bool:
        planner, flags = _asked(device)
        best = fastest(problem, device, flags, planner)
        if best is not None and device in on_gpu:
            on_gpu[device].append(best)
        return best is not None

    if on_gpu:
        _replace(Writing(_copied(graph), is_answered, is_better_last))
    for device, solutions in on_gpu.items():
        compile_ahead(solutions, device, _asked(device)[0])


def _replace(writing: Writing) -> None:
    """Put operators in for the convolutions of a graph, where they are served."""
    if writing.is_better_last:
        _turn_last(writing)
    for node in list(writing.graph.nodes):
        if node.target is aten.convolution.default and _is_plain(node, node.args[6]):
            _replace_forward(writing, node)
        elif node.target is aten.convolution_backward.default and _is_plain(node, node.args[7]):
            _replace_backward(writing, node)


def _turn_last(writing: Writing) -> None:
    """Have the 2-D operators that the network itself calls run channels last, where FindDBs answer all of them so.

    Where one stayed channels first, tensors would be copied between it and its neighbours. Nodes are marked for the
    lowering, and say what they were traced with: who reads strides (views of outputs, `as_strided`, operators of a
    fixed stride order) is given these by Inductor, as it gives them where it turns convolutions itself.
    """
    operators = [node for node in writing.graph.nodes if node.target is OPERATORS[Forward] and _is_first(node)]
    calls = [Forward(*node.args, **node.kwargs) for node in operators]
    problems = [writing.served(call._replace(channels_last=True)) for call in calls]
    if None in problems:
        return
    for node, call, problem in zip(operators, calls, problems, strict=True):
        assert problem is not None
        _write(node, call)
        node.meta[_TURNED] = True
        writing.put_in.append(problem)


def _write(node: fx.Node, call: Call) -> None:
    """Have a node make a call whose memory format is given by name."""
    node.args, node.kwargs = spelt(call)


def _is_first(node: fx.Node) -> bool:
    """Whether an operator's tensors are 2-D, of sizes that are numbers, and channels first as it was traced."""
    value = node.meta["val"]
    return value.dim() == 4 and _is_plain(node, transposed=False) and bool(value.is_contiguous())


@dataclass(slots=True)
class _Chain:
    """A convolution and what follows it.

    Attributes:
        nodes: in order, the convolution first.
        channel_steps: "sub", "mul" or "add" with what has a number for each channel, on what the convolution gives.
        channel_bias: what is added to each image's channels after them, None for nothing.
        residual: what is added, None for nothing.
        numbers: the activation, and what is done with the residual.
    """

    nodes: list[fx.Node]
    channel_steps: list[tuple[str, fx.Node]] = field(default_factory=list)
    channel_bias: fx.Node | None = None
    residual: fx.Node | None = None
    numbers: Nonlinearity = field(default_factory=Nonlinearity)

    @property
    def is_fused(self) -> bool:
        """Whether anything follows but conversions."""
        added = (self.channel_bias, self.residual)
        return bool(self.channel_steps) or any(added) or self.numbers.activation != "none"


def _chains(convolution: fx.Node) -> list[_Chain]:
    """What follows a convolution and is used by nothing else, as far as it goes, longest first.

    Each ends with a tensor of the convolution's dtype.
    """
    chain, ends = _Chain([convolution]), list[_Chain]()
    while True:
        end = chain.nodes[-1]
        if chain.is_fused and end.meta["val"].dtype == convolution.meta["val"].dtype:
            ends.append(replace(chain, nodes=[*chain.nodes], channel_steps=[*chain.channel_steps]))
        if not _takes_next(chain):
            return ends[::-1]


def _takes_next(chain: _Chain) -> bool:
    """Whether the step after a chain was taken into it."""
    end = chain.nodes[-1]
    if chain.numbers.activation == "none" and (found := activation_of(end)) is not None:
        chain.numbers = replace(found.numbers, beta=chain.numbers.beta)
        chain.nodes += found.steps
        return True
    if len(end.users) != 1:
        return False
    (user,) = end.users
    if user.target is _CONVERSION:
        is_taken = user.args[1] in (torch.float32, chain.nodes[0].meta["val"].dtype)
    else:
        is_taken = any(takes(chain, user) for takes in (_takes_channel_step, _takes_channel_bias, _takes_residual))
    chain.nodes += [user] if is_taken else []
    return is_taken


def _takes_channel_step(chain: _Chain, user: fx.Node) -> bool:
    kinds = {aten.sub.Tensor: "sub", aten.mul.Tensor: "mul", aten.add.Tensor: "add"}
    is_begun = chain.channel_bias is not None or chain.residual is not None or chain.numbers.activation != "none"
    if user.target not in kinds or user.kwargs or is_begun:
        return False
    end, convolution = chain.nodes[-1], chain.nodes[0]
    first, second = user.args
    kind, other = kinds[user.target], second if first is end else first
    is_subtracted = kind != "sub" or first is end
    if not is_subtracted or not _is_of_channels(other, convolution.meta["val"].shape):
        return False
    chain.channel_steps.append((kind, other))
    return True


def _is_of_channels(node: Any, shape: Sequence[int]) -> bool:
    """Whether a step gives a number for each channel of a tensor of that shape."""
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return False
    ones = (1,) * (len(shape) - 2)
    return tuple(value.shape) in ((shape[1], *ones), (1, shape[1], *ones))


def _takes_channel_bias(chain: _Chain, user: fx.Node) -> bool:
    """Whether a step adds a number to each channel of each image, before anything is added to each element."""
    is_begun = chain.channel_bias is not None or chain.residual is not None or chain.numbers.activation != "none"
    if user.target is not aten.add.Tensor or user.kwargs or is_begun:
        return False
    first, second = user.args
    other, value = second if first is chain.nodes[-1] else first, chain.nodes[0].meta["val"]
    given = other.meta.get("val") if isinstance(other, fx.Node) else None
    shape = (*value.shape[:2], *(1,) * (value.dim() - 2))
    if not isinstance(given, torch.Tensor) or tuple(given.shape) != shape or given.dtype != value.dtype:
        return False
    chain.channel_bias = other
    return True


def _takes_residual(chain: _Chain, user: fx.Node) -> bool:
    if user.target is not aten.add.Tensor or chain.residual is not None or user.kwargs.keys() - {"alpha"}:
        return False
    end, value = chain.nodes[-1], chain.nodes[0].meta["val"]
    first, second = user.args
    is_first = first is end
    other, alpha = second if is_first else first, user.kwargs.get("alpha", 1)
    if first is second or not isinstance(other, fx.Node) or (alpha != 1 and not is_first):
        return False
    if other.target is _CONVERSION and other.args[0].meta["val"].dtype == value.dtype:
        other = other.args[0]
    given = other.meta.get("val")
    if not isinstance(given, torch.Tensor) or given.shape != value.shape or given.dtype != value.dtype:
        return False
    position = "before" if chain.numbers.activation == "none" else "after"
    chain.residual = other
    chain.numbers = replace(chain.numbers, residual_position=position, beta=float(alpha))
    return True


def _replace_forward(writing: Writing, node: fx.Node) -> None:
    """Put an operator in for a convolution with what follows it, if a FindDB answers."""
    if put_statistics(writing, node):
        return
    for chain in _chains(node):
        end = chain.nodes[-1]
        with writing.graph.inserting_before(end):
            made = _put_forward(writing, chain)
        if made is not None:
            end.replace_all_uses_with(made)
            for each in reversed(chain.nodes):
                if not each.users:
                    writing.graph.erase_node(each)
        writing.tidy()
        if made is not None:
            return


def _put_forward(writing: Writing, chain: _Chain) -> fx.Node | None:
    """The operator for a chain; with steps of channels, in the first form that a FindDB answers.

    These are scale and bias in float32; weights times the scale and a bias in float32; the same with a bias of x's
    dtype, as a network has whose batch norms are folded.
    """
    x, w, bias, stride, padding, dilation, _, _, groups = chain.nodes[0].args
    numbers, value = chain.numbers, chain.nodes[0].meta["val"]
    call = Forward(
        x,
        w,
        bias,
        None,
        chain.residual,
        numbers.activation,
        stride,
        padding,
        dilation,
        groups,
        numbers.residual_position,
        numbers.beta,
        numbers.low,
        numbers.high,
        numbers.slope,
        writing.is_last(value),
        None if chain.channel_bias is None else writing.step(aten.reshape.default, chain.channel_bias, value.shape[:2]),
    )
    if not chain.channel_steps:
        return writing.put(call)
    scale, shift = _scale_and_shift(writing, chain, bias)
    made = writing.put(call._replace(scale=scale, bias=shift))
    if made is not None:
        return made
    if scale is not None:
        factors = writing.step(aten.reshape.default, scale, [-1, *(1,) * (value.dim() - 1)])
        product = writing.step(aten.mul.Tensor, w, factors)
        call = call._replace(w=_converted(writing, product, w.meta["val"].dtype))
        made = writing.put(call._replace(bias=shift))
    if made is None and shift is not None:
        made = writing.put(call._replace(bias=_converted(writing, shift, value.dtype)))
    return made


def _scale_and_shift(writing: Writing, chain: _Chain, bias: Any) -> tuple[fx.Node | None, fx.Node | None]:
    """The factor and the summand of each channel that a chain's steps make together, in float32 or wider."""
    wide = torch.promote_types(torch.float32, chain.nodes[0].meta["val"].dtype)
    scale, shift = None, None if bias is None else _converted(writing, bias, wide)
    for kind, node in chain.channel_steps:
        vector = _converted(writing, writing.step(aten.reshape.default, node, [-1]), wide)
        if kind == "mul":
            scale = vector if scale is None else writing.step(aten.mul.Tensor, scale, vector)
            shift = None if shift is None else writing.step(aten.mul.Tensor, shift, vector)
        elif shift is None:
            shift = writing.step(aten.neg.default, vector) if kind == "sub" else vector
        else:
            shift = writing.step(aten.sub.Tensor if kind == "sub" else aten.add.Tensor, shift, vector)
    return scale, shift


def _converted(writing: Writing, node: fx.Node, dtype: Any) -> fx.Node:
    return node if node.meta["val"].dtype == dtype else writing.step(_CONVERSION, node, dtype)


def _replace_backward(writing: Writing, node: fx.Node) -> None:
    """Put operators in for the gradients of a convolution that something is computed with, where a FindDB answers."""
    gradients = {user.args[1]: user for user in node.users}
    mask = list(node.args[10])
    if 0 in gradients and mask[0] and _put_backward_data(writing, node, gradients[0]):
        mask[0] = False
    sums = gradients.get(2) if mask[2] else _sum_of_channels(node)
    if 1 in gradients and mask[1] and sums is not None and _put_backward_weights(writing, node, gradients[1], sums):
        mask[1] = mask[2] = False
    writing.tidy()
    for each in [user for user in node.users if not user.users]:
        writing.graph.erase_node(each)
    if not node.users:
        writing.graph.erase_node(node)
    elif mask != list(node.args[10]):
        node.args = (*node.args[:10], mask)
        node.meta["val"] = tuple(v if wanted else None for v, wanted in zip(node.meta["val"], mask, strict=True))


def _geometry(node: fx.Node) -> tuple[Any, ...]:
    """Stride, padding, dilation and groups of a backward convolution."""
    *_, stride, padding, dilation, _, _, groups, _ = node.args
    return stride, padding, dilation, groups


def _put_backward_data(writing: Writing, node: fx.Node, gradient: fx.Node) -> bool:
    """Whether the gradient of the input was put in with what is added to it and relu's mask, or one of them."""
    dy, x, w = node.args[:3]
    value = gradient.meta["val"]
    steps: list[tuple[fx.Node, Any, Any]] = []
    end, residual = gradient, None
    addition = next(iter(end.users)) if len(end.users) == 1 else None
    if addition is not None and addition.target is aten.add.Tensor and not addition.kwargs:
        first, second = addition.args
        residual = second if first is end else first
        given = residual.meta.get("val") if isinstance(residual, fx.Node) else None
        is_alike = isinstance(given, torch.Tensor) and given.shape == value.shape and given.dtype == value.dtype
        if first is second or not is_alike:
            residual = None
        else:
            steps.append((addition, residual, None))
            end = addition
    mask = next(iter(end.users)) if len(end.users) == 1 else None
    saved = None if mask is None else _relu_saved(mask, end)
    if mask is not None and saved is not None:
        steps.append((mask, residual, saved))
    last = writing.is_last(value, dy.meta["val"])
    for end, residual, saved in reversed(steps):
        call = BackwardData(dy, x, w, residual, saved, "relu" if saved is not None else "none", *_geometry(node))
        with writing.graph.inserting_before(end):
            made = writing.put(call._replace(channels_last=last))
        if made is not None:
            end.replace_all_uses_with(made)
            _erase_unused(writing.graph, end)
            return True
    return False


def _relu_saved(mask: fx.Node, gradient: fx.Node) -> fx.Node | None:
    """What relu's derivative is taken at, where a step is where(saved <= 0, 0, gradient)."""
    if mask.target is not aten.where.self or mask.args[2] is not gradient or mask.args[1] is gradient:
        return None
    condition, zero, _ = mask.args
    is_zero = isinstance(zero, fx.Node) and (
        (zero.target is aten.scalar_tensor.default and zero.args[0] == 0)
        or (zero.target is aten.full.default and zero.args[1] == 0)
    )
    if not is_zero or not isinstance(condition, fx.Node) or condition.target is not aten.le.Scalar:
        return None
    saved, bound = condition.args
    given, value = saved.meta.get("val"), gradient.meta["val"]
    is_alike = isinstance(given, torch.Tensor) and given.shape == value.shape and given.dtype == value.dtype
    return saved if bound == 0 and is_alike and mask.meta["val"].dtype == value.dtype else None


def _erase_unused(graph: fx.Graph, node: fx.Node) -> None:
    """Erase a step, and those before it that nothing else uses, up to convolutions."""
    if node.users or node.op != "call_function" or node.target is aten.convolution_backward.default:
        return
    before = node.all_input_nodes
    graph.erase_node(node)
    for each in before:
        if each._erased is False:
            _erase_unused(graph, each)


def _sum_of_channels(node: fx.Node) -> fx.Node | None:
    """The step that sums the gradient of the output of a backward convolution over all but channels."""
    dy = node.args[0]
    rank = dy.meta["val"].dim()
    axes = [0, *range(2, rank)]
    sums = (user for user in dy.users if user.target is aten.sum.dim_IntList and len(user.args) == 2)
    return next((each for each in sums if sorted(axis % rank for axis in each.args[1]) == axes), None)


def _put_backward_weights(writing: Writing, node: fx.Node, gradient: fx.Node, sums: fx.Node) -> bool:
    """Whether the gradient of the weights was put in together with that of the bias."""
    dy, x, w = node.args[:3]
    last = writing.is_last(gradient.meta["val"], dy.meta["val"])
    stride, padding, dilation, groups = _geometry(node)
    call = BackwardWeights(dy, x, w, stride, padding, dilation, groups, sums.meta["val"].dtype, last)
    order = {each: place for place, each in enumerate(writing.graph.nodes)}
    if any(order[user] < order[node] for user in sums.users):
        return False
    with writing.graph.inserting_after(node):
        made = writing.put(call)
    if made is None:
        return False
    with writing.graph.inserting_after(made):
        for i, each in enumerate((gradient, sums)):
            item = writing.graph.call_function(operator.getitem, (made, i))
            item.meta["val"] = made.meta["val"][i]
            each.replace_all_uses_with(item)
            writing.graph.erase_node(each)
    return True
