"""A convolution as PyTorch's dispatcher sees it, and the problems that it poses.

`aten::convolution` is one operator for 1 to 3 spatial dimensions, transposed or not, always batched. A transposed one
is the mirrored direction of the convolution that leads from its output to its input: its output is that one's backward
data, its input's gradient is that one's output, and the gradient of its weights that of the same weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from miofind.core.problem import ProblemDescription
from miofind.core.tensor import DataType, Direction, Layout, MathMode
from miofind.errors import InvalidProblemError
from miofind.torch.override.dtypes import data_type_of
from miofind.torch.override.formats import missing_functions, output_layout

COMPUTED = ("y", "dx", "dw")
"""What the two operators compute: `aten::convolution` y, `aten::convolution_backward` dx and dw."""

DIRECTION_OF = {"y": Direction.FORWARD, "dx": Direction.BACKWARD_DATA, "dw": Direction.BACKWARD_WEIGHTS}
"""The direction of a call that computes one of them; of a transposed convolution the problem's is the mirrored one."""
COMPUTED_OF = {direction: computed for computed, direction in DIRECTION_OF.items()}

# The operands x, w and y of a problem by what they are in a call. `grad` is the gradient of the call's output.
_OPERANDS = {
    (False, "y"): ("x", "w", "y"),
    (False, "dx"): ("dx", "w", "grad"),
    (False, "dw"): ("x", "dw", "grad"),
    (True, "y"): ("y", "w", "x"),
    (True, "dx"): ("grad", "w", "dx"),
    (True, "dw"): ("grad", "dw", "x"),
}
_BIAS_EPILOGUES = {"y": "bias", "dw": "bias_gradient"}
_DIRECTION_OF_OUTPUT = {0: Direction.BACKWARD_DATA, 1: Direction.BACKWARD_WEIGHTS, 2: Direction.FORWARD}


class Unserved(Exception):
    """PyTorch's own kernel runs a call, for the reason given. Caught inside `miofind.torch`; no user meets it."""


def served_type(dtype: Any) -> DataType:
    """The element type that a torch.dtype is.

    Raises:
        Unserved: miofind's convolutions have none such.
    """
    known = data_type_of(dtype)
    if known is None:
        raise Unserved(f"its element type is {str(dtype).removeprefix('torch.')}")
    return known


