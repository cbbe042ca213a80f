"""cuDNN's graph API as values: descriptors with typed attributes, handles a thread, statuses turned into errors.

Calls libcudnn through ctypes; must not know problems or plans. NVIDIA's Python frontend is left out on purpose: it has
no name for some knobs and loses them (14 of 41 plans of a float32 3x3 on an H200 cannot be rebuilt from what it
reports), and importing it imports PyTorch where that is installed (4.4 s).

Source: cudnn_graph.h of cuDNN 9, whose enumerators keep their values.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.util
import os
import sys
import threading
from enum import IntEnum
from pathlib import Path
from typing import Any, NamedTuple, Self

from miofind.device.captures import captures_undisturbed
from miofind.device.device import INSTALL_CUDA
from miofind.errors import LaunchError, MissingLibraryError

_SONAME = "libcudnn.so.9"
_MESSAGE_BYTES = 1024
_OUT_OF_MEMORY = frozenset({4003, 4004})  # CUDNN_STATUS_INTERNAL_ERROR_HOST/DEVICE_ALLOCATION_FAILED


class Kind(IntEnum):
    """cudnnBackendDescriptorType_t: what a descriptor describes."""

    POINTWISE = 0
    CONVOLUTION = 1
    ENGINE = 2
    ENGINE_CONFIG = 3
    HEURISTICS = 4
    EXECUTION_PLAN = 5
    KNOB_CHOICE = 7
    CONVOLUTION_FORWARD = 10
    CONVOLUTION_BACKWARD_FILTER = 11
    CONVOLUTION_BACKWARD_DATA = 12
    OPERATION_POINTWISE = 13
    OPERATION_GRAPH = 15
    VARIANT_PACK = 16
    TENSOR = 17


class Type(IntEnum):
    """cudnnBackendAttributeType_t: type of an attribute's elements."""

    HANDLE = 0
    DATA_TYPE = 1
    BOOLEAN = 2
    INT64 = 3
    FLOAT = 4
    DOUBLE = 5
    VOID_PTR = 6
    CONVOLUTION_MODE = 7
    HEURISTIC_MODE = 8
    KNOB_TYPE = 9
    NAN_PROPAGATION = 10
    NUMERICAL_NOTE = 11
    POINTWISE_MODE = 14
    DESCRIPTOR = 15


_CTYPES: dict[Type, Any] = {
    Type.HANDLE: ctypes.c_void_p,
    Type.BOOLEAN: ctypes.c_bool,
    Type.DOUBLE: ctypes.c_double,
    Type.INT64: ctypes.c_int64,
    Type.FLOAT: ctypes.c_float,
    Type.VOID_PTR: ctypes.c_void_p,
    Type.DESCRIPTOR: ctypes.c_void_p,
}


class Attribute(IntEnum):
    """cudnnBackendAttributeName_t: attributes of the descriptors in `Kind`."""

    POINTWISE_MODE = 0
    POINTWISE_COMPUTE_TYPE = 1
    POINTWISE_NAN_PROPAGATION = 2
    POINTWISE_RELU_LOWER_CLIP = 3
    POINTWISE_RELU_UPPER_CLIP = 4
    POINTWISE_RELU_LOWER_CLIP_SLOPE = 5
    POINTWISE_ELU_ALPHA = 6
    CONVOLUTION_COMPUTE_TYPE = 100
    CONVOLUTION_MODE = 101
    CONVOLUTION_DILATIONS = 102
    CONVOLUTION_STRIDES = 103
    CONVOLUTION_POST_PADDINGS = 104
    CONVOLUTION_PRE_PADDINGS = 105
    CONVOLUTION_SPATIAL_DIMS = 106
    HEURISTICS_MODE = 200
    HEURISTICS_OPERATION_GRAPH = 201
    HEURISTICS_RESULTS = 202
    CONFIG_ENGINE = 300
    CONFIG_KNOB_CHOICES = 302
    CONFIG_WORKSPACE_SIZE = 303
    PLAN_ENGINE_CONFIG = 401
    PLAN_WORKSPACE_SIZE = 402
    KNOB_CHOICE_TYPE = 600
    KNOB_CHOICE_VALUE = 601
    FORWARD_ALPHA = 700
    FORWARD_BETA = 701
    FORWARD_CONVOLUTION = 702
    FORWARD_W = 703
    FORWARD_X = 704
    FORWARD_Y = 705
    BACKWARD_DATA_ALPHA = 706
    BACKWARD_DATA_BETA = 707
    BACKWARD_DATA_CONVOLUTION = 708
    BACKWARD_DATA_W = 709
    BACKWARD_DATA_DX = 710
    BACKWARD_DATA_DY = 711
    BACKWARD_FILTER_ALPHA = 712
    BACKWARD_FILTER_BETA = 713
    BACKWARD_FILTER_CONVOLUTION = 714
    BACKWARD_FILTER_DW = 715
    BACKWARD_FILTER_X = 716
    BACKWARD_FILTER_DY = 717
    OPERATION_POINTWISE_POINTWISE = 750
    OPERATION_POINTWISE_X = 751
    OPERATION_POINTWISE_B = 752
    OPERATION_POINTWISE_Y = 753
    GRAPH_HANDLE = 800
    GRAPH_OPERATIONS = 801
    TENSOR_ALIGNMENT = 900
    TENSOR_DATA_TYPE = 901
    TENSOR_DIMENSIONS = 902
    TENSOR_STRIDES = 903
    TENSOR_UNIQUE_ID = 906
    TENSOR_IS_VIRTUAL = 907
    TENSOR_IS_BY_VALUE = 908
    PACK_UNIQUE_IDS = 1000
    PACK_DATA_POINTERS = 1001
    PACK_WORKSPACE = 1003
    ENGINE_OPERATION_GRAPH = 1300
    ENGINE_GLOBAL_INDEX = 1301
    ENGINE_NUMERICAL_NOTES = 1303


