"""Logging of commands to stderr."""

from __future__ import annotations

import logging
import os

import click

from miofind.cli.output import stderr
from miofind.errors import InvalidOptionError
from miofind.text.printable import printable, printable_lines

_LEVELS = ("debug", "info", "warning", "error")
_LOGGER = logging.getLogger("miofind")
_UNSEEN = logging.NullHandler()


class _StderrHandler(logging.Handler):
    """A handler that writes through the console of progress bars, so that neither spoils the other."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = f"{record.levelname.lower()}: {printable(record.getMessage())}"
            if record.exc_info:
                text += f"\n{printable_lines(logging.Formatter().formatException(record.exc_info))}"
            elif record.exc_text:  # of a child process
                text += f"\n{printable_lines(record.exc_text)}"
            stderr().print(text, markup=False, highlight=False, soft_wrap=True)
        except (OSError, ValueError):
            self.handleError(record)


def configure_logging(verbose: int) -> None:
    """Send miofind's log to stderr: warnings; with `verbose` 1 progress, too; with 2 details.

    Without `verbose` the environment variable MIOFIND_LOG names the level.

    Raises:
        InvalidOptionError: MIOFIND_LOG names no level.
    """
    named = (os.environ.get("MIOFIND_LOG") or "warning").lower()
    if named not in _LEVELS:
        raise InvalidOptionError(f"MIOFIND_LOG={named!r} is no level: use one of {', '.join(_LEVELS)}")
    level = (named, "info", "debug")[min(verbose, 2)]
    reset_logging()
    _LOGGER.addHandler(_StderrHandler())
    _LOGGER.setLevel(level.upper())
    # Python prints what nobody handles: a traceback where Ctrl-C meets the closing of a FindDB.
    logging.getLogger("sqlalchemy").addHandler(_UNSEEN)


def reset_logging() -> None:
    """Undo `configure_logging`, for programs that call the command line's functions."""
    for handler in list(_LOGGER.handlers):
        if isinstance(handler, _StderrHandler):
            _LOGGER.removeHandler(handler)
    _LOGGER.setLevel(logging.NOTSET)


def _verbose(ctx: click.Context, parameter: click.Parameter, value: int) -> None:
    if value:
        configure_logging(value)


verbose_option = click.option(
    "--verbose",
    count=True,
    expose_value=False,
    callback=_verbose,
    help="Log progress to stderr; twice for details.",
)
