"""Text files that appear whole or not at all, and files of other people, read to a bound."""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, TextIO

_BLOCK_BYTES = 1 << 20


def read_bounded(file: BinaryIO, limit_bytes: int) -> bytes:
    """What a file or a pipe has; one byte more than the limit where it has more.

    Takes memory for what is there, where `read(limit_bytes)` takes it for the limit.
    """
    blocks: list[bytes] = []
    left = limit_bytes + 1
    while left > 0 and (block := file.read(min(left, _BLOCK_BYTES))):
        blocks.append(block)
        left -= len(block)
    return b"".join(blocks)


@contextmanager
def replacing(path: Path) -> Iterator[TextIO]:
    """A file that takes the place of `path` when the block ends well; else `path` is as it was.

    A link is followed. What is no regular file, such as /dev/stdout or a named pipe, is written to, never replaced.

    Raises:
        OSError, ValueError: it cannot be written, is no path, or a link of a loop.
    """
    if path.exists() and not path.is_file():
        with path.open("w", encoding="utf-8", newline="\n") as target:
            yield target
        return
    path = Path(os.path.realpath(path))
    if path.is_symlink():
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
    temporary = path.with_name(f".{path.name[:100]}.{secrets.token_hex(8)}.tmp")
    target = temporary.open("x", encoding="utf-8", newline="\n")  # in /tmp, a link of that name may lie in wait
    try:
        with target:
            yield target
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_whole(path: Path, content: bytes) -> None:
    """Write a file that appears whole or not at all, in the place of what was there; a link is followed.

    Raises:
        OSError: it cannot be written.
    """
    path = Path(os.path.realpath(path))
    temporary = path.with_name(f".{path.name[:100]}.{secrets.token_hex(8)}.tmp")
    target = temporary.open("xb")
    try:
        with target:
            target.write(content)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
