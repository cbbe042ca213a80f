"""Matrix products by cuBLASLt: plans made once, launched with device addresses and a stream.

A plan holds descriptors, an algorithm and scalars; a launch allocates nothing and may be captured in a CUDA graph. The
step's device must be current. An algorithm is recorded as attributes and built from them again, never taken by its
place in a list, since places change between versions of the library.
"""

from __future__ import annotations

import ctypes
import functools
import os
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from miofind.core.epilogue import Activation, EpilogueParameters
from miofind.core.problem import DataType, MathMode
from miofind.device.device import INSTALL_CUDA, Device
from miofind.errors import LaunchError, MissingLibraryError
from miofind.libraries.matmul_choice import ALGORITHM_ATTRIBUTES, MatmulShape
from miofind.libraries.nvmath_bindings import binding
from miofind.solver.steps import MatmulStep

# Values of cudaDataType_t and cublasComputeType_t. Source: library_types.h and cublas_api.h of the CUDA toolkit.
_CUDA_TYPE = {DataType.FLOAT32: 0, DataType.FLOAT64: 1, DataType.FLOAT16: 2, DataType.BFLOAT16: 14}
# cublasLtEpilogue_t: what an activation and a bias add up to; _DEFAULT for neither.
_EPILOGUES = {Activation.NONE: 0, Activation.RELU: 2}
_BIAS = 4
_DEFAULT = 1
_COMPUTE_32F = 68
_COMPUTE_64F = 70
_COMPUTE_32F_FAST_TF32 = 77
_MAX_RESULTS = 64
_PLANS = 4096

