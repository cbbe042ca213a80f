"""Write docs/benchmarks.md: the text of benchmarks/document.md with tables of the figures in benchmarks/results.

Run: python benchmarks/document.py [--check], which writes nothing and ends with 1 where the document is out of date.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import end_to_end
import figures
import script
from figures import Figure

from miofind.core.epilogue import Activation
from miofind.core.problem import Direction, ProblemDescription
from miofind.device.device import Library
from miofind.solver.registry import Registry

TEXT = Path(__file__).with_name("document.md")
DOCUMENT = Path(__file__).parents[1] / "docs" / "benchmarks.md"
_SLOT = re.compile(r"\{\{(\w+)\}\}")
_CLEARLY = 1.02  # two runs of one comparison differ by less
_DENSE = ("1x1", "3x3", "small batch")
_FEW = ("depthwise", "depthwise large", "grouped", "first layer")
_ALL = ("1x1", "3x3", "small batch", "dilated", "first layer", "depthwise", "depthwise large", "grouped", "other")
_NAMES = {"depthwise large": "depthwise, filters above 7"}
_FUSED = {"one-pass": "one pass", "torch": "PyTorch", "cudnn": "cuDNN"}
_HOW = ("sum", "mean")
_RESULTS = "../benchmarks/results"
_GPU = "NVIDIA H200"
"""The page is of; rows of another one say so."""

_EAGER = {
    "torch": ("torch eager", "torch folded eager"),
    "miofind": ("miofind eager", "miofind fused eager"),
}
_SHORT = {Direction.FORWARD: "forward", Direction.BACKWARD_DATA: "data", Direction.BACKWARD_WEIGHTS: "weights"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A column of a table: its heading, and the figures that it is of."""

    heading: str
    figures: Sequence[Figure]


def by_direction(of: Sequence[Figure], *cases: tuple[str, str, str]) -> list[Column]:
    """Three columns for each case of arithmetic, layout and what the first of its headings begins with."""
    return [
        Column(
            heading=f"{name} {short}" if direction is Direction.FORWARD else short,
            figures=[figure for figure in of if figure.case == (arithmetic, layout, direction)],
        )
        for arithmetic, layout, name in cases
        for direction, short in _SHORT.items()
    ]


def all_directions(of: Sequence[Figure], *cases: tuple[str, str, str]) -> list[Column]:
    """One column for each case of arithmetic, layout and heading."""
    return [
        Column(heading=name, figures=[figure for figure in of if figure.case[:2] == (arithmetic, layout)])
        for arithmetic, layout, name in cases
    ]


def table(columns: Sequence[Column], classes: Sequence[str], total: str = "") -> str:
    """A row of geometric means for each class, with the number of problems, and one of all where it has a name."""
    groups = [(_NAMES.get(name, name), [name]) for name in classes]
    lines = [f"| {' | '.join(('class (problems)', *(column.heading for column in columns)))} |"]
    lines.append("|---" * (len(columns) + 1) + "|")
    for name, group in [*groups, *([(total, list(classes))] if total else [])]:
        chosen = [figures.of_classes(column.figures, *group) for column in columns]
        count = max(len({_shape(figure) for figure in some}) for some in chosen)
        cells = [f"{name} ({count})", *(ratio_text(figures.mean(some)) if some else "-" for some in chosen)]
        lines.append(f"| {' | '.join(f'**{cell}**' if name == total else cell for cell in cells)} |")
    return "\n".join(lines)


def ratio_text(ratio: float) -> str:
    """Three significant digits."""
    return f"{ratio:.{2 if ratio < 9.995 else 1 if ratio < 99.95 else 0}f}"


def _shape(figure: Figure) -> str:
    """What a problem has in common with those of other directions, layouts and types."""
    text = figure.problem.network_config
    return text.partition(f"-{figure.problem.direction.value}-")[2].partition(f"-{figure.problem.x.dtype.value}-")[0]


