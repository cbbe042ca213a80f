"""PyTorch's convolution in the form of an invoker, so that it is timed by the protocol that times our solutions.

An epilogue is what eager PyTorch makes of it: the bias is the convolution's where nothing stands between and its type
is the tensors', all else is a pass of its own, in place where PyTorch has it. So are statistics, the pass being that of
its batch norm; the bias gradient is what its backward convolution gives of it.

cudnn.benchmark is on and benchmark_limit is 0, so that PyTorch tries every algorithm; float32 may use TF32 exactly
where the problem's math says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from miofind.core.epilogue import DEFAULT_PARAMETERS, Activation, ResidualPosition
from miofind.core.operand import Operand
from miofind.core.problem import Direction, ProblemDescription
from miofind.core.tensor import DataType, MathMode, TensorDescriptor
from miofind.device.device import INSTALL_CUDA
from miofind.errors import LaunchError, MissingLibraryError
from miofind.solver.steps import Config

_EPSILON = 1e-5
_TYPESTR = {2: "<i2", 4: "<i4", 8: "<i8"}


class _Memory:
    """Device memory at an address, readable by PyTorch."""

    def __init__(self, address: int, tensor: TensorDescriptor) -> None:
        self.__cuda_array_interface__ = {
            "shape": (tensor.size,),
            "typestr": _TYPESTR[tensor.dtype.itemsize],
            "data": (address, False),
            "version": 3,
            "strides": None,
        }


class TorchRival:
    """Runs a problem with PyTorch on given addresses; outputs are PyTorch's own, kept until the next run.

    Raises:
        MissingLibraryError: PyTorch is not installed or sees no GPU.
    """

    solver_id = "torch"
    workspace_bytes = 0
    deterministic = False

    def __init__(self, problem: ProblemDescription, device_index: int) -> None:
        self.problem = problem
        self.config = Config()
        self._index = device_index
        self._torch = torch = _import_torch()
        self._tensors: dict[tuple[str, int], Any] = {}
        self._outputs: dict[int, Any] = {}
        self._streams: dict[int, Any] = {}
        backends = torch.backends
        backends.cudnn.benchmark = True
        backends.cudnn.benchmark_limit = 0
        backends.cudnn.allow_tf32 = backends.cuda.matmul.allow_tf32 = problem.math is MathMode.TF32
        conv = problem.conv
        if conv.pad_before != conv.pad_after:
            raise LaunchError("PyTorch's convolution takes no asymmetric padding")

    def run(self, bases: tuple[int, ...], stream: int) -> None:
        """Run once, asynchronously; the output's address only names the run."""
        torch = self._torch
        if stream not in self._streams:
            self._streams[stream] = torch.cuda.ExternalStream(stream, device=self._index)
        addresses = {operand.name: base for operand, base in zip(self.problem.operands, bases, strict=False)}
        given = {operand.name: self._tensor(operand, addresses[operand.name]) for operand in self.problem.inputs}
        a, b = [given[operand.name] for operand in self.problem.bare.inputs]
        with torch.cuda.stream(self._streams[stream]), torch.no_grad():
            result = self._convolve(a, b, given["bias"] if self._convolution_adds_bias else None)
            result = self._pass_by_pass(result, given)
            statistics = torch.batch_norm_stats(result, _EPSILON) if self.problem.epilogue.statistics else ()
            self._outputs[addresses[self.problem.direction.output]] = (result, statistics)

    @property
    def _convolution_adds_bias(self) -> bool:
        epilogue = self.problem.epilogue
        return epilogue.bias and not epilogue.scale and epilogue.parameter_dtype is None

    def _pass_by_pass(self, result: Any, given: Mapping[str, Any]) -> Any:
        """The epilogue applied to the convolution's result."""
        epilogue = self.problem.epilogue
        if epilogue.scale:
            result.mul_(given["scale"])
        if epilogue.bias and not self._convolution_adds_bias:
            result.add_(given["bias"])
        if epilogue.channel_bias:
            result.add_(given["channel_bias"])
        if epilogue.residual is ResidualPosition.BEFORE:
            result.add_(given["residual"])
        if epilogue.activation is not Activation.NONE:
            result = _activated(self._torch, result, epilogue.activation)
        if epilogue.derivative is not Activation.NONE:
            result = _gradient(self._torch, result, given["saved"], epilogue.derivative)
        if epilogue.residual is ResidualPosition.AFTER:
            result.add_(given["residual"])
        return result

    def _convolve(self, a: Any, b: Any, bias: Any) -> Any:
        problem, aten = self.problem, self._torch.ops.aten
        conv = problem.conv
        geometry = [list(conv.stride), list(conv.pad_before), list(conv.dilation), False, [0] * problem.spatial_dims]
        if problem.direction is Direction.FORWARD:
            return aten.convolution(a, b, bias, *geometry, conv.groups)
        data = problem.direction is Direction.BACKWARD_DATA
        x, w = (self._shape_only("x"), b) if data else (b, self._shape_only("w"))
        bias = [problem.k] if problem.epilogue.bias_gradient else None
        wanted = [data, not data, bias is not None]
        gradients = aten.convolution_backward(a, x, w, bias, *geometry, conv.groups, wanted)
        return gradients[0] if data else gradients

    def _shape_only(self, name: str) -> Any:
        """A tensor that stands for the output's shape and layout; never read."""
        return self._tensors.setdefault((name, 0), self._empty(self.problem.tensor(name)))

    def _empty(self, tensor: TensorDescriptor) -> Any:
        torch = self._torch
        dtype = getattr(torch, tensor.dtype.value)
        return torch.empty_strided(tensor.shape, tensor.strides, dtype=dtype, device=f"cuda:{self._index}")

    def _tensor(self, operand: Operand, address: int) -> Any:
        """An operand as PyTorch takes it: in as many dimensions as the output, but for the convolution's own bias."""
        key = (operand.name, address)
        if key not in self._tensors:
            tensor = operand.tensor
            flat = self._torch.as_tensor(_Memory(address, tensor), device=f"cuda:{self._index}")
            typed = flat.view(getattr(self._torch, DataType(tensor.dtype).value))
            is_vector = operand.name == "bias" and self._convolution_adds_bias
            self._tensors[key] = typed if is_vector else typed.as_strided(tensor.shape, tensor.strides)
        return self._tensors[key]


