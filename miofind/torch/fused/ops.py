"""The operators `miofind::convolution`, `convolution_statistics`, and those of gradients.

They run the fastest solution that the FindDB has, else PyTorch's own operations (`unfused`). They have fake kernels,
for torch.compile and torch.export, and rules for autocast and vmap, but no gradients: `differentiable` has those.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from miofind.errors import LaunchError
from miofind.runtime.handle import Handle
from miofind.torch.direct import direct_path
from miofind.torch.fused import unfused
from miofind.torch.fused.answers import override_of, planner_of
from miofind.torch.fused.calls import (
    SHORT,
    BackwardData,
    BackwardWeights,
    Call,
    Forward,
    ShortForward,
    Statistics,
    empty,
    of_one_dtype,
)
from miofind.torch.fused.kept_weights import kept, kept_weights
from miofind.torch.fused.nonlinearity import Nonlinearity
from miofind.torch.fused.packed_filters import PackedFilters, of_solution
from miofind.torch.fused.plans import Unfused, fallback, planned
from miofind.torch.override.calls import Unserved
from miofind.torch.override.formats import dense, layout_like
from miofind.torch.override.plans import Planner
from miofind.torch.override.settings import Settings
from miofind.torch.override.untraced import untraced

LIBRARY = torch.library.Library("miofind", "FRAGMENT")

_WINDOW = "SymInt[] stride, SymInt[] padding, SymInt[] dilation, SymInt groups"
_NUMBERS = "float beta=1., float low=0., float high=6., float? slope=None"
LIBRARY.define(
    f"convolution(Tensor x, Tensor w, Tensor? bias, Tensor? scale, Tensor? residual, str activation, {_WINDOW}, "
    f"str residual_position='before', {_NUMBERS}, bool? channels_last=None, Tensor? channel_bias=None, "
    "Tensor? filters=None, str packing='') -> Tensor"
)
LIBRARY.define(
    f"convolution_statistics(Tensor x, Tensor w, Tensor? bias, {_WINDOW}, bool? channels_last=None) "
    "-> (Tensor, Tensor, Tensor)"
)
LIBRARY.define(
    "convolution_backward_data(Tensor dy, Tensor x, Tensor w, Tensor? residual, Tensor? saved, str derivative, "
    f"{_WINDOW}, {_NUMBERS}, bool? channels_last=None) -> Tensor"
)
LIBRARY.define(
    f"convolution_backward_weights(Tensor dy, Tensor x, Tensor w, {_WINDOW}, ScalarType? bias_dtype=None, "
    "bool? channels_last=None) -> (Tensor, Tensor)"
)
LIBRARY.define(
    "short_convolution(Tensor x, Tensor w, Tensor? bias, Tensor? scale, Tensor? residual, Tensor? channel_bias, "
    "Tensor? filters, str words) -> Tensor"
)
LIBRARY.define("short_convolution_statistics(Tensor x, Tensor w, Tensor? bias, str words) -> (Tensor, Tensor, Tensor)")
LIBRARY.define(
    "short_convolution_backward_data(Tensor dy, Tensor x, Tensor w, Tensor? residual, Tensor? saved, str words) "
    "-> Tensor"
)
LIBRARY.define("short_convolution_backward_weights(Tensor dy, Tensor x, Tensor w, str words) -> (Tensor, Tensor)")
LIBRARY.define("kept_weights(Tensor[] weights, ScalarType dtype, bool channels_last) -> Tensor[]")
LIBRARY.define("packed_filters(Tensor[] weights, str[] solutions, int[] bytes) -> Tensor[]")


def _forward(call: Forward) -> Any:
    plan = planned(call)
    made = None if plan is None else plan.run(call)
    if made is not None:
        return made[0]
    if plan is not None and plan.answer is not None and plan.answer.takes_packed:
        return _forward(call.unpacked)  # by the whole solution, or another
    told = Unfused.of(call) if plan is None else plan.unfused
    assert told is not None
    if told.is_empty:
        return call.output(told.layout)
    with fallback(plan):
        return told.computed(call)


def _statistics(call: Statistics) -> tuple[Any, Any, Any]:
    plan = planned(call)
    made = None if plan is None else plan.run(call)
    if made is not None:
        y, total, of_squares = made
        return y, total, of_squares
    call, layout = of_one_dtype(call), call.layout()
    y, total, of_squares = call.output(layout)
    if not y.numel():
        return y, total.zero_(), of_squares.zero_()
    vectors = (call.bias, None, None, None)
    with fallback(plan):
        y = dense(unfused.convolution(call.x, call.w, vectors, call.window, Nonlinearity()), layout)
    return y, unfused.channel_sums(y), unfused.channel_sums(y.to(total.dtype).square())


def _backward_data(call: BackwardData) -> Any:
    plan = planned(call)
    made = None if plan is None else plan.run(call)
    if made is not None:
        return made[0]
    layout = call.layout()
    if not call.x.numel() or not call.dy.numel():
        return call.output(layout).zero_()
    with fallback(plan):
        dx = unfused.gradients(call.dy, call.x, call.w, call.window, (True, False, False))[0]
    if call.residual is not None:
        dx = torch.add(dx, call.residual, alpha=call.beta)
    if call.saved is not None:
        dx = unfused.derivative(dx, call.saved, call.nonlinearity)
    return dense(dx, layout)


def _backward_weights(call: BackwardWeights) -> tuple[Any, Any]:
    plan = planned(call)
    made = None if plan is None else plan.run(call)
    if made is not None:
        return made[0], made[1] if call.bias_dtype is not None else call.dy.new_empty(0)
    layout = call.layout()
    if not call.x.numel() or not call.dy.numel():
        dw, of_bias = call.output(layout)
        return dw.zero_(), of_bias.zero_()
    with fallback(plan):
        dw = unfused.gradients(call.dy, call.x, call.w, call.window, (False, True, False))[1]
    if call.bias_dtype is None:
        return dense(dw, layout), call.dy.new_empty(0)
    return dense(dw, layout), unfused.channel_sums(call.dy).to(call.bias_dtype)


def _kernel(kind: Callable[..., Call], kernel: Callable[[Any], Any]) -> Callable[..., Any]:
    """What runs an operator whose arguments are those of a call."""

    def run(*arguments: Any, **named: Any) -> Any:
        return kernel(kind(*arguments, **named))

    return run


def _fake(call: Call) -> Any:
    """What a call gives, without its numbers."""
    return call.output(call.layout())


def _autocast(operator: Any, device_type: str) -> Callable[..., Any]:
    """The operator under autocast: all tensors but vectors in the dtype of autocast.

    Bias and scale keep theirs: float32 ones are added before the result is rounded.
    """
    key = torch._C.DispatchKey.AutocastCUDA if device_type == "cuda" else torch._C.DispatchKey.AutocastCPU
    excluded = torch._C.DispatchKeySet(key)

    def kernel(*arguments: Any, **named: Any) -> Any:
        dtype = torch.get_autocast_dtype(device_type)
        with torch._C._ExcludeDispatchKeyGuard(excluded):
            cast = [in_autocast(value, dtype) for value in arguments]
            return operator(*cast, **{name: in_autocast(value, dtype) for name, value in named.items()})

    return untraced(kernel)


def in_autocast(value: Any, dtype: Any) -> Any:
    """A tensor of more than one dimension in the dtype of autocast, unless it is float64; whatever else as it is."""
    if not isinstance(value, torch.Tensor) or value.dim() < 2 or value.dtype == torch.float64:
        return value
    return value.to(dtype) if value.is_floating_point() else value


_KERNELS: dict[str, tuple[type[Call], Callable[[Any], Any]]] = {
    "convolution": (Forward, _forward),
    "convolution_statistics": (Statistics, _statistics),
    "convolution_backward_data": (BackwardData, _backward_data),
    "convolution_backward_weights": (BackwardWeights, _backward_weights),
}
for _long, (_kind, _run) in _KERNELS.items():
    for _name, _made in ((_long, _kind), (f"short_{_long}", SHORT[_kind].of)):
        for _place in ("CPU", "CUDA"):
            LIBRARY.impl(_name, untraced(_kernel(_made, _run)), _place)
            LIBRARY.impl(_name, _autocast(getattr(torch.ops.miofind, _name), _place.lower()), f"Autocast{_place}")
        torch.library.register_fake(f"miofind::{_name}", _kernel(_made, _fake), lib=LIBRARY)

SHORT_OPERATORS = {kind: getattr(torch.ops.miofind, f"short_{name}").default for name, (kind, _) in _KERNELS.items()}
"""By the arguments of those that they stand for, at less cost to the host: for calls that nobody reads in a graph."""
OPERATORS = {kind: getattr(torch.ops.miofind, name).default for name, (kind, _) in _KERNELS.items()}
"""By the arguments that they take."""
ARGUMENTS = {operator: kind for kind, operator in OPERATORS.items()}
"""The arguments that operators take."""


def _kept_weights_fake(weights: Sequence[Any], dtype: Any, channels_last: bool) -> list[Any]:
    layouts = [layout_like(w, channels_last=channels_last) for w in weights]
    return [empty(w.shape, w, layout).to(dtype) for w, layout in zip(weights, layouts, strict=True)]


def _packed_filters(weights: Sequence[Any], solutions: Sequence[str], sizes_bytes: Sequence[int]) -> list[Any]:
    """The filters of weights on one device, each packed for a solution that `PackedFilters` names."""
    handle = _handle_for(weights[0])
    return [kept(w, _packing_of(solution, handle)) for w, solution in zip(weights, solutions, strict=True)]


def _handle_for(weight: Any) -> Handle:
    """The handle in force for a weight's device; the default one where none is."""
    try:
        return planner_of(override_of(weight)).handle_of(weight.device)
    except Unserved:  # the graph was compiled when others were in force
        return Planner(Settings()).handle_of(weight.device)