class CudnnFunctions(NamedTuple):
    """Addresses of the functions that execute a plan, for callers in C."""

    create_descriptor: int
    set_attribute: int
    finalize: int
    execute: int
    destroy_descriptor: int
    get_stream: int


class CudnnLibrary:
    """The functions of one loaded libcudnn.

    Attributes:
        version: 91900 for 9.19.0.
        functions: addresses of those that execute a plan.

    The calls of a run keep the interpreter's lock: they take microseconds, and giving the lock away can cost a
    waiting thread's whole switch interval (5 ms). Calls that may compile release it.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        locked = ctypes.PyDLL(None, handle=library._handle)
        pointer, number, count = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64
        self.create = _function(locked.cudnnBackendCreateDescriptor, number, pointer)
        self.destroy = _function(library.cudnnBackendDestroyDescriptor, pointer)
        self.set = _function(locked.cudnnBackendSetAttribute, pointer, number, number, count, pointer)
        self.get = _function(library.cudnnBackendGetAttribute, pointer, number, number, count, pointer, pointer)
        self.finalize = _function(library.cudnnBackendFinalize, pointer)
        self.execute = _function(locked.cudnnBackendExecute, pointer, pointer, pointer)
        self.create_handle = _function(library.cudnnCreate, pointer)
        self.set_stream = _function(locked.cudnnSetStream, pointer, pointer)
        self._error_string = library.cudnnGetErrorString
        self._error_string.restype = ctypes.c_char_p
        self._last_error = _function(library.cudnnGetLastErrorString, ctypes.c_char_p, ctypes.c_size_t)
        library.cudnnGetVersion.restype = ctypes.c_size_t
        self.version = int(library.cudnnGetVersion())
        called = (self.create, self.set, self.finalize, self.execute, self.destroy, library.cudnnGetStream)
        self.functions = CudnnFunctions(*(ctypes.cast(each, pointer).value or 0 for each in called))

    def message(self, status: int) -> str:
        """Name of a status and what the library said last, on one line."""
        text = ctypes.create_string_buffer(_MESSAGE_BYTES)
        self._last_error(text, _MESSAGE_BYTES)
        name = self._error_string(status) or b"unknown status"
        said = " ".join(text.value.decode(errors="replace").split())
        return f"{name.decode()} ({status})" + (f": {said}" if said else "")


def _function(symbol: Any, *arguments: Any) -> Any:
    # A second view of a symbol, because ctypes keeps one prototype for each view of a library.
    symbol.argtypes = arguments
    symbol.restype = ctypes.c_int
    return symbol


@functools.cache
def library() -> CudnnLibrary:
    """The process's cuDNN: the one already loaded (PyTorch's, say), else the wheel's, else the system's.

    Raises:
        MissingLibraryError: there is none, or it is not cuDNN 9.
    """
    for opened in (_already_loaded, _from_wheel, _from_system):
        found = opened()
        if found is not None:
            return CudnnLibrary(found)
    raise MissingLibraryError(f"{_SONAME} cannot be loaded: {INSTALL_CUDA}, or put it on LD_LIBRARY_PATH")


def _already_loaded() -> ctypes.CDLL | None:
    with contextlib.suppress(OSError):
        return ctypes.CDLL(_SONAME, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    return None


def _from_wheel() -> ctypes.CDLL | None:
    spec = importlib.util.find_spec("nvidia.cudnn") if importlib.util.find_spec("nvidia") else None
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(folder, "lib", _SONAME)
        if path.exists():
            _load_dependencies()
            with contextlib.suppress(OSError):
                return ctypes.CDLL(str(path))
    return None


def _from_system() -> ctypes.CDLL | None:
    with contextlib.suppress(OSError):
        return ctypes.CDLL(_SONAME)
    return None


def _load_dependencies() -> None:
    """Loads what cuDNN opens by name, since the wheels' folders are on no search path."""
    with contextlib.suppress(ImportError):
        from cuda.pathfinder import load_nvidia_dynamic_lib

        for name in ("cublasLt", "nvrtc"):
            with contextlib.suppress(RuntimeError):  # not found: most engines need neither
                load_nvidia_dynamic_lib(name)


