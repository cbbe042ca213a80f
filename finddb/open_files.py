"""Database files as they are on the disk, read beside SQLite, and whether their file system has locks.

A process that closes any descriptor of a file loses all its locks on it, SQLite's too (fcntl(2);
sqlite.org/howtocorrupt.html, 2.2). So a process keeps one descriptor a file, for as long as anybody in it uses that.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from miofind.errors import DatabaseError

HEADER_BYTES = 100
"""Of an SQLite database (sqlite.org/fileformat.html, 1.3)."""

_MAGIC = b"SQLite format 3\0"
_UNUSED_BYTE = 1 << 50  # SQLite locks bytes from 2**30 on, and none that far out
_NO_LOCKS = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL})


class FileKey(NamedTuple):
    """What names a file whatever its path: its device and inode."""

    device: int
    inode: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenFile:
    """A file that is held open; `release` it after SQLite has closed it."""

    key: FileKey
    descriptor: int

    @property
    def header(self) -> bytes:
        """The file's first HEADER_BYTES, fewer where it is shorter."""
        return os.pread(self.descriptor, HEADER_BYTES, 0)

    @property
    def is_database(self) -> bool:
        """Whether it begins as SQLite's do; an empty one, which SQLite takes for a new one, does not."""
        return self.header.startswith(_MAGIC)

    @property
    def is_portable(self) -> bool:
        """Whether it can be copied by itself and read on read-only media: no process writes it a log."""
        return self.header[18:20] == b"\1\1"  # 2 stands for a write-ahead log

    def check_locks(self, where: str) -> None:
        """Do nothing where the file can be locked.

        SQLite takes the answer that there are no locks for one that another process holds them, and waits.

        Raises:
            DatabaseError: its file system has no locks.
        """
        try:
            fcntl.lockf(self.descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB, 1, _UNUSED_BYTE)
            fcntl.lockf(self.descriptor, fcntl.LOCK_UN, 1, _UNUSED_BYTE)
        except OSError as error:
            if error.errno in _NO_LOCKS:
                raise DatabaseError(
                    f"{where} is on a file system without locks ({error.strerror}), which keep processes from "
                    "spoiling each other's writes: name a file on a local disk, by MIOFIND_DB or --db"
                ) from error


@dataclass(slots=True)
class _Held:
    """The descriptors of one file, of which the first is used, and by how many."""

    descriptors: list[int] = field(default_factory=list)
    users: int = 0


_held: dict[FileKey, _Held] = {}
_lock = threading.RLock()


def acquire(path: Path, *, create: bool = False) -> OpenFile:
    """The file at a path, open to be read until it is released.

    Raises:
        OSError: it cannot be opened, or is none.
    """
    with _lock:
        key = file_key(path)
        if key not in _held:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | create * os.O_CREAT, 0o644)
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                os.close(descriptor)
                raise OSError(errno.EINVAL, "it is no regular file", str(path))
            key = FileKey(status.st_dev, status.st_ino)
            _held.setdefault(key, _Held()).descriptors.append(descriptor)
        assert key is not None
        held = _held[key]
        held.users += 1
        return OpenFile(key=key, descriptor=held.descriptors[0])


def release(file: OpenFile) -> None:
    """Let a file go that was acquired."""
    with _lock:
        held = _held[file.key]
        held.users -= 1
        if held.users == 0:
            del _held[file.key]
            for descriptor in held.descriptors:
                os.close(descriptor)


@contextmanager
def acquired(path: Path) -> Iterator[OpenFile]:
    """The file at a path, open to be read until the block ends.

    Raises:
        OSError: it cannot be opened, or is none.
    """
    file = acquire(path)
    try:
        yield file
    finally:
        release(file)


def file_key(path: Path) -> FileKey | None:
    """What a path names, None where that is nothing."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return FileKey(status.st_dev, status.st_ino)


def written_at(status: os.stat_result) -> tuple[int, int]:
    """When a file was written to last, in nanoseconds, and its size."""
    return status.st_mtime_ns, status.st_size


def is_database(path: Path) -> bool:
    """Whether there is a file that begins as SQLite's do."""
    if not path.is_file():
        return False
    with acquired(path) as file:
        return file.is_database


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release)
