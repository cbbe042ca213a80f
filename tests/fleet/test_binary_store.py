"""Hosts share binaries over a store, and run none that the fleet's secret has not signed."""

from __future__ import annotations

import contextlib
import http.server
import json
import logging
import os
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fsspec")

from miofind.compiler import Binary, BinaryCache, KernelResources
from miofind.errors import InvalidOptionError, MissingLibraryError
from miofind.fleet.binary_store import BinaryStore, NotSignedError, SharedCache, read_secret, signed, unsigned

SECRET = b"0123456789abcdef"
KEY = "ab" * 32
RESOURCES = {"convolve": KernelResources(registers=40, spill_bytes=0, stack_bytes=0, shared_bytes=1024)}
BINARY = Binary(key=KEY, cubin=b"\x7fELF code", path=None, resources=RESOURCES, log="a log")


class _Puts(http.server.SimpleHTTPRequestHandler):
    """A web server that takes what is put."""

    def do_PUT(self) -> None:
        path = Path(self.translate_path(self.path))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(201)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(params=["folder", "http"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """Of an empty store."""
    folder = tmp_path / "store"
    folder.mkdir()
    if request.param == "folder":
        yield str(folder)
        return
    pytest.importorskip("aiohttp")
    serve = lambda *a: _Puts(*a, directory=str(folder))  # noqa: E731
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), serve) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def test_a_binary_comes_back_as_it_was(url: str) -> None:
    store = BinaryStore(url, SECRET)
    assert store.get(KEY) is None
    assert not store.has(KEY)
    assert store.put(BINARY)
    assert store.has(KEY)
    assert store.get(KEY) == BINARY


def test_a_host_takes_what_another_made_and_keeps_it(url: str, tmp_path: Path) -> None:
    makes, takes = (SharedCache(BinaryStore(url, SECRET), tmp_path / name) for name in ("makes", "takes"))
    assert makes.put(KEY, BINARY.cubin, RESOURCES, "a log").path
    assert takes.fetch([KEY, "cd" * 32]) == 1
    assert (makes.published, takes.fetched, takes.published) == (1, 1, 0)
    alone = BinaryCache(tmp_path / "takes").get(KEY)
    assert alone is not None
    assert (alone.cubin, dict(alone.resources), alone.log) == (BINARY.cubin, RESOURCES, "a log")


def test_a_host_that_only_takes_publishes_nothing(url: str, tmp_path: Path) -> None:
    store = BinaryStore(url, SECRET)
    SharedCache(store, tmp_path / "cache", publish=False).put(KEY, BINARY.cubin, RESOURCES, "")
    assert not store.has(KEY)


def _entry(**changes: object) -> bytes:
    header, _, cubin = signed(BINARY, SECRET).partition(b"\n")
    return json.dumps(json.loads(header) | changes).encode() + b"\n" + cubin


FORGED = {
    "another secret": signed(BINARY, b"another secret.."),
    "another key": signed(replace(BINARY, key="cd" * 32), SECRET),
    "another binary": signed(BINARY, SECRET).replace(b"code", b"evil"),
    "no binary": signed(replace(BINARY, cubin=b"#!/bin/sh"), SECRET),
    "more after the binary": signed(BINARY, SECRET) + b"more",
    "cut short": signed(BINARY, SECRET)[:-1],
    "a resource changed": _entry(resources={}),
    "a log changed": _entry(log="another"),
    "no signature": signed(BINARY, SECRET).replace(b"signature", b"signatura"),
    "a signature of another type": _entry(signature=None),
    "no header": b"\x7fELF code",
    "nested": b"[" * 100_000 + b"\n",
    "empty": b"",
    "a list": b"[]\ncode",
}


@pytest.mark.parametrize("name", FORGED)
def test_what_the_secret_has_not_signed_is_not_run(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(NotSignedError):
        unsigned(FORGED[name], KEY, SECRET)
    path = tmp_path / KEY[:2] / KEY
    path.parent.mkdir()
    path.write_bytes(FORGED[name])
    cache = SharedCache(BinaryStore(str(tmp_path), SECRET), tmp_path / "cache")
    assert cache.get(KEY) is None
    assert "not used" in caplog.text


def test_a_huge_entry_is_not_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / KEY[:2] / KEY
    path.parent.mkdir()
    path.touch()
    os.truncate(path, 1 << 40)
    assert BinaryStore(str(tmp_path), SECRET).get(KEY) is None
    assert "no entry has more" in caplog.text


class _Endless(http.server.BaseHTTPRequestHandler):
    """Sends ever more, and says nothing of a length."""

    def do_HEAD(self) -> None:
        self.send_response(200)
        self.end_headers()

    def do_GET(self) -> None:
        self.do_HEAD()
        with contextlib.suppress(OSError):
            while True:
                self.wfile.write(bytes(1 << 16))

    def log_message(self, *_: object) -> None:
        """Tell nobody."""


def test_an_entry_without_an_end_is_not_read(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("aiohttp")
    monkeypatch.setattr("miofind.fleet.binary_store.MAX_BYTES", 1 << 20)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Endless) as server:
        threading.Thread(target=server.serve_forever).start()
        try:
            assert BinaryStore(f"http://127.0.0.1:{server.server_address[1]}", SECRET).get(KEY) is None
        finally:
            server.shutdown()
    assert "no entry has more than 1048576 bytes" in caplog.text


@pytest.mark.parametrize("key", ["", "../../etc/passwd", "AB" * 32, KEY[:-1], f"{KEY}/x"])
def test_keys_that_are_none_name_no_file(key: str, tmp_path: Path) -> None:
    store = BinaryStore(str(tmp_path), SECRET)
    assert store.get(key) is None
    assert not store.put(replace(BINARY, key=key))
    assert list(tmp_path.iterdir()) == []


def test_a_store_that_does_not_answer_is_told_once_and_hinders_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    cache = SharedCache(BinaryStore(str(tmp_path / "file" / "store"), SECRET), tmp_path / "cache")
    for key in (KEY, "cd" * 32):
        assert cache.put(key, BINARY.cubin, RESOURCES, "").path
        assert cache.get(key) is not None
    assert [record.levelno for record in caplog.records].count(logging.WARNING) == 1


def test_writers_of_one_entry_leave_a_whole_one_and_nothing_else(tmp_path: Path) -> None:
    store = BinaryStore(str(tmp_path), SECRET)
    writers = [threading.Thread(target=store.put, args=(BINARY,)) for _ in range(8)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert [path.name for path in (tmp_path / KEY[:2]).iterdir()] == [KEY]
    assert store.get(KEY) == BINARY


def test_urls_of_unknown_file_systems_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidOptionError, match="store="):
        BinaryStore("nothing://host/folder", SECRET)


def test_file_systems_without_their_library_are_told() -> None:
    with pytest.raises((MissingLibraryError, InvalidOptionError), match="gs"):
        BinaryStore("gs://bucket/folder", SECRET)


@pytest.mark.parametrize(
    ("text", "mode", "told"),
    [(b"short", 0o600, "5 bytes"), (SECRET, 0o640, "read by others"), (b" \n", 0o600, "0 bytes")],
)
def test_weak_secrets_are_refused(text: bytes, mode: int, told: str, tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_bytes(text)
    path.chmod(mode)
    with pytest.raises(InvalidOptionError, match=told):
        read_secret(path)
    with pytest.raises(InvalidOptionError, match="cannot be read"):
        read_secret(tmp_path / "none")


def test_a_secret_is_what_a_file_of_the_user_alone_holds(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_bytes(SECRET + b"\n")
    path.chmod(0o600)
    assert read_secret(path) == SECRET
