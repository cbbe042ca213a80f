"""A convolution as column matrices and products: the steps of one solution, chunk by chunk of images.

The columns of an image hold, for each output pixel, the inputs its filter taps read. They are made by
kernels_src/vendor/im2col.cu in the workspace, or are x itself where a filter of one tap reads every input once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from miofind.core.cached import cached_property
from miofind.core.epilogue import Activation, ResidualPosition
from miofind.core.problem import DataType, Direction, ProblemDescription
from miofind.device.device import Device
from miofind.libraries.gemm import MAX_BATCH, STEP_MS, BatchedGemm, ColumnProducts, ImageRange, product_ms
from miofind.solver.epilogue import epilogue_arguments
from miofind.solver.solver import APPLICABLE, Applicability
from miofind.solver.steps import KernelStep, MatmulStep, Pointer, Region, Scalar, Step
from miofind.solver.structs import Struct, StructType
from miofind.solvers.common.split_k import SplitK

SOURCE = "vendor/im2col.cu"
COLUMNS = "columns"
PARTIALS = "partials"
FILTERS = "filters"
MAX_SIZE = 2**31 - 1
# The kernels round sizes up to whole blocks of vectors in int32.
_MAX_KERNEL_SIZE = MAX_SIZE - 8192
# cuBLASLt's gelu, too, is the approximation by tanh, and yet 0 below some -5, where that is not: an H200 refused it.
_ACTIVATIONS = (Activation.NONE, Activation.RELU)
_THREADS = 256
_CHANNELS_A_THREAD = 4
# Padding of the depth pays up to this growth of the columns; products of unaligned rows run at a tenth of the speed.
_MOST_PADDING = 1.25
_BANDWIDTH_SHARE = 0.7  # of the device's, that columns reach
_FOLD_CYCLES = 0.8  # of a multiprocessor, with each element that `fold` writes channels first, on an H200
_SHAPE = StructType(
    "Shape",
    **dict.fromkeys(("channels", "group_channels", "padded_elements", "depth", "height", "width"), "int32"),
    **dict.fromkeys(("out_depth", "out_height", "out_width", "pad_front", "pad_top", "pad_left"), "int32"),
)


@dataclass(frozen=True, kw_only=True)
class ColumnPlan:
    """One way to compute a problem by columns.

    What a choice among plans asks for often is kept.

    Attributes:
        problem: of any number of spatial dimensions; the kernels see three.
        images: images a chunk.
        slots: partial sums of backward weights kept side by side where images do not merge into one matrix.
    """

    problem: ProblemDescription
    images: int
    slots: int = 1

    @cached_property
    def in_place(self) -> bool:
        """Whether x itself is the column matrix."""
        return self.problem.is_1x1 and self.problem.spatial == self.problem.out_spatial

    @cached_property
    def taps(self) -> int:
        """Taps of the filter."""
        return math.prod(self.problem.filter)

    @cached_property
    def pixels(self) -> int:
        """Output pixels of an image."""
        return math.prod(self.problem.out_spatial)

    @cached_property
    def column_dtype(self) -> DataType:
        """Element type of the columns: float32 where several taps are summed from them."""
        summed = self.problem.direction is Direction.BACKWARD_DATA and self.taps > 1
        return DataType.FLOAT32 if summed else self.problem.x.dtype

    @cached_property
    def column_bytes(self) -> int:
        """Bytes of one image's columns, 0 where x is the column matrix."""
        return 0 if self.in_place else self._column_elements * self.column_dtype.itemsize

    @property
    def _column_elements(self) -> int:
        return self.problem.groups * self.depth * self.pixels

    @property
    def width(self) -> int:
        """Elements of one filter."""
        return self.problem.w.shape[1] * self.taps

    @cached_property
    def depth(self) -> int:
        """`width`, padded with zeros to 16 bytes where that costs little: the library is slow on unaligned rows."""
        multiple = 16 // self.problem.x.dtype.itemsize
        padded = -(-self.width // multiple) * multiple
        return self.width if self.in_place or padded > _MOST_PADDING * self.width else padded

    @property
    def pads(self) -> bool:
        """Whether columns and filters are padded with zeros."""
        return self.depth != self.width

    @cached_property
    def products(self) -> ColumnProducts:
        """The products over the columns."""
        p = self.problem
        one_pixel = self.pixels == 1
        return ColumnProducts(
            pixels=self.pixels,
            groups=p.groups,
            outputs=p.k // p.groups,
            depth=self.depth,
            columns="x" if self.in_place else COLUMNS,
            weights=FILTERS if self.pads else "w",
            columns_dtype=self.column_dtype,
            columns_pixel_major=p.x.layout.channels_last or one_pixel,
            y_pixel_major=p.y.layout.channels_last or one_pixel,
            dtype=p.y.dtype,
            math=p.math,
        )

    @cached_property
    def needs_slots(self) -> bool:
        """Whether backward weights is one product an image."""
        return self.problem.direction is Direction.BACKWARD_WEIGHTS and not self.products.merges_images

    @property
    def split_k(self) -> SplitK:
        """The partial sums of backward weights, in float32, a slot each."""
        return SplitK(results=self.products.filter_size, splits=self.slots, region=PARTIALS)

    @cached_property
    def writes_partials(self) -> bool:
        """Whether backward weights goes to a float32 region before w."""
        if self.problem.direction is not Direction.BACKWARD_WEIGHTS:
            return False
        several = self.problem.n > (self.images if self.products.merges_images else 1)
        return self.pads or self.slots > 1 or (several and self.problem.w.dtype is not DataType.FLOAT32)

    @property
    def step_count(self) -> int:
        """At most so many steps."""
        chunks = -(-self.problem.n // self.images)
        return chunks * (self._products_a_chunk + 1) + 2

    @property
    def _products_a_chunk(self) -> int:
        p, products = self.problem, self.products
        splits = self.images * p.groups // MAX_BATCH
        if products.merges_images:
            return 1 + splits
        if p.direction is Direction.BACKWARD_WEIGHTS:
            same_order = products.columns_pixel_major == products.y_pixel_major
            return -(-self.images // self.slots) * (1 if same_order else min(self.slots, p.groups)) + splits
        return min(self.images, p.groups) + splits

    def regions(self) -> tuple[Region, ...]:
        """Workspace for columns, padded filters and partial sums."""
        regions = []
        if not self.in_place:
            regions.append(Region(name=COLUMNS, bytes=self.images * self.column_bytes))
        if self._pads_filters:
            regions.append(Region(name=FILTERS, bytes=self.products.filter_size * self.problem.w.dtype.itemsize))
        if self.writes_partials:
            regions.append(self.split_k.partials)
        return tuple(regions)

    def steps(self) -> Iterator[Step]:
        """The steps in order; products have no algorithm and no workspace yet."""
        if self._pads_filters:
            yield self._filters_step("pad", Pointer(buffer="w"), Pointer(buffer=FILTERS))
        for first in range(0, self.problem.n, self.images):
            count = min(self.images, self.problem.n - first)
            if not self.in_place and not self._folds:
                yield self._kernel(first, count)
            for product in self._chunk(first, count):
                yield from map(self._fused, product.steps())
            if not self.in_place and self._folds:
                yield self._kernel(first, count)
        if self.writes_partials:
            yield self._filters_step(
                "sum", Pointer(buffer=PARTIALS), Pointer(buffer="w"), Scalar(ctype="int32", value=self.slots)
            )

    def _fused(self, product: MatmulStep) -> MatmulStep:
        """A product with the problem's epilogue, if it has one."""
        if not self.problem.epilogue:
            return product
        (epilogue,) = epilogue_arguments(self.problem)
        residual = replace(product.c, buffer="residual") if epilogue.residual else None
        return replace(product, epilogue=replace(epilogue, residual=residual))

    def refuse_epilogue(self) -> Applicability:
        """Why the products do not take the problem's epilogue; APPLICABLE if they do.

        cuBLASLt adds a bias to each row of what it sees, an output channel where channels are last.
        """
        epilogue = self.problem.epilogue
        if epilogue.scale or epilogue.channel_bias or epilogue.parameter_dtype:
            return Applicability("cuBLASLt fuses a bias in the output's dtype, no scale and no bias of each image")
        if epilogue.residual is ResidualPosition.AFTER:
            return Applicability("cuBLASLt adds before the activation")
        if epilogue.activation not in _ACTIVATIONS:
            return Applicability(f"cuBLASLt fuses {', '.join(_ACTIVATIONS)}, not {epilogue.activation}")
        if self.problem.groups > 1 or not self.products.merges_images:
            return Applicability("cuBLASLt adds a bias to rows: channels must be last, in one group")
        return APPLICABLE

    def estimate_ms(self, device: Device, workspace_bytes: int) -> float:
        """Analytic milliseconds: the products, and the traffic of columns and partial sums."""
        chunks = self.problem.n / self.images
        products = self.images / self.slots if self.needs_slots else 1
        total = chunks * products * product_ms(self._first_product, device, splits=workspace_bytes > 0)
        moved = 0.0
        if not self.in_place:
            moved = self.problem.n * self.column_bytes + self.problem.x.bytes
            total += chunks * STEP_MS
            if self._folds and not self.problem.x.layout.channels_last:
                processors = max(1, device.sm_count)
                total += 1e3 * _FOLD_CYCLES * self.problem.x.size / (processors * device.clock_hz)
        if self._pads_filters:
            total += STEP_MS
        if self.problem.epilogue.has_residual:
            moved += self.problem.y.bytes
        if self.writes_partials:
            moved += float(self.split_k.bytes)
            total += STEP_MS
        return total + 1e3 * moved / (_BANDWIDTH_SHARE * device.bandwidth_bytes_per_s)

    def least_ms(self, device: Device) -> float:
        """What every plan of the problem takes at least: the traffic of columns, in one chunk."""
        if self.in_place:
            return 0.0
        moved = self.problem.n * self.column_bytes + self.problem.x.bytes
        return STEP_MS + 1e3 * moved / (_BANDWIDTH_SHARE * device.bandwidth_bytes_per_s)

    @cached_property
    def _first_product(self) -> BatchedGemm:
        """The first of a chunk."""
        return next(self._chunk(0, self.images))

    def _chunk(self, first: int, count: int) -> Iterator[BatchedGemm]:
        images = ImageRange(first=first, count=count, first_column=first if self.in_place else 0)
        if self.problem.direction is Direction.FORWARD:
            yield self.products.forward(images)
        elif self.problem.direction is Direction.BACKWARD_DATA:
            yield self.products.backward_data(images)
        else:
            yield from self._weights(images)

    def _weights(self, images: ImageRange) -> Iterator[BatchedGemm]:
        """Sums over all images: the first product writes, the others add."""
        in_w = not self.writes_partials
        filters = self.products.filters(*(("w", self.problem.w.dtype) if in_w else (PARTIALS, DataType.FLOAT32)))
        size = self.slots if self.needs_slots else images.count
        for start in range(0, images.count, size):
            first = images.first + start
            part = ImageRange(
                first=first, count=min(size, images.count - start), first_column=images.first_column + start
            )
            yield self.products.backward_weights(part, filters, accumulate=first > 0)

    @property
    def _pads_filters(self) -> bool:
        return self.pads and self.problem.direction is not Direction.BACKWARD_WEIGHTS

    @property
    def vector(self) -> int:
        """Elements that the kernels write at once."""
        p = self.problem
        if p.x.layout.channels_last:
            itemsize = max(p.x.dtype.itemsize, self.column_dtype.itemsize)
            return math.gcd(16 // itemsize, p.w.shape[1] if self._folds else self.depth)
        return 1 if self._folds else math.gcd(4, p.out_spatial[-1])

    @property
    def read(self) -> int:
        """Elements of x that unfold reads at once."""
        return math.gcd(self.vector, self.problem.w.shape[1]) if self.problem.x.layout.channels_last else self.vector

    @property
    def _bounded(self) -> bool:
        """Whether a tap of some pixel falls outside x."""
        p = self.problem
        reach = zip(p.spatial, p.out_spatial, p.filter, p.conv.pad_before, p.conv.stride, p.conv.dilation, strict=True)
        return any(before > 0 or (o - 1) * s + (f - 1) * d >= size for size, o, f, before, s, d in reach)

    @property
    def _defines(self) -> tuple[tuple[str, str | int], ...]:
        p = self.problem.lifted(3)
        named = (("FILTER", p.filter), ("STRIDE", p.conv.stride), ("DILATION", p.conv.dilation))
        return (
            ("ELEMENT", p.x.dtype.value),
            ("COLUMN", self.column_dtype.value),
            ("BOUNDED", int(self._bounded)),
            ("VECTOR", self.vector),
            ("READ", self.read),
            *((f"{name}_{axis}", size) for name, sizes in named for axis, size in zip("DHW", sizes, strict=True)),
            _SHAPE.define,
        )

    @property
    def _folds(self) -> bool:
        return self.problem.direction is Direction.BACKWARD_DATA

    def _kernel(self, first: int, count: int) -> KernelStep:
        """unfold or fold of images [first, first + count)."""
        p = self.problem
        x = Pointer(buffer="x", offset_bytes=first * p.x.bytes // p.n)
        columns = Pointer(buffer=COLUMNS)
        layout = "nhwc" if p.x.layout.channels_last else "nchw"
        name = "fold" if self._folds else "unfold"
        grid, block = self._launch(count)
        return KernelStep(
            source=SOURCE,
            entry=f"im2col_{name}_{layout}",
            defines=self._defines,
            grid=(grid, 1, 1),
            block=(*block, 1),
            args=(*((columns, x) if self._folds else (x, columns)), self._shape),
        )

    @property
    def _shape(self) -> Struct:
        p = self.problem.lifted(3)
        depth, height, width = p.spatial
        out_depth, out_height, out_width = p.out_spatial
        pad_front, pad_top, pad_left = p.conv.pad_before
        return _SHAPE(
            channels=p.c,
            group_channels=p.w.shape[1],
            padded_elements=self.depth,
            depth=depth,
            height=height,
            width=width,
            out_depth=out_depth,
            out_height=out_height,
            out_width=out_width,
            pad_front=pad_front,
            pad_top=pad_top,
            pad_left=pad_left,
        )

    def _launch(self, count: int) -> tuple[int, tuple[int, int]]:
        """Blocks and (x, y) threads of unfold or fold; mirrors the decomposition in vendor/im2col.cu."""
        p = self.problem
        if not p.x.layout.channels_last:
            width = math.prod(p.spatial) if self._folds else self.pixels // self.vector
            channels = -(-p.c // _CHANNELS_A_THREAD) if self._folds else p.c
            block = _block(width, channels)
            return count * -(-channels // block[1]) * -(-width // block[0]), block
        if self._folds:
            width, line = p.c // self.vector, p.spatial
            block = _block(width, line[-1])
            across = block[1]
        else:
            width, line = p.groups * self.depth // self.vector, p.out_spatial
            pixels = 8 if self.vector > self.read else 4
            block = _block(width, -(-line[-1] // pixels))
            across = block[1] * pixels
        rows = count * math.prod(line[:-1])
        return rows * -(-line[-1] // across) * -(-width // block[0]), block

    def _filters_step(self, name: str, source: Pointer, target: Pointer, *more: Scalar) -> KernelStep:
        """pad or sum of all filters."""
        size = self.products.filter_size
        sizes = (Scalar(ctype="int32", value=self.width), Scalar(ctype="int32", value=self.depth))
        return KernelStep(
            source=SOURCE,
            entry=f"im2col_{name}",
            defines=self._defines,
            grid=(min(-(-size // _THREADS), 4096), 1, 1),
            block=(_THREADS, 1, 1),
            args=(source, target, *sizes, Scalar(ctype="int64", value=size), *more),
        )

    def refuse_sizes(self) -> Applicability:
        """Why sizes overflow the kernels' or the library's 32-bit counts; APPLICABLE if they do not."""
        p, products = self.problem, self.products
        padded = (s + b + a for s, b, a in zip(p.spatial, p.conv.pad_before, p.conv.pad_after, strict=True))
        named = {
            "input positions an image": math.prod(p.spatial),
            "output pixels an image": self.pixels,
            "channels times taps": p.groups * self.depth,
            "padded input size": max(padded),
            "rows of a chunk's columns": self.images * self.pixels if products.merges_images else self.pixels,
            "output channels": p.k,
            "blocks of a chunk": self._launch(self.images)[0],
        }
        for name, value in named.items():
            if value > _MAX_KERNEL_SIZE:
                return Applicability(f"{name} are {value}, at most {_MAX_KERNEL_SIZE} are served")
        return APPLICABLE


def _block(width: int, height: int) -> tuple[int, int]:
    """Threads (x, y) of a block that covers `width` evenly, `height` at most."""
    x = -(-width // -(-width // _THREADS))
    return x, max(1, min(height, _THREADS // x))
