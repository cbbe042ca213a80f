"""Every error miofind raises on purpose.

    MiofindError
    ├── InvalidProblemError      a problem that no convolution can have
    ├── InvalidArrayError        an array that does not fit its problem
    ├── InvalidConfigError       a configuration outside its solver's schema
    ├── InvalidOptionError       a find option or argument with an impossible value
    ├── UnknownSolverError       a solver id that is not registered
    ├── NoSolutionError          nothing usable answers the request
    │   └── NoPlaceError         it needs another place or a library that is not here; a MissingEnvironmentError, too
    ├── WorkspaceError           a workspace that is too small
    ├── MissingEnvironmentError        something this machine lacks
    │   ├── NoDeviceError        no usable GPU
    │   ├── MissingLibraryError  a library that is not installed
    │   └── ForkedProcessError   CUDA was initialised before a fork
    ├── CompileError             NVRTC refused a kernel
    ├── LaunchError              a kernel or library call failed to start or to finish
    ├── WrongResultError         a solution failed verification
    ├── MeasurementError         a solution could not be timed
    ├── DatabaseError            a FindDB that cannot be used as asked
    │   ├── SchemaVersionError   a FindDB of another schema version
    │   ├── DamagedDatabaseError a FindDB whose content is spoilt
    │   ├── DatabaseTargetError  a file that no FindDB can be written into
    │   └── MissingDriverError   its driver is not installed; a MissingLibraryError, too
    ├── ModelError               a model of candidates' times that cannot be read, written or trained
    └── SolutionFileError        a saved solution that cannot be loaded

A message says what, where, the offending value and what to do. `exit_code` is what the command line ends with. `str` of
an error may be printed on a terminal, whatever names are in it; `args` has the message as it is.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import threading
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import ClassVar, ParamSpec, TypeVar

from miofind.text.printable import printable, printable_lines, printable_name

P = ParamSpec("P")
R = TypeVar("R")

MAX_TOLD = 2000
"""Characters of what a foreign exception says that are told."""


class MiofindError(Exception):
    """Base class of all errors raised by miofind on purpose."""

    exit_code: ClassVar[int] = 1
    has_lines: ClassVar[bool] = False
    """Whether its message has several lines; in others a line break can only be part of a name."""

    def __str__(self) -> str:
        message = super().__str__()
        return printable_lines(message) if self.has_lines else printable(message)


class InvalidProblemError(MiofindError, ValueError):
    """A problem description that no convolution can have; the message names the field and the value."""

    exit_code: ClassVar[int] = 2


class InvalidArrayError(MiofindError, ValueError):
    """An array whose shape, strides, dtype, device or alignment does not fit the problem."""

    exit_code: ClassVar[int] = 2


class InvalidConfigError(MiofindError, ValueError):
    """A configuration outside its solver's schema."""

    exit_code: ClassVar[int] = 2


class InvalidOptionError(MiofindError, ValueError):
    """A find option or argument with an impossible value."""

    exit_code: ClassVar[int] = 2


class UnknownSolverError(MiofindError, LookupError):
    """A solver id, algorithm or library that is not registered."""

    exit_code: ClassVar[int] = 2


class NoSolutionError(MiofindError):
    """Nothing usable answers the request; the message lists each solver's reason."""

    has_lines: ClassVar[bool] = True


class WorkspaceError(MiofindError, ValueError):
    """A workspace smaller than the solution declares."""

    exit_code: ClassVar[int] = 2


class MissingEnvironmentError(MiofindError):
    """Something that this machine or environment lacks."""

    exit_code: ClassVar[int] = 3


class NoPlaceError(NoSolutionError, MissingEnvironmentError):
    """Every solver that was asked for runs elsewhere: on a GPU, on the CPU place or with a library that is missing."""


class NoDeviceError(MissingEnvironmentError):
    """No usable GPU, or no device of the asked index."""


class MissingLibraryError(MissingEnvironmentError, ImportError):
    """A library that is not installed; the message says how to install it."""


class ForkedProcessError(MissingEnvironmentError):
    """CUDA was initialised before this process was forked; CUDA does not survive a fork."""


class CompileError(MiofindError):
    """NVRTC refused a kernel.

    Attributes:
        source: name of the source file.
        options: the options the compiler was given.
        log: the compiler's log, whole.
    """

    has_lines: ClassVar[bool] = True

    def __init__(self, message: str, *, source: str, options: tuple[str, ...], log: str) -> None:
        super().__init__(message)
        self.source = source
        self.options = options
        self.log = log

    def __str__(self) -> str:
        head = [
            printable(line)
            for line in (self.args[0], f"  source:  {self.source}", f"  options: {' '.join(self.options)}")
        ]
        return "\n".join([*head, printable_lines(self.log)]).rstrip()

    def __reduce__(self) -> tuple[object, ...]:
        return (_compile_error, (self.args[0], self.source, self.options, self.log))


def _compile_error(message: str, source: str, options: tuple[str, ...], log: str) -> CompileError:
    return CompileError(message, source=source, options=options, log=log)


class LaunchError(MiofindError):
    """A kernel or library call failed to start or to finish."""


class WrongResultError(MiofindError):
    """Solutions failed verification; one a line."""

    has_lines: ClassVar[bool] = True


class MeasurementError(MiofindError):
    """A solution could not be timed."""