FusedOperands = tuple[int, int, int, int, int]
"""Addresses of A, B, C, the bias and the residual; 0 for what there is not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MatmulAlgorithm:
    """One algorithm of the library for one product.

    Attributes:
        algorithm: (attribute, value) pairs that name it.
        workspace_bytes: workspace it needs.
        waves: how often it fills the device, as the library counts.
    """

    algorithm: tuple[tuple[str, int], ...]
    workspace_bytes: int
    waves: float


class MatmulPlan:
    """A product ready to launch; made by `matmul_plan`, shared between threads.

    Attributes:
        workspace_bytes: bytes of the workspace that a launch uses.
        result: the library's structure that holds the algorithm.
        launch: `launch(a, b, c, workspace, stream)` with device addresses and a stream's address as ints. Starts the
            product asynchronously; raises LaunchError where the library refuses.
    """

    __slots__ = ("__weakref__", "launch", "result", "workspace_bytes")

    launch: Callable[[int, int, int, int, int], None]

    def __init__(self, operation: _Operation, result: npt.NDArray[Any]) -> None:
        self.result = result
        self.workspace_bytes = int(result["workspace_size"][0])
        self.launch = _launcher(operation, result, self.workspace_bytes)


def matmul_plan(step: MatmulStep, device: Device) -> MatmulPlan:
    """The plan of a step, cached by its shape and device. Buffers are taken to begin at 16-byte boundaries.

    Raises:
        MissingLibraryError: nvmath-python or cuBLASLt is not installed.
        LaunchError: the library has no algorithm for the step, or refuses the recorded one.
    """
    return _plan(MatmulShape.of(step), device.index)


def matmul_algorithms(step: MatmulStep, device: Device, limit: int = 8) -> tuple[MatmulAlgorithm, ...]:
    """The library's algorithms for a step within its workspace, best first by its heuristics; () where it has none.

    Raises:
        MissingLibraryError: nvmath-python or cuBLASLt is not installed.
        LaunchError: the library failed.
    """
    shape = MatmulShape.of(step)
    operation = _operation(shape, device.index)
    found: dict[tuple[tuple[str, int], ...], MatmulAlgorithm] = {}
    for result in _heuristics(operation, shape, min(4 * limit, _MAX_RESULTS)):
        pairs = _attributes(operation.library, result)
        if _replays(operation, pairs):
            found.setdefault(
                pairs,
                MatmulAlgorithm(
                    algorithm=pairs,
                    workspace_bytes=int(result["workspace_size"][0]),
                    waves=float(result["waves_count"][0]),
                ),
            )
        if len(found) == limit:
            break
    return tuple(found.values())


class FusedProduct:
    """A product with an epilogue, of one thread: its bias and numbers are written where the library reads them.

    Args:
        step: the product.
        plan: its plan, whose algorithm is taken.

    Raises:
        LaunchError: the library refuses its descriptors.
    """

    __slots__ = ("_activation", "_bias", "_operation", "_parameters", "_plan")

    def __init__(self, step: MatmulStep, plan: MatmulPlan, device: Device) -> None:
        assert step.epilogue is not None
        self._activation = step.epilogue.activation
        self._operation = _operation(MatmulShape.of(step), device.index)
        self._plan = plan
        self._bias = 0
        self._parameters: EpilogueParameters | None = None

    def launch(self, operands: FusedOperands, parameters: EpilogueParameters, workspace: int, stream: int) -> None:
        """Start the product asynchronously.

        Raises:
            LaunchError: the library refuses.
        """
        operation, result = self._operation, self._plan.result
        library = operation.library
        a, b, c, bias, residual = operands
        try:
            if bias != self._bias:
                flags = library.MatmulDescAttribute
                _set(library.matmul_desc_set_attribute, operation.operation, flags.BIAS_POINTER, np.uint64(bias))
                self._bias = bias
            if parameters is not self._parameters:
                alpha, beta, _, _ = parameters.numbers(self._activation)
                operation.scalars[:] = alpha, beta if residual else 0.0
                self._parameters = parameters
            scalars = operation.scalars.ctypes.data
            library.matmul(
                operation.handle, operation.operation, scalars, a, operation.a, b, operation.b,
                scalars + operation.scalars.itemsize, residual or c, operation.c, c, operation.c,
                result.ctypes.data, workspace, self._plan.workspace_bytes, stream,
            )  # fmt: skip
        except library.cuBLASLtError as error:
            raise LaunchError(f"cuBLASLt did not start {operation.description}: {error}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class MatmulCall:
    """What cuBLASLt is called with beside matrices, workspace and stream, for callers in C: addresses.

    Attributes:
        matmul, set_attribute: of cublasLtMatmul and cublasLtMatmulDescSetAttribute.
        handle, operation, layout_a, layout_b, layout_c: of the library's; C's layout is D's, too.
        alpha, beta: of the factors.
        algorithm: of the library's structure.
        workspace_bytes: bytes of the workspace that a call uses.
        bias_attribute: number of the operation's attribute that is the bias's address.
        kept: what these are in, to be kept as long as there are callers.
    """

    matmul: int
    set_attribute: int
    handle: int
    operation: int
    layout_a: int
    layout_b: int
    layout_c: int
    alpha: int
    beta: int
    algorithm: int
    workspace_bytes: int
    bias_attribute: int
    kept: tuple[Any, ...]


def matmul_call(step: MatmulStep, plan: MatmulPlan, device: Device) -> MatmulCall:
    """What a launch of a plan calls, with the default numbers where the step has an epilogue.

    Raises:
        LaunchError: the library refuses the descriptors, or its functions are not found.
    """
    functions = _functions()
    operation = _operation(MatmulShape.of(step), device.index)
    if step.epilogue is not None:
        operation.scalars[:] = 1.0, 0.0 if step.epilogue.residual is None else 1.0
    alpha = operation.scalars.ctypes.data
    return MatmulCall(
        matmul=functions[0],
        set_attribute=functions[1],
        handle=operation.handle,
        operation=operation.operation,
        layout_a=operation.a,
        layout_b=operation.b,
        layout_c=operation.c,
        alpha=alpha,
        beta=alpha + operation.scalars.itemsize,
        algorithm=plan.result.ctypes.data,
        workspace_bytes=plan.workspace_bytes,
        bias_attribute=int(operation.library.MatmulDescAttribute.BIAS_POINTER),
        kept=(operation, plan),
    )


@functools.cache
def _functions() -> tuple[int, int]:
    """Addresses of cublasLtMatmul and cublasLtMatmulDescSetAttribute of the library that the bindings have loaded.

    Raises:
        LaunchError: none that is loaded is theirs.
    """
    version = _library().get_version()
    try:
        loaded = ctypes.CDLL(f"libcublasLt.so.{version // 10_000}", mode=os.RTLD_NOLOAD | os.RTLD_NOW)
        loaded.cublasLtGetVersion.restype = ctypes.c_size_t
        found = loaded.cublasLtGetVersion()
    except OSError:
        found = None
    if found != version:
        raise LaunchError(f"cuBLASLt {version} is not the library that is loaded by its name, which is {found}")
    called = (loaded.cublasLtMatmul, loaded.cublasLtMatmulDescSetAttribute)
    matmul, set_attribute = (ctypes.cast(each, ctypes.c_void_p).value or 0 for each in called)
    return matmul, set_attribute


class _Operation:
    """Descriptors of one product; destroyed with the object."""

    __slots__ = ("__weakref__", "a", "b", "c", "description", "handle", "library", "operation", "scalars", "types")

    def __init__(self, shape: MatmulShape, device_index: int) -> None:
        step = shape.step
        library: Any = _library()
        self.library = library
        self.handle = _handle(device_index)
        self.description = _describe(step)
        scale = step.dtype_ab.accumulator
        compute = _compute_type(step)
        ab, c, scalar = _CUDA_TYPE[step.dtype_ab], _CUDA_TYPE[step.dtype_c], _CUDA_TYPE[scale]
        self.types = (compute, scalar, ab, ab, c, c)
        self.scalars = np.array([step.alpha, step.beta], dtype=scale.value)
        with _reported(self.description):
            self.operation = library.matmul_desc_create(compute, scalar)
            _end_with(self, library.matmul_desc_destroy, self.operation)
            flags = library.MatmulDescAttribute
            for name, transposed in ((flags.TRANSA, step.transpose_a), (flags.TRANSB, step.transpose_b)):
                _set(library.matmul_desc_set_attribute, self.operation, name, np.int32(transposed))
            if step.epilogue is not None:
                fused = np.int32(_EPILOGUES[step.epilogue.activation] + (_BIAS if step.epilogue.bias else 0))
                _set(library.matmul_desc_set_attribute, self.operation, flags.EPILOGUE, fused or np.int32(_DEFAULT))
            rows_a, columns_a = (step.k, step.m) if step.transpose_a else (step.m, step.k)
            rows_b, columns_b = (step.n, step.k) if step.transpose_b else (step.k, step.n)
            self.a = self._layout(ab, (rows_a, columns_a, step.lda), step.batch, step.stride_a)
            self.b = self._layout(ab, (rows_b, columns_b, step.ldb), step.batch, step.stride_b)
            self.c = self._layout(c, (step.m, step.n, step.ldc), step.batch, step.stride_c)

    def _layout(self, dtype: int, sizes: tuple[int, int, int], batch: int, stride: int) -> int:
        library = self.library
        rows, columns, ld = sizes
        layout = int(library.matrix_layout_create(dtype, rows, columns, ld))
        _end_with(self, library.matrix_layout_destroy, layout)
        if batch > 1:
            names = library.MatrixLayoutAttribute
            _set(library.matrix_layout_set_attribute, layout, names.BATCH_COUNT, np.int32(batch))
            _set(library.matrix_layout_set_attribute, layout, names.STRIDED_BATCH_OFFSET, np.int64(stride))
        return layout


def _end_with(owner: object, destroy: Callable[[int], None], pointer: int) -> None:
    """Destroy what a pointer is of with its owner; not where the process ends, in which callers in C may go on."""
    weakref.finalize(owner, destroy, pointer).atexit = False


def _launcher(operation: _Operation, result: npt.NDArray[Any], size: int) -> Callable[[int, int, int, int, int], None]:
    """A closure over plain ints, the cheapest call there is from Python; the defaults keep what they point to alive."""
    matmul, error_type = operation.library.matmul, operation.library.cuBLASLtError
    handle, desc, layout_c = operation.handle, operation.operation, operation.c
    layout_a, layout_b = operation.a, operation.b
    alpha = operation.scalars.ctypes.data
    beta = alpha + operation.scalars.itemsize
    algorithm = result.ctypes.data
    keep = (operation, result)

    def launch(a: int, b: int, c: int, workspace: int, stream: int) -> None:
        try:
            matmul(
                handle, desc, alpha, a, layout_a, b, layout_b, beta, c, layout_c, c, layout_c,
                algorithm, workspace, size, stream,
            )  # fmt: skip
        except error_type as error:
            raise LaunchError(f"cuBLASLt did not start {keep[0].description}: {error}") from error

    return launch


@functools.lru_cache(maxsize=_PLANS)
def _plan(shape: MatmulShape, device_index: int) -> MatmulPlan:
    operation = _operation(shape, device_index)
    step = shape.step
    if step.algorithm:
        return MatmulPlan(operation, _built(operation, step.algorithm, step.workspace_bytes))
    results = _heuristics(operation, shape, 1)
    if not results:
        raise LaunchError(
            f"cuBLASLt has no algorithm for {operation.description} within {step.workspace_bytes} bytes of workspace"
        )
    return MatmulPlan(operation, results[0])


def _operation(shape: MatmulShape, device_index: int) -> _Operation:
    import cupy

    with cupy.cuda.Device(device_index):
        return _Operation(shape, device_index)


def _heuristics(operation: _Operation, shape: MatmulShape, count: int) -> list[npt.NDArray[Any]]:
    """At most `count` usable results, best first, each one structure in an array of its own."""
    library, step = operation.library, shape.step
    names = library.MatmulPreferenceAttribute
    wanted = (
        (names.MAX_WORKSPACE_BYTES, np.uint64(step.workspace_bytes)),
        (names.REDUCTION_SCHEME_MASK, np.uint32(_reduction_mask(library, step))),
        (names.MIN_ALIGNMENT_A_BYTES, np.uint32(shape.alignment_a)),
        (names.MIN_ALIGNMENT_B_BYTES, np.uint32(shape.alignment_b)),
        (names.MIN_ALIGNMENT_C_BYTES, np.uint32(shape.alignment_c)),
        (names.MIN_ALIGNMENT_D_BYTES, np.uint32(shape.alignment_c)),
    )
    results = np.zeros(count, dtype=library.matmul_heuristic_result_dtype)
    returned = np.zeros(1, dtype=np.int32)
    with _reported(operation.description):
        preference = library.matmul_preference_create()
        try:
            for name, value in wanted:
                _set(library.matmul_preference_set_attribute, preference, name, value)
            library.matmul_algo_get_heuristic(
                operation.handle, operation.operation, operation.a, operation.b, operation.c, operation.c,
                preference, count, results.ctypes.data, returned.ctypes.data,
            )  # fmt: skip
        except library.cuBLASLtError as error:
            if "NOT_SUPPORTED" not in library.get_status_name(error.status):
                raise
            return []
        finally:
            library.matmul_preference_destroy(preference)
    usable = results[: int(returned[0])]
    return [usable[i : i + 1].copy() for i in range(len(usable)) if usable["state"][i] == 0]


def _reduction_mask(library: Any, step: MatmulStep) -> int:
    """Schemes that keep partial sums in float32: the others add in the output's type."""
    schemes = library.ReductionScheme
    return int(schemes.MASK if step.dtype_c.itemsize >= 4 else schemes.COMPUTE_TYPE)


