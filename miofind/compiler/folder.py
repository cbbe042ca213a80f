"""A folder whose files its user alone can have written, held open so that nothing can be put in its place.

What is checked is what is used: folders above it, links on the way to it and files in it are asked by descriptor for
their owner and mode. Source: StrictModes of OpenSSH (misc.c, safe_path), by descriptor instead of by name.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import secrets
import stat
import weakref
from pathlib import Path, PurePath

TEMPORARY = ".writing-"
"""Begins the names of files that are being written."""

_MAX_FILE_BYTES = 256 << 20
_MAX_LINKS = 40  # as Linux (fs/namei.c, MAXSYMLINKS)
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
# O_PATH where there is one: of folders above, such as /home, others may not have the right to read.
_FOLDER = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_WRITE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class NotPrivateError(Exception):
    """Others own a folder or file, or can put another in its place; the message says who, and what to do."""


class PrivateFolder:
    """A folder of this user's, made with mode 0700 where it is missing; one that others can read is made private.

    Args:
        path: where it is; links are followed where they are the user's or root's.

    Raises:
        NotPrivateError: others own it, or can write to it or to a folder above it.
        OSError: it cannot be opened or made.
    """

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self._descriptor = _opened(self.path)
        weakref.finalize(self, os.close, self._descriptor)

    def names(self) -> list[str]:
        """Names of what is in it."""
        # A description of its own: threads that share one would share its position, too.
        listed = os.open(os.curdir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self._descriptor)
        try:
            return os.listdir(listed)
        finally:
            os.close(listed)

    def status(self, name: str) -> os.stat_result:
        """A file's size and times; of a link, its own."""
        return os.stat(name, dir_fd=self._descriptor, follow_symlinks=False)

    def read(self, name: str) -> bytes:
        """Content of a file that this user or root wrote.

        Raises:
            NotPrivateError: others own it, can write to it, or know it by another name; or it is no file.
            OSError: it cannot be read, or is larger than any binary.
        """
        try:
            descriptor = os.open(name, _READ, dir_fd=self._descriptor)
        except OSError as error:
            if error.errno == errno.ELOOP:  # O_NOFOLLOW
                raise NotPrivateError(f"{name} in {self.path} is a link") from error
            raise
        with open(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            complaint = _about_file(status)
            if complaint:
                raise NotPrivateError(f"{name} in {self.path} {complaint}")
            if status.st_size > _MAX_FILE_BYTES:
                raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), name)
            return file.read(status.st_size)

    def replace(self, name: str, content: bytes) -> None:
        """Write a file so that a reader sees all of it or what was there before.

        Raises:
            OSError: it cannot be written; nothing of it is left.
        """
        temporary = f"{TEMPORARY}{secrets.token_hex(8)}"
        descriptor = os.open(temporary, _WRITE, 0o600, dir_fd=self._descriptor)
        try:
            with open(descriptor, "wb") as file:
                file.write(content)
            os.replace(temporary, name, src_dir_fd=self._descriptor, dst_dir_fd=self._descriptor)
        except BaseException:
            with contextlib.suppress(OSError):
                self.remove(temporary)
            raise

    def remove(self, name: str) -> None:
        """Remove a file."""
        os.unlink(name, dir_fd=self._descriptor)

    def touch(self, name: str) -> None:
        """Note that a file was used now."""
        os.utime(name, dir_fd=self._descriptor, follow_symlinks=False)


def _opened(path: Path) -> int:
    """Descriptor of the folder at an absolute path; each folder on the way is checked before a name in it is used.

    Raises:
        NotPrivateError, OSError: as of `PrivateFolder`.
    """
    pending = list(reversed(path.parts))
    here, where, links = -1, PurePath(), 0
    try:
        while pending:
            name = pending.pop()
            target = None if here < 0 else _link_target(here, name, where)
            if target is not None:
                links += 1
                if links > _MAX_LINKS:
                    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
                pending += reversed(target.parts)
                continue
            where /= name  # the root, with which paths and the targets of some links begin, replaces what was before
            here = _entered(here, name, where)
            if pending:
                _check_above(os.fstat(here), where)
        _check_own(here, where)
    except BaseException:
        if here >= 0:
            os.close(here)
        raise
    return here


