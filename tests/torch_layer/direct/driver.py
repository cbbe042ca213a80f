"""A driver and libraries whose steps are the CPU place's solutions, for the direct path without a GPU."""

from __future__ import annotations

import ctypes
import itertools
import struct
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from miofind.arrays.arrays import NUMPY_DTYPES
from miofind.core.epilogue import DEFAULT_PARAMETERS, EpilogueParameters
from miofind.launch.bound_steps import BasedAddress
from miofind.launch.flat import Fixup, FlatConvolution, FlatKernel, FlatParameter, FlatProduct, FlatStep
from miofind.launch.invoker import Invoker
from miofind.libraries.cublaslt import MatmulCall
from miofind.libraries.cudnn import ConvCall
from miofind.libraries.cudnn_backend import Attribute, CudnnFunctions, Kind, Type
from miofind.solver.registry import Registry

FORMS = ("kernel", "product", "convolution")
_POINTER, _INT = ctypes.c_void_p, ctypes.c_int


class Driver:
    """Runs an invoker of the CPU place where a step is launched, which says which one by a number.

    Attributes:
        form: what `flat` gives, one of FORMS.
        launches: how many there were.
        status: what further ones end with.
        stream: of the handle of convolutions.
        streams: into which each launch went.
        current: the current stream of each thread that has another one than the default one, by its ident.
        captured: streams on which a graph is captured.
        current_status, capture_status: what the questions for these end with.
        leases_ended: of the plans of convolutions.
        biases_set: how often a product got the address of a bias.
        between: called between that and the start of the product.
        packs: how many packs of convolutions' operands there are.
    """

    def __init__(self) -> None:
        self.form = "kernel"
        self.launches = 0
        self.status = 0
        self.stream = 0
        self.streams: list[int] = []
        self.current: dict[int, int] = {}
        self.captured: set[int] = set()
        self.current_status = self.capture_status = 0
        self.leases_ended = ctypes.c_int64()
        self.biases_set = 0
        self.between: Callable[[], None] = lambda: None
        self.runs: list[tuple[Invoker, EpilogueParameters]] = []
        launch = ctypes.CFUNCTYPE(_INT, *[_POINTER] * 2, ctypes.POINTER(_POINTER), _POINTER)
        replace = ctypes.CFUNCTYPE(_INT, _POINTER, _POINTER)
        self.launch, self.replace_address = launch(self._launch), replace(self._replace_address)
        self.current_stream = ctypes.CFUNCTYPE(_INT, ctypes.c_int32, ctypes.POINTER(_POINTER))(self._current_stream)
        self.is_capturing = ctypes.CFUNCTYPE(_INT, _POINTER, ctypes.POINTER(_INT))(self._is_capturing)
        matmul = ctypes.CFUNCTYPE(_INT, *[_POINTER] * 14, ctypes.c_size_t, _POINTER)
        set_bias = ctypes.CFUNCTYPE(_INT, _POINTER, _INT, ctypes.POINTER(_POINTER), ctypes.c_size_t)
        self._products = matmul(self._matmul), set_bias(self._set_bias)
        self._factors = (ctypes.c_float * 2)(1, 0)
        self._biases: dict[int, int] = {}
        self._operations: dict[int, int] = {}
        self._packs: dict[int, dict[int, list[int]]] = {}
        self._numbers = itertools.count(1)
        at = ctypes.POINTER(_POINTER)
        self._convolutions = (
            ctypes.CFUNCTYPE(_INT, _INT, at)(self._create),
            ctypes.CFUNCTYPE(_INT, _POINTER, _INT, _INT, ctypes.c_int64, ctypes.POINTER(ctypes.c_int64))(self._set),
            ctypes.CFUNCTYPE(_INT, _POINTER)(lambda pack: 0),
            ctypes.CFUNCTYPE(_INT, *[_POINTER] * 3)(self._execute),
            ctypes.CFUNCTYPE(_INT, _POINTER)(self._destroy),
            ctypes.CFUNCTYPE(_INT, _POINTER, at)(self._get_stream),
        )

    def use(self, stream: int) -> None:
        """Make a stream this thread's current one."""
        self.current[threading.get_ident()] = stream

    @property
    def packs(self) -> int:
        return len(self._packs)

    def flat(self, invoker: Invoker, parameters: EpilogueParameters = DEFAULT_PARAMETERS) -> tuple[FlatStep, ...]:
        """A launch of it."""
        self.runs.append((invoker, parameters))
        count = len(invoker.problem.operands)
        operands = [BasedAddress(base, 0) for base in range(count)]
        workspace = BasedAddress(count + bool(invoker.problem.epilogue), 0)
        made = {"kernel": self._kernel, "product": self._product, "convolution": self._convolution}
        return (made[self.form](operands, workspace),)

    def _kernel(self, operands: list[BasedAddress], workspace: BasedAddress) -> FlatKernel:
        """Its number, each base by a pointer, the first one by a tensor map once more."""
        given = [FlatParameter(content=struct.pack("=q", len(self.runs) - 1))]
        given += [FlatParameter(content=bytes(8), fixups=(Fixup(0, where),)) for where in (*operands, workspace)]
        of_first = (Fixup(0, BasedAddress(0, 16)),)
        given.append(FlatParameter(content=b"map" + bytes(125), fixups=of_first, is_map=True))
        one = (1, 1, 1)
        return FlatKernel(function=7, grid=one, block=one, shared_bytes=0, pdl=False, parameters=tuple(given))

    def _product(self, operands: list[BasedAddress], workspace: BasedAddress) -> FlatProduct:
        """Its number by the operation, one an invoker, the third operand as what is written, a fourth as a bias."""
        operation = self._operations.setdefault(id(self.runs[-1][0]), len(self.runs))
        matmul, set_attribute = map(_address, self._products)
        alpha = ctypes.addressof(self._factors)
        call = MatmulCall(
            matmul=matmul, set_attribute=set_attribute, handle=5, operation=operation,
            layout_a=11, layout_b=12, layout_c=13, alpha=alpha, beta=alpha + 4, algorithm=14,
            workspace_bytes=64, bias_attribute=8, kept=(),
        )  # fmt: skip
        a, b, d, *rest = operands
        return FlatProduct(call=call, a=a, b=b, c=d, d=d, bias=rest[0] if rest else None, workspace=workspace)

    def _convolution(self, operands: list[BasedAddress], workspace: BasedAddress) -> FlatConvolution:
        """Its number by the plan."""
        functions = CudnnFunctions(*map(_address, self._convolutions))
        call = ConvCall(
            functions=functions, handle=6, plan=len(self.runs), ids=tuple(range(100, 100 + len(operands))),
            leases_ended=ctypes.addressof(self.leases_ended), leases_ended_before=self.leases_ended.value,
        )  # fmt: skip
        return FlatConvolution(call=call, operands=tuple(operands), workspace=workspace)

    def _replace_address(self, at: int, address: int) -> int:
        assert at % 64 == 0
        assert ctypes.string_at(at, 3) == b"map"
        ctypes.memmove(at + 64, struct.pack("=Q", address), 8)
        return 0

    def _launch(self, config: int, function: int, parameters: Any, extra: int) -> int:
        self.launches += 1
        if self.status:
            return self.status
        assert (function, extra) == (7, None)
        *blocks, stream = struct.unpack("@7I4xQ", ctypes.string_at(config, 40))
        assert blocks == [1] * 6 + [0]
        self.streams.append(stream)
        number = struct.unpack("=q", ctypes.string_at(parameters[0], 8))[0]
        count = len(self.runs[number][0].problem.operands)
        addresses = [struct.unpack("=Q", ctypes.string_at(parameters[1 + i], 8))[0] for i in range(count + 1)]
        mapped = ctypes.string_at(parameters[count + 2] + 64, 8)
        assert struct.unpack("=Q", mapped) == (addresses[0] + 16,)
        return self._run(number, addresses)

    def _matmul(
        self, handle: int, operation: int, alpha: int, a: int, layout_a: int, b: int, layout_b: int, beta: int,
        c: int, layout_c: int, d: int, layout_d: int, algorithm: int, workspace: int, size: int, stream: int,
    ) -> int:  # fmt: skip
        self.launches += 1
        if self.status:
            return self.status
        assert (handle, layout_a, layout_b, layout_c, layout_d, algorithm, size) == (5, 11, 12, 13, 13, 14, 64)
        assert (c, beta) == (d, alpha + 4)
        self.streams.append(stream or 0)
        bias = [self._biases[operation]] if operation in self._biases else []
        return self._run(operation - 1, [a, b, d, *bias, workspace or 0])

    def _set_bias(self, operation: int, attribute: int, value: Any, size: int) -> int:
        assert (attribute, size) == (8, 8)
        self._biases[operation] = value[0]
        self.biases_set += 1
        self.between()
        return 0

    def _create(self, kind: int, made: Any) -> int:
        assert kind == Kind.VARIANT_PACK
        made[0] = number = next(self._numbers)
        self._packs[number] = {}
        return 0

    def _set(self, pack: int, attribute: int, kind: int, count: int, values: Any) -> int:
        assert kind == (Type.INT64 if attribute == Attribute.PACK_UNIQUE_IDS else Type.VOID_PTR)
        self._packs[pack][attribute] = values[:count]
        return 0

    def _execute(self, handle: int, plan: int, pack: int) -> int:
        self.launches += 1
        if self.status:
            return self.status
        assert handle == 6
        self.streams.append(self.stream)
        given = self._packs[pack]
        operands = given[Attribute.PACK_DATA_POINTERS]
        assert given[Attribute.PACK_UNIQUE_IDS] == list(range(100, 100 + len(operands)))
        return self._run(plan - 1, [*operands, *given[Attribute.PACK_WORKSPACE]])

    def _destroy(self, pack: int) -> int:
        del self._packs[pack]
        return 0

    def _get_stream(self, handle: int, made: Any) -> int:
        made[0] = self.stream or None
        return 0

    def _current_stream(self, device: int, made: Any) -> int:
        made[0] = self.current.get(threading.get_ident())
        return self.current_status

    def _is_capturing(self, stream: int, status: Any) -> int:
        status[0] = int(stream in self.captured)
        return self.capture_status

    def _run(self, number: int, addresses: list[int]) -> int:
        invoker, numbers = self.runs[number]
        operands = invoker.problem.operands
        assert len(addresses) == len(operands) + 1
        bases: list[Any] = [_array(address, each.array) for address, each in zip(addresses, operands, strict=False)]
        if size := _packed_bytes(invoker):
            place = next(i for i, each in enumerate(operands) if each.name == "w")
            bases[place] = np.frombuffer((ctypes.c_char * size).from_address(addresses[place]), np.uint8)
        bases += [numbers] if invoker.problem.epilogue else []
        size = invoker.workspace_bytes
        scratch = np.frombuffer((ctypes.c_char * size).from_address(addresses[-1]), np.uint8) if size else None
        invoker.run((*bases, scratch), 0)
        return 0


def _address(function: Any) -> int:
    return ctypes.cast(function, _POINTER).value or 0


def _packed_bytes(invoker: Invoker) -> int:
    """Of the filters that an invoker is given packed; 0 where it is given them as they are."""
    solver = Registry.default().named(invoker.solver_id)
    packing = solver.packing(invoker.problem, invoker.device, invoker.config)
    return packing.bytes if packing is not None and packing.run == invoker.solution else 0


def _array(address: int, tensor: Any) -> Any:
    """The memory of a tensor as an array of its shape and strides."""
    dtype = NUMPY_DTYPES[tensor.dtype]
    flat = np.frombuffer((ctypes.c_char * tensor.bytes).from_address(address), dtype)
    return np.lib.stride_tricks.as_strided(flat, tensor.shape, [step * dtype.itemsize for step in tensor.strides])
