"""The command line: click commands that parse arguments, call the library and print results.

Exit codes: 0 done, 1 failed, 2 usage or files, 3 environment, 4 database, 130 interrupted. Results go to stdout,
progress, logs and errors to stderr.
"""

from __future__ import annotations

import importlib
import logging
import sys
from typing import Any

import click

from miofind import __version__
from miofind.cli.group import CommandGroup
from miofind.cli.output import discard_output, prepare_streams, print_error, print_note
from miofind.cli.session import configure_logging, reset_logging
from miofind.errors import MiofindError
from miofind.process import interrupts
from miofind.text.printable import printable

logger = logging.getLogger(__name__)

_COMMANDS = {
    "doctor": "miofind.cli.doctor:doctor",
    "find": "miofind.cli.find:find",
    "run": "miofind.cli.run:run",
    "solvers": "miofind.cli.solvers:solvers",
    "tune": "miofind.cli.tune:tune",
    "compile": "miofind.cli.compile:compile_",
    "bench": "miofind.cli.bench:bench_",
    "report": "miofind.cli.report:report",
    "db": "miofind.cli.db:db",
    "train": "miofind.cli.train:train",
    "fleet": "miofind.cli.fleet:fleet",
}


class _Commands(CommandGroup):
    """The top-level commands: each is imported when it is used, and its errors become exit codes."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        module, _, name = _COMMANDS[cmd_name].partition(":")
        command: click.Command = getattr(importlib.import_module(module), name)
        return command

    def main(self, *arguments: Any, **settings: Any) -> Any:
        prepare_streams()
        try:
            return super().main(*arguments, **settings)
        except OSError as error:  # click itself ends on a closed pipe
            print_note(f"error: {error.filename or 'the output'}: {error.strerror or error}")
            discard_output()
            sys.exit(MiofindError.exit_code)

    def make_context(self, *arguments: Any, **settings: Any) -> click.Context:
        try:
            return super().make_context(*arguments, **settings)
        except click.ClickException as error:
            raise _printable(error) from error

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        found = super().resolve_command(ctx, args)
        interrupts.raise_again()  # its module is imported, and what it does is cleaned up after
        return found

    def invoke(self, ctx: click.Context) -> object:
        is_program = interrupts.ends_at_once()
        try:
            return self._invoke(ctx)
        finally:
            if is_program:
                interrupts.end_at_once()

    def _invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except MiofindError as error:
            print_error(error)
            raise click.exceptions.Exit(error.exit_code) from error
        except KeyboardInterrupt:
            print_note("interrupted")
            raise click.exceptions.Exit(interrupts.INTERRUPTED) from None
        except click.ClickException as error:
            raise _printable(error) from error
        except (click.exceptions.Exit, click.Abort, OSError):
            raise
        except MemoryError as error:
            print_note(f"error: the memory of this machine does not suffice: {error}")
            raise click.exceptions.Exit(MiofindError.exit_code) from error
        except Exception as error:
            logger.debug("what was not foreseen", exc_info=True)
            print_note(
                f"error: {type(error).__name__}: {error}: this is a defect of miofind or of a solver; "
                "`miofind -vv` and the same command shows where, please report it"
            )
            raise click.exceptions.Exit(MiofindError.exit_code) from error


def _printable(error: click.ClickException) -> click.ClickException:
    """The error with its message made printable: it quotes what was typed, but for the help of a bare group."""
    if isinstance(error, getattr(click.exceptions, "NoArgsIsHelpError", ())):  # click has it from 8.2 on
        return error
    message = printable(error.format_message())
    error.format_message = lambda: message  # type: ignore[method-assign]
    return error


@click.group(
    cls=_Commands,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="\b\nExit codes:\n"
    "  0 done, 1 failed, 2 wrong usage or an unusable file, 3 no GPU or library,\n"
    "  4 unusable FindDB, 130 interrupted\n\n"
    "\b\nExample:\n  miofind find conv -n 32 -c 64 -H 56 -W 56 -k 64 -y 3 -x 3 -p 1 -q 1 -F 1",
)
@click.version_option(__version__, prog_name="miofind")
@click.option("-v", "--verbose", count=True, help="Log progress to stderr; twice for details.")
@click.pass_context
def main(ctx: click.Context, verbose: int) -> None:
    """Find, remember and run the fastest correct convolution on an NVIDIA GPU."""
    from miofind.finddb.location import tell_whole_paths  # the command, whose module is there by now, imports it, too

    configure_logging(verbose)
    ctx.call_on_close(reset_logging)
    tell_whole_paths(True)
    ctx.call_on_close(lambda: tell_whole_paths(False))
