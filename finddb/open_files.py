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
_BESIDE = ("-wal", "-shm", "-journal")
_UNUSED_BYTE = 1 << 50  # SQLite locks bytes from 2**30 on, and none that far out
_NO_LOCKS = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL})
_NOT_WRITABLE = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})


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

    def check_names(self, where: str) -> None:
        """Do nothing where the file has one name.

        SQLite keeps a log beside each name: what is written under one is lost to the other.

        Raises:
            DatabaseError: it has several.
        """
        if os.fstat(self.descriptor).st_nlink > 1:
            raise DatabaseError(
                f"{where} has several names (hard links), and what is written under one is lost to the others: remove "
                "the others, or copy it and name the copy"
            )

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
class _SharedFile:
    """The descriptors of one file, which of them the next user gets, and how many use it."""

    descriptors: list[int] = field(default_factory=list)
    best: int = -1
    is_writable: bool = False
    users: int = 0


_held: dict[FileKey, _SharedFile] = {}
_lock = threading.RLock()


def acquire(path: Path, *, to_write: bool = False) -> OpenFile:
    """The file at a path, open until it is released.

    Args:
        to_write: it is made where there is none. Of a file that can be written a file system in layers makes a copy
            when it is opened to be, and what was open before stays the original.

    Raises:
        OSError: it cannot be opened, or is none.
    """
    with _lock:
        key = file_key(path)
        held = _held.get(key) if key is not None else None
        if held is None or (to_write and not held.is_writable):
            descriptor, is_writable = _opened(path, to_write=to_write)
            key = key_of(descriptor)
            held = _held.setdefault(key, _SharedFile())
            held.descriptors.append(descriptor)
            held.best, held.is_writable = descriptor, is_writable
        assert key is not None
        held.users += 1
        return OpenFile(key=key, descriptor=held.best)


def _opened(path: Path, *, to_write: bool) -> tuple[int, bool]:
    """A descriptor, and whether it can be written to."""
    always = os.O_CLOEXEC | os.O_NONBLOCK
    is_writable = to_write
    try:
        descriptor = os.open(path, (os.O_RDWR | os.O_CREAT if to_write else os.O_RDONLY) | always, 0o644)
    except OSError as error:
        if not to_write or error.errno not in _NOT_WRITABLE:
            raise
        try:
            descriptor, is_writable = os.open(path, os.O_RDONLY | always), False
        except FileNotFoundError:
            raise error from None  # there is none, and none can be made: that is what keeps it from being used
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    return descriptor, is_writable


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
def acquired(path: Path, *, to_write: bool = False) -> Iterator[OpenFile]:
    """The file at a path, open until the block ends.

    Raises:
        OSError: it cannot be opened, or is none.
    """
    file = acquire(path, to_write=to_write)
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


def key_of(descriptor: int) -> FileKey:
    """What an open file is."""
    status = os.fstat(descriptor)
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


def is_of_database(path: Path) -> bool:
    """Whether a path names a database, or the log that SQLite has or would have beside one."""
    real = Path(os.path.realpath(path))
    named = [real.with_name(real.name.removesuffix(suffix)) for suffix in _BESIDE if real.name.endswith(suffix)]
    return is_database(real) or any(map(is_database, named))


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release)