def check(status: int, what: str) -> None:
    """Do nothing for success.

    Raises:
        LaunchError: any other status, with cuDNN's message; its cause is a MemoryError where memory ran out.
    """
    if status == 0:
        return
    error = LaunchError(f"cuDNN {library().version}: {what} failed with {library().message(status)}")
    if status in _OUT_OF_MEMORY:
        raise error from MemoryError(what)
    raise error


class Descriptor:
    """One backend descriptor; keeps alive what it refers to."""

    __slots__ = ("_kept", "_library", "kind", "pointer")

    def __init__(self, kind: Kind) -> None:
        self.kind = kind
        self.pointer = 0
        self._library = library()
        self._kept: list[Descriptor] = []
        created = ctypes.c_void_p()
        status = self._library.create(kind, ctypes.byref(created))
        if status:
            check(status, f"creating a descriptor of {kind.name}")
        self.pointer = created.value or 0

    def set(self, attribute: Attribute, kind: Type, *values: float) -> Self:
        """Sets an attribute to numbers, enumerators or addresses."""
        array = (_CTYPES.get(kind, ctypes.c_int32) * len(values))(*values)
        status = self._library.set(self.pointer, attribute, kind, len(values), array)
        if status:
            check(status, f"setting {attribute.name} to {values}")
        return self

    def link(self, attribute: Attribute, *children: Descriptor) -> Self:
        """Sets an attribute to other descriptors."""
        self.keep(*children)
        return self.set(attribute, Type.DESCRIPTOR, *(child.pointer for child in children))

    def keep(self, *others: Descriptor) -> Self:
        """Keeps other descriptors alive as long as this one."""
        self._kept.extend(others)
        return self

    def finalize(self) -> Self:
        """Checks and completes the descriptor; a plan is compiled here."""
        status = self._library.finalize(self.pointer)
        if status:
            check(status, f"finalizing a descriptor of {self.kind.name}")
        return self

    def count(self, attribute: Attribute, kind: Type) -> int:
        """Number of elements of an attribute; 0 for attributes that the library counts only while it reads them."""
        return self._get(attribute, kind, None, 0)

    def values(self, attribute: Attribute, kind: Type, capacity: int = 1) -> tuple[int, ...]:
        """At most `capacity` elements of an attribute."""
        array = (_CTYPES.get(kind, ctypes.c_int32) * capacity)()
        return tuple(array[: self._get(attribute, kind, array, capacity)])

    def children(self, attribute: Attribute, kind: Kind, capacity: int) -> tuple[Descriptor, ...]:
        """Copies of at most `capacity` descriptors that an attribute refers to."""
        found = tuple(Descriptor(kind) for _ in range(capacity))
        array = (ctypes.c_void_p * capacity)(*(child.pointer for child in found))
        return found[: self._get(attribute, Type.DESCRIPTOR, array, capacity)]

    def _get(self, attribute: Attribute, kind: Type, array: Any, capacity: int) -> int:
        count = ctypes.c_int64()
        status = self._library.get(self.pointer, attribute, kind, capacity, ctypes.byref(count), array)
        if status:
            check(status, f"reading {attribute.name}")
        return count.value if array is None else min(count.value, capacity)

    def __del__(self, finalizing: Any = sys.is_finalizing) -> None:
        if self.pointer and not finalizing():
            with captures_undisturbed():  # a plan unloads the kernels that it compiled
                self._library.destroy(self.pointer)


class CudnnHandle:
    """A cuDNN context of one device and the stream it uses; for one thread at a time."""

    __slots__ = ("_set_stream", "pointer", "stream")

    def __init__(self) -> None:
        created = ctypes.c_void_p()
        check(library().create_handle(ctypes.byref(created)), "creating a handle")
        self.pointer = created.value or 0
        self._set_stream = library().set_stream
        self.stream = 0

    def use(self, stream: int) -> None:
        """Makes later executions go to a stream; free where they already do (a change costs about 2 us)."""
        if stream != self.stream:
            check(self._set_stream(self.pointer, stream), f"setting stream {stream:#x}")
            self.stream = stream


# Handles are lent to threads and never destroyed: destroying one synchronises the device.
_idle: dict[int, list[CudnnHandle]] = {}
_lock = threading.Lock()


class _Leases:
    """The handles of one thread by device; given back when the thread ends."""

    __slots__ = ("_idle", "handles")

    def __init__(self) -> None:
        self.handles: dict[int, CudnnHandle] = {}
        self._idle = _idle

    def __del__(self) -> None:
        for device_index, handle in self.handles.items():
            self._idle.setdefault(device_index, []).append(handle)


class _Thread(threading.local):
    def __init__(self) -> None:
        self.leases = _Leases()


_thread = _Thread()


def thread_handle(device_index: int) -> CudnnHandle:
    """This thread's handle on a device, which must be current.

    Raises:
        MissingLibraryError: cuDNN cannot be loaded.
        LaunchError: cuDNN refuses the device.
    """
    handles = _thread.leases.handles
    handle = handles.get(device_index)
    if handle is None:
        with _lock:  # the documentation wants the first handle to be made alone
            idle = _idle.get(device_index)
            handle = idle.pop() if idle else CudnnHandle()
        handles[device_index] = handle
    return handle
