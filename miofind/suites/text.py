"""Reads files of lines whose size nobody vouches for: a file, a pipe, or for "-" stdin."""

from __future__ import annotations

import sys
from pathlib import Path

from miofind.errors import InvalidOptionError, unreadable
from miofind.files import read_bounded

MAX_FILE_BYTES = 256 << 20
MAX_LINE_CHARS = 1 << 18

_SQLITE = b"SQLite format 3\0"


def read_lines(path: Path, *, errors: str = "strict") -> list[str]:
    """The lines of a text in UTF-8.

    Args:
        errors: what becomes of other bytes, as in `bytes.decode`.

    Raises:
        InvalidOptionError: it cannot be read, is no text, or is larger than MAX_FILE_BYTES; a line is longer than
            MAX_LINE_CHARS.
    """
    try:
        content = _content(path)
        if len(content) > MAX_FILE_BYTES:
            raise InvalidOptionError(f"{path} has more than {MAX_FILE_BYTES >> 20} MiB: name a smaller file, or parts")
        if content.startswith(_SQLITE):
            raise InvalidOptionError(
                f"file {path} cannot be read: it is an SQLite database, as FindDBs are, and no text: name another file"
            )
        lines = content.decode("utf-8-sig", errors).splitlines()
    except OSError as error:
        raise unreadable(f"file {path}", error) from error
    except UnicodeDecodeError as error:
        told = f"byte {error.object[error.start]:#04x} at {error.start}"
        raise InvalidOptionError(
            f"file {path} cannot be read: it is no text in UTF-8 ({told}): name another file, or convert it"
        ) from error
    for number, line in enumerate(lines, start=1):
        if len(line) > MAX_LINE_CHARS:
            raise InvalidOptionError(
                f"{path}, line {number} has {len(line)} characters, more than {MAX_LINE_CHARS}: it is no problem"
            )
    return lines


def refuse_missing(path: Path) -> None:
    """Do nothing where there is a file: of a mistyped path no library is to be asked for.

    Raises:
        InvalidOptionError: there is none.
    """
    try:
        path.stat()
    except OSError as error:
        raise unreadable(f"file {path}", error) from error


def _content(path: Path) -> bytes:
    if path == Path("-"):
        if sys.stdin is None:
            raise OSError("stdin is closed")
        return read_bounded(sys.stdin.buffer, MAX_FILE_BYTES)
    with path.open("rb") as file:
        return read_bounded(file, MAX_FILE_BYTES)
