"""Problems by their shapes: `--x 32,64,56,56 --w 64,64,3,3 --padding 1`, the plain form beside MIOpenDriver's flags.

The names, values and defaults are those of `ProblemDescription.convolution`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from miofind.core.arguments import Padding
from miofind.core.problem import DataType, Direction, Layout, MathMode, ProblemDescription, enum_value
from miofind.driver.epilogue import FLAG_NAMES, SWITCHES, check_directions, epilogue_of
from miofind.driver.flags import is_driver_flag
from miofind.errors import InvalidProblemError, suggestion

NAMES = ("x", "w", "padding", "stride", "dilation", "groups", "dtype", "layout", "math", "direction", *FLAG_NAMES)
"""Of the flags, each of which takes a value but for the switches of an epilogue."""

_ALL = "all"


def is_shape_line(words: Sequence[str]) -> bool:
    """Whether words begin with one of the flags."""
    return bool(words) and words[0].startswith("--") and words[0][2:].partition("=")[0] in NAMES


def parse_shapes(words: Sequence[str]) -> tuple[ProblemDescription, ...]:
    """The problems that flags name, one a direction.

    Args:
        words: each flag followed by its value, or --name=value; --x n,c,h,w and --w k,c/groups,y,x are needed.

    Raises:
        InvalidProblemError: the message names the flag and the value.
    """
    given = _given(words)
    for name in ("x", "w"):
        if name not in given:
            raise InvalidProblemError(f"--{name} is missing: a problem has both --x n,c,h,w and --w k,c/groups,y,x")
    x, w = (_numbers(name, given[name]) for name in ("x", "w"))
    rank = len(x) - 2
    layout = enum_value(Layout, given.get("layout", Layout.NCHW), "--layout")
    if rank not in (1, 2, 3):
        raise InvalidProblemError(f"--x {given['x']} has {len(x)} sizes: write n,c,h,w (n,c,w or n,c,d,h,w)")
    epilogue = epilogue_of({name: given[name] for name in FLAG_NAMES if name in given})
    own = epilogue.directions[0]
    first, *others = _directions(given.get("direction", own.value))
    check_directions(epilogue, (first, *others), f"--direction {given.get('direction', own)}")
    problem = ProblemDescription.convolution(
        x=x,
        w=w,
        padding=_padding(given.get("padding", "0")),
        stride=_one_or_each("stride", given.get("stride", "1")),
        dilation=_one_or_each("dilation", given.get("dilation", "1")),
        groups=_number("groups", given.get("groups", "1")),
        direction=first,
        dtype=enum_value(DataType, given.get("dtype", DataType.FLOAT32), "--dtype"),
        layout=Layout.of(rank, channels_last=layout.channels_last),
        math=enum_value(MathMode, given.get("math", MathMode.IEEE), "--math"),
        epilogue=epilogue,
    )
    return (problem, *(problem.in_direction(direction) for direction in others))


def _given(words: Sequence[str]) -> Mapping[str, str]:
    """The values by flag."""
    given: dict[str, str] = {}
    remaining = iter(words)
    for word in remaining:
        name, separator, text = word.removeprefix("--").partition("=")
        if not word.startswith("--") or name not in NAMES:
            if is_driver_flag(word):
                raise InvalidProblemError(
                    f"{word} is no flag beside --x and --w: it is MIOpenDriver's, and the two forms do not mix"
                )
            known = [f"--{name}" for name in NAMES]
            near = suggestion(word, known) or f": there are {', '.join(known)}"
            raise InvalidProblemError(f"{word} is no flag beside --x and --w{near}")
        if name in SWITCHES and separator:
            raise InvalidProblemError(f"--{name} takes no value: leave ={text} out")
        value = "1" if name in SWITCHES else text if separator else next(remaining, None)
        if value is None:
            raise InvalidProblemError(f"--{name} needs a value")
        if name in given:
            raise InvalidProblemError(f"--{name} is given twice: {given[name]} and {value}")
        given[name] = value
    return given


def _number(name: str, text: str) -> int:
    if re.fullmatch(r"[+-]?[0-9]{1,20}", text) is None:
        raise InvalidProblemError(f"--{name} {text!r} must be a whole number")
    return int(text)


def _numbers(name: str, text: str) -> tuple[int, ...]:
    """Numbers with commas between, or x as in 56x56."""
    return tuple(_number(name, part) for part in re.split(r"[,x]", text))


def _one_or_each(name: str, text: str) -> int | tuple[int, ...]:
    """One number for all spatial dimensions, or one for each."""
    numbers = _numbers(name, text)
    return numbers[0] if len(numbers) == 1 else numbers


def _padding(text: str) -> Padding:
    """One number, one a spatial dimension, before:after a dimension, or "same" or "valid"."""
    if text == "same":
        return "same"
    if text == "valid":
        return "valid"
    if re.search("[a-wyzA-Z]", text):
        raise InvalidProblemError(f"--padding {text!r} must be same, valid, or numbers such as 1, 1,2 and 0:1,0:1")
    if ":" not in text:
        return _one_or_each("padding", text)
    pairs = [part.split(":") for part in text.split(",")]
    if any(len(pair) != 2 for pair in pairs):
        raise InvalidProblemError(f"--padding {text!r} must be before:after in each dimension, such as 0:1,0:1")
    return tuple((_number("padding", before), _number("padding", after)) for before, after in pairs)


def _directions(text: str) -> tuple[Direction, ...]:
    """The directions with commas between, or all."""
    if text.lower() == _ALL:
        return tuple(Direction)
    return tuple(dict.fromkeys(enum_value(Direction, name, "--direction") for name in text.split(",")))