def _activated(torch: Any, result: Any, activation: Activation) -> Any:
    """An activation by PyTorch's function of that name, with the default parameters of a run."""
    aten, numbers = torch.ops.aten, DEFAULT_PARAMETERS.numbers(activation)[2:]
    if activation in (Activation.GELU, Activation.GELU_TANH):
        return aten.gelu(result, approximate="tanh" if activation is Activation.GELU_TANH else "none")
    if activation is Activation.CLAMP:
        return aten.hardtanh_(result, *numbers)
    if activation in (Activation.LEAKY_RELU, Activation.ELU):
        return getattr(aten, f"{activation.value}_")(result, numbers[0])
    return getattr(aten, f"{activation.value}_")(result)


def _gradient(torch: Any, result: Any, saved: Any, activation: Activation) -> Any:
    """A gradient behind an activation, by PyTorch's function for it, with the default parameters of a run."""
    aten, numbers = torch.ops.aten, DEFAULT_PARAMETERS.numbers(activation)[2:]
    if activation is Activation.RELU:
        return aten.threshold_backward(result, saved, 0)
    if activation in (Activation.GELU, Activation.GELU_TANH):
        return aten.gelu_backward(result, saved, approximate="tanh" if activation is Activation.GELU_TANH else "none")
    if activation is Activation.CLAMP:
        return aten.hardtanh_backward(result, saved, *numbers)
    if activation is Activation.LEAKY_RELU:
        return aten.leaky_relu_backward(result, saved, numbers[0], False)
    return getattr(aten, f"{activation.value}_backward")(result, saved)


def _import_torch() -> Any:
    try:
        import torch
    except ImportError as error:
        raise MissingLibraryError(f"PyTorch is not installed, so there is nothing to compare with: {error}") from error
    if not torch.cuda.is_available():
        raise MissingLibraryError(f"this PyTorch sees no GPU; for miofind itself: {INSTALL_CUDA}")
    return torch
