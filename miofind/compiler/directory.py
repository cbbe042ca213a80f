"""Where binaries are kept: a folder that its user alone can read and write.

A binary runs with the rights of who loads it, so a folder that another user owns or can write to is not trusted.
"""

from __future__ import annotations

import atexit
import errno
import functools
import logging
import os
import shutil
import stat
import tempfile
from pathlib import Path

logger = logging.getLogger(__name__)

CACHE_VARIABLE = "MIOFIND_CACHE_DIR"


def default_directory() -> Path:
    """`kernels` in MIOFIND_CACHE_DIR, or in the user's cache folder."""
    import platformdirs

    chosen = os.environ.get(CACHE_VARIABLE)
    named = os.path.expanduser(chosen or platformdirs.user_cache_dir("miofind", appauthor=False))
    return Path(named) / "kernels"


def private_directory(directory: Path) -> Path:
    """The folder, made with mode 0700 if it is missing; a temporary one, with a warning, if others own or can write it.

    Raises:
        OSError: it cannot be made.
    """
    if directory.parts[:1] and directory.parts[0].startswith("~"):  # what expanduser leaves of an unknown user
        raise FileNotFoundError(errno.ENOENT, "no user of that name has a home folder", str(directory))
    directory = directory.absolute()
    directory.parent.mkdir(parents=True, exist_ok=True)
    directory.mkdir(mode=0o700, exist_ok=True)
    status = directory.stat()
    owner = os.geteuid()
    if status.st_uid != owner:
        return _substitute(directory, f"it belongs to user {status.st_uid}, not to {owner}")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return _substitute(directory, f"others can write to it (mode {stat.S_IMODE(status.st_mode):o}): chmod 700 it")
    if status.st_mode & 0o077:
        directory.chmod(0o700)
    return directory


def _substitute(directory: Path, reason: str) -> Path:
    temporary = _temporary_directory()
    logger.warning("kernels are kept in %s until this process ends, not in %s: %s", temporary, directory, reason)
    return temporary


@functools.cache
def _temporary_directory() -> Path:
    """One folder a process, removed when it ends."""
    directory = tempfile.mkdtemp(prefix="miofind-")
    atexit.register(_remove_own, directory, os.getpid())
    return Path(directory)


def _remove_own(directory: str, owner: int) -> None:
    """Remove the folder, unless this is a forked child of the process that made it."""
    if os.getpid() == owner:
        shutil.rmtree(directory, ignore_errors=True)
