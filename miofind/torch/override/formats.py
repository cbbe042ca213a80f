"""The stride contract: the strides that PyTorch's fake kernels predict for a convolution's output and gradients.

Compiled graphs assert them. PyTorch decides them by the strides of the input and the weights together, and where sizes
of 1 leave a memory format open it has rules of its own, so it is asked, and nothing is derived anew.

Source: pytorch, torch/_subclasses/fake_impls.py, conv; aten/src/ATen/native/Convolution.cpp.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from miofind.core.tensor import Layout

_SELECT = "_select_conv_backend"
_DETERMINE = "_conv_determine_backend_memory_format"


def missing_functions() -> tuple[str, ...]:
    """Those of PyTorch's private functions that are asked here and that the installed release lacks."""
    return tuple(name for name in (_SELECT, _DETERMINE) if not hasattr(torch._C, name))


def output_layout(x: Any, w: Any, bias: Any, geometry: Sequence[Any]) -> Layout:
    """The memory order that PyTorch gives the output and both gradients of a convolution.

    Args:
        x: (n, c, *spatial), 3 to 5 dimensions; a real or a fake tensor, or one of the device "meta", which stands for
            a GPU.
        w: weights of as many dimensions.
        bias: a tensor, its sizes, or None.
        geometry: stride, padding, dilation, transposed, output_padding and groups, as of `aten::convolution`.
    """
    told = _told_by_pytorch(x, w, bias, geometry) if _is_answered_here(x.device) else _as_for_cudnn(x, w)
    return layout_like(x, channels_last=told in (torch.channels_last, torch.channels_last_3d))


def layout_like(tensor: Any, *, channels_last: bool) -> Layout:
    """A memory order of tensors of as many dimensions as one."""
    return Layout.of(tensor.dim() - 2, channels_last=channels_last)


def strides(shape: tuple[int, ...], layout: Layout) -> tuple[int, ...]:
    """The very strides that PyTorch gives a tensor in a memory order, along dimensions of size 1, too."""
    return packed_strides(shape, layout.channels_last)


@functools.lru_cache(maxsize=4096)
def packed_strides(shape: tuple[int, ...], channels_last: bool) -> tuple[int, ...]:
    """The same by where the channels are."""
    made = torch.empty(shape, device="meta")
    if not channels_last:
        return tuple(made.stride())
    if len(shape) == 3:
        return tuple(made.unsqueeze(2).to(memory_format=torch.channels_last).squeeze(2).stride())
    return tuple(made.to(memory_format=channels_last_format(len(shape))).stride())


def is_dense(tensor: Any, layout: Layout) -> bool:
    """Whether a tensor's elements lie packed in a memory order; strides along dimensions of size 1 mean nothing."""
    if not layout.channels_last:
        return bool(tensor.is_contiguous())
    if tensor.dim() == 3:
        return bool(tensor.unsqueeze(2).is_contiguous(memory_format=torch.channels_last))
    return bool(tensor.is_contiguous(memory_format=channels_last_format(tensor.dim())))


def is_spread(tensor: Any, layout: Layout) -> bool:
    """Whether a tensor's elements lie in a memory order, packed or with gaps, as those of some channels of a larger."""
    order = [1, *range(tensor.dim() - 1, 1, -1), 0] if layout.channels_last else [*range(tensor.dim() - 1, -1, -1)]
    least = 0
    for dimension in order:
        if tensor.shape[dimension] > 1:
            if tensor.stride(dimension) <= least:
                return False
            least = tensor.stride(dimension) * (tensor.shape[dimension] - 1)
    return True


def is_last(tensor: Any) -> bool:
    """Whether a tensor is packed channels last, and not channels first as well; those of 3 to 5 dimensions may be."""
    if tensor.dim() not in (3, 4, 5):
        return False
    return is_dense(tensor, layout_like(tensor, channels_last=True)) and not tensor.is_contiguous()


def dense(tensor: Any, layout: Layout) -> Any:
    """The tensor itself where it is packed in a memory order, else a copy that is."""
    if not layout.channels_last:
        return tensor.contiguous()
    if tensor.dim() == 3:
        return tensor.unsqueeze(2).contiguous(memory_format=torch.channels_last).squeeze(2)
    return tensor.contiguous(memory_format=channels_last_format(tensor.dim()))


def channels_last_format(rank: int) -> Any:
    """PyTorch's name for channels last of tensors of 4 or 5 dimensions."""
    return torch.channels_last if rank == 4 else torch.channels_last_3d


def _is_answered_here(device: Any) -> bool:
    """Whether the installed PyTorch answers for a device: one that was built without CUDA does not for a GPU."""
    if device.type == "meta":
        return False
    return bool(device.type != "cuda" or torch.backends.cuda.is_built())


def _told_by_pytorch(x: Any, w: Any, bias: Any, geometry: Sequence[Any]) -> Any:
    """A `torch.memory_format`, by PyTorch's own functions, asked as its fake kernels ask them."""
    stride, padding, dilation, transposed, output_padding, groups = geometry
    arguments = {
        "stride": stride,
        "padding": padding,
        "dilation": dilation,
        "transposed": transposed,
        "output_padding": output_padding,
        "groups": groups,
    }
    if isinstance(bias, torch.Tensor):
        arguments["bias"] = bias
    else:
        arguments |= {"bias": None, "bias_sizes": bias}
    backend = getattr(torch._C, _SELECT)(x, w, **arguments)
    if x.dim() == 3:  # it takes a 1-D convolution for a 2-D one of contiguous inputs
        x, w = x.contiguous().unsqueeze(2), w.unsqueeze(2)
    return getattr(torch._C, _DETERMINE)(x, w, backend)


def _as_for_cudnn(x: Any, w: Any) -> Any:
    """A `torch.memory_format`, by PyTorch's rule for cuDNN, where nothing here can be asked.

    Source: pytorch, aten/src/ATen/native/ConvUtils.h, cudnn_conv_suggest_memory_format.
    """
    if torch.float64 in (x.dtype, w.dtype):
        return torch.contiguous_format
    if x.dim() == 3:
        x, w = torch.empty(x.shape, device="meta").unsqueeze(2), w.unsqueeze(2)
    suggested = (_suggested(x), _suggested(w))
    wanted = channels_last_format(w.dim())
    return wanted if wanted in suggested else torch.contiguous_format


def _suggested(tensor: Any) -> Any:
    """The memory format that a tensor's strides are in, PyTorch's choice where several fit."""
    from torch._prims_common import suggest_memory_format

    return suggest_memory_format(tensor)
