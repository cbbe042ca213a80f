"""Where the FindDBs are: the user's, the shipped ones, and whether a folder can hold one.

Nothing here opens a database.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from miofind.errors import DatabaseError, brief

MEMORY = ":memory:"

# fmt: off
NETWORK_FILE_SYSTEMS = frozenset({
    "nfs", "nfs4", "cifs", "smb", "smb2", "smb3", "smbfs", "lustre", "9p", "gpfs", "afs", "ceph", "beegfs", "panfs",
    "glusterfs", "orangefs", "pvfs2", "wekafs", "davfs", "ncpfs", "fuse.sshfs", "fuse.ceph", "fuse.glusterfs",
    "fuse.s3fs", "fuse.rclone", "fuse.gcsfuse", "fuse.juicefs", "fuse.mfs",
})
# fmt: on
"""File systems on which SQLite's write-ahead log, which shares memory between processes, is unsafe."""


def user_path(environ: Mapping[str, str] = os.environ) -> str:
    """Path of the user's FindDB: MIOFIND_DB, else finddb.db in the user's data directory; ":memory:" is one."""
    named = environ.get("MIOFIND_DB", "")
    if named:
        return named
    import platformdirs

    return str(Path(platformdirs.user_data_dir("miofind", appauthor=False)) / "finddb.db")


def shipped_paths(environ: Mapping[str, str] = os.environ) -> tuple[Path, ...]:
    """Shipped FindDBs: those of the package, or the file or the folder's *.db that MIOFIND_SYSTEM_DB names; "" is none.

    Raises:
        DatabaseError: MIOFIND_SYSTEM_DB names nothing that exists.
    """
    named = environ.get("MIOFIND_SYSTEM_DB")
    if named == "":
        return ()
    folder = Path(__file__).parent / "prebuilt" if named is None else _expanded(named, "MIOFIND_SYSTEM_DB")
    if folder.is_file():
        return (folder,)
    if named is not None and not folder.is_dir():
        raise DatabaseError(f"MIOFIND_SYSTEM_DB={named!r} is neither a file nor a folder: correct it or unset it")
    return tuple(sorted(folder.glob("*.db")))


def checked_path(path: str | Path) -> Path | None:
    """The file a path names, None for memory.

    Raises:
        DatabaseError: it is a server's URL, or no path.
    """
    if not isinstance(path, str | os.PathLike):
        raise DatabaseError(f"database={brief(path)} must be the path of a file")
    text = str(path)
    if text == MEMORY:
        return None
    scheme, separator, _ = text.partition("://")
    if separator:
        raise DatabaseError(f"a FindDB on {scheme} cannot be used by this release: name a local SQLite file")
    return _expanded(text, "database")


def _expanded(text: str, name: str) -> Path:
    try:
        if "\0" in text:
            raise ValueError("a path holds no null character")
        return Path(text).expanduser()
    except (RuntimeError, ValueError) as error:  # of a user who has no home folder
        raise DatabaseError(f"{name}={text!r} cannot be a path ({error}): correct it") from error


def shown(path: Path | None) -> str:
    """A path for messages, which may end in logs: below the home folder from there on, else its last two parts."""
    if path is None:
        return "the FindDB in memory"
    absolute = path.absolute()
    try:
        return str(Path("~") / absolute.relative_to(Path.home()))
    except (ValueError, RuntimeError):
        return str(absolute) if len(absolute.parts) <= 3 else os.path.join("...", *absolute.parts[-2:])


def network_file_system(path: Path, mounts: Path = Path("/proc/self/mounts")) -> str:
    """Type of the network file system that a path lies on, "" for a local one or where that cannot be told."""
    try:
        lines = mounts.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return ""
    target = Path(os.path.realpath(path))
    deepest, kind = -1, ""
    for line in lines:
        _, mount_point, file_system, *_ = [*line.split(" "), "", "", ""]
        folder = Path(_unescaped(mount_point))
        if target.is_relative_to(folder) and len(folder.parts) >= deepest:
            deepest, kind = len(folder.parts), file_system
    return kind if kind in NETWORK_FILE_SYSTEMS else ""


def _unescaped(mount_point: str) -> str:
    """A mount point with the octal escapes of /proc/mounts undone (proc_pid_mounts(5))."""
    for escape, character in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        mount_point = mount_point.replace(escape, character)
    return mount_point