def _link_target(folder: int, name: str, where: PurePath) -> PurePath | None:
    """Where a link leads; None for what is none, or not there.

    Raises:
        NotPrivateError: the link is another user's.
    """
    try:
        status = os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return None
    if not stat.S_ISLNK(status.st_mode):
        return None
    if status.st_uid not in _trusted() and status.st_uid != _root_above():
        raise NotPrivateError(f"{where / name} is a link of user {status.st_uid}: name a folder without it")
    return PurePath(os.readlink(name, dir_fd=folder))


def _entered(folder: int, name: str, where: PurePath) -> int:
    """Descriptor of a folder in a folder, made where it is missing; the descriptor of the outer one is closed."""
    within = None if folder < 0 or name.startswith("/") else folder
    try:
        try:
            inner = os.open(name, _FOLDER, dir_fd=within)
        except FileNotFoundError:
            with contextlib.suppress(FileExistsError):  # another process was faster
                os.mkdir(name, 0o700, dir_fd=within)
            inner = os.open(name, _FOLDER, dir_fd=within)
    except OSError as error:
        error.filename = str(where)
        raise
    if folder >= 0:
        os.close(folder)
    return inner


def _check_above(status: os.stat_result, where: PurePath) -> None:
    """Nothing, where others cannot replace what this user has in a folder: in /tmp they can add to it alone.

    Raises:
        NotPrivateError: they can.
    """
    if status.st_uid not in _trusted() and status.st_uid != _root_above():
        raise NotPrivateError(
            f"{where} above it belongs to user {status.st_uid}, who can put another in its place: name another folder"
        )
    if status.st_mode & _OTHERS_WRITE and not status.st_mode & stat.S_ISVTX:
        raise NotPrivateError(
            f"others can write to {where} above it (mode {stat.S_IMODE(status.st_mode):o}) and what lies in it may be"
            f" theirs: empty it and chmod go-w {where}, or name another folder"
        )


def _check_own(folder: int, where: PurePath) -> None:
    """Nothing, where a folder is this user's; what others may do with it, if it is no more than to read, ends here.

    Raises:
        NotPrivateError: others own it or can write to it.
    """
    status = os.fstat(folder)
    if status.st_uid != os.geteuid():
        raise NotPrivateError(f"it belongs to user {status.st_uid}, not to {os.geteuid()}: name a folder of your own")
    if status.st_mode & _OTHERS_WRITE:
        raise NotPrivateError(
            f"others can write to it (mode {stat.S_IMODE(status.st_mode):o}) and what lies in it may be theirs:"
            f" empty it and chmod 700 it"
        )
    if status.st_mode & 0o077:
        os.chmod(os.curdir, 0o700, dir_fd=folder)


def _about_file(status: os.stat_result) -> str:
    """Who else may have written a file, "" for nobody."""
    if not stat.S_ISREG(status.st_mode):
        return "is no file"
    if status.st_uid not in _trusted():
        return f"belongs to user {status.st_uid}"
    if status.st_mode & _OTHERS_WRITE:
        return f"can be written by others (mode {stat.S_IMODE(status.st_mode):o})"
    if status.st_nlink != 1:
        return f"has {status.st_nlink} names"
    return ""


def _trusted() -> frozenset[int]:
    """Users whose files may be run: this one, and root, who can do anything anyway."""
    return frozenset({0, os.geteuid()})


@functools.cache
def _root_above() -> int:
    """Root's user id as the owner of folders above: in a container that does not map root, such as an unprivileged
    one of Apptainer, /, /home and /tmp belong to the id that stands for all users from outside.

    Source: user_namespaces(7), "Unmapped user and group IDs".
    """
    try:
        mapped = [line.split() for line in Path("/proc/self/uid_map").read_text(encoding="ascii").splitlines()]
        if any(int(first) == 0 for first, _, _ in mapped):
            return 0
        return int(Path("/proc/sys/kernel/overflowuid").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return 0