def _packing_of(solution: str, handle: Handle) -> PackedFilters:
    found = of_solution(solution, handle)
    if found is None:
        raise LaunchError(f"filters of a compiled graph cannot be packed for {solution}: compile the network anew")
    return found


def _packed_filters_fake(weights: Sequence[Any], solutions: Sequence[str], sizes_bytes: Sequence[int]) -> list[Any]:
    return [w.new_empty((size,), dtype=torch.uint8) for w, size in zip(weights, sizes_bytes, strict=True)]


for _place in ("CPU", "CUDA"):
    LIBRARY.impl("kept_weights", untraced(kept_weights), _place)
    LIBRARY.impl("packed_filters", untraced(_packed_filters), _place)
torch.library.register_fake("miofind::kept_weights", _kept_weights_fake, lib=LIBRARY)
torch.library.register_fake("miofind::packed_filters", _packed_filters_fake, lib=LIBRARY)
direct_path()  # stands before these kernels, where it was built


def _vmap_forward(info: Any, in_dims: tuple[Any, ...], *arguments: Any, **named: Any) -> tuple[Any, int]:
    """The operator over a batch: one of more images, where x and the residual alone have it."""
    operator = torch.ops.miofind.convolution
    shared = all(place is None for place in in_dims[1:4])
    call = Forward(*arguments, **named)
    if not shared or in_dims[0] is None or call.channel_bias is not None:
        return _one_by_one(operator, info.batch_size, in_dims, arguments, named)
    x = call.x.movedim(in_dims[0], 0)
    residual = call.residual
    if residual is not None:
        residual = residual.expand(len(x), *residual.shape) if in_dims[4] is None else residual.movedim(in_dims[4], 0)
        residual = residual.flatten(0, 1)
    y = operator(*call._replace(x=x.flatten(0, 1), residual=residual))
    return y.unflatten(0, x.shape[:2]), 0


