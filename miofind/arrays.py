"""Arrays of other libraries: what they hold, where, on which stream, and how to make one more of the kind.

Knows PyTorch, CuPy and NumPy by name, everything else by `__cuda_array_interface__` or DLPack. Knows nothing of
solvers. No framework is imported that the caller has not imported already.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import ml_dtypes
import numpy as np

from miofind.errors import InvalidArrayError, InvalidOptionError, WorkspaceError
from miofind.tensor import DataType, Layout, TensorDescriptor


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
    return _view_cupy(_as_cupy(array, name), name, framework)


def _dtype(value: object, name: str) -> DataType:
    text = str(value).removeprefix("torch.")
    if text not in _BY_NAME:
        raise InvalidArrayError(f"{name} has dtype {text}: use one of {', '.join(_BY_NAME)}")
    return _BY_NAME[text]


def _view_numpy(array: Any, name: str, framework: Framework) -> ArrayView:
    return ArrayView(
        framework=framework,
        device_index=-1,
        shape=array.shape,
        strides=tuple(step // array.itemsize for step in array.strides),
        dtype=_dtype(array.dtype, name),
        address=array.ctypes.data,
        nbytes=array.nbytes,
        host=array,
    )


def _view_cupy(array: Any, name: str, framework: Framework) -> ArrayView:
    return ArrayView(
        framework=framework,
        device_index=int(array.device.id),
        shape=tuple(array.shape),
        strides=tuple(step // array.itemsize for step in array.strides),
        dtype=_dtype(array.dtype, name),
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
    dtype = _dtype(array.dtype, name)
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


def _as_cupy(array: Any, name: str) -> Any:
    """Any other library's CUDA array as a CuPy array over the same memory."""
    has_interface = hasattr(array, "__cuda_array_interface__")
    if not has_interface and not hasattr(array, "__dlpack__"):
        raise InvalidArrayError(
            f"{name} is a {type(array).__name__}: pass a PyTorch, CuPy or NumPy array, or one with "
            "__cuda_array_interface__ or DLPack"
        )
    import cupy

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


def strides_fit(descriptor: TensorDescriptor, strides: tuple[int, ...]) -> bool:
    """Whether strides (in elements) are the descriptor's, dimensions of size 1 ignored."""
    return all(
        size == 1 or given == wanted
        for size, given, wanted in zip(descriptor.shape, strides, descriptor.strides, strict=True)
    )


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


def allocate(like: Any, tensor: TensorDescriptor, device_index: int) -> Any:
    """A new uninitialised array of the tensor's shape, dtype and layout, of the kind of `like`."""
    framework = framework_of(like)
    order = (0, *range(2, len(tensor.shape)), 1) if tensor.layout.channels_last else tuple(range(len(tensor.shape)))
    if framework is Framework.TORCH:
        torch: Any = sys.modules["torch"]
        dtype = getattr(torch, tensor.dtype.value)
        return torch.empty_strided(tensor.shape, tensor.strides, dtype=dtype, device=like.device)
    shape = tuple(tensor.shape[i] for i in order)
    inverse = tuple(order.index(i) for i in range(len(order)))
    dtype = NUMPY_DTYPES[tensor.dtype]
    if framework is Framework.NUMPY:
        return np.empty(shape, dtype).transpose(inverse)
    import cupy

    with cupy.cuda.Device(device_index):
        result = cupy.empty(shape, dtype).transpose(inverse)
    return result if framework is Framework.CUPY else _back(like, result)


def _back(like: Any, result: Any) -> Any:
    """A CuPy array handed to another library: by the array API's from_dlpack where it has one, else as it is."""
    namespace = getattr(like, "__array_namespace__", None)
    if namespace is None:
        return result
    return namespace().from_dlpack(result)


def aligned_copy(array: Any, alignment: int) -> Any:
    """The array itself where its address is a multiple of `alignment`, else a copy of it in the same layout."""
    if view(array, "array").address % alignment == 0:
        return array
    if framework_of(array) is Framework.TORCH:
        return array.clone()
    cupy_array = array if framework_of(array) is Framework.CUPY else _as_cupy(array, "array")
    return cupy_array.copy(order="K")


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


def workspace_address(workspace: Any, wanted_bytes: int, device_index: int) -> Any:
    """Address of a workspace on the device, or a uint8 NumPy array of it in host memory.

    Raises:
        WorkspaceError: smaller than wanted, on another device, misaligned or not contiguous.
    """
    raw = _raw_workspace(workspace)
    if raw.nbytes < wanted_bytes:
        raise WorkspaceError(f"workspace has {raw.nbytes} bytes, the solution needs {wanted_bytes}")
    if raw.device_index != device_index:
        raise WorkspaceError(f"workspace is on {_device_name(raw.device_index)}, not on {_device_name(device_index)}")
    if raw.address % 16:
        raise WorkspaceError(f"workspace begins at address {raw.address:#x}, which is not a multiple of 16")
    return raw.address if raw.host is None else raw.host


@dataclass(frozen=True, slots=True)
class _RawMemory:
    address: int
    nbytes: int
    device_index: int
    host: Any = None


def _raw_workspace(workspace: Any) -> _RawMemory:
    framework = framework_of(workspace)
    if framework is Framework.TORCH:
        if not workspace.is_contiguous():
            raise WorkspaceError("workspace is not contiguous: pass a contiguous tensor")
        nbytes = workspace.numel() * workspace.element_size()
        if workspace.device.type == "cpu":
            torch: Any = sys.modules["torch"]
            host = workspace.detach().reshape(-1).view(torch.uint8).numpy()
            return _RawMemory(workspace.data_ptr(), nbytes, -1, host)
        return _RawMemory(workspace.data_ptr(), nbytes, workspace.get_device())
    if framework is Framework.NUMPY:
        if not workspace.flags.c_contiguous:
            raise WorkspaceError("workspace is not contiguous: pass a contiguous array")
        return _RawMemory(workspace.ctypes.data, workspace.nbytes, -1, workspace.reshape(-1).view(np.uint8))
    array = workspace if framework is Framework.CUPY else _as_cupy(workspace, "workspace")
    if not array.flags.c_contiguous:
        raise WorkspaceError("workspace is not contiguous: pass a contiguous array")
    return _RawMemory(int(array.data.ptr), int(array.nbytes), int(array.device.id))


