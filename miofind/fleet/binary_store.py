"""Compiled binaries that hosts share: a folder, a web server or an object store, whose entries are signed.

A binary is code, and whoever can write to the store could have it run: an entry counts only where its signature is
that of the fleet's secret, its key is the one that was asked for (the hash of all that a binary is made from, which the
reader computes) and its checksum is the binary's. An entry is one object, `<first two digits>/<key>`: a line of JSON,
then the binary.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import hmac
import json
import logging
import math
import os
import re
import secrets
import stat
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType
from typing import Any

from miofind.compiler import Binary, BinaryCache, KernelResources
from miofind.errors import InvalidOptionError, MissingLibraryError, described
from miofind.process.threads import in_threads

logger = logging.getLogger(__name__)

MAX_BYTES = 64 << 20
"""Of an entry; the largest binary has less than one."""
_FORMAT = 1
_MAX_HEADER = 1 << 20
_LEAST_SECRET = 16
_ELF = b"\x7fELF"
_KEY = re.compile(r"[0-9a-f]{64}")
_AT_ONCE = 8
_SILENT_S = 30.0
_LOCAL = ("file", "local")


class NotSignedError(Exception):
    """An entry that the fleet's secret has not signed, or that is damaged."""


def read_secret(path: str | Path) -> bytes:
    """The secret that a file holds, white space around it left out.

    Raises:
        InvalidOptionError: it cannot be read, others can read it, or it is short.
    """
    told = f"the store's secret {str(path)!r:.200}"
    try:
        with open(path, "rb") as file:
            if os.fstat(file.fileno()).st_mode & (stat.S_IRWXG | stat.S_IRWXO):
                raise InvalidOptionError(f"{told} can be read by others: chmod 600 it")
            found = file.read(1 << 16).strip()
    except OSError as error:
        raise InvalidOptionError(f"{told} cannot be read: {error.strerror}") from error
    if len(found) < _LEAST_SECRET:
        raise InvalidOptionError(f"{told} has {len(found)} bytes: write 32 random ones, `openssl rand -hex 32`")
    return found


class BinaryStore:
    """Binaries by key at a URL; safe to share between threads.

    Args:
        url: a folder, or what fsspec has a file system for: "https://host/binaries", "s3://bucket/binaries".
        secret: what entries are signed with, see `read_secret`.

    Raises:
        InvalidOptionError: fsspec has no such file system, or it refuses the URL.
        MissingLibraryError: fsspec or the library of that file system is not installed.
    """

    def __init__(self, url: str, secret: bytes) -> None:
        self._url = url
        self._secret = secret
        self._silent_until = -math.inf
        self._files, self._root = _file_system(url)
        self._lock = threading.Lock()
        self._has_warned = False

    def __reduce__(self) -> tuple[object, ...]:
        """The same store in another process of this user."""
        return BinaryStore, (self._url, self._secret)

    def get(self, key: str) -> Binary | None:
        """The binary of that key; None where there is none, where its signature is wrong, or nothing answers.

        A store that did not answer is not asked again for a while: each kernel would wait for it.
        """
        if time.monotonic() < self._silent_until:
            return None
        try:
            return unsigned(self._read(key), key, self._secret)
        except FileNotFoundError as error:
            if _is_silence(error.__cause__):
                self._warn_once(error)
            return None
        except NotSignedError as error:
            logger.warning("the shared binary %s is not used and will be compiled here: %s", key, error)
        except Exception as error:  # whatever a file system's library raises, the kernel can be compiled here
            self._warn_once(error)
        return None

    def put(self, binary: Binary) -> bool:
        """Share a binary; whether that worked."""
        if time.monotonic() < self._silent_until:
            return False
        try:
            self._write(binary.key, signed(binary, self._secret))
        except Exception as error:  # as above
            self._warn_once(error)
            return False
        return True

    def has(self, key: str) -> bool:
        """Whether there is an entry of that key, whoever signed it."""
        try:
            return bool(self._files.exists(self._path(key)))
        except Exception as error:  # as above
            self._warn_once(error)
            return False

    def _path(self, key: str) -> str:
        if not _KEY.fullmatch(key):
            raise InvalidOptionError(f"key={key!r:.80} must be 64 hexadecimal digits")
        return f"{self._root}/{key[:2]}/{key}"

    def _read(self, key: str) -> bytes:
        found = bytearray()
        with self._files.open(self._path(key), "rb") as file:
            while part := file.read(MAX_BYTES + 1 - len(found)):  # a server's answer comes in parts
                found += part
        if len(found) > MAX_BYTES:
            raise NotSignedError(f"no entry has more than {MAX_BYTES} bytes")
        return bytes(found)

    def _write(self, key: str, entry: bytes) -> None:
        path = self._path(key)
        if self._files.protocol not in (_LOCAL, *_LOCAL):  # elsewhere an object is there whole or not at all
            self._files.pipe_file(path, entry)
            return
        self._files.makedirs(os.path.dirname(path), exist_ok=True)
        part = f"{path}.{secrets.token_hex(8)}"
        try:
            self._files.pipe_file(part, entry)
            os.replace(part, path)
        finally:
            with contextlib.suppress(OSError):
                os.unlink(part)

    def _warn_once(self, error: Exception) -> None:
        with self._lock:
            is_first, self._has_warned = not self._has_warned, True
            self._silent_until = time.monotonic() + _SILENT_S
        level = logging.WARNING if is_first else logging.DEBUG
        logger.log(level, "kernels are not shared, the store does not answer: %s", described(error))


