"""Arrays of other libraries: what they hold, where, on which stream, and how to make one more of the kind.

Knows PyTorch, CuPy and NumPy by name, everything else by `__cuda_array_interface__` or DLPack. No framework is imported
that the caller has not imported already.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import ml_dtypes
import numpy as np

from miofind.core.operand import FlatTensor
from miofind.core.tensor import DataType, Layout, TensorDescriptor
from miofind.errors import InvalidArrayError, MissingLibraryError


class Framework(StrEnum):
    """Library an array belongs to."""

    NUMPY = "numpy"
    CUPY = "cupy"
    TORCH = "torch"
    OTHER = "other"


NUMPY_DTYPES: Mapping[DataType, np.dtype[Any]] = {
    DataType.FLOAT64: np.dtype(np.float64),
    DataType.FLOAT32: np.dtype(np.float32),
    DataType.FLOAT16: np.dtype(np.float16),
    DataType.BFLOAT16: np.dtype(ml_dtypes.bfloat16),
}
_BY_NAME = {str(dtype): dtype for dtype in DataType}


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayView:
    """An array as miofind sees it.

    Attributes:
        framework: whose array it is.
        device_index: CUDA ordinal, -1 for host memory.
        shape: logical shape.
        strides: elements between neighbours along each dimension.
        dtype: element type.
        address: of the first element.
        nbytes: bytes of its elements.
        host: the same memory as a NumPy array, for host memory.
    """

    framework: Framework
    device_index: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: DataType
    address: int
    nbytes: int
    host: Any = None


def framework_of(array: object) -> Framework:
    """The library an array belongs to."""
    if isinstance(array, np.ndarray):
        return Framework.NUMPY
    for name, framework in (("torch", Framework.TORCH), ("cupy", Framework.CUPY)):
        module = sys.modules.get(name)
        kind = getattr(module, "Tensor" if name == "torch" else "ndarray", None)
        if kind is not None and isinstance(array, kind):
            return framework
    return Framework.OTHER


def refuse_other_library(array: Any, name: str, like: Any, like_name: str) -> None:
    """Do nothing where one library computes with two arrays: their own, or CuPy with all that it reads.

    Raises:
        InvalidArrayError: none does.
    """
    both = {framework_of(array), framework_of(like)}
    if len(both) > 1 and both != {Framework.CUPY, Framework.OTHER}:
        given, other = (type(each).__module__.partition(".")[0] for each in (array, like))
        raise InvalidArrayError(f"{name} is an array of {given}, {like_name} of {other}: pass both of one library")


def view(array: Any, name: str) -> ArrayView:
    """What an array holds and where.

    Raises:
        InvalidArrayError: not an array, an element type that convolutions do not have, or a tensor that requires
            gradients while they are recorded.
    """
    framework = framework_of(array)
    if framework is Framework.NUMPY:
        return _view_numpy(array, name, framework)
    if framework is Framework.TORCH:
        return _view_torch(array, name)
    if framework is Framework.CUPY:
        return _view_cupy(array, name, framework)
    return _view_cupy(as_cupy(array, name), name, framework)


def _dtype(value: object, name: str) -> DataType:
    text = str(value).removeprefix("torch.")
    if text not in _BY_NAME:
        raise InvalidArrayError(f"{name} has dtype {text}: use one of {', '.join(_BY_NAME)}")
    return _BY_NAME[text]


def _strides(array: Any, name: str) -> tuple[int, ...]:
    """Elements between neighbours; those along dimensions of size 1 mean nothing."""
    steps, size = array.strides, array.itemsize
    if any(step % size and length > 1 for step, length in zip(steps, array.shape, strict=True)):
        told = f"{name} has strides {tuple(steps)} (bytes), no multiples of its elements' {size}"
        raise InvalidArrayError(f"{told}, as a field of a structured array has: pass a contiguous copy")
    return tuple(step // size for step in steps)


def _view_numpy(array: Any, name: str, framework: Framework) -> ArrayView:
    if isinstance(array, np.ma.MaskedArray):
        raise InvalidArrayError(f"{name} is a masked array, whose mask would be ignored: pass {name}.filled(0)")
    return ArrayView(
        framework=framework,
        device_index=-1,
        shape=array.shape,
        dtype=_dtype(array.dtype, name),
        strides=_strides(array, name),
        address=array.ctypes.data,
        nbytes=array.nbytes,
        host=array,
    )


def _view_cupy(array: Any, name: str, framework: Framework) -> ArrayView:
    return ArrayView(
        framework=framework,
        device_index=int(array.device.id),
        shape=tuple(array.shape),
        dtype=_dtype(array.dtype, name),
        strides=_strides(array, name),
        address=int(array.data.ptr),
        nbytes=int(array.nbytes),
    )


def _view_torch(array: Any, name: str) -> ArrayView:
    torch: Any = sys.modules["torch"]
    if array.requires_grad and torch.is_grad_enabled():
        raise InvalidArrayError(
            f"{name} requires gradients, which miofind does not record: "
            f"call inside torch.no_grad() or pass {name}.detach()"
        )
    if array.layout is not torch.strided:
        raise InvalidArrayError(f"{name} has torch layout {array.layout}: pass a dense (strided) tensor")
    if array.device.type not in ("cuda", "cpu"):
        raise InvalidArrayError(f"{name} is on {array.device}: use a CUDA device or the CPU")
    if array.is_neg():
        raise InvalidArrayError(f"{name} is a negated view, whose memory holds the opposite: pass {name}.resolve_neg()")
    dtype = _dtype(array.dtype, name)
    try:
        return _view_dense_torch(array, dtype)
    except RuntimeError as error:  # nested, fake and functorch tensors have no memory of their own
        raise InvalidArrayError(f"{name} is a {type(array).__name__} without memory to read: {error}") from error


def _view_dense_torch(array: Any, dtype: DataType) -> ArrayView:
    on_host = array.device.type == "cpu"
    return ArrayView(
        framework=Framework.TORCH,
        device_index=-1 if on_host else array.get_device(),
        shape=tuple(array.shape),
        strides=tuple(array.stride()),
        dtype=dtype,
        address=array.data_ptr(),
        nbytes=array.numel() * array.element_size(),
        host=_torch_to_numpy(array.detach(), dtype) if on_host else None,
    )


def _torch_to_numpy(array: Any, dtype: DataType) -> Any:
    if dtype is not DataType.BFLOAT16:
        return array.numpy()
    torch: Any = sys.modules["torch"]
    return array.view(torch.int16).numpy().view(ml_dtypes.bfloat16)


def as_cupy(array: Any, name: str) -> Any:
    """Any other library's CUDA array as a CuPy array over the same memory."""
    has_interface = hasattr(type(array), "__cuda_array_interface__") or hasattr(array, "__cuda_array_interface__")
    if not has_interface and not hasattr(array, "__dlpack__"):
        raise InvalidArrayError(
            f"{name} is a {type(array).__name__}: pass a PyTorch, CuPy or NumPy array, or one with "
            "__cuda_array_interface__ or DLPack"
        )
    try:
        import cupy
    except ImportError as error:
        raise MissingLibraryError(
            f"{name} is a {type(array).__name__}, which is read through CuPy, and CuPy cannot be imported ({error}): "
            "install it, or pass a PyTorch or NumPy array"
        ) from error
    try:
        return cupy.asarray(array) if has_interface else cupy.from_dlpack(array)
    except Exception as error:  # whatever the other library raises, the array cannot be used
        raise InvalidArrayError(
            f"{name} is a {type(array).__name__} that cannot be read on the GPU: {error}"
        ) from error


