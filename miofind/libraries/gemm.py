"""Products of row-major matrices as `MatmulStep`s, over a batch of images times groups.

A convolution as matrix products is written here once, for the solvers that differ only in where the columns come from:
(out pixels x filter taps) of x per image, or x itself where the filter has one tap.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass

from miofind.core.problem import DataType, MathMode
from miofind.device.device import Device
from miofind.libraries.matmul_choice import TENSOR_ALIGNMENT
from miofind.solver.steps import MatmulStep, Pointer

# Batches become the z dimension of a grid in many of the library's kernels.
MAX_BATCH = 65535
# Start and drain of one launch on a GPU that is kept busy.
STEP_MS = 2.5e-3

# Of `product_ms`. The library's kernels for operands that no 16-byte load can fetch are slower by the alignment, and
# take about twice as long where traffic is what counts.
_TENSOR_SHARE, _PLAIN_SHARE, _TRAFFIC_SHARE = 0.57, 0.70, 0.87
_SLOWDOWN = {8: 3.2, 4: 6.1}
_UNALIGNED_TRAFFIC = 2.0
_SPLIT_DEPTH = 320
_MOST_SPLIT = 4
_START_MS = 3.4e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmOperand:
    """A matrix in row-major order, one for each image and group.

    Attributes:
        buffer: buffer that holds it.
        dtype: element type.
        ld: elements between its rows.
        transposed: whether the buffer holds its transpose.
        image_stride, group_stride: elements between the matrices of neighbouring images and groups.
        offset: elements before the first matrix.
    """

    buffer: str
    dtype: DataType
    ld: int
    transposed: bool = False
    image_stride: int = 0
    group_stride: int = 0
    offset: int = 0

    def at(self, image: int, group: int) -> Pointer:
        """Address of one image's and group's matrix."""
        element = self.offset + image * self.image_stride + group * self.group_stride
        return Pointer(buffer=self.buffer, offset_bytes=element * self.dtype.itemsize)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchedGemm:
    """out[rows, columns] = left[rows, depth] @ right[depth, columns] (+ out), for `images` times `groups` matrices.

    Attributes:
        accumulate: whether the product is added to what `out` holds.
    """

    rows: int
    columns: int
    depth: int
    left: GemmOperand
    right: GemmOperand
    out: GemmOperand
    images: int = 1
    groups: int = 1
    accumulate: bool = False
    math: MathMode = MathMode.IEEE

    def __post_init__(self) -> None:
        assert not self.out.transposed, "a product writes rows"

    def steps(self) -> Iterator[MatmulStep]:
        """As few batched steps as one stride an operand allows."""
        operands = (self.left, self.right, self.out)
        merges = all(operand.image_stride == self.groups * operand.group_stride for operand in operands)
        if merges or self.images == 1:
            yield from self._batches(0, 0, self.images * self.groups, images=False)
        elif self.groups <= self.images:
            for group in range(self.groups):
                yield from self._batches(0, group, self.images, images=True)
        else:
            for image in range(self.images):
                yield from self._batches(image, 0, self.groups, images=False)

    def _batches(self, image: int, group: int, count: int, *, images: bool) -> Iterator[MatmulStep]:
        """`count` products from one image and group on, along images or groups, at most MAX_BATCH a step."""
        for first in range(0, count, MAX_BATCH):
            at = (image + first, group) if images else (image, group + first)
            yield self._step(at, min(MAX_BATCH, count - first), images)

    def _step(self, at: tuple[int, int], batch: int, images: bool) -> MatmulStep:
        # A row-major matrix is its column-major transpose, and out^T = right^T left^T.
        def stride(operand: GemmOperand) -> int:
            if batch == 1:
                return 0
            return operand.image_stride if images else operand.group_stride

        return MatmulStep(
            m=self.columns,
            n=self.rows,
            k=self.depth,
            transpose_a=self.right.transposed,
            transpose_b=self.left.transposed,
            lda=self.right.ld,
            ldb=self.left.ld,
            ldc=self.out.ld,
            a=self.right.at(*at),
            b=self.left.at(*at),
            c=self.out.at(*at),
            dtype_ab=self.left.dtype,
            dtype_c=self.out.dtype,
            math=self.math,
            batch=batch,
            stride_a=stride(self.right),
            stride_b=stride(self.left),
            stride_c=stride(self.out),
            beta=1.0 if self.accumulate else 0.0,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageRange:
    """Images [first, first + count) of y, whose columns begin with image `first_column` of their buffer."""

    first: int
    count: int
    first_column: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnProducts:
    """The products of one convolution over its column matrix.

    A group's columns are (pixels x depth) an image; depth = channels of a group * taps, in the order of the filter's
    memory, or more where columns and filters are padded with zeros. Pixel-major columns are (images, pixels, groups,
    depth), the others (images, groups, depth, pixels); y is (images, pixels, k) or (images, k, pixels).

    Attributes:
        pixels, groups, outputs, depth: sizes; `outputs` are the output channels of a group.
        columns: buffer that holds the columns of the images at hand.
        weights: buffer that holds the filters, (outputs x depth) a group.
        columns_dtype: their element type.
        columns_pixel_major, y_pixel_major: memory orders.
        dtype, math: element type of the problem's tensors, and arithmetic.
    """

    pixels: int
    groups: int
    outputs: int
    depth: int
    columns: str
    weights: str
    columns_dtype: DataType
    columns_pixel_major: bool
    y_pixel_major: bool
    dtype: DataType
    math: MathMode

    @property
    def merges_images(self) -> bool:
        """Whether the images follow each other as rows of one matrix."""
        return self.columns_pixel_major and self.y_pixel_major

    @property
    def filter_size(self) -> int:
        """Elements of the filters."""
        return self.groups * self.outputs * self.depth

    def forward(self, images: ImageRange) -> BatchedGemm:
        """y of the images."""
        columns, y, w = self._columns(images.first_column), self._y(images.first), self._w()
        pixels, count = self._merged(images.count)
        if self.y_pixel_major:
            return self._product((pixels, self.outputs, self.depth), columns, transpose(w), y, count)
        return self._product((self.outputs, pixels, self.depth), w, transpose(columns), transpose(y), count)

    def backward_data(self, images: ImageRange) -> BatchedGemm:
        """The columns of the images."""
        columns, y, w = self._columns(images.first_column), self._y(images.first), self._w()
        pixels, count = self._merged(images.count)
        if self.columns_pixel_major:
            return self._product((pixels, self.depth, self.outputs), y, w, columns, count)
        sizes = (self.depth, pixels, self.outputs)
        return self._product(sizes, transpose(w), transpose(y), transpose(columns), count)

    def backward_weights(self, images: ImageRange, filters: GemmOperand, *, accumulate: bool) -> BatchedGemm:
        """w of each image, or of all of them where images merge, written to or added to `filters`."""
        columns, y = self._columns(images.first_column), self._y(images.first)
        pixels, count = self._merged(images.count)
        sizes = (self.outputs, self.depth, pixels)
        product = self._product(sizes, transpose(y), columns, filters, count)
        return dataclasses.replace(product, accumulate=accumulate)

    def filters(self, buffer: str, dtype: DataType) -> GemmOperand:
        """Gradients of w, (outputs x depth) a group and one after another for images."""
        size = self.outputs * self.depth
        stride = self.filter_size
        return GemmOperand(buffer=buffer, dtype=dtype, ld=self.depth, image_stride=stride, group_stride=size)

    def _product(
        self, sizes: tuple[int, int, int], left: GemmOperand, right: GemmOperand, out: GemmOperand, images: int
    ) -> BatchedGemm:
        rows, columns, depth = sizes
        return BatchedGemm(
            rows=rows,
            columns=columns,
            depth=depth,
            left=left,
            right=right,
            out=out,
            images=images,
            groups=self.groups,
            math=self.math,
        )

    def _merged(self, images: int) -> tuple[int, int]:
        return (images * self.pixels, 1) if self.merges_images else (self.pixels, images)

    def _columns(self, image: int) -> GemmOperand:
        """(pixels x depth)."""
        return self._pixels_by(self.depth, self.columns, self.columns_dtype, self.columns_pixel_major, image)

    def _y(self, image: int) -> GemmOperand:
        """(pixels x outputs)."""
        return self._pixels_by(self.outputs, "y", self.dtype, self.y_pixel_major, image)

    def _w(self) -> GemmOperand:
        """(outputs x depth)."""
        size = self.outputs * self.depth
        return GemmOperand(buffer=self.weights, dtype=self.dtype, ld=self.depth, group_stride=size)

    def _pixels_by(self, width: int, buffer: str, dtype: DataType, pixel_major: bool, image: int) -> GemmOperand:
        image_stride = self.pixels * self.groups * width
        return GemmOperand(
            buffer=buffer,
            dtype=dtype,
            ld=self.groups * width if pixel_major else self.pixels,
            transposed=not pixel_major,
            image_stride=image_stride,
            group_stride=width if pixel_major else width * self.pixels,
            offset=image * image_stride,
        )


def transpose(operand: GemmOperand) -> GemmOperand:
    """The transposed matrix in the same memory."""
    return dataclasses.replace(operand, transposed=not operand.transposed)


def product_ms(product: BatchedGemm, device: Device, *, splits: bool) -> float:
    """Analytic milliseconds of a product: the larger of arithmetic and traffic, and one start a step.

    Arithmetic counts whole 64 x 64 tiles on the multiprocessors that 64 x 128 tiles fill. With workspace the library
    splits the depth where tiles are few, as `_may_split` says. Constants were fitted to 2,500 products of convolutions
    of one tap on an H200.
    """
    batch = product.images * product.groups
    dtype = product.left.dtype
    tensor_cores = dtype.itemsize == 2 or product.math is MathMode.TF32
    tiles = batch * -(-product.rows // 64) * -(-product.columns // 128)
    busy = min(1.0, tiles / device.sm_count)
    if splits and _may_split(batch, dtype):
        busy = min(1.0, busy * max(1.0, product.depth / _SPLIT_DEPTH))
    padded = 2.0 * batch * _up(product.rows, 64) * _up(product.columns, 64) * _up(product.depth, 16)
    peak = device.peak_flops_per_s(dtype, product.math, tensor_cores=tensor_cores) * busy
    peak *= _TENSOR_SHARE if tensor_cores else _PLAIN_SHARE
    elements = product.rows * product.depth + product.depth * product.columns
    size: float = batch * (dtype.itemsize * elements + 2 * product.out.dtype.itemsize * product.rows * product.columns)
    alignment = min(map(_alignment, (product.left, product.right, product.out)))
    if tensor_cores and alignment < TENSOR_ALIGNMENT:
        peak /= _SLOWDOWN.get(alignment, max(_SLOWDOWN.values()))
        size *= _UNALIGNED_TRAFFIC
    steps = 1 if batch == 1 else min(product.images, product.groups)
    return 1e3 * max(padded / peak, size / (_TRAFFIC_SHARE * device.bandwidth_bytes_per_s)) + _START_MS * steps


def _may_split(batch: int, dtype: DataType) -> bool:
    """Whether the library splits the depth of so many products at once.

    Times on an H200 over the estimate, in the geometric mean: of 71 convolutions by larger batches, or in 32 bits, 1.49
    with splits (up to 4.4) and 1.10 without; of 35 by batches of up to four in 16 bits 1.13 and 0.79.
    """
    return batch == 1 or (batch <= _MOST_SPLIT and dtype.itemsize == 2)


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _alignment(operand: GemmOperand) -> int:
    """The bytes that all rows and matrices of an operand begin at a multiple of, 16 at most."""
    strides = (operand.ld, operand.image_stride, operand.group_stride)
    return math.gcd(TENSOR_ALIGNMENT, *(stride * operand.dtype.itemsize for stride in strides))
