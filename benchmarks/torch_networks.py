"""Networks that are timed in PyTorch, of random weights: torchvision's, and own code of the same shapes for the others.

Each takes one tensor and gives one; what else a network reads (time steps, a text's embedding) is a buffer of it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from miofind.errors import InvalidOptionError, MissingLibraryError


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """How a network is made.

    Attributes:
        build: makes it, with the weights that PyTorch's generator gives.
        shape: of its input, without the batch.
        batch: the large batch of inference, halved where it does not fit.
        training_batch: the same of a training step.
    """

    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    batch: int = 128
    training_batch: int = 128


def _imported(module: str) -> Any:
    """A module of a library that need not be installed."""
    try:
        return importlib.import_module(module)
    except ImportError:
        library = module.partition(".")[0]
        raise MissingLibraryError(f"{library} is not installed: pip install {library}") from None


def of_torchvision(path: str, **keywords: Any) -> Callable[[], nn.Module]:
    """A builder of a network of torchvision, by its path in `torchvision.models`."""

    def build() -> nn.Module:
        place = _imported("torchvision.models")
        for part in path.split("."):
            place = getattr(place, part)
        network: nn.Module = place(weights=None, **keywords)
        return network

    return build


def of_timm(name: str) -> Callable[[], nn.Module]:
    """A builder of a network of timm."""

    def build() -> nn.Module:
        network: nn.Module = _imported("timm").create_model(name, pretrained=False)
        return network

    return build


class Named(nn.Module):
    """One of the tensors that a network gives in a dictionary."""

    def __init__(self, network: nn.Module, name: str) -> None:
        super().__init__()
        self.network, self.name = network, name

    def forward(self, x: Any) -> Any:
        return self.network(x)[self.name]


def deeplab() -> nn.Module:
    """DeepLabV3 on ResNet-50, 21 classes."""
    return Named(of_torchvision("segmentation.deeplabv3_resnet50", weights_backbone=None)(), "out")


class ConvNorm(nn.Module):
    """Convolution, batch norm and an activation."""

    def __init__(self, convolution: nn.Conv2d, act: nn.Module) -> None:
        super().__init__()
        self.conv, self.norm, self.act = convolution, nn.BatchNorm2d(convolution.out_channels), act

    def forward(self, x: Any) -> Any:
        return self.act(self.norm(self.conv(x)))


def conv_bn(c: int, k: int, size: int, *, stride: int = 1, groups: int = 1, act: Any = nn.ReLU) -> ConvNorm:
    """A convolution that keeps the size but for its stride, its norm and its activation; act=None for none."""
    convolution = nn.Conv2d(c, k, size, stride, size // 2, groups=groups, bias=False)
    return ConvNorm(convolution, act() if act else nn.Identity())


class LargeKernelBlock(nn.Module):
    """1x1, a large depthwise filter with a 5x5 beside it, 1x1; then a feed-forward part. As in RepLKNet."""

    def __init__(self, c: int, size: int) -> None:
        super().__init__()
        self.norm, self.norm_2 = nn.BatchNorm2d(c), nn.BatchNorm2d(c)
        self.first, self.last = conv_bn(c, c, 1), conv_bn(c, c, 1, act=None)
        self.large = conv_bn(c, c, size, groups=c, act=None)
        self.small = conv_bn(c, c, 5, groups=c, act=None)
        self.widen, self.narrow = conv_bn(c, 4 * c, 1, act=nn.GELU), conv_bn(4 * c, c, 1, act=None)

    def forward(self, x: Any) -> Any:
        y = self.first(self.norm(x))
        x = x + self.last(functional.relu(self.large(y) + self.small(y)))
        return x + self.narrow(self.widen(self.norm_2(x)))


def replknet_31b(classes: int = 1000) -> nn.Module:
    """RepLKNet-31B (arXiv:2203.06717): stages of 2, 2, 18 and 2 blocks with filters of 31, 29, 27 and 13."""
    widths = (128, 256, 512, 1024)
    layers: list[nn.Module] = [conv_bn(3, 128, 3, stride=2), conv_bn(128, 128, 3, groups=128)]
    layers += [conv_bn(128, 128, 1), conv_bn(128, 128, 3, stride=2, groups=128)]
    for stage, (width, depth, size) in enumerate(zip(widths, (2, 2, 18, 2), (31, 29, 27, 13), strict=True)):
        layers += [LargeKernelBlock(width, size) for _ in range(depth)]
        if stage < 3:
            wider = widths[stage + 1]
            layers += [conv_bn(width, wider, 1), conv_bn(wider, wider, 3, stride=2, groups=wider)]
    layers += [nn.BatchNorm2d(1024), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(1024, classes)]
    return nn.Sequential(*layers)


class SplitBlock(nn.Module):
    """YOLOv8's C2f: half of the channels through bottlenecks, all of their results joined."""

    def __init__(self, c: int, k: int, depth: int, *, adds: bool) -> None:
        super().__init__()
        half = k // 2
        self.first, self.adds = conv_bn(c, k, 1, act=nn.SiLU), adds
        self.blocks = nn.ModuleList(
            nn.Sequential(conv_bn(half, half, 3, act=nn.SiLU), conv_bn(half, half, 3, act=nn.SiLU))
            for _ in range(depth)
        )
        self.last = conv_bn((2 + depth) * half, k, 1, act=nn.SiLU)

    def forward(self, x: Any) -> Any:
        parts = [*self.first(x).chunk(2, 1)]
        for block in self.blocks:
            parts.append(parts[-1] + block(parts[-1]) if self.adds else block(parts[-1]))
        return self.last(torch.cat(parts, 1))


