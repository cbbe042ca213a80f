"""Where the FindDBs are: the user's, the shipped ones, and whether a folder can hold one.

Nothing here opens a database. A server's URL may hold a password, so no message quotes one.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Mapping
from pathlib import Path

from miofind.errors import DatabaseError, brief, suggestion

MEMORY = ":memory:"
SERVER_SCHEMES = ("postgresql", "postgres")

# One slash is left of two where a URL was taken for a path.
_URL = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*(?=://)|postgres[a-z]*(?=:/)):(?P<rest>//?)", re.ASCII)

_tells_whole_paths = False

# fmt: off
NETWORK_FILE_SYSTEMS = frozenset({
    "nfs", "nfs4", "cifs", "smb", "smb2", "smb3", "smbfs", "lustre", "9p", "gpfs", "afs", "ceph", "beegfs", "panfs",
    "glusterfs", "orangefs", "pvfs2", "wekafs", "davfs", "ncpfs", "fuse.sshfs", "fuse.ceph", "fuse.glusterfs",
    "fuse.s3fs", "fuse.rclone", "fuse.gcsfuse", "fuse.juicefs", "fuse.mfs",
})
# fmt: on
"""File systems on which SQLite's write-ahead log, which shares memory between processes, is unsafe."""


def user_path(environ: Mapping[str, str] = os.environ) -> str:
    """Address of the user's FindDB: MIOFIND_DB, else finddb.db in the user's data directory.

    MIOFIND_DB names a file, ":memory:", or a server by its URL.
    """
    named = environ.get("MIOFIND_DB", "")
    if named:
        return named
    import platformdirs

    return str(Path(platformdirs.user_data_dir("miofind", appauthor=False)) / "finddb.db")


def system_addresses(environ: Mapping[str, str] = os.environ) -> tuple[str | Path, ...]:
    """FindDBs that are asked after the user's, and only read: the server that MIOFIND_SYSTEM_DB names, else files.

    Raises:
        DatabaseError: MIOFIND_SYSTEM_DB names nothing that exists, or cannot be an address.
    """
    url = server_url(environ.get("MIOFIND_SYSTEM_DB", ""))
    return shipped_paths(environ) if url is None else (url,)


def shipped_paths(environ: Mapping[str, str] = os.environ) -> tuple[Path, ...]:
    """Shipped FindDBs: those of the package, or the file or the folder's *.db that MIOFIND_SYSTEM_DB names; "" is none.

    Raises:
        DatabaseError: MIOFIND_SYSTEM_DB names nothing that exists.
    """
    named = environ.get("MIOFIND_SYSTEM_DB")
    if named == "" or (named and server_url(named) is not None):
        return ()
    folder = Path(__file__).parent / "prebuilt" if named is None else _expanded(named, "MIOFIND_SYSTEM_DB")
    if folder.is_file():
        return (folder,)
    if named is not None and not folder.is_dir():
        raise DatabaseError(f"MIOFIND_SYSTEM_DB={named!r} is neither a file nor a folder: correct it or unset it")
    return tuple(sorted(folder.glob("*.db")))


def server_url(address: str | Path) -> str | None:
    """The URL of a server as it is, None where the address is a file's, or memory's.

    Raises:
        DatabaseError: it is a URL, and none of a PostgreSQL server; or no address.
    """
    if not isinstance(address, str | os.PathLike):
        raise DatabaseError(f"database={brief(address)} must be the path of a file, or a server's URL")
    text = str(address)
    begins = _URL.match(text)
    if begins is None:
        return None
    if isinstance(address, str) and begins["scheme"] in SERVER_SCHEMES and begins["rest"] == "//":
        return text
    near = suggestion(begins["scheme"], SERVER_SCHEMES) or "."
    raise DatabaseError(
        f"a FindDB named by {begins['scheme']}:{begins['rest']}... cannot be used{near} Name a local SQLite file, or a "
        "PostgreSQL server as text of the form postgresql://user@host:5432/database"
    )


def checked_path(path: str | Path) -> Path | None:
    """The file a path names, None for memory.

    Raises:
        DatabaseError: it is a server's URL, or no path.
    """
    if server_url(path) is not None:
        raise DatabaseError("a server's URL is given where a file is wanted: name a local file")
    text = str(path)
    return None if text == MEMORY else _expanded(text, "database")


def shown_url(url: str) -> str:
    """A server's URL for messages: its scheme, host and database.

    Raises:
        DatabaseError: it has a character of a password where none can be.
    """
    before, _, settings = url.partition("?")
    authority, _, name = before.partition("://")[2].partition("/")
    if "@" in name + settings or authority.count("@") > 1:
        raise DatabaseError(
            "the URL of the FindDB's server has an @ after its host's place: in a user's name or password write @ as "
            "%40, : as %3A, / as %2F and ? as %3F"
        )
    host = authority.rpartition("@")[2]
    return f"postgresql://{host}/{name}"


def told_address(address: str | Path) -> str:
    """An address as it may be told: a path as it is, a server's URL without who asks."""
    try:
        url = server_url(address)
        return str(address) if url is None else shown_url(url)
    except DatabaseError:
        return "a URL that names no FindDB"


def _expanded(text: str, name: str) -> Path:
    try:
        if "\0" in text:
            raise ValueError("a path holds no null character")
        path = Path(text).expanduser()
        path.exists()
    except (RuntimeError, ValueError) as error:  # of a user who has no home folder
        raise DatabaseError(f"{name}={text!r} cannot be a path ({error}): correct it") from error
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            return path  # whoever opens it tells what is wrong
        raise DatabaseError(f"{name}={text[:60]!r}... cannot be a path ({error.strerror}): correct it") from error
    return path


def tell_whole_paths(is_told: bool) -> None:
    """Have messages name paths as they were given from now on, or no longer: they are printed for who gave them."""
    global _tells_whole_paths
    _tells_whole_paths = is_told


def shown(path: Path | None) -> str:
    """A path for messages, which may end in logs: below the home folder from there on, else its last two parts.

    On the command line, which `tell_whole_paths`, it is as it was given, to be copied.
    """
    if path is None:
        return "the FindDB in memory"
    if _tells_whole_paths:
        return str(path)
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
