"""The flags of a MIOpenDriver convolution line: names, defaults and ranges, and how words are read into them.

Flags that MIOpenDriver lacks are long only and marked as miofind's own. Lines of fused convolutions (CBAInfer) have
flags of their own, and some letters mean something else there.

Source: ROCm/MIOpen, driver/conv_driver.hpp and driver/CBAInferFusion_driver.hpp, AddCmdLineArgs; driver/InputFlags.cpp,
Parse.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from miofind.errors import InvalidProblemError, suggestion

_GREATEST = 2**31 - 1
_INTEGER = re.compile(r"[+-]?[0-9]{1,20}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """One flag and its value's range.

    Attributes:
        name: long name, without dashes.
        short: short name, "" for none.
        default: what it is when left out; an int for flags that take integers.
        least: least integer it takes.
        only: the texts it takes; empty for any.
        ignored: it says how MIOpenDriver runs, not what; accepted and dropped.
        is_file: it names a file, so that a number was meant for another flag.
        is_switch: it takes 0 or 1, and means 1 without a value.
    """

    name: str
    short: str = ""
    default: int | str = ""
    least: int = 1
    only: tuple[str, ...] = ()
    ignored: bool = False
    is_file: bool = False
    is_switch: bool = False

    def __str__(self) -> str:
        return f"--{self.name} (-{self.short})" if self.short else f"--{self.name}"


_PROBLEM = (
    Flag(name="spatial_dim", short="_", default=2),
    Flag(name="forw", short="F", default=0, least=0),
    Flag(name="mode", short="m", default="conv", only=("conv", "trans")),
    Flag(name="batchsize", short="n", default=100),
    Flag(name="in_channels", short="c", default=3),
    Flag(name="in_d", short="!", default=32),
    Flag(name="in_h", short="H", default=32),
    Flag(name="in_w", short="W", default=32),
    Flag(name="out_channels", short="k", default=32),
    Flag(name="fil_d", short="@", default=3),
    Flag(name="fil_h", short="y", default=3),
    Flag(name="fil_w", short="x", default=3),
    Flag(name="pad_d", short="$", default=0, least=0),
    Flag(name="pad_h", short="p", default=0, least=0),
    Flag(name="pad_w", short="q", default=0, least=0),
    Flag(name="pad_mode", short="z", default="default", only=("default", "same", "valid")),
    Flag(name="conv_stride_d", short="#", default=1),
    Flag(name="conv_stride_h", short="u", default=1),
    Flag(name="conv_stride_w", short="v", default=1),
    Flag(name="dilation_d", short="^", default=1),
    Flag(name="dilation_h", short="l", default=1),
    Flag(name="dilation_w", short="j", default=1),
    Flag(name="trans_output_pad_d", short="%", default=0, least=0),
    Flag(name="trans_output_pad_h", short="Y", default=0, least=0),
    Flag(name="trans_output_pad_w", short="X", default=0, least=0),
    Flag(name="group_count", short="g", default=1, least=0),
    Flag(name="in_layout", short="I"),
    Flag(name="fil_layout", short="f"),
    Flag(name="out_layout", short="O"),
)

_OWN = (
    Flag(name="pad_after_d", default=0, least=0),
    Flag(name="pad_after_h", default=0, least=0),
    Flag(name="pad_after_w", default=0, least=0),
    Flag(name="layout"),
    Flag(name="dtype"),
    Flag(name="in_dtype"),
    Flag(name="fil_dtype"),
    Flag(name="out_dtype"),
    Flag(name="math", default="ieee"),
)

_EPILOGUE = (
    Flag(name="epilogue"),
    Flag(name="scale", default=0, is_switch=True),
    Flag(name="bias", short="b", default=0, is_switch=True),
    Flag(name="channel-bias", default=0, is_switch=True),
    Flag(name="residual"),
    Flag(name="activation"),
    Flag(name="parameter-dtype"),
)

# Values other than these ask for something that miofind does not compute.
_DEFAULT_ONLY = (
    Flag(name="pad_val", short="r", only=("0",)),
    Flag(name="tensor_vect", short="Z", only=("0",)),
    Flag(name="vector_length", short="L", only=("1",)),
    Flag(name="in_cast_type", short="U", only=("-1",)),
    Flag(name="out_cast_type", short="T", only=("-1",)),
    Flag(name="wei_cast_type", short="R", only=("-1",)),
)

_SWITCH = ("0", "1")
_SWITCHED = {"": 0, "0": 0, "1": 1}
_IGNORED = (
    Flag(name="iter", short="i", ignored=True),
    Flag(name="verify", short="V", ignored=True, only=_SWITCH),
    Flag(name="verification_cache", short="C", ignored=True),
    Flag(name="time", short="t", ignored=True, only=_SWITCH),
    Flag(name="wall", short="w", ignored=True, only=("0", "1", "2")),
    Flag(name="search", short="s", ignored=True, only=_SWITCH),
    Flag(name="printconv", short="P", ignored=True, only=_SWITCH),
    Flag(name="dump_output", short="o", ignored=True, only=_SWITCH),
    Flag(name="in_data", short="d", ignored=True, is_file=True),
    Flag(name="weights", short="e", ignored=True, is_file=True),
    Flag(name="in_bias", short="a", ignored=True, is_file=True),
    Flag(name="dout_data", short="D", ignored=True, is_file=True),
    Flag(name="solution", short="S", ignored=True),
    Flag(name="gpualloc", short="G", ignored=True, only=_SWITCH),
)
_MEANT = {
    "wall": "the filter's width is -x, the image's -W",
    "search": "strides are -u and -v",
    "printconv": "padding is -p and -q",
    "in_data": "dilations are -l and -j, depth is --in_d with --spatial_dim 3",
    "dout_data": "depth is --in_d with --spatial_dim 3, dilations are -l and -j",
    "gpualloc": "groups are -g",
}
"""What may have been meant by a flag whose value it does not take."""

FLAGS: Mapping[str, Flag] = {flag.name: flag for flag in (*_PROBLEM, *_OWN, *_EPILOGUE, *_DEFAULT_ONLY, *_IGNORED)}

_FUSION = (
    Flag(name="fusion_mode", short="F", default=0, least=0),
    Flag(name="activMode", short="m", default=3, least=0),
    Flag(name="bnMode", short="M", default=0, least=0),
    Flag(name="batchsize", short="n", default=32),
    Flag(name="pad_mode", short="z", default="default", only=("default", "same", "valid", "conv")),
    Flag(name="alpha", short="A", ignored=True),
    Flag(name="beta", short="B", ignored=True),
    Flag(name="gamma", short="G", ignored=True),
    Flag(name="dot_graph", short="D", only=("",)),
)
_NOT_OF_FUSION = ("forw", "mode", "gpualloc", "dout_data", *(flag.name for flag in _EPILOGUE))

FUSION_FLAGS: Mapping[str, Flag] = {name: flag for name, flag in FLAGS.items() if name not in _NOT_OF_FUSION} | {
    flag.name: flag for flag in _FUSION
}
"""Those of CBAInfer lines; what is not theirs alone is as in other lines."""


def _written(flags: Mapping[str, Flag]) -> Mapping[str, Flag]:
    """The flags by what a line writes."""
    return {f"--{name}": flag for name, flag in flags.items()} | {f"-{f.short}": f for f in flags.values() if f.short}


_OF_SHAPES = ("--x", "--w", "--padding", "--stride", "--dilation", "--groups", "--direction")
"""Flags of the other form of a problem (`shapes`) that are none here."""

_WRITTEN, _WRITTEN_OF_FUSION = _written(FLAGS), _written(FUSION_FLAGS)


@dataclass(frozen=True, slots=True)
class FlagValues:
    """The flags that a line gives, by long name, as checked values: integers where the flag takes these."""

    given: Mapping[str, int | str]
    flags: Mapping[str, Flag]

    def __contains__(self, name: str) -> bool:
        return name in self.given

    def text(self, name: str) -> str:
        """The value of a flag, its default where it is left out."""
        return str(self.given.get(name, self.flags[name].default))

    def integer(self, name: str) -> int:
        """The value of a flag that takes integers, its default where it is left out."""
        value = self.given.get(name, self.flags[name].default)
        assert isinstance(value, int), f"{name} takes no integers"
        return value


def read_flags(arguments: Sequence[str], *, of_fusion: bool = False) -> FlagValues:
    """The flags in `arguments`, each followed by its value or written as --name=value; a switch may have none.

    Args:
        of_fusion: whether they are those of a CBAInfer line.

    Raises:
        InvalidProblemError: an unknown flag, one given twice, a missing value, or a value outside the flag's range.
    """
    given: dict[str, int | str] = {}
    known = _WRITTEN_OF_FUSION if of_fusion else _WRITTEN
    remaining = list(reversed(arguments))
    while remaining:
        written = remaining.pop()
        name, separator, text = written.partition("=") if written.startswith("--") else (written, "", "")
        flag = _known(name, known)
        if not separator and flag.is_switch and (not remaining or remaining[-1].startswith("-")):
            separator, text = "=", "1"
        value = text if separator else remaining.pop() if remaining else None
        if value is None:
            raise InvalidProblemError(f"{flag} needs a value")
        if flag.name in given:
            raise InvalidProblemError(f"{flag} is given twice: {given[flag.name]} and {value}")
        given[flag.name] = _checked(flag, value)
    return FlagValues(given, FUSION_FLAGS if of_fusion else FLAGS)


def is_driver_flag(word: str) -> bool:
    """Whether a word is a flag of a driver line, of whatever kind."""
    return word.partition("=")[0] in _WRITTEN.keys() | _WRITTEN_OF_FUSION.keys()


def _known(written: str, known: Mapping[str, Flag]) -> Flag:
    if written in known:
        return known[written]
    if written in _OF_SHAPES:
        raise InvalidProblemError(
            f"flag {written} is none of MIOpenDriver's: it is of shapes, which begin with --x or --w, and the two "
            "forms do not mix"
        )
    if not written.startswith("-"):
        raise InvalidProblemError(f"{written!r} is not a flag: each value follows its flag, as in -n 32")
    if written[:2] in known and _INTEGER.fullmatch(written[2:]):
        raise InvalidProblemError(f"flag {written} is unknown: write {written[:2]} {written[2:]}")
    other_case = f". Did you mean {written.swapcase()}?" if written.swapcase() in known else ""
    names = (name for name, flag in known.items() if name.startswith("--") and not flag.ignored)
    near = other_case or suggestion(f"--{written.lstrip('-')}", names)
    raise InvalidProblemError(
        f"flag {written} is unknown{near or ': `miofind find --help` has those of MIOpenDriver that are taken'}"
    )


def _checked(flag: Flag, value: str) -> int | str:
    """`value` if the flag takes it."""
    if flag.is_file and _INTEGER.fullmatch(value):
        raise InvalidProblemError(f"{flag} {value} names a file of MIOpenDriver's: {_told(flag)}")
    if flag.is_switch and value in _SWITCHED:
        return _SWITCHED[value]
    if flag.ignored and (not flag.only or value in flag.only):
        return value
    if flag.is_switch:
        raise InvalidProblemError(f"{flag} {value!r} is not supported: it must be '0' or '1', or stand alone")
    if isinstance(flag.default, int):
        return _integer(flag, value)
    if flag.only and value not in flag.only:
        allowed = " or ".join(repr(text) for text in flag.only)
        told = f"; {_told(flag)}" if flag.ignored else ""
        raise InvalidProblemError(f"{flag} {value!r} is not supported: it must be {allowed}{told}")
    return value


def _told(flag: Flag) -> str:
    """The advice about a flag that says how MIOpenDriver runs."""
    return _MEANT.get(flag.name, "leave it out")


def _integer(flag: Flag, value: str) -> int:
    if _INTEGER.fullmatch(value) is None:
        raise InvalidProblemError(f"{flag} {value!r} must be an integer")
    number = int(value)
    if not flag.least <= number <= _GREATEST:
        raise InvalidProblemError(f"{flag} {number} must be between {flag.least} and {_GREATEST}")
    return number