class DatabaseError(MiofindError):
    """A FindDB that cannot be read or written as asked."""

    exit_code: ClassVar[int] = 4


class SchemaVersionError(DatabaseError):
    """A FindDB of a schema version that this release does not read."""


class DamagedDatabaseError(DatabaseError):
    """A FindDB whose content is spoilt: cut off, overwritten, or with entries that make no sense."""


class DatabaseTargetError(DatabaseError):
    """A file that was named for a new FindDB, and cannot be written or holds what would be lost."""

    exit_code: ClassVar[int] = 2


class MissingDriverError(DatabaseError, MissingLibraryError):
    """The library that speaks to a FindDB's server is not installed; the message says how to install it."""

    exit_code: ClassVar[int] = 3


class ModelError(MiofindError):
    """A model of candidates' times that cannot be read or written, or that is not worth writing."""


class SolutionFileError(MiofindError, ValueError):
    """A saved solution that cannot be loaded, or saved: damaged, of another architecture or of other sources."""

    exit_code: ClassVar[int] = 2


def install_extra(name: str) -> str:
    """How to install one of miofind's extras, for the end of a message: miofind is on no index of packages."""
    return (
        f"install miofind's extra {name}: `pip install -e '.[{name}]'` in its clone, "
        f"`pip install 'FILE.whl[{name}]'` for its wheel"
    )


def file_advice(error: OSError) -> str:
    """What to do about a file that cannot be read or written, for the end of a message."""
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        return "correct the path"
    if isinstance(error, IsADirectoryError):
        return "name a file in it"
    if isinstance(error, PermissionError):
        return "correct the permissions, or name another file"
    return "correct that, or name another file"


def unreadable(what: object, error: OSError) -> InvalidOptionError:
    """The error of a file that cannot be read, such as `file x.csv`."""
    return _unusable(what, "read", error)


def unwritable(what: object, error: Exception) -> InvalidOptionError:
    """The error of a file that cannot be written, such as `--json x.json`."""
    return _unusable(what, "written", error)


def _unusable(what: object, how: str, error: Exception) -> InvalidOptionError:
    reason = f"{error.strerror or error}: {file_advice(error)}" if isinstance(error, OSError) else str(error)
    return InvalidOptionError(f"{what} cannot be {how}: {reason}")


def described(foreign: object, form: Callable[[object], str] = repr) -> str:
    """What an exception or a value says, MAX_TOLD characters of it at most; what cannot say it is named by its type."""
    try:
        return form(foreign)[:MAX_TOLD]
    except BaseException as second:  # the code of what is foreign may raise anything
        raise_if_interrupted(second)
        return f"{type(foreign).__name__}, which cannot be shown: that raises {type(second).__name__}"


def brief(value: object) -> str:
    """A user's argument for a message: an array by its type and shape, all else in at most NAME_CHARS characters."""
    shape = getattr(value, "shape", None)
    if isinstance(shape, tuple) and shape:
        return f"<{type(value).__name__} of shape {tuple(shape)}>"
    return printable_name(described(value))


def with_known_keywords(function: Callable[P, R]) -> Callable[P, R]:
    """The function, whose TypeError about an unknown keyword suggests one and lists all."""
    names = [name for name in inspect.signature(function).parameters if name != "self"]

    @functools.wraps(function)
    def checked(*arguments: P.args, **keywords: P.kwargs) -> R:
        if unknown := keywords.keys() - names:
            near = suggestion(min(unknown), names) or "."
            raise TypeError(f"unknown arguments {sorted(unknown)}{near} Known are {', '.join(names)}")
        return function(*arguments, **keywords)

    return checked


def suggestion(given: object, known: Iterable[str]) -> str:
    """The end of a message about a mistyped name: ". Did you mean X?", or "" where it is near to none."""
    by_name = {name.lower(): name for name in known}
    near = difflib.get_close_matches(str(given)[:MAX_TOLD].lower(), by_name, n=3)
    return f". Did you mean {' or '.join(by_name[name] for name in near)}?" if near else ""


def causes(error: BaseException) -> Iterator[BaseException]:
    """An exception, what caused that, and so on, each once: one may be its own cause."""
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        yield cause
        cause = cause.__cause__


def raise_if_interrupted(error: BaseException) -> None:
    """Raise an exception again that a signal brought, Ctrl-C above all; nothing where code raised it by itself.

    Foreign code may raise anything, SystemExit too, and that is its failing. Signals arrive in the main thread, and a
    KeyboardInterrupt there counts as the user's.
    """
    if threading.current_thread() is threading.main_thread() and (_holds_ctrl_c(error) or _is_of_handler(error)):
        raise error


def _holds_ctrl_c(error: BaseException) -> bool:
    if isinstance(error, BaseExceptionGroup):
        return error.subgroup(KeyboardInterrupt) is not None
    return isinstance(error, KeyboardInterrupt)


def _is_of_handler(error: BaseException) -> bool:
    """Whether a function that was given the frame below its own raised it: what Python gives to a signal's handler."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        interrupted, trace = trace.tb_frame, trace.tb_next
        if _was_given(trace.tb_frame, interrupted):
            return True
    return False


def _was_given(frame: FrameType, interrupted: FrameType) -> bool:
    for value in frame.f_locals.values():
        if value is interrupted or (isinstance(value, tuple) and any(item is interrupted for item in value)):
            return True
    return False