def whole_section(whole: Sequence[Figure]) -> str:
    """How the whole product compares, "" where that was not measured."""
    if not whole:
        return ""
    columns = by_direction(whole, *_layouts("float16"))
    behind = [figure for figure in whole if figure.ratio < 1 / _CLEARLY]
    known = Registry.default()
    own = [figure for figure in whole if known.named(figure.solver_id).library is Library.PLAIN]
    least = min(figure.ratio for figure in whole)
    return f"""## The whole product, float16

What a find of all solvers answers, from the shipped database, against PyTorch with tensors of the
same memory order: channels_last in NHWC, its default in NCHW.

{table(columns, _ALL, "all")}

PyTorch is ahead by more than 2 % in {len(behind)} of {len(whole)} problems (the least ratio is
{ratio_text(least)}). One of miofind's own kernels is the answer in {len(own)}, a library's in the others.

"""


def fused_section(folder: Path = figures.RESULTS) -> str:
    """How networks of fused convolutions compare, "" where none was measured."""
    files = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob(f"{figures.FUSED}_*.json"))]
    lines = [fused_line(content, network) for content in files for network in content["networks"]]
    if not lines:
        return ""
    headings = ("network", "layers", "miofind, ms", *(f"{name} {how}" for name in _FUSED.values() for how in _HOW))
    table = "\n".join([f"| {' | '.join(headings)} |", "|---" * len(headings) + "|", *lines])
    return f"""## Networks of fused convolutions

The convolutions of inference with batch norms folded, each with its bias, residual and activation; of ResNet-50 also
the passes of a training step: forward with batch norm's statistics, backward data through the ReLU before (and beside
the skip), backward weights with the bias gradient. *One pass* is cuDNN's best convolution and one kernel of miofind's
behind it, which is what a compiler of networks makes; *PyTorch* is eager; *cuDNN* is the best of its own fused engines.
*Sum* compares the sums of a pass through the network (a dash where a layer lacks one), *mean* is the geometric mean
over the distinct layers.

{table}

{cost_text(folder)}"""


def cost_text(folder: Path) -> str:
    """What an epilogue costs in a kernel, "" where that was not measured."""
    path = folder / "fused_cost_h200.json"
    if not path.exists():
        return ""
    content = json.loads(path.read_text(encoding="utf-8"))
    costs: dict[bool, list[float]] = {}
    for row in content["rows"]:
        costs.setdefault(Activation(row["activation"]).is_exact, []).append(row["cost"])
    cheap, dear = (statistics.geometric_mean(costs[is_exact]) for is_exact in (True, False))
    first, second = (f"({len(costs[is_exact])} layers)" for is_exact in (True, False))
    return f"""Of miofind's own kernels that were the answers at {content["commit"]} a fused one takes
{cheap:.2f} of what the same kernel takes without an epilogue, and the residual's bytes {first}; with
SiLU, GELU or a sigmoid, whose exponentials and divisions follow the last product, {dear:.2f} {second}.
Float16, batch 32, geometric means.

"""


def fused_line(content: Mapping[str, Any], network: Mapping[str, Any]) -> str:
    """A network's line of the table, from the file that has it."""
    row = next(row for row in content["rows"] if row["suite"] == network["suite"])
    problem = ProblemDescription.from_network_config(row["network_config"])
    name = network["suite"].removesuffix("_fused")
    ours = network["sums_ms"]["miofind"]
    cells = [f"{name}, {problem.x.dtype} {problem.x.layout}, batch {problem.n}", str(network["layers"])]
    cells.append("-" if ours is None else f"{ours:.3f}")
    for rival in _FUSED:
        cells += map(_ratio_or_dash, (network["sum_ratios"][rival], network["mean_ratios"][rival]))
    return f"| {' | '.join(cells)} |"


def _ratio_or_dash(ratio: float | None) -> str:
    return "-" if ratio is None else ratio_text(ratio)


_HOST_WAYS = {
    "pytorch": "PyTorch",
    "direct hit": "hit",
    "direct hit beside": "hit on another stream",
    "python hit": "hit, by Python",
    "direct fallback": "fallback",
    "python fallback": "fallback, by Python",
}
"""What the ways of `torch_overhead.py` are called."""