def _device_name(index: int) -> str:
    return "the host" if index < 0 else f"cuda:{index}"


def current_stream(array: Any, device_index: int) -> int:
    """Address of the current stream of an array's library on a device; 0 in host memory."""
    if device_index < 0:
        return 0
    if framework_of(array) is Framework.TORCH:
        torch: Any = sys.modules["torch"]
        return int(torch.cuda.current_stream(device_index).cuda_stream)
    import cupy

    return int(cupy.cuda.get_current_stream(device_index).ptr)


@contextlib.contextmanager
def allocating_on(like: Any, stream: Any, device_index: int) -> Iterator[None]:
    """Allocations of `like`'s library belong to a stream, so that memory is not reused under a running kernel."""
    if stream is None or device_index < 0:
        yield
        return
    address = stream_address(stream)
    if framework_of(like) is Framework.TORCH:
        torch: Any = sys.modules["torch"]
        with torch.cuda.stream(torch.cuda.ExternalStream(address, device=device_index)):
            yield
        return
    import cupy

    with cupy.cuda.Device(device_index), cupy.cuda.Stream.from_external(_StreamProtocol(address)):
        yield


@dataclass(frozen=True, slots=True)
class _StreamProtocol:
    """A stream's address in the form that other libraries read."""

    address: int

    def __cuda_stream__(self) -> tuple[int, int]:
        return (0, self.address)


def stream_address(stream: Any) -> int:
    """Address of a stream given as an int, a CuPy or PyTorch stream, or by the __cuda_stream__ protocol.

    Raises:
        InvalidOptionError: none of these.
    """
    if isinstance(stream, int) and not isinstance(stream, bool):
        return stream
    for attribute in ("ptr", "cuda_stream"):
        value = getattr(stream, attribute, None)
        if isinstance(value, int):
            return value
    protocol = getattr(stream, "__cuda_stream__", None)
    if protocol is not None:
        return int((protocol() if callable(protocol) else protocol)[1])
    raise InvalidOptionError(f"stream={stream!r} is no stream: pass a CuPy or PyTorch stream or its address")


class TensorSlot:
    """Strict check of one tensor of a problem, made once and used on every run."""

    __slots__ = ("_byte_strides", "_numpy_dtype", "_strides", "alignment", "index", "name", "tensor")

    def __init__(self, name: str, tensor: TensorDescriptor, device_index: int, alignment: int) -> None:
        self.name = name
        self.tensor = tensor
        self.index = device_index
        self.alignment = alignment
        self._numpy_dtype = NUMPY_DTYPES[tensor.dtype]
        self._strides = tensor.strides
        self._byte_strides = tuple(step * tensor.dtype.itemsize for step in tensor.strides)

    def address(self, array: Any) -> Any:
        """Address of a device array, or a NumPy array over host memory, after the checks.

        Raises:
            InvalidArrayError: what was given and what the problem wants.
        """
        kind = type(array)
        module = kind.__module__
        if module == "cupy":
            if (
                array.shape == self.tensor.shape
                and array.strides == self._byte_strides
                and array.dtype is self._numpy_dtype
            ):
                memory = array.data
                address = memory.ptr
                if memory.device_id == self.index and not address % self.alignment:
                    return address
        elif module == "torch" and (
            array.shape == self.tensor.shape
            and array.stride() == self._strides
            and array.dtype is _torch_dtype(self.tensor.dtype)
            and array.get_device() == self.index
            and self.index >= 0
            and not array.requires_grad
        ):
            address = array.data_ptr()
            if not address % self.alignment:
                return address
        return self._checked(array)

    def _checked(self, array: Any) -> Any:
        """The same checks, slower: with messages, size-1 dimensions ignored and every kind of array."""
        v = view(array, self.name)
        name, tensor = self.name, self.tensor
        if v.shape != tensor.shape:
            raise InvalidArrayError(f"{name} has shape {v.shape}, the problem wants {tensor.shape}")
        if v.dtype is not tensor.dtype:
            raise InvalidArrayError(f"{name} has dtype {v.dtype}, the problem wants {tensor.dtype}")
        if v.device_index != self.index:
            given, wanted = _device_name(v.device_index), _device_name(self.index)
            raise InvalidArrayError(f"{name} is on {given}, the solution runs on {wanted}: move the array there")
        if not strides_fit(tensor, v.strides):
            raise InvalidArrayError(
                f"{name} has strides {v.strides} (elements), the problem's layout {tensor.layout} wants "
                f"{tensor.strides}: pass a contiguous copy in that layout, or describe the problem by from_arrays"
            )
        if v.host is not None:
            return v.host
        if v.address % self.alignment:
            raise InvalidArrayError(
                f"{name} begins at address {v.address:#x}, the solution needs a multiple of {self.alignment} bytes: "
                "pass a copy, or another of the solutions found"
            )
        return v.address


_TORCH_DTYPES: dict[DataType, Any] = {}


def _torch_dtype(dtype: DataType) -> Any:
    try:
        return _TORCH_DTYPES[dtype]
    except KeyError:
        torch: Any = sys.modules["torch"]
        return _TORCH_DTYPES.setdefault(dtype, getattr(torch, dtype.value))
