"""The arrays of one run: strict checks of its tensors, its workspace, its stream.

Checks are made once for a problem and are fast for CuPy arrays and PyTorch tensors; what they refuse is looked at
again, slower, for a message.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from miofind.arrays.arrays import NUMPY_DTYPES, Framework, as_cupy, framework_of, is_reshaped, strides_fit, view
from miofind.core.operand import WORKSPACE_ALIGNMENT, FlatTensor
from miofind.core.tensor import TensorDescriptor
from miofind.errors import InvalidArrayError, InvalidOptionError, WorkspaceError, brief

HOST_WORKSPACE_ALIGNMENT = 16
"""A workspace in host memory begins at a multiple of this, as NumPy's arrays do."""

Check = Callable[[Any], Any]
"""Takes an array; gives its device address, or the NumPy array over its host memory."""

_DESCRIBED = "find solutions of the problem that the arrays have, ProblemDescription.from_arrays(...)"

_OVERLAPS = "out shares memory with an input, which would be overwritten while it is read"
_OUTPUTS_OVERLAP = "{} shares memory with another array of the run: pass memory of its own"
_SHARED = "{} shares memory with {}, which would be overwritten: pass memory of its own"

CheckOfAll = Callable[[tuple[Any, ...]], tuple[Any, ...]]
"""Takes the arrays of all operands in order; gives what their checks give."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OperandMemory:
    """The memory of a problem's operands.

    Attributes:
        sizes_bytes: of each, in order.
        written: position of the main one that is written.
        alignment: that their addresses need.
        also_written: name by position, of the other ones that are written.
    """

    sizes_bytes: tuple[int, ...]
    written: int
    alignment: int
    also_written: Mapping[int, str] = field(default_factory=dict)

    @property
    def others(self) -> tuple[tuple[int, int], ...]:
        """Position and bytes of each but the main output and the other outputs."""
        mine = {self.written, *self.also_written}
        return tuple((i, size) for i, size in enumerate(self.sizes_bytes) if i not in mine)


def strict_check(
    name: str, tensor: TensorDescriptor | FlatTensor, device_index: int, alignment: int, *, is_written: bool = False
) -> Check:
    """A check of one tensor of a problem, made once and used on every run.

    Raises (when called):
        InvalidArrayError: what was given and what the problem wants.
    """
    shape = tensor.shape
    byte_strides = tuple(step * tensor.dtype.itemsize for step in tensor.strides)
    numpy_dtype = NUMPY_DTYPES[tensor.dtype]
    cupy_kind: Any = None

    def check(array: Any) -> Any:
        nonlocal cupy_kind
        kind = type(array)
        if kind is cupy_kind:
            if array.shape == shape and array.strides == byte_strides and array.dtype is numpy_dtype:
                memory = array.data
                address = memory.ptr
                if memory.device_id == device_index and not address % alignment:
                    return address
        elif device_index >= 0 and kind.__module__ == "cupy":
            cupy_kind = kind
        checked = _checked(array, name, tensor, device_index, alignment)
        if is_written and isinstance(checked, np.ndarray) and not checked.flags.writeable:
            raise InvalidArrayError(f"{name} is read-only: pass an array that can be written")
        return checked

    return check


def check_of_all(checks: Sequence[Check], memory: OperandMemory, device_index: int) -> CheckOfAll:
    """The checks of a problem's operands in one, and that the output shares no memory with an input.

    Quick for PyTorch tensors on a device that are like those of the last run.

    Raises (when called):
        InvalidArrayError: what was given and what the problem wants, or the output shares memory.
    """
    written, size, others = memory.written, memory.sizes_bytes[memory.written], memory.others
    each, aligned_addresses = _written_out(len(checks))
    check_each, alignment = each(*checks), memory.alignment
    also_written = memory.also_written
    guarded: Any = None
    unguarded: Any = None
    is_like_last: Callable[..., bool] | None = None

    def check_on_host(arrays: tuple[Any, ...]) -> tuple[Any, ...]:
        checked = check_each(arrays)
        out = checked[written]
        for position, _ in others:
            if np.may_share_memory(out, checked[position]):
                raise InvalidArrayError(_OVERLAPS)
        for position, name in also_written.items():
            if any(np.may_share_memory(checked[position], other) for other in _all_but(checked, position)):
                raise InvalidArrayError(_OUTPUTS_OVERLAP.format(name))
        return checked

    def check_on_device(arrays: tuple[Any, ...]) -> tuple[Any, ...]:
        nonlocal guarded, unguarded, is_like_last
        kind, addresses = type(arrays[0]), None
        if kind is guarded and is_like_last is not None and is_like_last(*arrays):
            addresses = aligned_addresses(arrays, alignment)
        if addresses is None:
            addresses = check_each(arrays)
            if kind is not unguarded:
                is_like_last = _torch_guard(*arrays)
                if is_like_last is None:
                    unguarded = kind
                else:
                    guarded = kind
        start = addresses[written]
        end = start + size
        for position, other_size in others:
            other = addresses[position]
            if other < end and start < other + other_size:
                raise InvalidArrayError(_OVERLAPS)
        if also_written:
            _check_also_written(addresses, memory)
        return addresses

    return check_on_host if device_index < 0 else check_on_device


def several_outputs(out: Any, names: Sequence[str]) -> tuple[Any, ...]:
    """The outputs of these names that `out` gives, in order; None for each that it does not.

    Raises:
        InvalidArrayError: `out` is no tuple of as many.
    """
    if out is None:
        return (None,) * len(names)
    if isinstance(out, (tuple, list)) and len(out) == len(names):
        return tuple(out)
    raise InvalidArrayError(f"out={brief(out)} must be a tuple of {len(names)} arrays: ({', '.join(names)})")


def refuse_shared_memory(written: Mapping[str, Any], read: Mapping[str, Any]) -> None:
    """Do nothing where arrays that are written share memory with none that are read, nor with each other.

    For calls of several runs: each run checks its own operands alone. An array with gaps is taken for all that lies
    between its first and its last element.

    Args:
        written, read: by what a user calls them; one that is read may be None, for none.

    Raises:
        InvalidArrayError: two share memory, or one is no array.
    """
    taken = {name: memory_of(array, name) for name, array in read.items() if array is not None}
    for name, array in written.items():
        mine = memory_of(array, name)
        for other, memory in taken.items():
            if memory.start < mine.stop and mine.start < memory.stop:
                raise InvalidArrayError(_SHARED.format(name, other))
        taken[name] = mine


def memory_of(array: Any, name: str) -> range:
    """Addresses from the first byte of an array's elements to the last; a tenth of the work of a view.

    Raises:
        InvalidArrayError: it is no array, or a tensor without memory.
    """
    framework = framework_of(array)
    unit_bytes = 1
    if framework is Framework.TORCH:
        try:
            start, item_bytes, strides = array.data_ptr(), array.element_size(), array.stride()
        except RuntimeError:
            view(array, name)  # says which tensor it is that has no memory
            raise
        unit_bytes = item_bytes
    else:
        if framework is Framework.OTHER:
            array = as_cupy(array, name)
        start = array.ctypes.data if framework is Framework.NUMPY else array.data.ptr
        item_bytes, strides = array.itemsize, array.strides
    if not start or 0 in array.shape:
        return range(0)
    first = last = start
    for size, step in zip(array.shape, strides, strict=True):
        reach = (size - 1) * step * unit_bytes
        if reach < 0:
            first += reach
        else:
            last += reach
    return range(first, last + item_bytes)


def _check_also_written(addresses: Sequence[int], memory: OperandMemory) -> None:
    """Do nothing where the outputs beside the main one share memory with no operand.

    Raises:
        InvalidArrayError: one does.
    """
    for position, name in memory.also_written.items():
        start = addresses[position]
        end = start + memory.sizes_bytes[position]
        others = zip(_all_but(addresses, position), _all_but(memory.sizes_bytes, position), strict=True)
        if any(other < end and start < other + size for other, size in others):
            raise InvalidArrayError(_OUTPUTS_OVERLAP.format(name))


def _all_but(values: Sequence[Any], position: int) -> tuple[Any, ...]:
    return (*values[:position], *values[position + 1 :])


class _WrittenOut(NamedTuple):
    """Expressions over a number of operands.

    Attributes:
        each: takes a check of each; gives a function that takes their arrays and gives a tuple of what the checks give.
        aligned_addresses: takes PyTorch tensors and an alignment; gives their addresses, None where one is 0 or not so
            aligned.
    """

    each: Callable[..., CheckOfAll]
    aligned_addresses: Callable[[tuple[Any, ...], int], tuple[int, ...] | None]


@functools.cache
def _written_out(count: int) -> _WrittenOut:
    """The expressions as code for that many: loops take three times as long, 0.2 us more a run (Python 3.11)."""
    checks = [f"check{i}" for i in range(count)]
    addresses = [f"address{i}" for i in range(count)]
    checked = "".join(f"{check}(arrays[{i}]), " for i, check in enumerate(checks))
    are_there = " and ".join(f"({address} := arrays[{i}].data_ptr())" for i, address in enumerate(addresses))
    given = "".join(f"{address}, " for address in addresses)
    return _WrittenOut(
        eval(f"lambda {', '.join(checks)}: lambda arrays: ({checked})"),
        eval(
            f"lambda arrays, alignment: ({given}) "
            f"if {are_there} and not ({' | '.join(addresses)}) % alignment else None"
        ),
    )


def _torch_guard(*tensors: Any) -> Callable[..., bool] | None:
    """PyTorch's own test that tensors are like these; None where one is no CUDA tensor or PyTorch has no such test.

    Like means the same type, dispatch keys, dtype, device, shape, strides and whether gradients are asked for, and the
    same tensor in the same places: PyTorch's test takes no tensor twice, and an input may be its own residual.
    Source: pytorch, torch/csrc/dynamo/guards.cpp, which its compiler runs before each call of what it compiled.
    """
    if not all(framework_of(tensor) is Framework.TORCH and tensor.is_cuda for tensor in tensors):
        return None
    firsts = [next(i for i, other in enumerate(tensors) if other is tensor) for tensor in tensors]
    distinct = [tensors[i] for i in sorted(set(firsts))]
    try:
        guards = importlib.import_module("torch._C._dynamo.guards")
        guard = guards.TensorGuards(*distinct, dynamic_dims_sizes=None, dynamic_dims_strides=None)
        is_like: Callable[..., bool] = guard.check
    except (ImportError, AttributeError, TypeError, RuntimeError):
        return None
    if len(distinct) < len(tensors):
        is_like = _with_repeated(is_like, firsts)
    return is_like if is_like(*tensors) is True else None


def _with_repeated(is_like: Callable[..., bool], firsts: Sequence[int]) -> Callable[..., bool]:
    """A test of tensors some of which stand in several places, by a test of the others.

    Args:
        is_like: of each tensor once.
        firsts: by place, the first place of its tensor.
    """
    distinct = sorted(set(firsts))
    repeated = [(place, first) for place, first in enumerate(firsts) if place != first]

    def is_like_all(*tensors: Any) -> bool:
        if any(tensors[place] is not tensors[first] for place, first in repeated):
            return False
        return is_like(*(tensors[i] for i in distinct))

    return is_like_all


def _checked(array: Any, name: str, tensor: TensorDescriptor | FlatTensor, device_index: int, alignment: int) -> Any:
    """The same checks, slower: with messages, size-1 dimensions ignored and every kind of array."""
    if array is None:
        raise InvalidArrayError(f"{name} is missing: pass an array of shape {tensor.shape}, which the problem wants")
    v = view(array, name)
    if v.shape != tensor.shape:
        advice = _shape_advice(name, v.shape, tensor.shape)
        raise InvalidArrayError(f"{name} has shape {v.shape}, the problem wants {tensor.shape}: {advice}")
    if v.dtype is not tensor.dtype:
        raise InvalidArrayError(
            f"{name} has dtype {v.dtype}, the problem wants {tensor.dtype}: convert it, or {_DESCRIBED}"
        )
    if v.device_index != device_index:
        given, wanted = _device_name(v.device_index), _device_name(device_index)
        raise InvalidArrayError(f"{name} is on {given}, the solution runs on {wanted}: move the array there")
    if not strides_fit(tensor, v.strides):
        raise InvalidArrayError(f"{name} has strides {v.strides} (elements), {_stride_advice(tensor)}")
    if v.address == 0:
        raise InvalidArrayError(
            f"{name} holds no memory (address 0): a {type(array).__name__} of real memory is needed"
        )
    if v.address % alignment:
        raise InvalidArrayError(
            f"{name} begins at address {v.address:#x}, the solution needs a multiple of {alignment} bytes: "
            "pass a copy, or another of the solutions found"
        )
    return v.address if v.host is None else v.host


def _shape_advice(name: str, given: tuple[int, ...], wanted: tuple[int, ...]) -> str:
    """What to do about a shape: one that is in the order of memory where channels are last is seen wrongly."""
    if is_reshaped(given, wanted):
        return f"pass {name}.reshape{wanted}"
    axes = (0, len(wanted) - 1, *range(1, len(wanted) - 1))
    if len(given) == len(wanted) and tuple(given[axis] for axis in axes) == wanted:
        return (
            f"shapes have channels second in every layout: pass {name}.transpose{axes}, in PyTorch {name}.permute{axes}"
        )
    return f"pass such an array, or {_DESCRIBED}"


def _stride_advice(tensor: TensorDescriptor | FlatTensor) -> str:
    """What strides a problem wants, and what to do about others."""
    if isinstance(tensor, FlatTensor):
        return f"the problem wants {tensor.strides}: pass a contiguous copy"
    wanted = f"the problem's layout {tensor.layout} wants {tensor.strides}"
    return f"{wanted}: pass a contiguous copy in that layout, or describe the problem by from_arrays"


def _device_name(index: int) -> str:
    return "the host" if index < 0 else f"cuda:{index}"


def workspace_check(
    tensors: Mapping[str, int], wanted_bytes: int, device_index: int
) -> Callable[[Any, tuple[Any, ...]], Any]:
    """What `workspace_address` gives of a workspace; takes it and what the checks of the operands gave.

    Args:
        tensors: what a user calls the operands, in order, and the bytes of each.

    Raises (when called):
        WorkspaceError: as of `workspace_address`, or a byte that the solution needs is a tensor's, too.
    """
    names, sized = tuple(tensors), tuple(enumerate(tensors.values()))

    def check_on_host(workspace: Any, arrays: tuple[Any, ...]) -> Any:
        scratch = workspace_address(workspace, wanted_bytes, device_index)
        for array in arrays:
            if np.may_share_memory(scratch, array):
                sharing = (np.may_share_memory(scratch, other) for other in arrays)
                raise _workspace_shared(itertools.compress(names, sharing))
        return scratch

    def check_on_device(workspace: Any, addresses: tuple[int, ...]) -> Any:
        start = workspace_address(workspace, wanted_bytes, device_index)
        end = start + wanted_bytes
        for at, size in sized:
            address = addresses[at]
            if address < end and start < address + size:
                sharing = (addresses[i] < end and start < addresses[i] + other for i, other in sized)
                raise _workspace_shared(itertools.compress(names, sharing))
        return start

    return check_on_host if device_index < 0 else check_on_device


def _workspace_shared(names: Iterable[str]) -> WorkspaceError:
    which = " and ".join(names)
    return WorkspaceError(f"workspace shares memory with {which}, which a run would overwrite: pass memory of its own")


def workspace_address(workspace: Any, wanted_bytes: int, device_index: int) -> Any:
    """Address of a workspace on the device, or a uint8 NumPy array of its first `wanted_bytes` in host memory.

    Raises:
        WorkspaceError: smaller than wanted, on another device, misaligned or not contiguous.
    """
    raw = _raw_workspace(workspace)
    if raw.nbytes < wanted_bytes:
        raise WorkspaceError(f"workspace has {raw.nbytes} bytes, the solution needs {wanted_bytes}")
    if raw.device_index != device_index:
        raise WorkspaceError(f"workspace is on {_device_name(raw.device_index)}, not on {_device_name(device_index)}")
    alignment = HOST_WORKSPACE_ALIGNMENT if device_index < 0 else WORKSPACE_ALIGNMENT
    if raw.address % alignment:
        raise WorkspaceError(f"workspace begins at address {raw.address:#x}, which is not a multiple of {alignment}")
    return raw.address if raw.host is None else raw.host[:wanted_bytes]


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
        if workspace.device.type not in ("cuda", "cpu"):
            raise WorkspaceError(f"workspace is on {workspace.device}: use a CUDA device or the CPU")
        nbytes = workspace.numel() * workspace.element_size()
        if workspace.device.type == "cpu":
            torch: Any = sys.modules["torch"]
            host = workspace.detach().reshape(-1).view(torch.uint8).numpy()
            return _RawMemory(workspace.data_ptr(), nbytes, -1, host)
        return _RawMemory(workspace.data_ptr(), nbytes, workspace.get_device())
    if framework is Framework.NUMPY:
        if not workspace.flags.c_contiguous:
            raise WorkspaceError("workspace is not contiguous: pass a contiguous array")
        if not workspace.flags.writeable:
            raise WorkspaceError("workspace is read-only: pass an array that can be written")
        if isinstance(workspace, np.ma.MaskedArray):
            raise WorkspaceError("workspace is a masked array: pass a plain one, such as numpy.empty(size, 'uint8')")
        if workspace.dtype.hasobject:
            raise WorkspaceError(
                f"workspace has dtype {workspace.dtype}: pass bytes, such as numpy.empty(size, 'uint8')"
            )
        return _RawMemory(workspace.ctypes.data, workspace.nbytes, -1, np.asarray(workspace).reshape(-1).view(np.uint8))
    array = workspace if framework is Framework.CUPY else as_cupy(workspace, "workspace")
    if not array.flags.c_contiguous:
        raise WorkspaceError("workspace is not contiguous: pass a contiguous array")
    return _RawMemory(int(array.data.ptr), int(array.nbytes), int(array.device.id))


def current_stream(array: Any, device_index: int) -> int:
    """Address of the current stream of an array's library on a device; 0 in host memory."""
    if device_index < 0:
        return 0
    if framework_of(array) is Framework.TORCH:
        address: int = _torch_stream_reader()(device_index)
        return address
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
        # PyTorch reads address 0 as a wish for a stream of its pool. Source: pytorch, torch/csrc/cuda/Stream.cpp.
        external = torch.cuda.ExternalStream(address, device=device_index) if address else None
        with torch.cuda.stream(external or torch.cuda.default_stream(device_index)):
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
    raise InvalidOptionError(f"stream={brief(stream)} is no stream: pass a CuPy or PyTorch stream or its address")


def stream_reader(device_index: int) -> Callable[[Any], int]:
    """Reads the current stream of an array's library on a device; 0 in host memory."""
    if device_index < 0:
        return lambda array: 0
    torch_kind: type | None = None
    torch_stream: Any = None
    cupy_kind: type | None = None
    cupy_stream: Any = None

    def read(array: Any) -> int:
        nonlocal torch_kind, torch_stream, cupy_kind, cupy_stream
        kind = type(array)
        if kind is torch_kind:
            address: int = torch_stream(device_index)
            return address
        if kind is cupy_kind:
            pointer: int = cupy_stream(device_index).ptr
            return pointer
        if kind.__module__ == "torch":
            torch_stream = _torch_stream_reader()
            torch_kind = kind
        elif kind.__module__ == "cupy":
            cupy_stream = sys.modules["cupy"].cuda.get_current_stream
            cupy_kind = kind
        return current_stream(array, device_index)

    return read


def _torch_stream_reader() -> Callable[[int], int]:
    """PyTorch's own short cut to a stream's address, as its compilers use it, else the public way."""
    torch: Any = sys.modules["torch"]
    short_cut = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    return short_cut or (lambda index: int(torch.cuda.current_stream(index).cuda_stream))