def _attributes(library: Any, result: npt.NDArray[Any]) -> tuple[tuple[str, int], ...]:
    """The recorded form of a result's algorithm."""
    pairs = []
    for name in ALGORITHM_ATTRIBUTES:
        attribute = library.MatmulAlgoConfigAttribute[name]
        value = np.zeros(1, dtype=library.get_matmul_algo_config_attribute_dtype(attribute))
        written = np.zeros(1, dtype=np.uint64)
        library.matmul_algo_config_get_attribute(
            result.ctypes.data, attribute, value.ctypes.data, value.nbytes, written.ctypes.data
        )
        pairs.append((name, int(value[0])))
    return tuple(pairs)


def _replays(operation: _Operation, pairs: tuple[tuple[str, int], ...]) -> bool:
    try:
        _built(operation, pairs, None)
    except LaunchError:
        return False
    return True


def _built(operation: _Operation, pairs: tuple[tuple[str, int], ...], workspace_bytes: int | None) -> npt.NDArray[Any]:
    """The recorded algorithm as a checked result.

    Raises:
        LaunchError: this library refuses it for this product, or it needs more workspace than there is.
    """
    library = operation.library
    result = np.zeros(1, dtype=library.matmul_heuristic_result_dtype)
    values = dict(pairs)
    # The algorithm is the structure's first member, so that one address serves for both.
    with _reported(f"{operation.description} with {values}"):
        library.matmul_algo_init(operation.handle, *operation.types, values["ID"], result.ctypes.data)
        for name, value in values.items():
            attribute = library.MatmulAlgoConfigAttribute[name]
            if name != "ID":
                dtype = library.get_matmul_algo_config_attribute_dtype(attribute)
                _set(library.matmul_algo_config_set_attribute, result.ctypes.data, attribute, dtype(value))
        checked = np.zeros(1, dtype=library.matmul_heuristic_result_dtype)
        library.matmul_algo_check(
            operation.handle, operation.operation, operation.a, operation.b, operation.c, operation.c,
            result.ctypes.data, checked.ctypes.data,
        )  # fmt: skip
    result["workspace_size"] = checked["workspace_size"]
    needed = int(checked["workspace_size"][0])
    if workspace_bytes is not None and needed > workspace_bytes:
        raise LaunchError(
            f"{operation.description} with {values} needs {needed} bytes of workspace, given are {workspace_bytes}"
        )
    return result


