"""`FusedConvolution`, the module that a convolution becomes with what follows it."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._C import _is_tracing, _len_torch_dispatch_stack  # asked at each run: by their names alone
from torch.compiler import is_compiling

from miofind.errors import LaunchError
from miofind.torch.direct import times_forgotten
from miofind.torch.fused.calls import ShortForward
from miofind.torch.fused.differentiable import (
    Tensors,
    arguments_of,
    autocast_dtype,
    derivatives_are_off,
    need_derivatives,
    run,
)
from miofind.torch.fused.kept_weights import Memory, Turned, forget_if_swapped, is_of_processes, kept, may_keep, renew
from miofind.torch.fused.nonlinearity import Nonlinearity
from miofind.torch.fused.plans import Settled, decided, packing, planned, settled
from miofind.torch.fused.unfused import activated
from miofind.torch.fused.window import Window
from miofind.torch.override.calls import Unserved
from miofind.torch.override.formats import is_last, is_spread, layout_like, output_layout, strides
from miofind.torch.override.memory import is_capturing

logger = logging.getLogger(__name__)

_Tensor, _Parameter = torch.Tensor, torch.nn.Parameter  # likewise
_convolution = torch.ops.miofind.convolution.default
_short_convolution = torch.ops.miofind.short_convolution.default
_MAX_INPUTS = 64
"""Forms of inputs for which a module remembers what they need."""


@dataclass(slots=True)
class _Ready:
    """What inputs of one form need.

    Attributes:
        weight: in their dtype and memory format.
        parameter: that it is of.
        output_shape: of y.
        channel_shape: of residuals that have a number for each channel of each image.
        residual_strides: of residuals that are known to lie in y's order.
        settled: that PyTorch computes them, where a run showed it.
        packed: the weight's filters packed as the solution takes them that runs them, and the words that say so.
        asked: how often all had been decided anew when these were asked for.
    """

    weight: Any
    parameter: Any
    output_shape: tuple[int, ...]
    channel_shape: tuple[int, ...]
    residual_strides: set[tuple[int, ...]]
    settled: Settled | None = None
    packed: tuple[Any, ...] = ()
    asked: int = -1

    def run(self, arguments: tuple[Any, ...]) -> Any:
        """y, by the short operator's arguments; by PyTorch's own operations at once where those are known to do it."""
        if _wants_long_operator(arguments[0]):
            return _convolution(*ShortForward.of(*arguments))
        if self.settled is not None:
            call = ShortForward.of(*arguments)
            if self.settled.holds(call):
                return self.settled.run(call)
        if self.asked == times_forgotten():
            return _short_convolution(*(arguments[:-2] + self.packed if self.packed else arguments))
        y = _short_convolution(*arguments)
        self._ask(ShortForward.of(*arguments))
        return y

    def _ask(self, call: ShortForward) -> None:
        """Ask what runs calls like one that ran, unless that may change yet, and pack filters where it takes them so.

        The plan of the calls to come is made at once: one of them may be captured in a CUDA graph.
        """
        asked, plan = times_forgotten(), decided(call)
        if plan is None or is_capturing(call.x.device):
            return
        self.settled, self.packed = settled(call, plan), ()
        try:
            form = packing(call, plan)
            if form is not None and may_keep(self.parameter, form):
                call = call._replace(filters=kept(self.parameter, form), packing=form.name)
                self.packed = call.arguments[-2:]
                planned(call)
        except Unserved:
            return
        except (LaunchError, torch.OutOfMemoryError) as error:
            logger.warning("filters are not packed: %s", error)
        self.asked = asked


@dataclass(slots=True)
class _ReadyInputs:
    """Weights prepared for runs.

    Attributes:
        memory, version: of the weights that they were made of.
        of_inputs: by the dtype of a run and what its input is like.
    """

    memory: Memory | None = None
    version: int = -1
    of_inputs: dict[tuple[Any, ...], _Ready] = field(default_factory=dict)

    def are_of(self, weight: Any) -> bool:
        """Whether they were made of a weight, and it was not written to since."""
        memory = self.memory
        return memory is not None and self.version == weight._version and memory.is_of(weight)

    def __reduce__(self) -> tuple[Any, ...]:
        """None of them in copies and pickles, whoever makes these: parametrizations copy a module by its attributes."""
        return _ReadyInputs, ()


class FusedConvolution(torch.nn.Module):
    """activation(x * weight + bias + beta * residual) for inference, by `miofind.torch.convolution`.

    state_dict has `weight`, (k, c/groups, *filter), and `bias`, (k,), where there is one. Where a batch norm or
    numbers of the network's code are in these, it has `folded`, true; a state_dict of the network before `fuse` lacks
    that, and is refused. Weight and bias are parameters that require no gradient; x may. Weights in the dtype of
    autocast or in the memory format of x are made once, kept beside them, and written anew, in place, where the
    weights change; they are in no state_dict and in no pickle. Loading a state_dict does so at once, for captured CUDA
    graphs; other changes reach these by a run.

    Args:
        weight: (k, c/groups, *filter).
        bias: (k,), or None.
        window: how filters move over x.
        numbers: the activation, and what is done with a residual.
        adds_in_place: the sum with a residual of another dtype keeps that of the convolution's result.
        has_norm: a batch norm is folded into the weights, so x must have a batch dimension.
        widens: y has the weights' dtype under autocast, too, as the product with a constant of theirs has.
        has_residual: it takes a residual, without which it raises what the addition of None raises.
        residual_first: the sum is that of the residual and the convolution's result: in memory it lies as the residual.
        is_folded: a batch norm, or numbers of the network's code, are in the weights.
    """

    __module__ = "miofind.torch"  # by which networks are pickled

    def __init__(
        self,
        weight: Any,
        bias: Any,
        window: Window,
        numbers: Nonlinearity,
        *,
        adds_in_place: bool = False,
        has_norm: bool = False,
        widens: bool = False,
        has_residual: bool = False,
        residual_first: bool = False,
        is_folded: bool = False,
    ) -> None:
        super().__init__()
        self.has_residual = has_residual
        self.adds_in_place, self.has_norm, self.residual_first = adds_in_place, has_norm, residual_first
        self.widens = widens
        self.weight = torch.nn.Parameter(weight.detach(), requires_grad=False)
        given = None if bias is None else torch.nn.Parameter(bias.detach(), requires_grad=False)
        self.register_parameter("bias", given)
        if is_folded:
            self.register_buffer("folded", torch.ones((), dtype=torch.bool, device=weight.device))
        self.window = window
        self.numbers = numbers
        self._ready = _ReadyInputs()
        self._arguments = arguments_of(window, numbers)
        self._words = ShortForward(*(None,) * 5, *self._arguments).arguments[-1]

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; another weight has other copies, though its memory and version may be those of this one."""
        if name == "weight":
            object.__setattr__(self, "_ready", _ReadyInputs())
        super().__setattr__(name, value)

    def forward(self, x: Any, residual: Any = None) -> Any:
        """y, (n, k, *out_spatial), of x: (n, c, *spatial), and a residual of y's shape, which the kernel adds.

        So is a number for each channel of each image, (n, k, 1, ...). A residual of another shape or dtype, which
        PyTorch broadcasts or promotes, is added by PyTorch, and so is one that is the first summand and lies in another
        order, which the sum takes from it.

        Raises:
            TypeError: an addition was fused, and there is no residual.
            ValueError: a batch norm was fused, and x is unbatched, (c, *spatial).
        """
        if not _is_traced(x):
            ready = self._ready.of_inputs.get(_form(x, x.dtype))
            if ready is not None and self._is_plain(ready, x, residual):
                weight, bias, of_channels = ready.weight, self._parameters["bias"], None
                if derivatives_are_off() or not need_derivatives(Tensors(x, weight, bias, None, residual)):
                    if residual is not None and residual.shape != ready.output_shape:
                        residual, of_channels = None, residual.flatten(1)
                    return ready.run((x, weight, bias, None, residual, of_channels, None, self._words))
        return self._general(x, residual)

    def _is_plain(self, ready: _Ready, x: Any, residual: Any) -> bool:
        """Whether the operator alone computes a run, by weights that are still those; asked at every run."""
        weight = self._parameters.get("weight")  # none where it was parametrized or pruned since
        if type(weight) is not _Parameter or _is_read_itself(weight) or not self._ready.are_of(weight):
            return False
        if residual is None:
            if self.has_residual:
                return False
        else:
            is_tensor = isinstance(residual, torch.Tensor)
            if not is_tensor or residual.dtype != x.dtype:
                return False
            if residual.shape != ready.output_shape:
                if residual.shape != ready.channel_shape or not self._takes_channels(residual):
                    return False
            elif self.residual_first and residual.stride() not in ready.residual_strides:
                return False
        return x.dtype is weight.dtype and autocast_dtype(x) is None

    def _general(self, x: Any, residual: Any) -> Any:
        """The same for whatever there may be."""
        if residual is None and self.has_residual:
            raise TypeError("unsupported operand type(s) for +: 'Tensor' and 'NoneType'")
        is_single = x.dim() == self.weight.dim() - 1
        if is_single and self.has_norm:  # BatchNorm1d takes its places for channels, the others refuse it
            raise ValueError(f"a batch norm was fused, and x, {tuple(x.shape)}, is unbatched: give x.unsqueeze(0)")
        if is_single and isinstance(residual, torch.Tensor) and residual.dim() >= x.dim():
            residual = residual.unsqueeze(0)  # of fewer dimensions it spreads as it is; one of none decides no dtype
        x = x.unsqueeze(0) if is_single else x
        y = self._computed(x, residual)
        y = y.to(torch.promote_types(y.dtype, self.weight.dtype)) if self.widens else y
        return y.squeeze(0) if is_single else y

    def _computed(self, x: Any, residual: Any) -> Any:
        of_autocast = autocast_dtype(x)
        has_autocast = of_autocast is not None and x.dtype != torch.float64
        dtype = of_autocast if has_autocast else x.dtype
        if not has_autocast and x.dtype != self.weight.dtype:
            raise RuntimeError(f"x has {x.dtype} and the weights have {self.weight.dtype}: convert one")
        weight, numbers = self._weight_for(x, dtype), self.numbers
        bias = self.bias
        if has_autocast and bias is not None and bias.dtype != torch.float32:
            bias = bias.to(dtype)
        if residual is not None and not (self._is_alike(residual, x, dtype) and self._lies_alike(residual, x, dtype)):
            return self._with_other(residual, Tensors(x, weight, bias, None, None), dtype)
        given = Tensors(x, weight, bias, None, residual)
        if has_autocast or need_derivatives(given):
            return run(given, self.window, numbers, may_be_written=True)
        return self._run(given, None, dtype)

    def _run(self, given: Tensors, of_channels: Any, dtype: Any) -> Any:
        """y in a dtype, as later calls with such inputs are run.

        Without weights that are ready, too, by the operator of these calls: each operator has plans of its own, and
        while a CUDA graph is captured none is made.
        """
        arguments = (*given, of_channels, None, self._words)
        is_traced = _is_traced(given.x)
        ready = None if is_traced else self._ready.of_inputs.get(_form(given.x, dtype))
        if ready is not None and ready.weight is given.w:
            return ready.run(arguments)
        if is_traced or _wants_long_operator(given.x):
            return _convolution(*given, *self._arguments, None, of_channels)
        return _short_convolution(*arguments)

    def _with_other(self, residual: Any, given: Tensors, dtype: Any) -> Any:
        """The same with a residual that is unlike the convolution's result: PyTorch adds it, if not of channels."""
        is_of_channels = given.x.dtype == dtype and self._is_of_channels(residual, given.x, dtype)
        if is_of_channels and not need_derivatives(given._replace(residual=residual)):
            return self._run(given, residual.flatten(1), dtype)
        numbers = self.numbers
        y = run(given, self.window, Nonlinearity())
        if numbers.residual_position == "after":
            y = activated(y, numbers)
        add = torch.Tensor.add_ if self.adds_in_place else torch.add
        added = residual + y if self.residual_first else add(y, residual, alpha=numbers.beta)
        return added if numbers.residual_position == "after" else activated(added, numbers)

    def _takes_channels(self, residual: Any) -> bool:
        """Whether the kernel can add a residual of channels, of whose order a sum may be."""
        is_plain = self.numbers.residual_position == "before" and self.numbers.beta == 1
        return is_plain and (not self.residual_first or residual.is_contiguous())

    def _is_alike(self, residual: Any, x: Any, dtype: Any) -> bool:
        """Whether a residual has the shape and the dtype of the convolution's result."""
        if not isinstance(residual, torch.Tensor) or residual.dtype != dtype:
            return False
        return tuple(residual.shape) == self.window.output_shape(x.shape, self.weight.shape)

    def _lies_alike(self, residual: Any, x: Any, dtype: Any) -> bool:
        """Whether a sum lies in the order of the convolution's result."""
        if not self.residual_first:
            return True
        if _is_traced(x):  # and torch.compile has no order of its own of one dimension
            last = x.dim() > 3 and (is_last(x) or is_last(self.weight))
            return is_spread(residual, layout_like(x, channels_last=last))
        ready = self._ready.of_inputs.get(_form(x, dtype))
        if ready is not None and residual.stride() in ready.residual_strides:
            return True
        if not is_spread(residual, output_layout(x, self.weight, None, self.window.geometry)):
            return False
        if ready is not None and len(ready.residual_strides) < _MAX_INPUTS:
            ready.residual_strides.add(residual.stride())
        return True

    def _is_of_channels(self, residual: Any, x: Any, dtype: Any) -> bool:
        """Whether a residual has a number for each channel of each image, which a kernel adds, too."""
        if not isinstance(residual, torch.Tensor) or not self._takes_channels(residual):
            return False
        return residual.dtype == dtype and tuple(residual.shape) == _channel_shape(x, self.weight)

    def _weight_for(self, x: Any, dtype: Any) -> Any:
        """The weight in the dtype and the memory format that a run with x needs, from those kept."""
        weight = self.weight
        if _is_traced(x) or type(weight) is not _Parameter or _is_read_itself(weight):
            return weight
        if not self._ready.are_of(weight):
            self._ready = _ReadyInputs(Memory(weight), weight._version)
        made = self._ready
        key = _form(x, dtype)
        ready = made.of_inputs.get(key)
        if ready is None:
            layout = output_layout(x, weight, None, self.window.geometry)
            shape = self.window.output_shape(x.shape, weight.shape)
            copy, of_channels = kept(weight, Turned(dtype, layout.channels_last)), _channel_shape(x, weight)
            ready = _Ready(copy, weight, shape, of_channels, {strides(shape, layout)})
            is_of_this_run = is_capturing(weight.device) or is_of_processes(weight)
            if is_of_this_run or type(ready.weight) is not torch.Tensor:
                return ready.weight
            if len(made.of_inputs) >= _MAX_INPUTS:
                made.of_inputs.clear()
            made.of_inputs[key] = ready
        return ready.weight

    def _load_from_state_dict(self, state: Any, prefix: str, *arguments: Any, **named: Any) -> None:
        """Load weights, and have what was captured in CUDA graphs read them, too."""
        forget_if_swapped(self.weight)
        if "folded" in self._buffers and f"{prefix}weight" in state and f"{prefix}folded" not in state:
            *_, errors = arguments
            errors.append(f"{prefix}weight is of a network before `fuse`: load it into that one, and fuse it anew")
            return
        super()._load_from_state_dict(state, prefix, *arguments, **named)
        renew(self.weight)

    def _apply(self, *arguments: Any, **named: Any) -> Any:
        """Move or convert the module, and leave no copies where it was."""
        forget_if_swapped(self.weight)
        made = super()._apply(*arguments, **named)
        self._ready = _ReadyInputs()
        renew(self.weight)
        return made

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_ready": _ReadyInputs()}

    def extra_repr(self) -> str:
        k, c, *filter_shape = self.weight.shape
        window = self.window
        parts = [f"{c * window.groups}, {k}, kernel_size={tuple(filter_shape)}, stride={window.stride}"]
        parts += [f"padding={window.padding}"] if any(window.padding) else []
        parts += [f"dilation={window.dilation}"] if max(window.dilation) > 1 else []
        parts += [f"groups={window.groups}"] if window.groups > 1 else []
        parts += ["bias"] if self.bias is not None else []
        named = [self.numbers.activation] if self.numbers.activation != "none" else []
        if self.has_residual:
            named.insert(0 if self.numbers.residual_position == "before" else len(named), "residual")
        parts += named
        return ", ".join(parts)


