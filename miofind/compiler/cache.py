"""Compiled binaries on disk, private to their user: checksummed, bounded, shared by any number of processes.

An entry is `<key>.cubin` and its sidecar `<key>.json`, each written to a temporary file and moved into place. An entry
that is damaged, cut short, another's or that others may have written is a miss. Where the disk cannot be used the cache
keeps nothing, with one warning. It knows keys and bytes, not how they are made.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType

from miofind.compiler.directory import default_directory, private_folder
from miofind.compiler.folder import TEMPORARY, NotPrivateError, PrivateFolder
from miofind.compiler.resources import KernelResources
from miofind.process.forks import follow_forks

logger = logging.getLogger(__name__)

_FORMAT = 1
_TEMPORARY_AGE_S = 3600
_ELF = b"\x7fELF"


@dataclass(frozen=True, slots=True, kw_only=True)
class Binary:
    """A compiled source.

    Attributes:
        key: hash of all it was made from.
        cubin: the binary.
        path: its file in the cache, or None where it is kept in memory only.
        resources: use of a multiprocessor by entry; empty for a binary taken from a saved solution.
        log: the compiler's log.
    """

    key: str
    cubin: bytes
    path: Path | None
    resources: Mapping[str, KernelResources]
    log: str

    def has_entry(self, entry: str) -> bool:
        """Whether there is a kernel of that name."""
        return f".text.{entry}\0".encode() in self.cubin


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheStats:
    """State of a cache.

    Attributes:
        directory: where it is, or None where the disk cannot be used.
        entries, bytes: what is in it now.
        max_bytes: its bound.
        hits, misses: answers in this process.
    """

    directory: Path | None
    entries: int
    bytes: int
    max_bytes: int
    hits: int
    misses: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    key: str
    bytes: int
    used_ns: int


class BinaryCache:
    """Binaries by key; the least recently used go first when `max_bytes` is passed.

    Args:
        directory: where to keep them; by default `kernels` in MIOFIND_CACHE_DIR or in the user's cache folder.
        max_bytes: bound of the files' sizes. Processes that write at the same time may pass it by what they write
            between two looks at the folder.

    A folder that others own, can write to or can put another in the place of is not used: a private temporary one
    replaces it. It is held open from its first use on: what takes its place later is not looked at.
    """

    def __init__(self, directory: str | Path | None = None, max_bytes: int = 1 << 30) -> None:
        self._asked = None if directory is None else Path(directory)
        self._max_bytes = max_bytes
        self._lock = threading.RLock()
        self._opened: PrivateFolder | None = None
        self._is_opened = False
        self._writable = True
        self._has_warned = False
        self._bytes: int | None = None
        self._unseen_bytes = 0
        self._hits = 0
        self._misses = 0
        follow_forks(self)

    def leave_parent(self) -> None:
        """Make the lock anew in a forked child: a thread of the parent may have held it."""
        self._lock = threading.RLock()

    def __reduce__(self) -> tuple[object, ...]:
        """The same folder in another process."""
        return type(self), (self.directory or self._asked, self._max_bytes)

    @property
    def local(self) -> BinaryCache:
        """What of it is on this host and answers at once: all of it."""
        return self

    @property
    def directory(self) -> Path | None:
        """Folder in use, made on first use; None where the disk cannot be used."""
        folder = self._folder
        return None if folder is None else folder.path

    @property
    def _folder(self) -> PrivateFolder | None:
        with self._lock:
            if not self._is_opened:
                try:
                    self._opened = private_folder(self._asked or default_directory())
                except (OSError, NotPrivateError) as error:
                    self._give_up(error)
                self._is_opened = True  # not before: a fork, or Ctrl-C, may come between
            return self._opened

    def get(self, key: str) -> Binary | None:
        """The binary of that key, or None; counts as a use of it."""
        binary = self._read(key)
        with self._lock:
            self._hits += binary is not None
            self._misses += binary is None
        return binary

    def put(self, key: str, cubin: bytes, resources: Mapping[str, KernelResources], log: str) -> Binary:
        """Keep a binary. Its `path` is None where the disk cannot be used."""
        path = None
        folder = self._folder
        if folder is not None and self._writable:
            try:
                path = self._write(folder, key, cubin, _sidecar(key, cubin, resources, log))
            except OSError as error:
                self._give_up(error)
        return Binary(key=key, cubin=cubin, path=path, resources=resources, log=log)

    def stats(self) -> CacheStats:
        """What the cache holds now, and how often it answered in this process."""
        entries = list(self._entries())
        return CacheStats(
            directory=self.directory,
            entries=len(entries),
            bytes=sum(entry.bytes for entry in entries),
            max_bytes=self._max_bytes,
            hits=self._hits,
            misses=self._misses,
        )

    def clear(self) -> int:
        """Remove every entry; returns how many there were. Processes that use the cache rebuild what they need."""
        with self._lock:
            entries = list(self._entries())
            for entry in entries:
                self._remove(entry.key)
            self._bytes = None
        return len(entries)

    def _read(self, key: str) -> Binary | None:
        folder = self._folder
        if folder is None:
            return None
        cubin, sidecar = _names(key)
        try:
            values = json.loads(folder.read(sidecar).decode())
            binary = _checked(key, folder.read(cubin), folder.path / cubin, values)
        except OSError:
            return None
        except NotPrivateError as error:
            self._warn_once(error)
            return None
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            logger.info("binary %s in %s is damaged and will be rebuilt: %r", key, folder.path, error)
            return None
        with contextlib.suppress(OSError):
            folder.touch(sidecar)
        return binary

    def _write(self, folder: PrivateFolder, key: str, cubin: bytes, sidecar: bytes) -> Path:
        for name, content in zip(_names(key), (cubin, sidecar), strict=True):
            folder.replace(name, content)
        with self._lock:
            self._account(len(cubin) + len(sidecar))
        return folder.path / _names(key)[0]

    def _account(self, written_bytes: int) -> None:
        """Count what was written; look at the folder when the bound is passed or other processes may have filled it."""
        self._unseen_bytes += written_bytes
        is_stale = self._bytes is None or self._unseen_bytes > self._max_bytes // 16
        if is_stale or (self._bytes or 0) + self._unseen_bytes > self._max_bytes:
            self._bytes = self._evict()
            self._unseen_bytes = 0

    def _evict(self) -> int:
        """Remove the least recently used entries where the bound is passed; returns the bytes that stay."""
        self._remove_abandoned()
        entries = sorted(self._entries(), key=lambda entry: entry.used_ns)
        total = sum(entry.bytes for entry in entries)
        if total <= self._max_bytes:
            return total
        for entry in entries:
            if total <= self._max_bytes * 7 // 8:
                break
            self._remove(entry.key)
            total -= entry.bytes
        return total

    def _entries(self) -> Iterator[_Entry]:
        """What is in the folder, halves of entries included."""
        sizes: dict[str, int] = {}
        used: dict[str, int] = {}
        for name, status in self._files():
            key, _, suffix = name.partition(".")
            if suffix not in ("cubin", "json") or len(key) != 64:
                continue
            sizes[key] = sizes.get(key, 0) + status.st_size
            used[key] = max(used.get(key, 0), status.st_mtime_ns)
        for key, size in sizes.items():
            yield _Entry(key=key, bytes=size, used_ns=used[key])

    def _files(self) -> Iterator[tuple[str, os.stat_result]]:
        """Names of what is in the folder, links and the like included, with their sizes and times."""
        folder = self._folder
        if folder is None:
            return
        with contextlib.suppress(OSError):
            for name in folder.names():
                with contextlib.suppress(OSError):  # others may have removed it
                    yield name, folder.status(name)

    def _remove(self, key: str) -> None:
        folder = self._folder
        if folder is None:
            return
        for name in reversed(_names(key)):  # the sidecar first: without it the entry is gone
            with contextlib.suppress(OSError):
                folder.remove(name)

    def _remove_abandoned(self) -> None:
        """Remove temporary files of processes that died while they wrote."""
        folder = self._folder
        oldest_s = time.time() - _TEMPORARY_AGE_S
        for name, status in self._files():
            if folder is not None and name.startswith(TEMPORARY) and status.st_mtime < oldest_s:
                with contextlib.suppress(OSError):
                    folder.remove(name)

    def _warn_once(self, error: NotPrivateError) -> None:
        """Say that a file is not used; once, for where others could write one file they could write many."""
        with self._lock:
            is_first, self._has_warned = not self._has_warned, True
        logger.log(
            logging.WARNING if is_first else logging.INFO,
            "a binary is not used and will be rebuilt, since %s: somebody else may have written it, empty that folder",
            error,
        )

    def _give_up(self, error: OSError | NotPrivateError) -> None:
        """Write nothing more in this process; say so once."""
        with self._lock:
            if self._writable:
                self._writable = False
                where = self._asked or default_directory() if self._opened is None else self._opened.path
                reason = error if isinstance(error, NotPrivateError) else f"since {where} cannot be written: {error}"
                logger.warning("kernels are compiled but not kept, %s", reason)


def _names(key: str) -> tuple[str, str]:
    """Files of an entry: the binary, then its sidecar."""
    return f"{key}.cubin", f"{key}.json"


def _sidecar(key: str, cubin: bytes, resources: Mapping[str, KernelResources], log: str) -> bytes:
    values = {
        "format": _FORMAT,
        "key": key,
        "sha256": hashlib.sha256(cubin).hexdigest(),
        "resources": {entry: asdict(used) for entry, used in resources.items()},
        "log": log,
    }
    return json.dumps(values, separators=(",", ":")).encode()


def _checked(key: str, cubin: bytes, path: Path, sidecar: dict[str, object]) -> Binary:
    """The binary that a cubin and its sidecar make.

    Raises:
        ValueError, KeyError, TypeError: they do not belong together or are no entry of this format.
    """
    if sidecar["format"] != _FORMAT or sidecar["key"] != key:
        raise ValueError("the sidecar belongs to another entry or format")
    if not cubin.startswith(_ELF) or hashlib.sha256(cubin).hexdigest() != sidecar["sha256"]:
        raise ValueError("the cubin does not match its checksum")
    stored, log = sidecar["resources"], sidecar["log"]
    if not isinstance(stored, dict) or not isinstance(log, str):
        raise ValueError("the sidecar is malformed")
    resources = {entry: KernelResources(**used) for entry, used in stored.items()}
    return Binary(key=key, cubin=cubin, path=path, resources=MappingProxyType(resources), log=log)
