"""What a network asks of convolutions: each layer's calls, the problems that they pose, and how often."""

from __future__ import annotations

import atexit
import logging
import multiprocessing
import os
import shlex
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, replace
from multiprocessing.util import Finalize
from pathlib import Path

from miofind.core.problem import ProblemDescription
from miofind.errors import InvalidOptionError, brief
from miofind.process.forks import ForkedLock
from miofind.suites import Suite, SuiteProblem, SuiteRow, save_csv, save_lines
from miofind.torch.override.calls import ConvolutionCall

logger = logging.getLogger(__name__)

_WRITERS = {".csv": save_csv, ".txt": save_lines}


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedCall:
    """Calls of one layer that are alike.

    Attributes:
        layer: the path of the module that made them, "" outside of modules.
        computed: which result: "y", "dx" or "dw".
        call: what PyTorch was asked for, None where miofind cannot describe it.
        problem: what that asks of miofind, None where miofind has no such convolution.
        reason: why it has none, "" otherwise.
        count: how many calls.
    """

    layer: str
    computed: str
    call: ConvolutionCall | None = None
    problem: ProblemDescription | None = None
    reason: str = ""
    count: int = 1


class Recording:
    """The convolutions of what was recorded; filled while it goes on, from any thread."""

    def __init__(self, name: str = "recorded") -> None:
        self.name = name
        self._calls: dict[RecordedCall, int] = {}
        self._lock = ForkedLock()

    def __repr__(self) -> str:
        left_out = f", {len(self.left_out)} left out" if self.left_out else ""
        return f"<Recording {self.name!r}: {len(self.problems)} problems{left_out}>"

    def note(self, call: RecordedCall) -> None:
        """Count calls."""
        key = replace(call, count=1)
        with self._lock:
            self._calls[key] = self._calls.get(key, 0) + call.count

    @property
    def calls(self) -> tuple[RecordedCall, ...]:
        """All calls by layer and result, in the order of their first."""
        with self._lock:
            return tuple(replace(call, count=count) for call, count in self._calls.items())

    @property
    def problems(self) -> list[SuiteProblem]:
        """The distinct problems in order; `layer` is the first that has it, `count` that of all that have it."""
        found: dict[ProblemDescription, SuiteProblem] = {}
        for call in self.calls:
            if call.problem is None:
                continue
            known = found.get(call.problem)
            found[call.problem] = (
                SuiteProblem(problem=call.problem, suite=self.name, layer=call.layer, count=call.count)
                if known is None
                else replace(known, count=known.count + call.count)
            )
        return list(found.values())

    @property
    def left_out(self) -> tuple[RecordedCall, ...]:
        """The calls that are no problems of miofind's, each with its reason."""
        return tuple(call for call in self.calls if call.problem is None)

    @property
    def suite(self) -> Suite:
        """The problems as a suite, a row each."""
        return Suite(name=self.name, rows=tuple(map(_row, self.problems)))

    def save(self, path: str | Path) -> None:
        """Write the problems as a file that `miofind tune --suite` takes, whole or not at all.

        Args:
            path: ends in .csv for a table with layers and counts, or in .txt for MIOpenDriver lines.

        Raises:
            InvalidOptionError: another ending, or the file cannot be written.
        """
        check_ending(path)
        suite = replace(self.suite, name=Path(path).stem)
        rows = tuple(replace(row, suite=suite.name) for row in suite.rows)
        _WRITERS[Path(path).suffix.lower()](replace(suite, rows=rows), path)
        _forget_unsaved(self, Path(path))

    def save_or_keep(self, path: Path) -> None:
        """The same; what cannot be written is kept, and saved when the process ends.

        Raises:
            InvalidOptionError: the file cannot be written.
        """
        try:
            self.save(path)
        except InvalidOptionError as error:
            _unsaved[path] = self
            if multiprocessing.parent_process() is not None:  # such a process ends without what atexit knows
                Finalize(None, _save_unsaved, exitpriority=0)
            raise InvalidOptionError(
                f"{error}. The problems are kept: `save` of the recording, as in `with record(path) as recording`, "
                "takes another path; else they are saved when the process ends"
            ) from error


_unsaved: dict[Path, Recording] = {}
"""Recordings that are to be saved when the process ends; of those for one path the last, as if all had been saved."""

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_unsaved.clear)  # the parent saves them


def _forget_unsaved(saved: Recording, path: Path) -> None:
    """Do not save a recording again, nor an earlier one over it."""
    for kept, recording in [*_unsaved.items()]:
        if recording is saved or kept == path.absolute():
            _unsaved.pop(kept, None)  # other threads save, too


@atexit.register
def _save_unsaved() -> None:
    for path, recording in [*_unsaved.items()]:
        logger.warning("%s", saved_at_last(recording, path))


def saved_at_last(recording: Recording, path: Path) -> str:
    """Save a recording, among temporary files where its path fails, since nobody can choose another any more.

    Returns:
        where its problems are.
    """
    reason = ""
    try:
        try:
            recording.save(path)
        except InvalidOptionError as error:
            reason = f"{str(error).rstrip('.')}. Free space, or choose another path. "
            path = Path(tempfile.mkdtemp(prefix="miofind_"), f"recorded{path.suffix}")  # its name may be what is wrong
            recording.save(path)
    except (InvalidOptionError, OSError) as error:
        return f"{reason}The problems are lost, since no temporary file can be written: {error}"
    count = f"{len(recording.problems)} convolution problems"
    return f"{reason}The {count} are in {path}: miofind tune --suite {shlex.quote(str(path))}"


def check_ending(path: str | Path) -> None:
    """Do nothing where a recording can be saved under a name.

    Raises:
        InvalidOptionError: it has another ending.
    """
    if Path(path).suffix.lower() not in _WRITERS:
        raise InvalidOptionError(
            f"{path}: the problems of a recording are saved as .csv, a table, or as .txt, MIOpenDriver lines"
        )


def prepare_folder(path: str | Path) -> None:
    """Make the folder where a recording is to be saved, before what is recorded runs.

    Raises:
        InvalidOptionError: it is no path, has another ending, or its folder cannot be made or written to.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise InvalidOptionError(f"path={brief(path)} must be a path")
    check_ending(path)
    folder = Path(path).absolute().parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidOptionError(f"{path} cannot be written, as its folder cannot be made: {error.strerror}") from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise InvalidOptionError(f"{path} cannot be written: nothing can be in its folder")


def recorded(problems: Iterable[RecordedCall], name: str) -> Recording:
    """A recording of these calls."""
    recording = Recording(name)
    for call in problems:
        recording.note(call)
    return recording


def _row(entry: SuiteProblem) -> SuiteRow:
    return SuiteRow(
        problem=entry.problem,
        suite=entry.suite,
        layer=entry.layer,
        count=entry.count,
        directions=(entry.problem.direction,),
    )
