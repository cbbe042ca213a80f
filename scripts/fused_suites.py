"""Writes the suites of whole networks with epilogues, from the networks' architectures.

Layers of miofind/suites/*_fused.csv are those of inference: batch norms are folded, what follows a convolution element
by element is its epilogue. Those of resnet50_training.csv are the three passes of a training step.
Equal layers are one row with a count. With --check nothing is written and files that differ are named.
Sources: torchvision 0.28 (resnet, vgg, mobilenetv2, efficientnet, convnext), ultralytics (cfg/models/v8/yolov8.yaml,
nn/modules/block.py, head.py), diffusers 0.42 (models/unets, models/autoencoders/vae.py, models/resnet.py),
milesial/Pytorch-UNet (unet/unet_parts.py).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "miofind" / "suites"
_COLUMNS = "n,c,h,w,k,fy,fx,pad_h,pad_w,stride_h,stride_w,dil_h,dil_w,groups"


@dataclass(frozen=True, slots=True)
class Image:
    """What flows from layer to layer: channels and the sizes of a square image."""

    c: int
    size: int


@dataclass(slots=True)
class Network:
    """The layers of a network: (sizes, direction, epilogue) with the first layer's name and the count."""

    images: int = 1
    rows: dict[tuple[str, str, str], tuple[str, int]] = field(default_factory=dict)

    def conv(
        self, name: str, x: Image, k: int, taps: int = 1, *, stride: int = 1, groups: int = 1, epilogue: str = "bias"
    ) -> Image:
        """A convolution with padding of half its filter, none where the filter is as large as the stride."""
        pad = 0 if taps == stride else taps // 2
        self.add(name, (x.c, x.size, x.size, k, taps, taps, pad, pad, stride, stride, 1, 1, groups), epilogue)
        return Image(k, (x.size + 2 * pad - taps) // stride + 1)

    def transposed(self, name: str, x: Image, k: int) -> Image:
        """A transposed 2x2 convolution of stride 2: backward data of the one that gives x, and without an epilogue."""
        size = 2 * x.size
        self.add(name, (k, size, size, x.c, 2, 2, 0, 0, 2, 2, 1, 1, 1), "", "backward_data")
        return Image(k, size)

    def add(self, name: str, sizes: tuple[int, ...], epilogue: str, direction: str = "forward") -> None:
        """One layer."""
        key = (",".join(map(str, (self.images, *sizes))), direction, epilogue)
        first, count = self.rows.get(key, (name, 0))
        self.rows[key] = (first, count + 1)

    def table(self, suite: str) -> str:
        """The text of the suite's file."""
        has_backward = any(direction != "forward" for _, direction, _ in self.rows)
        lines = [f"suite,layer,{_COLUMNS},count,epilogue{',direction' if has_backward else ''}"]
        for (sizes, direction, epilogue), (layer, count) in self.rows.items():
            tail = f",{direction}" if has_backward else ""
            lines.append(f"{suite},{layer},{sizes},{count},{epilogue}{tail}")
        return "\n".join(lines) + "\n"


def resnet50() -> Network:
    return _resnet(groups=1, width=64)


def resnext50_32x4d() -> Network:
    return _resnet(groups=32, width=4)


def _resnet(*, groups: int, width: int) -> Network:
    net = Network()
    x = net.conv("conv1", Image(3, 224), 64, 7, stride=2, epilogue="bias.relu")
    x = Image(x.c, x.size // 2)  # max pooling
    for stage, blocks in enumerate((3, 4, 6, 3), start=1):
        planes = 64 << stage - 1
        inner = planes * width // 64 * groups
        for block in range(blocks):
            name, stride = f"layer{stage}.{block}", 2 if stage > 1 and block == 0 else 1
            y = net.conv(f"{name}.conv1", x, inner, epilogue="bias.relu")
            y = net.conv(f"{name}.conv2", y, inner, 3, stride=stride, groups=groups, epilogue="bias.relu")
            if block == 0:
                _strided_1x1(net, f"{name}.downsample.0", x, 4 * planes, stride)
            x = net.conv(f"{name}.conv3", y, 4 * planes, epilogue="bias.residual.relu")
    return net


def resnet50_training() -> Network:
    """The passes of a training step as they fuse.

    Forward, batch norm wants the statistics. Backward, dx meets the ReLU that made x, and at a block's entrance the
    gradient of the skip before it; what max pooling made has no ReLU behind it, and images want no gradient.
    """
    net = Network()

    def conv(name: str, x: Image, k: int, taps: int = 1, *, stride: int = 1, data: str | None = "drelu") -> Image:
        pad = taps // 2
        sizes = (x.c, x.size, x.size, k, taps, taps, pad, pad, stride, stride, 1, 1, 1)
        net.add(name, sizes, "statistics", "forward")
        if data is not None:
            net.add(name, sizes, data, "backward_data")
        net.add(name, sizes, "bias_gradient", "backward_weights")
        return Image(k, (x.size + 2 * pad - taps) // stride + 1)

    x = conv("conv1", Image(3, 224), 64, 7, stride=2, data=None)
    x = Image(x.c, x.size // 2)  # max pooling
    for stage, blocks in enumerate((3, 4, 6, 3), start=1):
        planes = 64 << stage - 1
        for block in range(blocks):
            name, stride = f"layer{stage}.{block}", 2 if stage > 1 and block == 0 else 1
            y = conv(f"{name}.conv1", x, planes, data="residual" if stage == 1 and block == 0 else "residual.drelu")
            y = conv(f"{name}.conv2", y, planes, 3, stride=stride)
            if block == 0:
                conv(f"{name}.downsample.0", x, 4 * planes, stride=stride, data="")
            x = conv(f"{name}.conv3", y, 4 * planes)
    return net


def _strided_1x1(net: Network, name: str, x: Image, k: int, stride: int) -> None:
    net.add(name, (x.c, x.size, x.size, k, 1, 1, 0, 0, stride, stride, 1, 1, 1), "bias")


def vgg16() -> Network:
    net, x, layer = Network(), Image(3, 224), 0
    for k, convs in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(convs):
            x = net.conv(f"features.{layer}", x, k, 3, epilogue="bias.relu")
            layer += 2
        x, layer = Image(k, x.size // 2), layer + 1  # max pooling
    return net


def mobilenet_v2() -> Network:
    net, relu6 = Network(), "bias.clamp"
    x = net.conv("features.0.0", Image(3, 224), 32, 3, stride=2, epilogue=relu6)
    number = 1
    for expansion, k, blocks, first_stride in (
        (1, 16, 1, 1),
        (6, 24, 2, 2),
        (6, 32, 3, 2),
        (6, 64, 4, 2),
        (6, 96, 3, 1),
        (6, 160, 3, 2),
        (6, 320, 1, 1),
    ):
        for block in range(blocks):
            name, stride = f"features.{number}.conv", first_stride if block == 0 else 1
            y, part = x, 0
            if expansion > 1:
                y, part = net.conv(f"{name}.0.0", x, x.c * expansion, epilogue=relu6), 1
            y = net.conv(f"{name}.{part}.0", y, y.c, 3, stride=stride, groups=y.c, epilogue=relu6)
            residual = stride == 1 and x.c == k
            x = net.conv(f"{name}.{part + 1}", y, k, epilogue="bias.residual" if residual else "bias")
            number += 1
    net.conv(f"features.{number}.0", x, 1280, epilogue=relu6)
    return net


def efficientnet_b0() -> Network:
    net, silu = Network(), "bias.silu"
    x = net.conv("features.0.0", Image(3, 224), 32, 3, stride=2, epilogue=silu)
    for stage, (expansion, taps, first_stride, k, blocks) in enumerate(
        (
            (1, 3, 1, 16, 1),
            (6, 3, 2, 24, 2),
            (6, 5, 2, 40, 2),
            (6, 3, 2, 80, 3),
            (6, 5, 1, 112, 3),
            (6, 5, 2, 192, 4),
            (6, 3, 1, 320, 1),
        ),
        start=1,
    ):
        for block in range(blocks):
            name, stride = f"features.{stage}.{block}.block", first_stride if block == 0 else 1
            y, part = x, 0
            if expansion > 1:
                y, part = net.conv(f"{name}.0.0", x, x.c * expansion, epilogue=silu), 1
            y = net.conv(f"{name}.{part}.0", y, y.c, taps, stride=stride, groups=y.c, epilogue=silu)
            squeezed = net.conv(f"{name}.{part + 1}.fc1", Image(y.c, 1), x.c // 4, epilogue=silu)
            net.conv(f"{name}.{part + 1}.fc2", squeezed, y.c, epilogue="bias.sigmoid")
            residual = stride == 1 and x.c == k
            x = net.conv(f"{name}.{part + 2}.0", y, k, epilogue="bias.residual" if residual else "bias")
    net.conv("features.8.0", x, 1280, epilogue=silu)
    return net


def convnext_tiny() -> Network:
    """Its linear layers stand as 1x1 convolutions; the layer scale is the scale of the second."""
    net = Network()
    x = net.conv("features.0.0", Image(3, 224), 96, 4, stride=4)
    for stage, (width, blocks) in enumerate(((96, 3), (192, 3), (384, 9), (768, 3))):
        if stage:
            x = net.conv(f"features.{2 * stage}.1", x, width, 2, stride=2)
        for block in range(blocks):
            name = f"features.{2 * stage + 1}.{block}.block"
            y = net.conv(f"{name}.0", x, width, 7, groups=width)
            y = net.conv(f"{name}.3", y, 4 * width, epilogue="bias.gelu")
            x = net.conv(f"{name}.5", y, width, epilogue="scale.bias.residual")
    return net


def yolov8s() -> Network:
    net, silu = Network(), "bias.silu"

    def conv(name: str, x: Image, k: int, taps: int = 1, stride: int = 1, epilogue: str = silu) -> Image:
        return net.conv(f"{name}.conv", x, k, taps, stride=stride, epilogue=epilogue)

    def c2f(name: str, x: Image, k: int, blocks: int, *, shortcut: bool) -> Image:
        half = Image(k // 2, x.size)
        conv(f"{name}.cv1", x, k)
        for block in range(blocks):
            conv(f"{name}.m.{block}.cv1", half, half.c, 3)
            conv(f"{name}.m.{block}.cv2", half, half.c, 3, epilogue=f"{silu}.residual" if shortcut else silu)
        return conv(f"{name}.cv2", Image((2 + blocks) * half.c, x.size), k)

    x = conv("model.0", Image(3, 640), 32, 3, 2)
    x = c2f("model.2", conv("model.1", x, 64, 3, 2), 64, 1, shortcut=True)
    p3 = c2f("model.4", conv("model.3", x, 128, 3, 2), 128, 2, shortcut=True)
    p4 = c2f("model.6", conv("model.5", p3, 256, 3, 2), 256, 2, shortcut=True)
    x = c2f("model.8", conv("model.7", p4, 512, 3, 2), 512, 1, shortcut=True)
    x = conv("model.9.cv1", x, 256)
    p5 = conv("model.9.cv2", Image(4 * x.c, x.size), 512)
    p4 = c2f("model.12", Image(p5.c + p4.c, p4.size), 256, 1, shortcut=False)
    p3 = c2f("model.15", Image(p4.c + p3.c, p3.size), 128, 1, shortcut=False)
    x = conv("model.16", p3, 128, 3, 2)
    p4 = c2f("model.18", Image(x.c + p4.c, x.size), 256, 1, shortcut=False)
    x = conv("model.19", p4, 256, 3, 2)
    p5 = c2f("model.21", Image(x.c + p5.c, x.size), 512, 1, shortcut=False)
    for branch, inner, outer in (("cv2", 64, 64), ("cv3", 128, 80)):
        for level, p in enumerate((p3, p4, p5)):
            name = f"model.22.{branch}.{level}"
            x = conv(f"{name}.1", conv(f"{name}.0", p, inner, 3), inner, 3)
            net.conv(f"{name}.2", x, outer)
    boxes = p3.size**2 + p4.size**2 + p5.size**2
    net.add("model.22.dfl.conv", (16, 4, boxes, 1, 1, 1, 0, 0, 1, 1, 1, 1, 1), "")
    return net


def _resnet_block(net: Network, name: str, x: Image, k: int, first: str = "bias") -> Image:
    """A residual block of diffusers: its norms stand before its convolutions, and so do their activations."""
    y = net.conv(f"{name}.conv1", x, k, 3, epilogue=first)
    if x.c != k:
        net.conv(f"{name}.conv_shortcut", x, k)
    return net.conv(f"{name}.conv2", y, k, 3, epilogue="bias.residual")


def sd15_unet() -> Network:
    """Its batch is the two samples of classifier-free guidance; `channel_bias` is the time embedding."""
    net, widths = Network(images=2), (320, 640, 1280, 1280)

    def block(name: str, x: Image, k: int) -> Image:
        return _resnet_block(net, name, x, k, "bias.channel_bias")

    def attention(name: str, x: Image) -> None:
        net.conv(f"{name}.proj_in", x, x.c)
        net.conv(f"{name}.proj_out", x, x.c, epilogue="bias.residual")

    x = net.conv("conv_in", Image(4, 64), 320, 3)
    skips = [x]
    for level, k in enumerate(widths):
        name = f"down_blocks.{level}"
        for layer in range(2):
            x = block(f"{name}.resnets.{layer}", x, k)
            if level < 3:
                attention(f"{name}.attentions.{layer}", x)
            skips.append(x)
        if level < 3:
            x = net.conv(f"{name}.downsamplers.0.conv", x, k, 3, stride=2)
            skips.append(x)
    x = block("mid_block.resnets.0", x, 1280)
    attention("mid_block.attentions.0", x)
    x = block("mid_block.resnets.1", x, 1280)
    for level, k in enumerate(reversed(widths)):
        name = f"up_blocks.{level}"
        for layer in range(3):
            x = block(f"{name}.resnets.{layer}", Image(x.c + skips.pop().c, x.size), k)
            if level > 0:
                attention(f"{name}.attentions.{layer}", x)
        if level < 3:
            x = net.conv(f"{name}.upsamplers.0.conv", Image(k, 2 * x.size), k, 3)
    net.conv("conv_out", x, 4, 3)
    return net


def sd_vae_decoder() -> Network:
    """One image of 512x512 from its latent; the attention's linear layers are left out, as in the U-Net."""
    net = Network()
    x = net.conv("post_quant_conv", Image(4, 64), 4)
    x = net.conv("decoder.conv_in", x, 512, 3)
    for layer in range(2):
        x = _resnet_block(net, f"decoder.mid_block.resnets.{layer}", x, 512)
    for level, k in enumerate((512, 512, 256, 128)):
        name = f"decoder.up_blocks.{level}"
        for layer in range(3):
            x = _resnet_block(net, f"{name}.resnets.{layer}", x, k)
        if level < 3:
            x = net.conv(f"{name}.upsamplers.0.conv", Image(k, 2 * x.size), k, 3)
    net.conv("decoder.conv_out", x, 3, 3)
    return net


def unet_segmentation() -> Network:
    """Its transposed convolutions are backward data problems, which take no bias."""
    net, relu = Network(), "bias.relu"

    def double(name: str, x: Image, k: int) -> Image:
        return net.conv(f"{name}.c.3", net.conv(f"{name}.c.0", x, k, 3, epilogue=relu), k, 3, epilogue=relu)

    x = double("inc", Image(3, 512), 64)
    for level in range(4):
        x = double(f"d.{level}", Image(x.c, x.size // 2), 2 * x.c)  # max pooling
    for level in range(4):
        y = net.transposed(f"up.{level}", x, x.c // 2)
        x = double(f"uc.{level}", Image(2 * y.c, y.size), y.c)
    net.conv("outc", x, 2)
    return net


NETWORKS: dict[str, Callable[[], Network]] = {
    "resnet50": resnet50,
    "resnext50_32x4d": resnext50_32x4d,
    "vgg16": vgg16,
    "mobilenet_v2": mobilenet_v2,
    "efficientnet_b0": efficientnet_b0,
    "convnext_tiny": convnext_tiny,
    "yolov8s": yolov8s,
    "sd15_unet": sd15_unet,
    "sd_vae_decoder": sd_vae_decoder,
    "unet_segmentation": unet_segmentation,
}


def tables() -> dict[Path, str]:
    """The text of each file."""
    made = {f"{name}_fused": make() for name, make in NETWORKS.items()} | {"resnet50_training": resnet50_training()}
    return {FOLDER / f"{suite}.csv": network.table(suite) for suite, network in made.items()}


def main() -> None:
    """Write the files, or with --check name those that differ."""
    if sys.argv[1:] == ["--check"]:
        old = [path.name for path, text in tables().items() if not path.exists() or path.read_text("utf-8") != text]
        sys.exit(f"out of date: {', '.join(old)}; python scripts/fused_suites.py writes them" if old else 0)
    for path, text in tables().items():
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