def _vmap_one_by_one(operator: Any) -> Callable[..., Any]:
    def rule(info: Any, in_dims: tuple[Any, ...], *arguments: Any, **named: Any) -> tuple[Any, Any]:
        return _one_by_one(operator, info.batch_size, in_dims, arguments, named)

    return rule


def _one_by_one(
    operator: Any, count: int, in_dims: tuple[Any, ...], arguments: tuple[Any, ...], named: Mapping[str, Any]
) -> tuple[Any, Any]:
    """An operator over a batch, one element after another."""
    places = (*in_dims, *(None,) * (len(arguments) - len(in_dims)))
    made = []
    for i in range(count):
        each = [
            value if place is None or not isinstance(value, torch.Tensor) else value.select(place, i)
            for value, place in zip(arguments, places, strict=True)
        ]
        made.append(operator(*each, **named))
    if isinstance(made[0], torch.Tensor):
        return torch.stack(made), 0
    return tuple(torch.stack(column) for column in zip(*made, strict=True)), (0,) * len(made[0])


def _vmap_short_forward(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> tuple[Any, int]:
    call, places = ShortForward.of(*arguments), ShortForward.of(*in_dims[:-1], arguments[-1])
    are_places = [isinstance(value, torch.Tensor) for value in call]
    in_dims = tuple(place if is_place else None for place, is_place in zip(places, are_places, strict=True))
    return _vmap_forward(info, in_dims, *call)


torch.library.register_vmap("miofind::convolution", _vmap_forward, lib=LIBRARY)
torch.library.register_vmap("miofind::short_convolution", _vmap_short_forward, lib=LIBRARY)
for _long in _KERNELS.keys() - {"convolution"}:
    for _name in (_long, f"short_{_long}"):
        _rule = _vmap_one_by_one(getattr(torch.ops.miofind, _name))
        torch.library.register_vmap(f"miofind::{_name}", _rule, lib=LIBRARY)
