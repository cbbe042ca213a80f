"""MIOpenDriver convolution lines: the shell's grammar for a problem, read and written.

What MIOpenDriver cannot say (padding that differs before and after, one spatial dimension, float64, mixed element
types, TF32, most epilogues) has long flags of miofind's own, so that every problem can be written as a line and read
back. A transposed convolution is read as the mirrored direction of the convolution whose gradient it is, a line of a
fused one (CBAInfer) as its convolution with an epilogue.

Source: ROCm/MIOpen, driver/conv_driver.hpp, driver/CBAInferFusion_driver.hpp and src/convolution.cpp (output sizes).
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath

from miofind.core.problem import DataType, Direction, Epilogue, Layout, MathMode, ProblemDescription, enum_value
from miofind.driver.epilogue import FLAG_NAMES, check_directions, epilogue_of, fusion_epilogue
from miofind.driver.flags import FLAGS, FlagValues, read_flags
from miofind.errors import InvalidProblemError

_DTYPES = {"conv": DataType.FLOAT32, "convfp16": DataType.FLOAT16, "convbfp16": DataType.BFLOAT16}
_FUSED = {"CBAInfer": "conv", "CBAInferfp16": "convfp16", "CBAInferbfp16": "convbfp16"}
OPERATIONS = (*_DTYPES, *_FUSED)
"""What a line begins with."""

_BITS = {Direction.FORWARD: 1, Direction.BACKWARD_DATA: 2, Direction.BACKWARD_WEIGHTS: 4}
_MIRRORED = {
    Direction.FORWARD: Direction.BACKWARD_DATA,
    Direction.BACKWARD_DATA: Direction.FORWARD,
    Direction.BACKWARD_WEIGHTS: Direction.BACKWARD_WEIGHTS,
}
_PREFIX = {"x": "in", "w": "fil", "y": "out"}
# What a flag of an unused spatial dimension may say: the value that changes nothing.
_UNUSED = {"in": 1, "fil": 1, "pad": 0, "pad_after": 0, "conv_stride": 1, "dilation": 1, "trans_output_pad": 0}


_PADDING_GIVEN = ("default", "conv")  # CBAInfer lines call their default "conv"
_QUOTED = re.compile(r"""["'\\]""")
_WORDS = re.compile(r"[^ \t\r\n]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverLine:
    """What a line asks for: one problem in one or several directions.

    Attributes:
        problem: in the first of the directions.
    """

    problem: ProblemDescription
    directions: tuple[Direction, ...]

    @property
    def problems(self) -> tuple[ProblemDescription, ...]:
        """One a direction."""
        return tuple(map(self.problem.in_direction, self.directions))


def parse_driver_line(text: str) -> tuple[ProblemDescription, ...]:
    """The problems of a line, one a direction that -F asks for.

    Args:
        text: as for `read_driver_line`.

    Raises:
        InvalidProblemError: the message names the flag and the value.
    """
    return read_driver_line(text).problems


def read_driver_line(text: str) -> DriverLine:
    """The problem of a line and the directions that -F asks for.

    Args:
        text: such as "convfp16 -n 32 -c 64 -H 56 -W 56 -k 64 -y 3 -x 3 -p 1 -q 1 -F 1"; words up to MIOpenDriver, or
            miofind and its command, may stand in front.

    Raises:
        InvalidProblemError: the message names the flag and the value.
    """
    arguments = _without_program(_words(text))
    base = arguments[0] if arguments else ""
    if base not in OPERATIONS:
        advice = f"; a FindDB is named by --db {base}" if base.endswith(".db") else ""
        raise InvalidProblemError(f"{base!r} is not an operation: a line begins with {', '.join(OPERATIONS)}{advice}")
    if base in _FUSED:
        return _fused(_FUSED[base], read_flags(arguments[1:], of_fusion=True))
    flags = read_flags(arguments[1:])
    rank = flags.integer("spatial_dim")
    if rank > 3:
        raise InvalidProblemError(f"{FLAGS['spatial_dim']} {rank} must be 1, 2 or 3")
    _check_unused(flags, rank)
    dtypes, layouts = _dtypes(base, flags), _layouts(flags, rank)
    epilogue = epilogue_of({name: flags.text(name) for name in FLAG_NAMES if name in flags and flags.given[name] != 0})
    directions = _directions(flags, epilogue)
    if flags.text("mode") == "trans":
        if epilogue:
            raise InvalidProblemError(
                f"-m trans takes no epilogue, {epilogue.text} is given: ask for the convolution that it mirrors, "
                "whose backward data it is forward"
            )
        mirrored = tuple(_MIRRORED[direction] for direction in directions)
        return DriverLine(problem=_transposed(flags, rank, mirrored[0], dtypes, layouts), directions=mirrored)
    problem = _ordinary(flags, rank, directions[0], dtypes, layouts)
    return DriverLine(problem=replace(problem, epilogue=epilogue) if epilogue else problem, directions=directions)


def _fused(base: str, flags: FlagValues) -> DriverLine:
    """The problem of a CBAInfer line: a convolution of two spatial dimensions and what its mode says."""
    rank = flags.integer("spatial_dim")
    if rank != 2:
        raise InvalidProblemError(f"{FLAGS['spatial_dim']} {rank}: a CBAInfer line has 2")
    _check_unused(flags, rank)
    epilogue = fusion_epilogue(flags.integer("fusion_mode"), flags.integer("activMode"), flags.integer("bnMode"))
    problem = _ordinary(flags, rank, Direction.FORWARD, _dtypes(base, flags), _layouts(flags, rank))
    return DriverLine(problem=replace(problem, epilogue=epilogue), directions=(Direction.FORWARD,))


def _words(text: str) -> Sequence[str]:
    """The words of a line as a POSIX shell splits it; where nothing is quoted, blanks alone separate them.

    The shell's grammar takes longer than all else of a line, and files have many thousand.
    """
    if _QUOTED.search(text) is None:
        return _WORDS.findall(text)
    try:
        return shlex.split(text)
    except ValueError as error:
        raise InvalidProblemError(f"driver line {text!r} cannot be read: {error}") from error


def driver_line(problem: ProblemDescription) -> str:
    """The line that names a problem; `parse_driver_line` gives exactly that problem back.

    MIOpenDriver takes it too unless it needs a flag of miofind's own.
    """
    conv, dims = problem.conv, "dhw"[3 - problem.spatial_dims :]
    base, own = _written_dtype(problem)
    per_dimension = {
        "in": problem.spatial,
        "fil": problem.filter,
        "pad": conv.pad_before,
        "conv_stride": conv.stride,
        "dilation": conv.dilation,
    }
    words = [base, "-n", problem.n, "-c", problem.c]
    for stem, sizes in per_dimension.items():
        if stem == "fil":
            words += ["-k", problem.k]
        for d, size in zip(dims, sizes, strict=True):
            words += [_flag(f"{stem}_{d}"), size]
    for d, before, after in zip(dims, conv.pad_before, conv.pad_after, strict=True):
        words += [f"--pad_after_{d}", after] if after != before else []
    words += ["--spatial_dim", problem.spatial_dims] if problem.spatial_dims != 2 else []
    for name, prefix in _PREFIX.items():
        layout = problem.tensor(name).layout
        words += [f"--{prefix}_layout", layout] if layout.channels_last else []
    words += own
    words += ["--math", problem.math] if problem.math is not MathMode.IEEE else []
    words += ["--epilogue", problem.epilogue.text] if problem.epilogue else []
    words += ["-m", "conv", "-g", problem.groups, "-F", _BITS[problem.direction]]
    return " ".join(map(str, words))


def _flag(name: str) -> str:
    """The short form, but for the depth flags, whose short forms a shell would interpret."""
    short = FLAGS[name].short
    return f"-{short}" if short.isalpha() else f"--{name}"


def _written_dtype(problem: ProblemDescription) -> tuple[str, list[str]]:
    """The operation, and the words that say what it cannot."""
    dtypes = {name: problem.tensor(name).dtype for name in _PREFIX}
    if len(set(dtypes.values())) > 1:
        return "conv", [word for name, dtype in dtypes.items() for word in (f"--{_PREFIX[name]}_dtype", dtype.value)]
    for base, dtype in _DTYPES.items():
        if dtype is dtypes["x"]:
            return base, []
    return "conv", ["--dtype", dtypes["x"].value]


def _without_program(words: Sequence[str]) -> Sequence[str]:
    """The words from the operation on: a log's prefix, the driver's path or miofind and its command are dropped."""
    for i, word in enumerate(words):
        if "MIOpenDriver" in word and PurePath(word).name == "MIOpenDriver":
            return words[i + 1 :]
    if words and PurePath(words[0]).name == "miofind":
        return words[1:] if len(words) > 1 and words[1] in OPERATIONS else words[2:]
    return words


def _check_unused(flags: FlagValues, rank: int) -> None:
    """Refuse flags of dimensions that the problem lacks, rather than compute another problem."""
    for d in "dhw"[: 3 - rank]:
        for stem, neutral in _UNUSED.items():
            name = f"{stem}_{d}"
            if name in flags and flags.integer(name) != neutral:
                raise InvalidProblemError(
                    f"{FLAGS[name]} {flags.text(name)} does not fit --spatial_dim {rank}: leave it out, "
                    f"or raise --spatial_dim"
                )


def _directions(flags: FlagValues, epilogue: Epilogue) -> tuple[Direction, ...]:
    """Those of -F; without it all, and with an epilogue those that it goes with."""
    is_open = epilogue and "forw" not in flags
    bits = sum(_BITS[direction] for direction in epilogue.directions) if is_open else flags.integer("forw")
    if bits > 7:
        raise InvalidProblemError(f"{FLAGS['forw']} {bits} must be a sum of 1 (forward), 2 (data) and 4 (weights)")
    directions = tuple(direction for direction, bit in _BITS.items() if bits == 0 or bits & bit)
    check_directions(epilogue, directions, f"{FLAGS['forw']} {bits}")
    return directions


def _dtypes(base: str, flags: FlagValues) -> dict[str, DataType]:
    """Element type of the driver's input, filter and output."""
    own = [name for name in ("dtype", *(f"{prefix}_dtype" for prefix in _PREFIX.values())) if name in flags]
    if own and base != "conv":
        raise InvalidProblemError(f"--{own[0]} {flags.text(own[0])} contradicts {base}: begin the line with conv")
    dtypes = {}
    for name, prefix in _PREFIX.items():
        flag = f"{prefix}_dtype" if f"{prefix}_dtype" in flags else "dtype"
        dtypes[name] = enum_value(DataType, flags.text(flag), f"--{flag}") if flag in flags else _DTYPES[base]
    return dtypes


def _layouts(flags: FlagValues, rank: int) -> dict[str, Layout]:
    """Memory order of the driver's input, filter and output."""
    layouts = {}
    for name, prefix in _PREFIX.items():
        flag = f"{prefix}_layout" if f"{prefix}_layout" in flags else "layout"
        if flag not in flags:
            layouts[name] = Layout.of(rank, channels_last=False)
            continue
        layout = enum_value(Layout, flags.text(flag), f"--{flag}")
        if layout.spatial_dims != rank:
            fitting = Layout.of(rank, channels_last=layout.channels_last)
            raise InvalidProblemError(f"--{flag} {layout} does not fit --spatial_dim {rank}: use {fitting}")
        layouts[name] = layout
    return layouts


def _sizes(flags: FlagValues, stem: str, rank: int) -> tuple[int, ...]:
    return tuple(flags.integer(f"{stem}_{d}") for d in "dhw"[3 - rank :])


def _groups(flags: FlagValues) -> int:
    return max(1, flags.integer("group_count"))  # MIOpenDriver reads 0 as 1


def _padding(flags: FlagValues, rank: int) -> tuple[tuple[int, int], ...]:
    """(before, after) a spatial dimension."""
    pairs = []
    is_given = flags.text("pad_mode") in _PADDING_GIVEN
    before = _sizes(flags, "pad", rank) if is_given else _padding_of_mode(flags, rank)
    for d, size in zip("dhw"[3 - rank :], before, strict=True):
        name = f"pad_after_{d}"
        if name in flags and not is_given:
            raise InvalidProblemError(f"--{name} {flags.text(name)} contradicts --pad_mode {flags.text('pad_mode')}")
        pairs.append((size, flags.integer(name) if name in flags else size))
    return tuple(pairs)


def _padding_of_mode(flags: FlagValues, rank: int) -> tuple[int, ...]:
    """What --pad_mode makes of the padding: "same" and "valid" act on undilated ordinary convolutions only.

    Source: ROCm/MIOpen, driver/conv_driver.hpp, SetConvDescriptorFromCmdLineArgs.
    """
    spatial, taps, stride = (_sizes(flags, stem, rank) for stem in ("in", "fil", "conv_stride"))
    undilated = set(_sizes(flags, "dilation", rank)) == {1} or set(taps) == {1}
    if ("mode" in flags and flags.text("mode") == "trans") or not undilated:
        return _sizes(flags, "pad", rank)
    if flags.text("pad_mode") == "valid":
        return (0,) * rank
    return tuple(max(taps[i] - (spatial[i] % stride[i] or stride[i]), 0) // 2 for i in range(rank))


def _ordinary(
    flags: FlagValues,
    rank: int,
    direction: Direction,
    dtypes: Mapping[str, DataType],
    layouts: Mapping[str, Layout],
) -> ProblemDescription:
    for d in "dhw"[3 - rank :]:
        if flags.integer(f"trans_output_pad_{d}"):
            flag = FLAGS[f"trans_output_pad_{d}"]
            raise InvalidProblemError(f"{flag} {flags.text(flag.name)} needs a transposed convolution: add -m trans")
    c, k, groups = flags.integer("in_channels"), flags.integer("out_channels"), _groups(flags)
    return ProblemDescription.convolution(
        x=(flags.integer("batchsize"), c, *_sizes(flags, "in", rank)),
        w=(k, max(1, c // groups), *_sizes(flags, "fil", rank)),
        padding=_padding(flags, rank),
        stride=_sizes(flags, "conv_stride", rank),
        dilation=_sizes(flags, "dilation", rank),
        groups=groups,
        direction=direction,
        dtype=dtypes,
        layout=layouts,
        math=flags.text("math"),
    )


def _transposed(
    flags: FlagValues,
    rank: int,
    direction: Direction,
    dtypes: Mapping[str, DataType],
    layouts: Mapping[str, Layout],
) -> ProblemDescription:
    """The problem that the driver's mirrors: its input (n, c, in) is the problem's y, its output (n, k, out) the x."""
    c, k, groups = flags.integer("in_channels"), flags.integer("out_channels"), _groups(flags)
    try:
        return ProblemDescription.convolution(
            x=(flags.integer("batchsize"), k, *_transposed_output(flags, rank)),
            w=(c, max(1, k // groups), *_sizes(flags, "fil", rank)),
            padding=_padding(flags, rank),
            stride=_sizes(flags, "conv_stride", rank),
            dilation=_sizes(flags, "dilation", rank),
            groups=groups,
            direction=direction,
            dtype={"x": dtypes["y"], "w": dtypes["w"], "y": dtypes["x"]},
            layout={"x": layouts["y"], "w": layouts["w"], "y": layouts["x"]},
            math=flags.text("math"),
        )
    except InvalidProblemError as error:
        raise InvalidProblemError(f"-m trans, as the convolution it mirrors (its x is the output): {error}") from error


def _transposed_output(flags: FlagValues, rank: int) -> tuple[int, ...]:
    """Output sizes of a transposed convolution.

    Source: ROCm/MIOpen, src/convolution.cpp, GetForwardOutputTensorWithLayout.
    """
    sizes = []
    for i, d in enumerate("dhw"[3 - rank :]):
        stride, extra = flags.integer(f"conv_stride_{d}"), flags.integer(f"trans_output_pad_{d}")
        if extra >= stride:
            raise InvalidProblemError(f"{FLAGS[f'trans_output_pad_{d}']} {extra} must be below the stride {stride}")
        reach = flags.integer(f"dilation_{d}") * (flags.integer(f"fil_{d}") - 1) + 1
        size = stride * (flags.integer(f"in_{d}") - 1) + reach - sum(_padding(flags, rank)[i]) + extra
        if size < 1:
            raise InvalidProblemError(f"{FLAGS[f'pad_{d}']} {flags.text(f'pad_{d}')} leaves an output size of {size}")
        sizes.append(size)
    return tuple(sizes)
