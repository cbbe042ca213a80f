"""Layers as families of networks have them, at random widths, sizes and batches: problems that no suite lists.

`immediate.py --families` draws them. A family comes first, so that a model which learns of these problems meets rare
kinds of layers as often as common ones; then the layer, its direction, element type and layout, and for 40 % of them an
epilogue.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from wild import with_epilogue

from miofind import ProblemDescription
from miofind.core.problem import DataType, Direction, Layout, MathMode

T = TypeVar("T")

_TYPES = (
    ((DataType.FLOAT16, MathMode.IEEE), 35),
    ((DataType.BFLOAT16, MathMode.IEEE), 25),
    ((DataType.FLOAT32, MathMode.TF32), 25),
    ((DataType.FLOAT32, MathMode.IEEE), 15),
)
_DIRECTIONS = ((Direction.FORWARD, 50), (Direction.BACKWARD_DATA, 25), (Direction.BACKWARD_WEIGHTS, 25))
_WITH_EPILOGUE = 0.4
_CHANNELS_LAST = 0.6
_MOST_ELEMENTS = 1 << 28
_MOST_FLOPS = {DataType.FLOAT32: 4e11, DataType.FLOAT16: 2e12, DataType.BFLOAT16: 2e12}
_IMAGES = (160, 192, 208, 224, 240, 256, 288, 299, 320, 352, 384, 416, 448, 480, 512, 600, 640, 768, 800, 1024)
_BATCHES = (1, 1, 1, 2, 4, 8, 8, 16, 16, 32, 32, 64, 128, 256)


@dataclass(frozen=True, slots=True)
class Layer:
    """One convolution of a network, but for its batch.

    Attributes:
        image: spatial sizes of its input.
        taps: those of its filters.
        padding: on both sides; None for half of the (dilated) filters.
    """

    channels: int
    filters: int
    image: tuple[int, ...]
    taps: tuple[int, ...] = (1, 1)
    stride: int = 1
    dilation: int = 1
    groups: int = 1
    padding: int | None = None

    def problem(
        self, batch: int, direction: Direction, dtype: DataType, math_mode: MathMode, *, channels_last: bool
    ) -> ProblemDescription:
        """Its problem.

        Raises:
            InvalidProblemError: the filters are larger than the padded input.
        """
        rank = len(self.image)
        same = [self.dilation * (taps - 1) // 2 for taps in self.taps]
        pads = same if self.padding is None else [self.padding] * rank
        return ProblemDescription.convolution(
            x=(batch, self.channels, *self.image),
            w=(self.filters, self.channels // self.groups, *self.taps),
            padding=tuple((pad, pad) for pad in pads),
            stride=(self.stride,) * rank,
            dilation=(self.dilation,) * rank,
            groups=self.groups,
            direction=direction,
            dtype=dtype,
            math=math_mode,
            layout=Layout.of(rank, channels_last=channels_last),
        )


def _map(draw: random.Random, *strides: int) -> tuple[int, int]:
    """The sizes of a map of features: a square image's, or a screen's, over one of these strides."""
    height = draw.choice(_IMAGES)
    width = height if draw.random() < 0.8 else 8 * round(height * draw.choice((0.5, 0.75, 4 / 3, 16 / 9, 2)) / 8)
    stride = draw.choice(strides)
    return math.ceil(height / stride), math.ceil(width / stride)


def _times(draw: random.Random, step: int, least: int, most: int) -> int:
    """A multiple of a step, of all sizes alike."""
    return max(step, step * round(math.exp(draw.uniform(math.log(least), math.log(most))) / step))


def residual(draw: random.Random) -> Layer:
    """ResNets of any width: bottlenecks, basic blocks, shortcuts."""
    stage = draw.randrange(4)
    width = draw.choice((16, 32, 40, 48, 64, 72, 80, 96, 128)) << stage
    image = _map(draw, 4 << stage)
    stride = 2 if draw.random() < 0.2 else 1
    return draw.choice(
        (
            Layer(4 * width, width, image),
            Layer(width, 4 * width, image),
            Layer(width, width, image, (3, 3), stride),
            Layer(width, width, image, (3, 3)),
            Layer(2 * width, 4 * width, image, stride=2, padding=0),
        )
    )


def grouped(draw: random.Random) -> Layer:
    """RegNet, ResNeXt, ResNeSt: groups of some channels each."""
    of_group = draw.choice((2, 4, 8, 8, 16, 16, 24, 32, 40, 48, 56, 64, 112, 120))
    groups = max(2, _times(draw, 8, 48, 2048) // of_group)
    channels = of_group * groups
    image = _map(draw, 4, 8, 16, 32)
    kept = draw.random() < 0.8
    return Layer(channels, channels, image, (3, 3) if kept else (1, 1), draw.choice((1, 1, 1, 2)), groups=groups)


def dense(draw: random.Random) -> Layer:
    """DenseNet, VoVNet, Res2Net: joined inputs, few filters."""
    growth = draw.choice((12, 16, 24, 26, 32, 40, 48))
    joined = 2 * growth + growth * draw.randrange(40)
    image = _map(draw, 4, 8, 16, 32)
    return draw.choice(
        (
            Layer(joined, 4 * growth, image),
            Layer(4 * growth, growth, image, (3, 3)),
            Layer(joined, joined // 2, image),
            Layer(growth, growth, image, (3, 3)),
        )
    )


def inverted(draw: random.Random) -> Layer:
    """MobileNets, EfficientNets, MNASNet, GhostNet: wide depthwise layers between narrow ones."""
    stage = draw.randrange(5)
    channels = _times(draw, 8, 8 + 12 * stage, 40 + 90 * stage)
    wide = channels * draw.choice((1, 3, 4, 6))
    image = _map(draw, 2 << stage)
    taps = draw.choice(((3, 3), (3, 3), (5, 5), (5, 5), (7, 7), (9, 9)))
    stride = 2 if draw.random() < 0.3 else 1
    squeezed = max(4, channels // 4)
    return draw.choice(
        (
            Layer(channels, wide, image),
            Layer(wide, channels, image),
            Layer(wide, wide, image, taps, stride, groups=wide),
            Layer(wide, wide, image, taps, groups=wide),
            Layer(channels, wide, image, (3, 3), stride),
            Layer(wide, squeezed, (1, 1)),
            Layer(squeezed, wide, (1, 1)),
        )
    )


def inception(draw: random.Random) -> Layer:
    """Inception, GoogLeNet, SqueezeNet: odd channels, rows and columns."""
    channels, filters = _times(draw, 16, 16, 1536), _times(draw, 16, 16, 384)
    taps = draw.choice(((1, 1), (1, 1), (3, 3), (5, 5), (1, 7), (7, 1), (1, 3), (3, 1), (1, 5), (5, 1)))
    stride = 2 if taps == (3, 3) and draw.random() < 0.3 else 1
    return Layer(channels, filters, _map(draw, 8, 16, 32), taps, stride)


def stem(draw: random.Random) -> Layer:
    """First layers and patches."""
    channels = draw.choice((1, 3, 3, 3, 3, 4, 6))
    image = _map(draw, 1)
    patch = draw.choice((2, 4, 7, 8, 14, 16, 32))
    return draw.choice(
        (
            Layer(channels, draw.choice((16, 24, 32, 40, 48, 64)), image, (3, 3), 2),
            Layer(channels, draw.choice((16, 32, 64, 96, 128)), image, (3, 3)),
            Layer(channels, draw.choice((32, 64, 96)), image, (7, 7), 2),
            Layer(channels, draw.choice((32, 64, 96)), image, (5, 5), draw.choice((1, 2))),
            Layer(channels, draw.choice((64, 96)), image, (11, 11), 4, padding=2),
            Layer(channels, draw.choice((96, 128, 192, 384, 768, 1024)), image, (patch, patch), patch, padding=0),
            Layer(channels, draw.choice((64, 96, 128)), image, (7, 7), 4),
        )
    )


def large_depthwise(draw: random.Random) -> Layer:
    """ConvNeXt, RepLKNet, InceptionNeXt, CoAtNet: large depthwise windows, and layers between patches."""
    stage = draw.randrange(4)
    channels = draw.choice((40, 48, 64, 80, 96, 128, 192, 256)) << stage
    image = _map(draw, 4 << stage)
    side = draw.choice((5, 7, 7, 7, 9, 11, 13, 21, 31))
    taps = draw.choice(((side, side), (side, side), (1, side), (side, 1)))
    return draw.choice(
        (
            Layer(channels, channels, image, taps, groups=channels),
            Layer(channels, channels, image, taps, groups=channels),
            Layer(channels, 4 * channels, image),
            Layer(channels, 2 * channels, image, (2, 2), 2, padding=0),
        )
    )


def decoder(draw: random.Random) -> Layer:
    """U-Nets, image restoration, GANs: large maps, joined channels, layers that end in few."""
    channels = _times(draw, 16, 16, 1024)
    image = _map(draw, *((1, 2, 4) if channels <= 128 else (4, 8, 16)))
    last, side = draw.choice((1, 2, 3, 4, 12, 19, 21, 48, 150)), draw.choice((1, 3, 5, 7, 9))
    return draw.choice(
        (
            Layer(channels, channels, image, (3, 3)),
            Layer(2 * channels, channels, image, (3, 3)),
            Layer(channels, 2 * channels, image, (3, 3)),
            Layer(channels, 4 * channels, image, (3, 3)),
            Layer(channels, channels, image, (5, 5)),
            Layer(channels, last, image, (side, side)),
            Layer(channels, 2 * channels, image, (2, 2), 2, padding=0),
            Layer(channels, 2 * channels, image, (4, 4), 2, padding=1),
        )
    )


def detector(draw: random.Random) -> Layer:
    """Pyramids, heads and YOLOs."""
    image = _map(draw, 4, 8, 16, 32, 64)
    width = _times(draw, 16, 16, 512)
    ends = draw.choice((4, 9, 18, 36, 64, 80, 91, 144, 255, 720))
    return draw.choice(
        (
            Layer(256, 256, image, (3, 3)),
            Layer(draw.choice((256, 512, 1024, 2048)), 256, image),
            Layer(256, ends, image, (3, 3)),
            Layer(width, ends, image),
            Layer(width, width, image, (3, 3)),
            Layer(width, 2 * width, image, (3, 3), 2),
            Layer(draw.choice((1, 2, 3, 4)) * width, width, image),
        )
    )


def dilated(draw: random.Random) -> Layer:
    """DeepLab, PSPNet, dilated ResNets, CSRNet."""
    width = draw.choice((64, 96, 128, 256, 512))
    rate = draw.choice((2, 2, 4, 4, 6, 8, 12, 18, 24, 36))
    image = _map(draw, 8, 16)
    depthwise = draw.random() < 0.25
    channels = draw.choice((width, 2048, 1024, 320)) if not depthwise else width
    return Layer(channels, width, image, (3, 3), dilation=rate, groups=width if depthwise else 1)


def diffusion(draw: random.Random) -> Layer:
    """U-Nets and autoencoders of latent diffusion."""
    width = draw.choice((128, 192, 256, 320, 384, 448, 512, 640, 768, 960, 1280, 1920, 2560))
    side = draw.choice((8, 16, 24, 32, 48, 64, 96, 128)) * (1 if width > 256 else draw.choice((1, 2, 4)))
    image = (side, draw.choice((side, side, side, max(8, 8 * round(side * 0.75 / 8)))))
    filters = draw.choice((width, width, max(128, width // 2), min(1280, 2 * width)))
    taps = draw.choice(((3, 3), (3, 3), (1, 1)))
    ends = draw.choice(
        (Layer(width, 4, image, (3, 3)), Layer(4, width, image, (3, 3)), Layer(16, width, image, (3, 3)))
    )
    stride = 2 if taps == (3, 3) and draw.random() < 0.15 else 1
    return ends if draw.random() < 0.1 else Layer(width, filters, image, taps, stride)


def high_resolution(draw: random.Random) -> Layer:
    """HRNet, segmentation on large maps, point pillars, optical flow."""
    stage = draw.randrange(4)
    width = draw.choice((16, 18, 20, 32, 36, 40, 44, 48, 64))
    image = _map(draw, 4 << stage)
    flow = _times(draw, 32, 64, 384)
    return draw.choice(
        (
            Layer(width << stage, width << stage, image, (3, 3)),
            Layer(width << stage, (width << stage) * 2, image, (3, 3), 2),
            Layer(width << stage, width, image),
            Layer(64, 64, (_times(draw, 8, 200, 512), _times(draw, 8, 200, 512)), (3, 3), draw.choice((1, 2))),
            Layer(flow, 128, _map(draw, 8), draw.choice(((1, 5), (5, 1), (3, 3), (7, 7)))),
        )
    )


def shuffled(draw: random.Random) -> Layer:
    """ShuffleNets: depthwise layers and 1x1 ones, whole or in few groups."""
    groups = draw.choice((1, 2, 3, 4, 8))
    channels = groups * _times(draw, 4, 24, 800 // groups)
    image = _map(draw, 4, 8, 16, 32)
    if draw.random() < 0.5:
        return Layer(channels, channels, image, (3, 3), draw.choice((1, 2)), groups=channels)
    return Layer(channels, channels, image, groups=groups)


def audio(draw: random.Random) -> Layer:
    """One dimension: WaveNet, HiFi-GAN, wav2vec, Conformer, TCNs, codecs."""
    length = _times(draw, 1, 64, 65536)
    channels = _times(draw, 8, 16, 1024)
    side, rate = draw.choice((3, 3, 5, 7, 9, 11, 15)), draw.choice((1, 1, 1, 2, 3, 5, 9, 16, 27))
    stride = draw.choice((2, 2, 4, 5, 8))
    return draw.choice(
        (
            Layer(channels, channels, (length,), (side,), dilation=rate),
            Layer(channels, draw.choice((1, 2)) * channels, (length,), (side,)),
            Layer(channels, channels, (length,), (1,)),
            Layer(channels, channels, (length,), (draw.choice((7, 15, 31)),), groups=channels),
            Layer(channels, 2 * channels, (length,), (2 * stride,), stride, padding=stride // 2),
            Layer(draw.choice((1, 2, 80, 128)), channels, (length,), (side,), draw.choice((1, 2, 4))),
            Layer(512, 512, (length,), (draw.choice((2, 3)),), 2, padding=0),
            Layer(768, 768, (min(length, 3000),), (128,), groups=16),
        )
    )


def video(draw: random.Random) -> Layer:
    """Three dimensions: R3D, (2+1)D, SlowFast, X3D, volumes of medicine."""
    stage = draw.randrange(4)
    width = draw.choice((16, 24, 32, 48, 64)) << stage
    side = max(4, draw.choice((112, 128, 160, 224)) >> (stage + 1))
    image = (draw.choice((4, 8, 16, 32)), side, side)
    taps = draw.choice(((3, 3, 3), (1, 3, 3), (3, 1, 1), (1, 1, 1), (5, 1, 1)))
    stride = 2 if draw.random() < 0.15 and min(image) > 4 else 1
    return draw.choice(
        (
            Layer(width, width, image, taps, stride),
            Layer(width, draw.choice((1, 2)) * width, image, taps),
            Layer(width, width, image, (3, 3, 3), groups=width),
            Layer(draw.choice((1, 3)), width, image, (3, 3, 3)),
            Layer(2 * width, width, image, (3, 3, 3)),
        )
    )


FAMILIES: tuple[tuple[Callable[[random.Random], Layer], int], ...] = (
    (residual, 12),
    (grouped, 12),
    (dense, 6),
    (inverted, 14),
    (inception, 6),
    (stem, 6),
    (large_depthwise, 7),
    (decoder, 9),
    (detector, 8),
    (dilated, 7),
    (diffusion, 8),
    (high_resolution, 5),
    (shuffled, 4),
    (audio, 8),
    (video, 6),
)


def _one(draw: random.Random, weighted: Sequence[tuple[T, int]]) -> T:
    return draw.choices([each for each, _ in weighted], [weight for _, weight in weighted])[0]


def _drawn(draw: random.Random) -> ProblemDescription | None:
    """A random problem of a random family; None for one that is too large to be worth its time."""
    layer = _one(draw, FAMILIES)(draw)
    dtype, math_mode = _one(draw, _TYPES)
    direction = _one(draw, _DIRECTIONS)
    problem = layer.problem(
        draw.choice(_BATCHES), direction, dtype, math_mode, channels_last=draw.random() < _CHANNELS_LAST
    )
    largest = max(math.prod(problem.x.shape), math.prod(problem.y.shape))
    if largest > _MOST_ELEMENTS or problem.flops > _MOST_FLOPS[dtype]:
        return None
    seed = draw.randrange(1 << 30)
    return with_epilogue(problem, seed) if draw.random() < _WITH_EPILOGUE else problem


def family_problems(count: int, seed: int) -> list[ProblemDescription]:
    """So many different problems; equal seeds draw equal ones."""
    draw = random.Random(seed)
    found: dict[ProblemDescription, None] = {}
    while len(found) < count:
        if (problem := _drawn(draw)) is not None:
            found[problem] = None
    return list(found)