def layouts_of(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[Layout, ...]:
    """Packed layouts that strides fit, channels first before channels last; both where sizes of 1 leave it open."""
    rank = len(shape) - 2
    if rank not in (1, 2, 3):
        return ()
    fits = []
    for channels_last in (False, True):
        layout = Layout.of(rank, channels_last=channels_last)
        if strides_fit(TensorDescriptor(shape=shape, layout=layout), strides):
            fits.append(layout)
    return tuple(fits)


def strides_fit(descriptor: TensorDescriptor | FlatTensor, strides: tuple[int, ...]) -> bool:
    """Whether strides (in elements) are the descriptor's, dimensions of size 1 ignored."""
    return all(
        size == 1 or given == wanted
        for size, given, wanted in zip(descriptor.shape, strides, descriptor.strides, strict=True)
    )


def is_reshaped(given: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    """Whether a shape has other dimensions of size 1 than a flat one that is wanted, and no other difference."""
    return len(wanted) < 3 and [size for size in given if size > 1] == [size for size in wanted if size > 1]


def infer_layouts(arrays: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]]) -> dict[str, Layout]:
    """A layout for each array given as (shape, strides).

    It is the one its strides fit; where they fit both, its peers'; else channels first.

    Raises:
        InvalidArrayError: strides that fit neither, or an array of other than 3 to 5 dimensions.
    """
    found = {name: layouts_of(shape, strides) for name, (shape, strides) in arrays.items()}
    for name, fits in found.items():
        shape, strides = arrays[name]
        if len(shape) not in (3, 4, 5):
            raise InvalidArrayError(f"{name} has shape {shape}: 3 to 5 dimensions are needed, (n, c, *spatial)")
        if not fits:
            raise InvalidArrayError(
                f"{name} of shape {shape} has strides {strides}, neither packed channels first nor channels last: "
                "pass a contiguous copy"
            )
    settled = [fits[0] for fits in found.values() if len(fits) == 1]
    return {name: fits[0] if len(fits) == 1 or not settled else settled[0] for name, fits in found.items()}