class PoolingPyramid(nn.Module):
    """YOLOv8's SPPF: three poolings, one after the other, joined."""

    def __init__(self, c: int) -> None:
        super().__init__()
        self.first, self.last = conv_bn(c, c // 2, 1, act=nn.SiLU), conv_bn(2 * c, c, 1, act=nn.SiLU)

    def forward(self, x: Any) -> Any:
        parts = [self.first(x)]
        for _ in range(3):
            parts.append(functional.max_pool2d(parts[-1], 5, 1, 2))
        return self.last(torch.cat(parts, 1))


class Yolo(nn.Module):
    """The convolutions of YOLOv8s: backbone, pyramid and the heads of three scales, without their decoding."""

    def __init__(self, classes: int = 80) -> None:
        super().__init__()

        def down(c: int, k: int) -> nn.Module:
            return conv_bn(c, k, 3, stride=2, act=nn.SiLU)

        self.to_8 = nn.Sequential(
            down(3, 32),
            down(32, 64),
            SplitBlock(64, 64, 1, adds=True),
            down(64, 128),
            SplitBlock(128, 128, 2, adds=True),
        )
        self.to_16 = nn.Sequential(down(128, 256), SplitBlock(256, 256, 2, adds=True))
        self.to_32 = nn.Sequential(down(256, 512), SplitBlock(512, 512, 1, adds=True), PoolingPyramid(512))
        self.up_16, self.up_8 = SplitBlock(768, 256, 1, adds=False), SplitBlock(384, 128, 1, adds=False)
        self.down_16, self.again_16 = down(128, 128), SplitBlock(384, 256, 1, adds=False)
        self.down_32, self.again_32 = down(256, 256), SplitBlock(768, 512, 1, adds=False)
        self.boxes = nn.ModuleList(self._head(c, 64, 64) for c in (128, 256, 512))
        self.classes = nn.ModuleList(self._head(c, 128, classes) for c in (128, 256, 512))

    @staticmethod
    def _head(c: int, width: int, k: int) -> nn.Module:
        silu = nn.SiLU
        return nn.Sequential(conv_bn(c, width, 3, act=silu), conv_bn(width, width, 3, act=silu), nn.Conv2d(width, k, 1))

    def forward(self, x: Any) -> Any:
        at_8 = self.to_8(x)
        at_16 = self.to_16(at_8)
        at_32 = self.to_32(at_16)
        at_16 = self.up_16(torch.cat([functional.interpolate(at_32, scale_factor=2.0), at_16], 1))
        at_8 = self.up_8(torch.cat([functional.interpolate(at_16, scale_factor=2.0), at_8], 1))
        at_16 = self.again_16(torch.cat([self.down_16(at_8), at_16], 1))
        at_32 = self.again_32(torch.cat([self.down_32(at_16), at_32], 1))
        scales = zip((at_8, at_16, at_32), self.boxes, self.classes, strict=True)
        return torch.cat([torch.cat([box(y), kind(y)], 1).flatten(2) for y, box, kind in scales], 2)


class ResidualBlock(nn.Module):
    """Group norm, SiLU and 3x3 twice, with a time's embedding between where there is one. As in Stable Diffusion."""

    def __init__(self, c: int, k: int, embedding: int = 0) -> None:
        super().__init__()
        self.norm, self.norm_2 = nn.GroupNorm(32, c), nn.GroupNorm(32, k)
        self.first, self.last = nn.Conv2d(c, k, 3, padding=1), nn.Conv2d(k, k, 3, padding=1)
        self.time = nn.Linear(embedding, k) if embedding else None
        self.skip = nn.Identity() if c == k else nn.Conv2d(c, k, 1)

    def forward(self, x: Any, time: Any = None) -> Any:
        y = self.first(functional.silu(self.norm(x)))
        if self.time is not None:
            y = y + self.time(functional.silu(time))[:, :, None, None]
        return self.skip(x) + self.last(functional.silu(self.norm_2(y)))


class Attention(nn.Module):
    """Attention of several heads, to itself or to a context."""

    def __init__(self, c: int, heads: int, context: int = 0) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.out = nn.Linear(c, c, bias=False), nn.Linear(c, c)
        self.k, self.v = (nn.Linear(context or c, c, bias=False) for _ in range(2))

    def forward(self, x: Any, context: Any = None) -> Any:
        context = x if context is None else context
        tensors = [made.unflatten(-1, (self.heads, -1)).transpose(1, 2) for made in (self.q(x), self.k(context))]
        values = self.v(context).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        y = functional.scaled_dot_product_attention(*tensors, values)
        return self.out(y.transpose(1, 2).flatten(2))


class Transformer(nn.Module):
    """Self-attention, attention to the text and a gated feed-forward part between 1x1 convolutions."""

    def __init__(self, c: int, context: int) -> None:
        super().__init__()
        self.norm, self.first, self.last = nn.GroupNorm(32, c), nn.Conv2d(c, c, 1), nn.Conv2d(c, c, 1)
        self.norms = nn.ModuleList(nn.LayerNorm(c) for _ in range(3))
        self.own, self.cross = Attention(c, 8), Attention(c, 8, context)
        self.widen, self.narrow = nn.Linear(c, 8 * c), nn.Linear(4 * c, c)

    def forward(self, x: Any, context: Any) -> Any:
        y = self.first(self.norm(x))
        height = y.shape[2]
        y = y.flatten(2).transpose(1, 2)
        y = y + self.own(self.norms[0](y))
        y = y + self.cross(self.norms[1](y), context)
        values, gate = self.widen(self.norms[2](y)).chunk(2, -1)
        y = y + self.narrow(values * functional.gelu(gate))
        return x + self.last(y.transpose(1, 2).unflatten(2, (height, -1)))


class DiffusionUnet(nn.Module):
    """The U-Net of Stable Diffusion 1.5 at one time step, its text 77 tokens of 768."""

    def __init__(self) -> None:
        super().__init__()
        widths, embedding, context = (320, 640, 1280, 1280), 1280, 768
        self.register_buffer("time", torch.randn(1, embedding))
        self.register_buffer("context", torch.randn(1, 77, context))
        self.first = nn.Conv2d(4, 320, 3, padding=1)
        self.down, self.up = nn.ModuleList(), nn.ModuleList()
        skips, c = [320], 320
        for level, k in enumerate(widths):
            for _ in range(2):
                attention = Transformer(k, context) if level < 3 else None
                self.down.append(nn.ModuleList([ResidualBlock(c, k, embedding), *([attention] if attention else [])]))
                skips, c = [*skips, k], k
            if level < 3:
                self.down.append(nn.ModuleList([nn.Conv2d(c, c, 3, 2, 1)]))
                skips.append(c)
        self.middle = nn.ModuleList(
            [ResidualBlock(c, c, embedding), Transformer(c, context), ResidualBlock(c, c, embedding)]
        )
        for level, k in reversed([*enumerate(widths)]):
            for number in range(3):
                parts: list[nn.Module] = [ResidualBlock(c + skips.pop(), k, embedding)]
                parts += [Transformer(k, context)] if level < 3 else []
                parts += [nn.Conv2d(k, k, 3, padding=1)] if number == 2 and level else []
                self.up.append(nn.ModuleList(parts))
                c = k
        self.norm, self.last = nn.GroupNorm(32, c), nn.Conv2d(c, 4, 3, padding=1)

    def forward(self, x: Any) -> Any:
        context = self.context.expand(x.shape[0], -1, -1)
        x = self.first(x)
        skips = [x]
        for parts in self.down:
            x = self._through(parts, x, context)
            skips.append(x)
        x = self._through(self.middle, x, context)
        for parts in self.up:
            x = self._through(parts, torch.cat([x, skips.pop()], 1), context, goes_up=True)
        return self.last(functional.silu(self.norm(x)))

    def _through(self, parts: Any, x: Any, context: Any, *, goes_up: bool = False) -> Any:
        for part in parts:
            if isinstance(part, ResidualBlock):
                x = part(x, self.time)
            elif isinstance(part, Transformer):
                x = part(x, context)
            else:
                x = part(functional.interpolate(x, scale_factor=2.0) if goes_up else x)
        return x


class SpatialAttention(nn.Module):
    """One head over all places of an image."""

    def __init__(self, c: int) -> None:
        super().__init__()
        self.norm, self.attention = nn.GroupNorm(32, c), Attention(c, 1)

    def forward(self, x: Any) -> Any:
        y = self.attention(self.norm(x).flatten(2).transpose(1, 2))
        return x + y.transpose(1, 2).unflatten(2, x.shape[2:])


def vae_decoder() -> nn.Module:
    """The decoder of Stable Diffusion's autoencoder: 64x64 latents to images of 512x512."""
    layers: list[nn.Module] = [nn.Conv2d(4, 4, 1), nn.Conv2d(4, 512, 3, padding=1), ResidualBlock(512, 512)]
    layers += [SpatialAttention(512), ResidualBlock(512, 512)]
    c = 512
    for level, k in enumerate((512, 512, 256, 128)):
        for _ in range(3):
            layers.append(ResidualBlock(c, k))
            c = k
        if level < 3:
            layers += [nn.Upsample(scale_factor=2.0), nn.Conv2d(c, c, 3, padding=1)]
    return nn.Sequential(*layers, nn.GroupNorm(32, c), nn.SiLU(), nn.Conv2d(c, 3, 3, padding=1))


class VolumeUnet(nn.Module):
    """A 3-D U-Net of five levels, as nnU-Net plans it for patches of 128^3: instance norms, leaky ReLU, strides."""

    def __init__(self, widths: tuple[int, ...] = (32, 64, 128, 256, 320), classes: int = 3) -> None:
        super().__init__()
        pairs = [*zip((1, *widths), widths, strict=False)]
        self.down = nn.ModuleList(self._level(c, k, 1 if i == 0 else 2) for i, (c, k) in enumerate(pairs))
        backwards = [*zip(widths[:0:-1], widths[-2::-1], strict=True)]
        self.grow = nn.ModuleList(nn.ConvTranspose3d(c, k, 2, 2) for c, k in backwards)
        self.up = nn.ModuleList(self._level(2 * k, k, 1) for _, k in backwards)
        self.last = nn.Conv3d(widths[0], classes, 1)

    @staticmethod
    def _level(c: int, k: int, stride: int) -> nn.Module:
        layers: list[nn.Module] = []
        for channels, step in ((c, stride), (k, 1)):
            norm = nn.InstanceNorm3d(k, affine=True)
            layers += [nn.Conv3d(channels, k, 3, step, 1), norm, nn.LeakyReLU(0.01, inplace=True)]
        return nn.Sequential(*layers)

    def forward(self, x: Any) -> Any:
        skips = []
        for level in self.down:
            x = level(x)
            skips.append(x)
        skips.pop()
        for grow, level in zip(self.grow, self.up, strict=True):
            x = level(torch.cat([grow(x), skips.pop()], 1))
        return self.last(x)


class DilatedStack(nn.Module):
    """Residual pairs of convolutions along time, of dilations 1, 3 and 5. As in HiFi-GAN."""

    def __init__(self, c: int, size: int) -> None:
        super().__init__()
        dilated = [nn.Conv1d(c, c, size, padding=d * (size // 2), dilation=d) for d in (1, 3, 5)]
        self.dilated, self.plain = (
            nn.ModuleList(dilated),
            nn.ModuleList(nn.Conv1d(c, c, size, padding=size // 2) for _ in dilated),
        )

    def forward(self, x: Any) -> Any:
        for dilated, plain in zip(self.dilated, self.plain, strict=True):
            y = dilated(functional.leaky_relu(x, 0.1))
            x = x + plain(functional.leaky_relu(y, 0.1))
        return x


class HifiGan(nn.Module):
    """HiFi-GAN V1's generator (arXiv:2010.05646): 80 mel bands to samples, 256 for each frame."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv1d(80, 512, 7, padding=3)
        self.grow, self.stacks, c = nn.ModuleList(), nn.ModuleList(), 512
        for rate, size in ((8, 16), (8, 16), (2, 4), (2, 4)):
            self.grow.append(nn.ConvTranspose1d(c, c // 2, size, rate, (size - rate) // 2))
            c //= 2
            self.stacks.append(nn.ModuleList(DilatedStack(c, filter_size) for filter_size in (3, 7, 11)))
        self.last = nn.Conv1d(c, 1, 7, padding=3)

    def forward(self, x: Any) -> Any:
        x = self.first(x)
        for grow, stacks in zip(self.grow, self.stacks, strict=True):
            x = grow(functional.leaky_relu(x, 0.1))
            x = torch.stack([stack(x) for stack in stacks]).mean(0)
        return torch.tanh(self.last(functional.leaky_relu(x)))


def tiny() -> nn.Module:
    """A few convolutions of all kinds for a trial."""
    return nn.Sequential(
        conv_bn(3, 8, 3),
        conv_bn(8, 8, 3, groups=8),
        conv_bn(8, 8, 1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 4),
    )


IMAGE = (3, 224, 224)
NETWORKS = {
    "resnet50": Network(build=of_torchvision("resnet50"), shape=IMAGE),
    "resnext50": Network(build=of_torchvision("resnext50_32x4d"), shape=IMAGE),
    "regnety_032": Network(build=of_torchvision("regnet_y_3_2gf"), shape=IMAGE),
    "efficientnet_b0": Network(build=of_torchvision("efficientnet_b0"), shape=IMAGE),
    "mobilenetv3_l": Network(build=of_torchvision("mobilenet_v3_large"), shape=IMAGE),
    "convnext_t": Network(build=of_torchvision("convnext_tiny"), shape=IMAGE),
    "replknet_31b": Network(build=replknet_31b, shape=IMAGE, batch=64, training_batch=32),
    "vgg16": Network(build=of_torchvision("vgg16"), shape=IMAGE, training_batch=64),
    "deeplabv3_r50": Network(build=deeplab, shape=(3, 512, 512), batch=16, training_batch=16),
    "yolov8s": Network(build=Yolo, shape=(3, 640, 640), batch=32, training_batch=16),
    "sd15_unet": Network(build=DiffusionUnet, shape=(4, 64, 64), batch=8, training_batch=4),
    "sd_vae_decoder": Network(build=vae_decoder, shape=(4, 64, 64), batch=4, training_batch=1),
    "unet_3d": Network(build=VolumeUnet, shape=(1, 128, 128, 128), batch=2, training_batch=2),
    "r3d_18": Network(build=of_torchvision("video.r3d_18"), shape=(3, 16, 112, 112), batch=16, training_batch=16),
    "r2plus1d_18": Network(
        build=of_torchvision("video.r2plus1d_18"), shape=(3, 16, 112, 112), batch=16, training_batch=16
    ),
    "hifi_gan": Network(build=HifiGan, shape=(80, 256), batch=16, training_batch=16),
    "tiny": Network(build=tiny, shape=(3, 12, 12), batch=4, training_batch=4),
}


def network_named(name: str) -> Network:
    """One of NETWORKS, or a classifier of another library by its name there, as timm/densenet121.

    Raises:
        InvalidOptionError: there is no such network, or no such library is known.
    """
    if name in NETWORKS:
        return NETWORKS[name]
    library, _, model = name.partition("/")
    builders = {"timm": of_timm, "torchvision": of_torchvision}
    if library not in builders or not model:
        raise InvalidOptionError(f"{name!r} is unknown: choose from {','.join(NETWORKS)},timm/NAME,torchvision/NAME")
    return Network(build=builders[library](model), shape=IMAGE)