def _wants_long_operator(x: Any) -> bool:
    """Whether somebody reads the operators that are called: a class of tensors of its own, as fake ones, or a mode."""
    return type(x) is not _Tensor or _len_torch_dispatch_stack() > 0


def _is_traced(x: Any) -> bool:
    """Whether torch.compile, TorchScript or `make_fx` writes down what is done, to be the same in each call."""
    return bool(is_compiling() or _is_tracing() or (type(x) is not _Tensor and _is_symbolic(x)))


def _is_symbolic(x: Any) -> bool:
    """Whether a tensor, of a class of its own, has sizes that are no numbers.

    Raises:
        TypeError: it is no tensor.
    """
    if not isinstance(x, _Tensor):
        raise TypeError(f"x must be a tensor, not {type(x).__name__}")
    return any(type(size) is not int for size in x.shape)


def _is_read_itself(weight: Any) -> bool:
    """Whether no copy may stand for a weight: gradients are to reach it, or nobody can tell when it is written to."""
    return bool(weight.requires_grad or weight.is_inference())


def _channel_shape(x: Any, weight: Any) -> tuple[int, ...]:
    """Of a number for each channel of each image."""
    return (x.shape[0], weight.shape[0], *(1,) * (x.dim() - 2))


def _form(x: Any, dtype: Any) -> tuple[Any, ...]:
    """What of an input decides which weights a run in a dtype needs."""
    return dtype, x.shape, x.stride(), x.dtype, x.get_device()
