"""Text files that appear whole or not at all."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO


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
    temporary = path.with_name(f".{path.name[:100]}.{os.getpid()}-{threading.get_ident()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8", newline="\n") as target:
            yield target
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
