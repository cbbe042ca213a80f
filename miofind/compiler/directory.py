"""Where binaries are kept: a folder that its user alone can read and write.

A binary runs with the rights of who loads it, so a folder that another user owns, can write to or can put another in
the place of is not trusted.
"""

from __future__ import annotations

import atexit
import errno
import functools
import logging
import os
import shutil
import tempfile
from pathlib import Path

from miofind.compiler.folder import NotPrivateError, PrivateFolder

logger = logging.getLogger(__name__)

CACHE_VARIABLE = "MIOFIND_CACHE_DIR"


def default_directory() -> Path:
    """`kernels` in MIOFIND_CACHE_DIR, or in the user's cache folder."""
    import platformdirs

    chosen = os.environ.get(CACHE_VARIABLE)
    named = os.path.expanduser(chosen or platformdirs.user_cache_dir("miofind", appauthor=False))
    return Path(named) / "kernels"


def private_folder(directory: Path) -> PrivateFolder:
    """The folder, made if it is missing; a temporary one, with a warning, where others may have written to it.

    Raises:
        OSError: it cannot be opened or made.
        NotPrivateError: neither it nor a temporary one is private.
    """
    if directory.parts[:1] and directory.parts[0].startswith("~"):  # what expanduser leaves of an unknown user
        raise FileNotFoundError(errno.ENOENT, "no user of that name has a home folder", str(directory))
    try:
        return PrivateFolder(directory)
    except NotPrivateError as error:
        reason = f"{directory.absolute()}: {error} ({CACHE_VARIABLE} names the folder)"
    temporary = _temporary_directory()
    try:
        folder = PrivateFolder(temporary)
    except NotPrivateError as error:
        raise NotPrivateError(f"neither in {reason}, nor in {temporary}: {error}") from error
    logger.warning("kernels are kept in %s until this process ends, not in %s", temporary, reason)
    return folder


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
