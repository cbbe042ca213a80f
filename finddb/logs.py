"""Whose a write-ahead log is.

SQLite finds a log by its name alone: moved under the log of another file, a database is read and written with the
pages of both (sqlite.org/howtocorrupt.html, 1.3 and 2.4). So each transaction draws a number and writes it into the
database's header, beside the one before it, and a log tells which state of which file it goes on from. What goes on
from another one is set aside, whoever left it: a process that was killed, or one that still has the file open that was
moved away.
"""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
import random
import secrets
import shutil
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from miofind.finddb.open_files import HEADER_BYTES, FileKey, OpenFile, file_key, key_of

# sqlite.org/fileformat.html, 1.3 and 4.1
_LOG_HEADER_BYTES = 32
_FRAME_HEADER_BYTES = 24
_USER_VERSION, _APPLICATION_ID = slice(60, 64), slice(68, 72)
_LOG_MAGIC = (b"\x37\x7f\x06\x82", b"\x37\x7f\x06\x83")
_PAGE_SIZE, _SALTS = slice(8, 12), slice(16, 24)
_PAGE, _SIZE_AFTER, _FRAME_SALTS = slice(0, 4), slice(4, 8), slice(8, 16)

_LOCK_TIMEOUT_S = 30.0
_NO_LOCK = frozenset({errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOLCK})


class Link(NamedTuple):
    """The number that a transaction drew, and that of the one before it."""

    before: int
    drawn: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Log:
    """What a log tells of the transactions in it.

    Attributes:
        frames: pages that were written, 0 where no transaction is whole.
        links: of the transactions, the oldest first; those of other programs have none, or that of the one before.
    """

    page_size: int
    frames: int
    links: tuple[Link, ...]

    def goes_on_from(self, header: bytes, since: int | None) -> bool:
        """Whether it is of the database with that header: in the state that the log began with, or a later one.

        Args:
            since: a state that the database was in, if one is known: an empty log leads to no other.
        """
        if not self.frames:
            return since in (None, drawn_last(header))
        if len(header) < HEADER_BYTES or header[18:20] != b"\2\2":  # it never had a log
            return False
        if _number(header[16:18]) % 0xFFFF != self.page_size % 0xFFFF:  # 1 stands for 65536
            return False
        state = drawn_last(header)
        if not self.links:
            return state == 0
        return state == self.links[0].before or any(state == link.drawn for link in self.links)


def drawn_last(header: bytes) -> int:
    """The number of the newest transaction that a database file holds, 0 where none drew any."""
    return _number(header[_USER_VERSION])


def draw(connection: sqlite3.Connection) -> None:
    """Give the connection's transaction its number."""
    (before,) = connection.execute("PRAGMA user_version").fetchone()
    connection.execute(f"PRAGMA application_id={before}").close()
    connection.execute(f"PRAGMA user_version={1 + secrets.randbelow(2**31 - 1)}").close()


def log_of(path: Path) -> Path:
    """Where SQLite keeps the log of a database: it follows links."""
    return Path(f"{os.path.realpath(path)}-wal")