def host_section(folder: Path = figures.RESULTS) -> str:
    """What a call costs the host in PyTorch, "" where that was not measured."""
    path = folder / "torch_overhead_h200.json"
    if not path.exists():
        return ""
    content = json.loads(path.read_text(encoding="utf-8"))
    lines = [f"| {call} | {' | '.join(f'{us:.1f}' for us in ways.values())} |" for call, ways in content["us"].items()]
    headings = ["call", *(_HOST_WAYS[name] for name in next(iter(content["us"].values())))]
    table = "\n".join([f"| {' | '.join(headings)} |", "|---" * len(headings) + "|", *lines])
    return f"""## What a call costs the host in PyTorch

Microseconds of a small 1x1 convolution, with miofind enabled or not ([figures]({_RESULTS}/{path.name})). A *hit* is
launched by the direct path (`miofind.torch.build()`); a *fallback* is left to PyTorch's own kernel. A call that no plan
is made of yet takes {content["miss_us"] / 1e3:.1f} ms once.

{table}

"""


def networks_table(folder: Path) -> str:
    """The table of the networks whose figures are in a folder, "" where none was measured."""
    files = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob(f"{end_to_end.NAME}_*.json"))]
    lines = [line for content in files for row in content["rows"] if (line := network_line(row, content["gpu"]))]
    headings = ("network", "PyTorch, ms", "miofind, ms", "ratio", "eager alone", "ratio")
    return "\n".join([f"| {' | '.join(headings)} |", "|---" * len(headings) + "|", *lines]) if lines else ""


def networks_section(folder: Path = figures.RESULTS) -> str:
    """How whole networks in PyTorch compare, "" where none was measured."""
    table = networks_table(folder)
    if not table:
        return ""
    return f"""## Whole networks in PyTorch

Inference in float16, and training steps under autocast to bfloat16. Each side's best of its forms: the network as it
is, in a CUDA graph, under torch.compile and both, in inference with its batch norms folded, too; miofind's are
`enable`, `fuse` and `inductor_options`. *Eager alone* compares the forms without graphs and compilers. RepLKNet-31B's
training step of four images was timed in CUDA graphs alone. This row was measured with the present kernels, and so were
those of inference channels first at batch 1, and channels last: ResNet-50, EfficientNet-B0, ConvNeXt-T, VGG-16 and
YOLOv8s at batch 32, HiFi-GAN, DeepLabV3, r3d_18, R(2+1)D-18 and the U-Net in three dimensions at more than one image,
and Stable Diffusion's U-Net of eight. The others were measured when cuDNN's engine 4 still ran some fused layers, and a
layer's kernel could begin before the one of the layer before had ended. Both are no more: by the shipped rows a
network's fused layers together take up to 1.8 % longer without the engine at batch 1, and 0.9 % at batch 32.

{table}

"""


def held_out_section(folder: Path = figures.RESULTS / "held_out") -> str:
    """The same of networks that nothing was made for, "" where none was measured."""
    table = networks_table(folder)
    if not table:
        return ""
    return f"""### Networks that nothing was made for

Of timm, chosen by their names, by `end_to_end.py --tune --folder benchmarks/results/held_out`. Of the first nine it is
the second time: the first, with a mean of 1.64, told that `fuse` left out batch norms that are functions before
activations in place, as in MobileNetV4, EfficientNetV2 and DarkNet, and convolutions whose weights are computed in each
call, as NFNet's. Of the others, from DLA-34 on, it is the first: {_mean_of_newest(folder):.2f} in the geometric mean.
DenseNet-121 was to be among these and was not done within 400 s; EdgeNeXt copies from the CPU, so that neither side has
it in a CUDA graph.

{table}

"""