@dataclass(frozen=True, slots=True)
class TensorForm:
    """What a tensor looks like: (n, c, *spatial) or (k, c/groups, *filter), strides in elements, element type."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: DataType

    @staticmethod
    def of(tensor: Any) -> TensorForm:
        """The form of a real or fake tensor, or of one of the device "meta".

        Raises:
            Unserved: an element type that miofind's convolutions do not have.
        """
        dtype = served_type(tensor.dtype)
        return TensorForm(tuple(map(int, tensor.shape)), tuple(map(int, tensor.stride())), dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvolutionCall:
    """One call of `aten::convolution`, or of `aten::convolution_backward` for it.

    Attributes:
        x, w: input and weights: (n, c, *spatial) and (k, c/groups, *filter), if transposed (c, k/groups, *filter).
        stride, padding, dilation, output_padding: one number a spatial dimension.
        transposed: whether it leads from outputs of a convolution to its inputs.
        groups: group count.
        backend_format: memory order that PyTorch gives the output and both gradients; the problems' tensors have it.
    """

    x: TensorForm
    w: TensorForm
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    output_padding: tuple[int, ...]
    transposed: bool
    groups: int
    backend_format: Layout

    @staticmethod
    def of(x: Any, w: Any, bias: Any, *geometry: Any) -> ConvolutionCall:
        """The call with these arguments, in the order of `aten::convolution`.

        Args:
            x, w: real or fake tensors, or such of the device "meta", which stands for a GPU.
            bias: a tensor, its sizes, as `aten::convolution_backward` has them, or None.
            geometry: stride, padding, dilation, transposed, output_padding and groups.

        Raises:
            Unserved: element types or ranks that miofind's convolutions do not have, arguments that PyTorch refuses, or
                a PyTorch that cannot be asked.
        """
        stride, padding, dilation, transposed, output_padding, groups = geometry
        spatial_dims = x.dim() - 2
        if spatial_dims not in (1, 2, 3) or w.dim() != x.dim():
            raise Unserved(f"its tensors have {x.dim()} and {w.dim()} dimensions")
        if missing := missing_functions():
            raise Unserved(f"this PyTorch has no torch._C.{missing[0]}, which says what strides its results have")
        forms = TensorForm.of(x), TensorForm.of(w)
        if forms[0].dtype is not forms[1].dtype:
            raise Unserved(f"its element types differ ({forms[0].dtype} and {forms[1].dtype})")
        try:
            layout = output_layout(x, w, bias, geometry)
        except RuntimeError as error:  # it tells the user so itself, when it runs the call
            raise Unserved(f"PyTorch refuses it: {error}") from error
        return ConvolutionCall(
            x=forms[0],
            w=forms[1],
            stride=_numbers(stride, spatial_dims),
            padding=_numbers(padding, spatial_dims),
            dilation=_numbers(dilation, spatial_dims),
            output_padding=_numbers(output_padding, spatial_dims) if transposed else (0,) * spatial_dims,
            transposed=bool(transposed),
            groups=int(groups),
            backend_format=layout,
        )

    @property
    def output_shape(self) -> tuple[int, ...]:
        """(n, k, *out_spatial).

        Source: pytorch, aten/src/ATen/native/ConvUtils.h, conv_output_size and conv_input_size.
        """
        channels = self.w.shape[1] * self.groups if self.transposed else self.w.shape[0]
        return (self.x.shape[0], channels, *map(self._output_size, range(len(self.stride))))

    def _output_size(self, i: int) -> int:
        size, reach = self.x.shape[i + 2], self.dilation[i] * (self.w.shape[i + 2] - 1) + 1
        if self.transposed:
            return (size - 1) * self.stride[i] - 2 * self.padding[i] + reach + self.output_padding[i]
        return (size + 2 * self.padding[i] - reach) // self.stride[i] + 1

    def operands(self, computed: str) -> tuple[str, str, str]:
        """What the operands x, w and y of a problem are here: "x", "w", "y", "dx", "dw", or "grad" for y's gradient.

        Args:
            computed: "y", "dx" or "dw".
        """
        return _OPERANDS[self.transposed, computed]

    def problem(self, computed: str, math: MathMode, *, with_bias: bool = False) -> ProblemDescription:
        """What is to be solved for one of the call's results, each tensor in the call's `backend_format`.

        Args:
            computed: "y", "dx" or "dw".
            math: of float32; other element types have one arithmetic.
            with_bias: y is to have the bias added, or the gradient of the bias is to come with dw; see `takes_bias`.

        Raises:
            Unserved: a convolution that miofind does not have.
        """
        if 0 in self.x.shape or 0 in self.w.shape:
            raise Unserved("a tensor of it is empty")
        shape_x, shape_y = self.x.shape, self.output_shape
        if self.transposed:
            shape_x, shape_y = shape_y, shape_x
        try:
            problem = ProblemDescription.convolution(
                x=shape_x,
                w=self.w.shape,
                padding=self.padding,
                stride=self.stride,
                dilation=self.dilation,
                groups=self.groups,
                direction=_DIRECTION_OF_OUTPUT[self.operands(computed).index(computed)],
                dtype=self.x.dtype,
                layout=self.backend_format,
                math=math if self.x.dtype is DataType.FLOAT32 else MathMode.IEEE,
                epilogue=_BIAS_EPILOGUES[computed] if with_bias else None,
            )
        except InvalidProblemError as error:
            raise Unserved(f"miofind has no such convolution: {error}") from error
        if problem.y.shape != shape_y:
            raise Unserved(f"output_padding={self.output_padding} is as large as its stride={self.stride}")
        return problem

    def takes_bias(self, computed: str) -> bool:
        """Whether miofind has kernels that add the bias to a result, or give the bias's gradient with it."""
        return not self.transposed and computed in _BIAS_EPILOGUES


def is_depthwise(asked: ConvolutionCall | ProblemDescription) -> bool:
    """Whether each channel has a filter of its own."""
    return asked.groups > 1 and asked.w.shape[1] == 1


def _numbers(values: Sequence[Any], count: int) -> tuple[int, ...]:
    """One number a spatial dimension; a single one stands for all, as in PyTorch."""
    numbers = tuple(map(int, values))
    return numbers * count if len(numbers) == 1 else numbers
