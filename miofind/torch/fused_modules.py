"""`FusedConvolution`, the module that a convolution becomes with what follows it."""

from __future__ import annotations

from typing import Any

import torch

from miofind.torch.differentiable import Tensors, run
from miofind.torch.formats import dense, output_layout
from miofind.torch.unfused import Nonlinearity, Window, activated


class FusedConvolution(torch.nn.Module):
    """activation(x * weight + bias + beta * residual) for inference, by `miofind.torch.convolution`.

    state_dict has `weight`, (k, c/groups, *filter), and `bias`, (k,), where there is one: batch norms are in them. Both
    are parameters that require no gradient; x may. Weights in the dtype of autocast or in the memory format of x are
    made once, kept beside them, and made again where the weights change; they are in no state_dict and in no pickle.

    Args:
        weight: (k, c/groups, *filter).
        bias: (k,), or None.
        window: how filters move over x.
        numbers: the activation, and what is done with a residual.
    """

    def __init__(self, weight: Any, bias: Any, window: Window, numbers: Nonlinearity) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(weight.detach(), requires_grad=False)
        given = None if bias is None else torch.nn.Parameter(bias.detach(), requires_grad=False)
        self.register_parameter("bias", given)
        self.window = window
        self.numbers = numbers
        self._packed: dict[tuple[Any, ...], Any] = {}

    def forward(self, x: Any, residual: Any = None) -> Any:
        """y, (n, k, *out_spatial), of x: (n, c, *spatial), and a residual of y's shape.

        A residual of another shape or dtype, which PyTorch broadcasts or promotes, is added by PyTorch.
        """
        rank = self.weight.dim()
        is_single = x.dim() == rank - 1
        if is_single:
            x, residual = x.unsqueeze(0), None if residual is None else residual.unsqueeze(0)
        y = self._computed(x, residual)
        return y.squeeze(0) if is_single else y

    def _computed(self, x: Any, residual: Any) -> Any:
        dtype = torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else x.dtype
        weight, numbers = self._weight_for(x, dtype), self.numbers
        given = Tensors(x, weight, self.bias, None, residual)
        if residual is None:
            return run(given, self.window, numbers)
        shape = self.window.output_shape(x.shape, weight.shape)
        if residual.dtype == dtype and residual.shape == torch.Size(shape):
            return run(given, self.window, numbers)
        y = run(given._replace(residual=None), self.window, Nonlinearity())
        if numbers.residual_position == "before":
            return activated(torch.add(y, residual, alpha=numbers.beta), numbers)
        return torch.add(activated(y, numbers), residual, alpha=numbers.beta)

    def _weight_for(self, x: Any, dtype: Any) -> Any:
        """The weight in the dtype and the memory format that a run with x needs, from those kept."""
        weight = self.weight
        if torch.compiler.is_compiling() or torch.is_inference(weight) or type(weight) is not torch.nn.Parameter:
            return weight
        layout = output_layout(x, weight, None, self.window.geometry)
        if weight.dtype == dtype and dense(weight, layout) is weight:
            return weight
        key = (dtype, layout, weight.data_ptr(), weight._version)
        if key not in self._packed:
            self._packed = {key: dense(weight.detach().to(dtype), layout)}
        return self._packed[key]

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_packed": {}}

    def extra_repr(self) -> str:
        k, c, *filter_shape = self.weight.shape
        window = self.window
        parts = [f"{c * window.groups}, {k}, kernel_size={tuple(filter_shape)}, stride={window.stride}"]
        parts += [f"padding={window.padding}"] if any(window.padding) else []
        parts += [f"dilation={window.dilation}"] if max(window.dilation) > 1 else []
        parts += [f"groups={window.groups}"] if window.groups > 1 else []
        parts += ["bias"] if self.bias is not None else []
        parts += [self.numbers.activation] if self.numbers.activation != "none" else []
        return ", ".join(parts)