def _mean_of_newest(folder: Path) -> float:
    """The geometric mean of the ratios of those networks that were measured with the newest commit."""
    contents = (json.loads(path.read_text(encoding="utf-8")) for path in folder.glob(f"{end_to_end.NAME}_*.json"))
    ratios = [end_to_end.ratio(r) for each in contents for r in each["rows"] if r["commit"] == each["commit"]]
    return statistics.geometric_mean(ratio for ratio in ratios if ratio is not None)


def network_line(row: Mapping[str, Any], gpu: str) -> str:
    """A network's line of the table, "" where a side has no time."""
    torchs, ours = end_to_end.best(row, "torch"), end_to_end.best(row, "miofind")
    if torchs is None or ours is None:
        return ""
    eager = {side: [ms for key, ms in row["ms"].items() if key in _EAGER[side]] for side in _EAGER}
    other = "" if gpu == _GPU else f", {gpu.removeprefix('NVIDIA ')}"
    cells = [f"{row['network']}, {row['kind']}, {row['layout']}, batch {row['size']}{other}"]
    cells += [f"{ms:.3f} ({form})" for form, ms in (torchs, ours)] + [ratio_text(torchs[1] / ours[1])]
    is_timed = all(eager.values())
    cells += [" : ".join(f"{min(ms):.3f}" for ms in eager.values()) if is_timed else "-"]
    cells += [ratio_text(min(eager["torch"]) / min(eager["miofind"])) if is_timed else "-"]
    return f"| {' | '.join(cells)} |"


def slots(kept: Sequence[Figure]) -> dict[str, str]:
    """What stands in the place of each {{name}} of the text."""
    own = [figure for figure in kept if not figure.whole]
    few = {
        arithmetic: figures.of_classes([figure for figure in own if figure.case[0] == arithmetic], *_FEW)
        for arithmetic in ("float16", "bfloat16", "float32")
    }
    nhwc, nchw = all_directions(figures.of_classes(own, "first layer"), *_layouts("tf32"))
    narrow = [("bfloat16", "NHWC", "bfloat16"), ("tf32", "NHWC", "TF32")]
    wide = [(kind, layout, f"{kind} {layout}") for kind in ("bfloat16", "float32") for layout in ("NHWC", "NCHW")]
    return {
        "networks": networks_section() + held_out_section() + host_section(),
        "whole": whole_section([figure for figure in kept if figure.whole]),
        "fused": fused_section(),
        "float16": table(by_direction(own, *_layouts("float16")), _ALL, "all"),
        "float32": table(by_direction(own, *_layouts("float32")), _DENSE, "dense"),
        "narrow": table(by_direction(own, *narrow), _DENSE, "dense"),
        "few": table(all_directions(own, *wide), _FEW),
        "first_tf32_nhwc": ratio_text(figures.mean(nhwc.figures)),
        "first_tf32_nchw": ratio_text(figures.mean(nchw.figures)),
        "few_count": str(len(set(map(_shape, few["float16"])))),
        "few_least": ratio_text(min(figure.ratio for figure in few["float16"])),
        "few_bfloat16_least": ratio_text(min(figure.ratio for figure in few["bfloat16"])),
        "few_float32_behind": str(sum(figure.ratio < 1 for figure in few["float32"])),
        "few_float32_count": str(len(few["float32"])),
        "few_float32_least": ratio_text(min(figure.ratio for figure in few["float32"])),
    }


def _layouts(arithmetic: str) -> list[tuple[str, str, str]]:
    return [(arithmetic, layout, layout) for layout in ("NHWC", "NCHW")]


def document() -> str:
    """The whole document."""
    found = slots(figures.kept())
    return _SLOT.sub(lambda slot: found[slot[1]], TEXT.read_text(encoding="utf-8"))


def main() -> None:
    parser = script.parser(__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing")
    arguments = parser.parse_args()
    made = document()
    if not arguments.check:
        DOCUMENT.write_text(made, encoding="utf-8")
    elif made != DOCUMENT.read_text(encoding="utf-8"):
        sys.exit(f"{DOCUMENT} is out of date: python benchmarks/document.py writes it")


if __name__ == "__main__":
    script.run(main)