def _compute_type(step: MatmulStep) -> int:
    if step.dtype_ab is DataType.FLOAT64:
        return _COMPUTE_64F
    return _COMPUTE_32F_FAST_TF32 if step.math is MathMode.TF32 else _COMPUTE_32F


def _describe(step: MatmulStep) -> str:
    a, b = ("T" if step.transpose_a else "N"), ("T" if step.transpose_b else "N")
    fused = f" with {step.epilogue.activation}" if step.epilogue else ""
    return (
        f"a product m={step.m} n={step.n} k={step.k} {a}{b} batch={step.batch} ld={step.lda},{step.ldb},{step.ldc} "
        f"strides={step.stride_a},{step.stride_b},{step.stride_c} {step.dtype_ab} to {step.dtype_c} {step.math}{fused}"
    )


def _set(setter: Callable[..., None], target: int, attribute: int, value: np.generic) -> None:
    """Set one attribute from a NumPy scalar of its type."""
    held = np.array([value])
    setter(target, attribute, held.ctypes.data, held.nbytes)


@contextmanager
def _reported(what: str) -> Iterator[None]:
    """The library's errors as LaunchError."""
    try:
        yield
    except _library().cuBLASLtError as error:
        raise LaunchError(f"cuBLASLt refused {what}: {error}") from error


@functools.cache
def _library() -> Any:
    """nvmath.bindings.cublasLt.

    Raises:
        MissingLibraryError: it is not installed.
    """
    try:
        return binding("cublasLt")
    except ImportError as error:
        raise MissingLibraryError(
            f"nvmath-python is not installed, so cuBLASLt cannot be used: {INSTALL_CUDA}"
        ) from error


@functools.cache
def _handle(device_index: int) -> int:
    """The handle of a device, kept for the process; the library may be called with it from several threads.

    Source: cuBLAS documentation, "Thread Safety". The device must be current.

    Raises:
        MissingLibraryError: the shared library cannot be loaded.
    """
    library = _library()
    try:
        return int(library.create())
    except library.cuBLASLtError as error:
        raise LaunchError(f"cuBLASLt cannot be used on CUDA device {device_index}: {error}") from error
    except RuntimeError as error:
        raise MissingLibraryError(f"cuBLASLt cannot be loaded ({error}): {INSTALL_CUDA}") from error