def allocate(like: Any, tensor: TensorDescriptor | FlatTensor, device_index: int, alignment: int = 1) -> Any:
    """A new uninitialised array of the tensor's shape, dtype and layout, of the kind of `like`.

    Its address is a multiple of `alignment`, which device memory is of up to 256 bytes by itself.
    """
    framework = framework_of(like)
    if framework is Framework.TORCH:
        torch: Any = sys.modules["torch"]
        dtype = getattr(torch, tensor.dtype.value)
        made = torch.empty_strided(tensor.shape, tensor.strides, dtype=dtype, device=like.device)
        if like.device.type != "cpu" or made.data_ptr() % alignment == 0:
            return made
        memory = torch.from_numpy(_aligned_bytes(tensor.bytes, alignment))
        return memory.view(dtype).as_strided(tensor.shape, tensor.strides)
    channels_last = isinstance(tensor, TensorDescriptor) and tensor.layout.channels_last
    order = (0, *range(2, len(tensor.shape)), 1) if channels_last else tuple(range(len(tensor.shape)))
    shape = tuple(tensor.shape[i] for i in order)
    inverse = tuple(order.index(i) for i in range(len(order)))
    dtype = NUMPY_DTYPES[tensor.dtype]
    if framework is Framework.NUMPY:
        made = np.empty(shape, dtype)
        if made.ctypes.data % alignment:
            made = _aligned_bytes(tensor.bytes, alignment).view(dtype).reshape(shape)
        return made.transpose(inverse)
    import cupy

    with cupy.cuda.Device(device_index):
        result = cupy.empty(shape, dtype).transpose(inverse)
    return result if framework is Framework.CUPY else as_kind_of(like, result)


def _aligned_bytes(size: int, alignment: int) -> Any:
    """Uninitialised bytes in host memory, at a multiple of `alignment`."""
    memory = np.empty(size + alignment, np.uint8)
    start = -memory.ctypes.data % alignment
    return memory[start : start + size]