def is_of(log: Path, file: OpenFile, *, since: int | None = None) -> bool:
    """Whether a log, if there is one, is of a file.

    Args:
        since: the number of a transaction that the file ended with when it was opened, None where that plays no part.
    """
    try:
        descriptor = os.open(log, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return since in (None, drawn_last(file.header))
    try:
        return _is_of(descriptor, file, since)
    finally:
        os.close(descriptor)


def set_foreign_aside(path: Path, file: OpenFile) -> Path | None:
    """Take what SQLite would take for the log of a database and is of another out of its way; returns a copy of it.

    Processes that use it for that other one go on with it, and nobody else finds it.

    Args:
        file: the database at the path.

    Raises:
        OSError: the log cannot be read, copied or removed.
    """
    log = log_of(path)
    with _locked(log) as descriptor:
        if descriptor is None or _is_of(descriptor, file):
            return None
        aside = _free_name(log)
        try:
            shutil.copyfile(log, aside)
        except BaseException:
            aside.unlink(missing_ok=True)
            raise
        _unlink_index(log)
        log.unlink()
        return aside


def opened(log: Path) -> int | None:
    """A descriptor of a log to tell it by, and to empty it; None where there is none that could be written."""
    try:
        return os.open(log, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None


def remove(log: Path, key: FileKey | None) -> None:
    """Remove a log whose every page is in its database, if it still is the one with that key."""
    with _locked(log) as descriptor:
        if descriptor is not None and file_key(log) == key:
            _unlink_index(log)
            log.unlink()


def _is_of(descriptor: int, file: OpenFile, since: int | None = None) -> bool:
    """Both are read without a lock: what changed meanwhile is read again."""
    while True:
        before = (file.header, os.pread(descriptor, _LOG_HEADER_BYTES, 0))
        found = _read(descriptor).goes_on_from(before[0], since)
        if found or before == (file.header, os.pread(descriptor, _LOG_HEADER_BYTES, 0)):
            return found
        time.sleep(0.001)


def _read(descriptor: int) -> Log:
    header = os.pread(descriptor, _LOG_HEADER_BYTES, 0)
    page_size = _number(header[_PAGE_SIZE]) if header.startswith(_LOG_MAGIC) else 0
    links: list[Link] = []
    frames, whole = 0, 0
    for number, frame in enumerate(_frames(descriptor, page_size, header[_SALTS]), start=1):
        if _number(frame[_PAGE]) == 1:
            page = frame[_FRAME_HEADER_BYTES:]
            links.append(Link(_number(page[_APPLICATION_ID]), _number(page[_USER_VERSION])))
        if _number(frame[_SIZE_AFTER]):  # a transaction's last
            frames, whole = number, len(links)
    return Log(page_size=page_size, frames=frames, links=tuple(links[:whole]))


def _frames(descriptor: int, page_size: int, salts: bytes) -> Iterator[bytes]:
    """The header of each frame of a log and the beginning of its page, until one that an earlier log left there."""
    size = _FRAME_HEADER_BYTES + page_size
    for number in itertools.count() if page_size else ():
        frame = os.pread(descriptor, _FRAME_HEADER_BYTES + HEADER_BYTES, _LOG_HEADER_BYTES + number * size)
        if len(frame) < _FRAME_HEADER_BYTES + HEADER_BYTES or frame[_FRAME_SALTS] != salts:
            return
        yield frame


def _number(text: bytes) -> int:
    return int.from_bytes(text, "big")


@contextmanager
def _locked(log: Path) -> Iterator[int | None]:
    """A descriptor of a log that nobody else decides about meanwhile, None where there is none.

    SQLite itself locks no log, but its index: to close a descriptor of a log costs nobody a lock.
    """
    deadline = time.monotonic() + _LOCK_TIMEOUT_S
    while True:
        try:
            descriptor = os.open(log, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            yield None
            return
        try:
            if _lock(descriptor, is_late=time.monotonic() > deadline) and file_key(log) == key_of(descriptor):
                yield descriptor
                return
        finally:
            os.close(descriptor)
        time.sleep(random.uniform(0.001, 0.004))


def _lock(descriptor: int, *, is_late: bool) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _NO_LOCK:  # where there are others, SQLite does with these
            return True
        if error.errno not in (errno.EWOULDBLOCK, errno.EACCES) or is_late:
            raise
        return False
    return True


def _unlink_index(log: Path) -> None:
    """Unlink the index of a log before the log itself, so that none is ever found beside another log."""
    with suppress(FileNotFoundError):
        Path(str(log).removesuffix("-wal") + "-shm").unlink()


def _free_name(log: Path) -> Path:
    """A name that no file has; whoever asks holds the log's lock."""
    names = (log.with_name(f"{log.name}.{number}.aside") for number in itertools.count(1))
    return next(name for name in names if not name.exists())
