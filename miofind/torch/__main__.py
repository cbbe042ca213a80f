"""`python -m miofind.torch train.py ...`: a script or module, with miofind running its convolutions.

MIOFIND_TORCH says how, whatever the script enables itself: 1 (as if left out) enables it, `tune` also measures what no
FindDB knows, `record` leaves all to PyTorch and writes the problems at exit, 0 runs the script alone. Exit code and
traceback are the script's own.
"""

from __future__ import annotations

import atexit
import importlib.util
import os
import pkgutil
import runpy
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import CodeType, ModuleType, TracebackType
from typing import Any, NoReturn

from miofind.errors import MiofindError
from miofind.text.printable import printable
from miofind.torch.override.environment import Way, way

RECORD_VARIABLE = "MIOFIND_TORCH_RECORD"
DEFAULT_RECORD = "miofind_problems.csv"

_USAGE = "usage: python -m miofind.torch SCRIPT [ARGUMENT...]\n       python -m miofind.torch -m MODULE [ARGUMENT...]"
_USAGE_ERROR = 2


def main() -> None:
    """Run what the command line names."""
    arguments = sys.argv[1:]
    if arguments[:1] in (["-h"], ["--help"]):
        print(f"{_USAGE}\n\n{__doc__}")
        return
    if not arguments or arguments == ["-m"]:
        _end(_USAGE, _USAGE_ERROR)
    is_module = arguments[0] == "-m"
    if not is_module and arguments[0].startswith("-"):
        _end(f"{arguments[0]} is no option\n{_USAGE}", _USAGE_ERROR)
    _enable()
    sys.excepthook = _without_our_frames(sys.excepthook)
    if is_module:
        sys.argv = arguments[1:]
        _refuse_missing(sys.argv[0])
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        _run_script(arguments[0])


def _enable() -> None:
    """Have miofind run PyTorch's convolutions, or note them, as the environment says."""
    try:
        _WAYS[way()]()
    except MiofindError as error:
        _end(str(error), error.exit_code)


def _leave_off() -> None:
    """Nothing is replaced."""


def _run_what_is_known() -> None:
    from miofind.torch import enable

    enable()
    _tell_where_there_is_no_gpu()


def _measure_what_is_missing() -> None:
    from miofind.torch import enable

    enable("find")
    _tell_where_there_is_no_gpu()


def _tell_where_there_is_no_gpu() -> None:
    import torch

    if torch.cuda.device_count() == 0:  # `is_available` may load the driver, after which a process cannot fork
        _tell("PyTorch sees no CUDA device, so its own kernels run all convolutions")


def _record() -> None:
    """Note all problems, and write them at exit, whatever ends the script."""
    from miofind.torch.override.dispatcher import record_program
    from miofind.torch.recording.recording import prepare_folder

    path = _record_path()
    prepare_folder(path)  # before a run of hours, whose recording would be lost without
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:  # by which launchers end their processes
        signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    atexit.register(_write, record_program(), path, os.getpid())


_WAYS: dict[Way, Callable[[], None]] = {
    Way.OFF: _leave_off,
    Way.ON: _run_what_is_known,
    Way.RECORD: _record,
    Way.TUNE: _measure_what_is_missing,
}


def _record_path() -> Path:
    """Where the problems go; those of the further processes of a distributed run go beside."""
    path = Path(os.environ.get(RECORD_VARIABLE) or DEFAULT_RECORD).absolute()
    rank = os.environ.get("RANK", "0")
    return path if rank == "0" else path.with_name(f"{path.stem}.rank{rank}{path.suffix}")


def _write(override: Any, path: Path, process: int) -> None:
    """Write the problems that an override noted; nothing in a forked child, and over no file where there are none."""
    from miofind.core.tensor import Direction
    from miofind.torch.override.calls import COMPUTED_OF
    from miofind.torch.recording.recording import RecordedCall, recorded, saved_at_last

    if os.getpid() != process:
        return
    calls = (
        RecordedCall(
            layer="", computed=COMPUTED_OF[Direction(count.direction)], problem=count.problem, count=count.calls
        )
        for count in override.report().counts
    )
    recording = recorded(calls, path.stem)
    if not recording.problems:
        _tell(f"the run had no convolution problem: nothing was written to {path}")
        return
    _tell(saved_at_last(recording, path))


def _refuse_missing(module: str) -> None:
    """End where there is no such module; what its packages raise as they are imported is theirs to tell."""
    try:
        is_there = importlib.util.find_spec(module) is not None
    except ModuleNotFoundError as error:
        is_there = not (error.name and f"{module}.".startswith(f"{error.name}."))
    except Exception:  # runpy comes to the same
        return
    if not is_there:
        _end(f"there is no module {module}", _USAGE_ERROR)


def _run_script(name: str) -> None:
    """Run a script as `python name` does."""
    if os.path.isdir(name) or name.endswith((".zip", ".pyz")):
        importer = pkgutil.get_importer(name)
        if importer is not None and importer.find_spec("__main__") is None:
            _end(f"{name} has no __main__.py to run", _USAGE_ERROR)
        del sys.path[0]
        runpy.run_path(name, run_name="__main__")
        return
    sys.path[0] = os.path.dirname(os.path.realpath(name))
    try:
        with open(name, "rb") as file:
            content = file.read()
    except OSError as error:
        _end(f"{name} cannot be read: {error.strerror or error}", _USAGE_ERROR)
    module, path = ModuleType("__main__"), os.path.abspath(name)
    module.__dict__.update(__file__=path, __builtins__=__builtins__, __cached__=None)
    sys.modules["__main__"] = module
    code: CodeType = compile(content, path, "exec")
    exec(code, module.__dict__)


def _without_our_frames(hook: Callable[..., Any]) -> Callable[..., Any]:
    """A hook for uncaught exceptions whose tracebacks begin with the script."""

    def shown(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        first = trace
        while first is not None and first.tb_frame.f_code.co_filename in (__file__, runpy.__file__, "<frozen runpy>"):
            first = first.tb_next
        if first is None and not isinstance(error, SyntaxError):  # whose place in the script it tells itself
            first = trace
        hook(kind, error.with_traceback(first), first)

    return shown


def _tell(text: str) -> None:
    print(f"miofind: {printable(text)}", file=sys.stderr)


def _end(text: str, code: int) -> NoReturn:
    print(f"miofind: {text}", file=sys.stderr)
    raise SystemExit(code)


if __name__ == "__main__":
    main()