def as_kind_of(like: Any, result: Any) -> Any:
    """A CuPy array handed to another library: by the array API's from_dlpack where it has one, else as it is."""
    namespace = getattr(like, "__array_namespace__", None)
    if namespace is None:
        return result
    return namespace().from_dlpack(result)


def packed_copy(array: Any, tensor: TensorDescriptor | FlatTensor, device_index: int, alignment: int = 1) -> Any:
    """A copy of an array in the tensor's layout, at a multiple of `alignment`; of other libraries' a CuPy array."""
    framework = framework_of(array)
    source = as_cupy(array, "array") if framework is Framework.OTHER else array
    copy = allocate(source, tensor, device_index, alignment)
    with device_of(copy, device_index):
        copy[...] = source
    return copy


def device_of(array: Any, device_index: int) -> contextlib.AbstractContextManager[object]:
    """A block in which CuPy computes on a device; PyTorch does so on each tensor's by itself."""
    if framework_of(array) is not Framework.CUPY:
        return contextlib.nullcontext()
    import cupy

    on_device: contextlib.AbstractContextManager[object] = cupy.cuda.Device(device_index)
    return on_device


def with_batch(array: Any, name: str) -> Any:
    """The array as one image of a batch, over the same memory; of other libraries' a CuPy array."""
    return (as_cupy(array, name) if framework_of(array) is Framework.OTHER else array)[None]


def fill_with_zeros(array: Any, device_index: int) -> None:
    """Write zeros, on the current stream of the array's library."""
    target = as_cupy(array, "out") if framework_of(array) is Framework.OTHER else array
    with device_of(target, device_index):
        target[...] = 0


def channel_sums(array: Any, dtype: DataType, device_index: int, out: Any = None) -> Any:
    """The sum of each channel of (n, k, *spatial) over n and space, (k,), rounded once; written to `out` if given.

    In float32, float64 on the host and of float64. On the current stream of the array's library.
    """
    framework = framework_of(array)
    source = as_cupy(array, "array") if framework is Framework.OTHER else array
    axes = (0, *range(2, len(source.shape)))
    if framework is Framework.TORCH:
        torch: Any = sys.modules["torch"]
        on_host = source.device.type == "cpu" or source.dtype is torch.float64
        result = source.detach().sum(axes, dtype=torch.float64 if on_host else torch.float32)
        result = result.to(getattr(torch, dtype.value))
    else:
        wide = np.float64 if device_index < 0 or source.dtype == np.float64 else np.float32
        with device_of(source, device_index):
            result = source.astype(wide).sum(axis=axes).astype(NUMPY_DTYPES[dtype])
    if out is None:
        return as_kind_of(array, result) if framework is Framework.OTHER else result
    target = as_cupy(out, "out") if framework_of(out) is Framework.OTHER else out
    with device_of(target, device_index):
        target[...] = result
    return out


def add_to_channels(array: Any, vector: Any, rank: int, device_index: int) -> None:
    """Add (c,) to an array of (n, c, *spatial) or (c, *spatial), in place.

    Args:
        array: what is added to.
        vector: what is added, of the same library.
        rank: spatial dimensions.
        device_index: where they are.
    """
    if framework_of(array) is Framework.OTHER:
        array, vector = as_cupy(array, "out"), as_cupy(vector, "bias")
    with device_of(array, device_index):
        memory = array[...]
        memory += vector.reshape(-1, *(1,) * rank)


def allocate_bytes(like: Any, size: int, device_index: int) -> Any:
    """`size` uninitialised bytes from the allocator of `like`'s library."""
    framework = framework_of(like)
    if framework is Framework.TORCH:
        torch: Any = sys.modules["torch"]
        return torch.empty(size, dtype=torch.uint8, device=like.device)
    if framework is Framework.NUMPY:
        return np.empty(size, np.uint8)
    import cupy

    with cupy.cuda.Device(device_index):
        return cupy.empty(size, cupy.uint8)
