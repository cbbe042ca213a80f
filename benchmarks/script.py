"""What benchmark scripts share: arguments that are checked before the work begins, and miofind's exit codes.

A type for `add_argument` makes a value of a text, or says what is wanted instead.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

from miofind.device.device import Device
from miofind.errors import MiofindError
from miofind.solver.registry import Registry

Number = TypeVar("Number", int, float)
Name = TypeVar("Name", bound=str)
Value = TypeVar("Value")


def parser(about: str | None) -> argparse.ArgumentParser:
    """A parser whose help begins with a script's docstring."""
    return argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)


def run(main: Callable[[], None]) -> None:
    """Run a script; where it lacks a GPU or a library or cannot use a database, it ends with one line that says so."""
    try:
        main()
    except MiofindError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


def compile_likely(suite: Path) -> subprocess.CompletedProcess[bytes]:
    """Compile what the likeliest candidates of a suite's problems run, in a process of its own."""
    words = [sys.executable, "-m", "miofind", "compile", "--suite", str(suite), "--likely"]
    return subprocess.run(words, check=False, stdout=subprocess.DEVNULL)


def at_least(least: Number) -> Callable[[str], Number]:
    """A type: numbers of the kind of `least`, from it up."""

    def checked(text: str) -> Number:
        with contextlib.suppress(ValueError):
            value = type(least)(text)
            if least <= value < math.inf:  # NaN is neither
                return value
        kind = "whole number" if isinstance(least, int) else "number"
        raise argparse.ArgumentTypeError(f"{text!r} is no {kind} from {least} up")

    return checked


count = at_least(1)
seconds = at_least(0.0)


def several(known: Iterable[Name], separator: str = ",") -> Callable[[str], list[Name]]:
    """A type: some of what is known, each once."""
    by_name = {str(one): one for one in known}

    def checked(text: str) -> list[Name]:
        names = text.split(separator)
        wrong = [name for name in names if name not in by_name or names.count(name) > 1]
        if wrong:
            told = "named twice" if wrong[0] in by_name else "unknown"
            raise argparse.ArgumentTypeError(f"{wrong[0]!r} is {told}: choose from {separator.join(by_name)}")
        return [by_name[name] for name in names]

    return checked


def solver_ids(text: str) -> list[str]:
    """A type: ids of solvers, with commas; one that comes twice counts once."""
    return _or_refused(lambda: [*dict.fromkeys(Registry.default().named(name).id for name in text.split(","))])


def arch(text: str) -> Device:
    """A type: an architecture such as 90a, as a device that need not be present."""
    return _or_refused(lambda: Device.virtual(text))


def share(text: str) -> tuple[int, int]:
    """A type: I/N, the I-th of N parts, as I - 1 and N."""
    match = re.fullmatch(r"(\d{1,9})/(\d{1,9})", text, re.ASCII)
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise argparse.ArgumentTypeError(
            f"{text!r} is no share: write 1/2 for the first of two parts, 2/2 for the other"
        )
    return int(match[1]) - 1, int(match[2])


def folder(text: str) -> Path:
    """A type: a folder to write to, made where there is none before anything is measured."""
    try:
        Path(text).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no folder to write to: {error.strerror or error}") from None
    return Path(text)


def output(text: str) -> Path:
    """A type: a file that can be written when the work is done."""
    path = Path(text)
    is_there = path.exists()
    is_possible = not path.is_dir() if is_there else path.parent.is_dir()
    if not is_possible or not os.access(path if is_there else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text!r} cannot be written: name a file in a folder that is there")
    return path


def _or_refused(make: Callable[[], Value]) -> Value:
    """A value, or what miofind says against it."""
    try:
        return make()
    except MiofindError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