class SharedCache(BinaryCache):
    """A host's cache in front of a store: what is missing here is taken from there, what is made here goes there.

    Args:
        store: where hosts share binaries.
        directory: as of `BinaryCache`.
        publish: whether what is made here goes to the store.

    Attributes:
        fetched, published: binaries taken from the store, and given to it.
    """

    def __init__(self, store: BinaryStore, directory: str | Path | None = None, *, publish: bool = True) -> None:
        super().__init__(directory)
        self.fetched, self.published = 0, 0
        self._store = store
        self._publish = publish
        self._counts = threading.Lock()

    def __reduce__(self) -> tuple[object, ...]:
        """The same store and folder in another process of this user."""
        return functools.partial(SharedCache, publish=self._publish), (self._store, self.directory)

    @property
    def local(self) -> BinaryCache:
        """What of it is on this host and answers at once."""
        return BinaryCache(self.directory)

    def get(self, key: str) -> Binary | None:
        """The binary of that key from this host, else from the store."""
        known = super().get(key)
        if known is not None:
            return known
        found = self._store.get(key)
        if found is None:
            return None
        with self._counts:
            self.fetched += 1
        return super().put(key, found.cubin, found.resources, found.log)

    def put(self, key: str, cubin: bytes, resources: Mapping[str, KernelResources], log: str) -> Binary:
        """Keep a binary here, and share it."""
        kept = super().put(key, cubin, resources, log)
        if self._publish and self._store.put(kept):
            with self._counts:
                self.published += 1
        return kept

    def share(self, binary: Binary) -> None:
        """Have the store have a binary that was here before."""
        if not self._store.has(binary.key) and self._store.put(binary):
            with self._counts:
                self.published += 1

    def fetch(self, keys: Iterable[str]) -> int:
        """Bring binaries here that the store has, several at once; how many are here then."""
        return sum(found is not None for found in in_threads(self.get, tuple(keys), _AT_ONCE, "miofind-fetch"))


def _is_silence(cause: BaseException | None) -> bool:
    """Whether what fsspec calls a missing file is a web server that does not answer."""
    return isinstance(cause, OSError | TimeoutError) and not isinstance(cause, FileNotFoundError)


def signed(binary: Binary, secret: bytes) -> bytes:
    """A binary as an entry of a store."""
    header = {
        "format": _FORMAT,
        "key": binary.key,
        "sha256": hashlib.sha256(binary.cubin).hexdigest(),
        "resources": {entry: asdict(used) for entry, used in binary.resources.items()},
        "log": binary.log,
    }
    return json.dumps(header | {"signature": _signature(header, secret)}).encode() + b"\n" + binary.cubin


def unsigned(entry: bytes, key: str, secret: bytes) -> Binary:
    """The binary of an entry.

    Raises:
        NotSignedError: another secret signed it, it is of another key, or it is damaged.
    """
    text, newline, cubin = entry[:_MAX_HEADER].partition(b"\n")
    cubin = entry[len(text) + 1 :]
    try:
        header = json.loads(text)
        signature = header.pop("signature")
        is_ours = bool(newline) and hmac.compare_digest(str(signature), _signature(header, secret))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise NotSignedError(f"it is no entry of a store: {described(error)}") from error
    if not is_ours:
        raise NotSignedError("it is signed with another secret")
    if header["format"] != _FORMAT or header["key"] != key:
        raise NotSignedError("it is another key's, or of another release")
    if not cubin.startswith(_ELF) or hashlib.sha256(cubin).hexdigest() != header["sha256"]:
        raise NotSignedError("its binary does not match its checksum")
    resources = {name: KernelResources(**used) for name, used in header["resources"].items()}
    return Binary(key=key, cubin=cubin, path=None, resources=MappingProxyType(resources), log=header["log"])


def _signature(header: Mapping[str, object], secret: bytes) -> str:
    """HMAC-SHA256 (RFC 2104) of a header, whatever the order of its fields."""
    text = json.dumps(header, sort_keys=True, separators=(",", ":"))
    return hmac.new(secret, text.encode(), hashlib.sha256).hexdigest()


def _file_system(url: str) -> tuple[Any, str]:
    """fsspec's file system of a URL, and the path of its folder there.

    Raises:
        InvalidOptionError, MissingLibraryError: see `BinaryStore`.
    """
    try:
        from fsspec.core import url_to_fs
    except ImportError as error:
        raise MissingLibraryError(f"fsspec cannot be imported ({error}): install miofind[fleet]") from error
    try:
        files, root = url_to_fs(url)
    except ImportError as error:
        raise MissingLibraryError(f"store={url!r:.200} needs a library of its own: {error}") from error
    except Exception as error:  # whatever a file system's library raises
        raise InvalidOptionError(f"store={url!r:.200} cannot be used: {described(error)}") from error
    return files, str(root).rstrip("/")
