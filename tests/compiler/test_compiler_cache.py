"""The cache of binaries: round trips, damage, bounds, folders that cannot or must not be used."""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from helpers.finddb.foreign_files import disown

from miofind.compiler import Binary, BinaryCache, KernelResources
from miofind.compiler.directory import default_directory
from miofind.compiler.folder import PrivateFolder

RESOURCES = {"scale": KernelResources(registers=32, spill_bytes=4, stack_bytes=8, shared_bytes=1024)}


def key_of(number: int) -> str:
    return hashlib.sha256(str(number).encode()).hexdigest()


def cubin_of(number: int, size: int = 4000) -> bytes:
    return b"\x7fELF" + hashlib.sha256(str(number).encode()).digest() * (size // 32)


def put(cache: BinaryCache, number: int, size: int = 4000) -> Binary:
    return cache.put(key_of(number), cubin_of(number, size), RESOURCES, f"log {number}")


@pytest.fixture
def cache(tmp_path: Path) -> BinaryCache:
    return BinaryCache(tmp_path / "kernels")


def folder(cache: BinaryCache) -> Path:
    assert cache.directory is not None
    return cache.directory


def test_round_trip(cache: BinaryCache) -> None:
    assert cache.get(key_of(1)) is None
    written = put(cache, 1)
    assert cache.get(key_of(1)) == written
    assert written.path == folder(cache) / f"{key_of(1)}.cubin"
    assert written.path.read_bytes() == written.cubin
    assert BinaryCache(folder(cache)).get(key_of(1)) == written
    assert BinaryCache(str(folder(cache))).get(key_of(1)) == written


def test_stats_and_clear(cache: BinaryCache) -> None:
    put(cache, 1)
    put(cache, 2)
    cache.get(key_of(1))
    cache.get(key_of(3))
    stats = cache.stats()
    assert (stats.entries, stats.hits, stats.misses, stats.max_bytes) == (2, 1, 1, 1 << 30)
    assert stats.bytes == sum(file.stat().st_size for file in folder(cache).iterdir())
    assert cache.clear() == 2
    assert list(folder(cache).iterdir()) == []
    assert cache.get(key_of(1)) is None
    assert put(cache, 1).path is not None


def test_clear_leaves_strange_files(cache: BinaryCache) -> None:
    put(cache, 1)
    (folder(cache) / "notes.txt").write_text("mine")
    cache.clear()
    assert [file.name for file in folder(cache).iterdir()] == ["notes.txt"]


def sidecar_with(**changes: object) -> Callable[[Path, Path], None]:
    def damage(cubin: Path, sidecar: Path) -> None:
        sidecar.write_text(json.dumps({**json.loads(sidecar.read_text()), **changes}))

    return damage


def flip(cubin: Path, sidecar: Path) -> None:
    content = bytearray(cubin.read_bytes())
    content[-1] ^= 1
    cubin.write_bytes(content)


DAMAGE: dict[str, Callable[[Path, Path], object]] = {
    "cubin flipped": flip,
    "cubin cut short": lambda cubin, sidecar: cubin.write_bytes(cubin.read_bytes()[:100]),
    "cubin empty": lambda cubin, sidecar: cubin.write_bytes(b""),
    "cubin missing": lambda cubin, sidecar: cubin.unlink(),
    "cubin no binary": lambda cubin, sidecar: cubin.write_text("PTX"),
    "sidecar missing": lambda cubin, sidecar: sidecar.unlink(),
    "sidecar cut short": lambda cubin, sidecar: sidecar.write_text(sidecar.read_text()[:50]),
    "sidecar empty": lambda cubin, sidecar: sidecar.write_text(""),
    "sidecar not UTF-8": lambda cubin, sidecar: sidecar.write_bytes(b"\xff\xff"),
    "sidecar a list": lambda cubin, sidecar: sidecar.write_text("[]"),
    "sidecar without fields": lambda cubin, sidecar: sidecar.write_text("{}"),
    "another entry's sidecar": sidecar_with(key=key_of(7)),
    "another format": sidecar_with(format=0),
    "strange resources": sidecar_with(resources={"scale": {"threads": 1}}),
    "resources a list": sidecar_with(resources=[1]),
    "log a number": sidecar_with(log=1),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_entry_is_a_miss_and_is_replaced(cache: BinaryCache, damage: str) -> None:
    written = put(cache, 1)
    assert written.path is not None
    DAMAGE[damage](written.path, written.path.with_suffix(".json"))
    assert cache.get(key_of(1)) is None
    assert put(cache, 1) == written
    assert cache.get(key_of(1)) == written


def test_least_recently_used_go_first(tmp_path: Path) -> None:
    cache = BinaryCache(tmp_path / "kernels", max_bytes=45_000)
    for number in range(8):
        put(cache, number)
        for file in folder(cache).glob(f"{key_of(number)}.*"):
            os.utime(file, ns=(0, (number + 1) * 10**9))
    cache.get(key_of(0))
    for number in range(8, 12):
        put(cache, number)
    kept = [number for number in range(12) if cache.get(key_of(number))]
    assert 0 in kept
    assert kept[-4:] == [8, 9, 10, 11]
    assert 1 not in kept
    assert cache.stats().bytes <= 45_000


def test_bound_holds_whatever_is_written(tmp_path: Path) -> None:
    cache = BinaryCache(tmp_path / "kernels", max_bytes=50_000)
    for number in range(60):
        put(cache, number, size=500 + 977 * number % 9000)
        assert cache.stats().bytes <= 50_000
        assert cache.get(key_of(number)) is not None


def test_bound_counts_what_others_wrote(tmp_path: Path) -> None:
    mine, theirs = (BinaryCache(tmp_path / "kernels", max_bytes=60_000) for _ in range(2))
    for number in range(0, 40, 2):
        put(mine, number)
        put(theirs, number + 1)
    assert mine.stats().bytes <= 60_000 * 17 // 16


def test_readers_and_writers_while_entries_are_evicted(tmp_path: Path) -> None:
    caches = [BinaryCache(tmp_path / "kernels", max_bytes=20_000) for _ in range(4)]

    def work(worker: int) -> int:
        hits = 0
        for turn in range(150):
            number = (worker + turn * 7) % 9
            binary = caches[worker].get(key_of(number)) or put(caches[worker], number)
            assert binary.cubin == cubin_of(number)
            hits += binary.log == f"log {number}"
        return hits

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(work, range(4))) == [150] * 4


def test_files_of_writers_that_died_are_removed(tmp_path: Path) -> None:
    cache = BinaryCache(tmp_path / "kernels")
    old, new = (folder(cache) / f".writing-{name}" for name in ("old", "new"))
    old.touch()
    new.touch()
    os.utime(old, (time.time() - 10_000,) * 2)
    put(cache, 1)
    assert not old.exists()
    assert new.exists()


def test_a_new_folder_is_private(tmp_path: Path) -> None:
    cache = BinaryCache(tmp_path / "deep" / "down" / "kernels")
    assert folder(cache).stat().st_mode & 0o777 == 0o700
    written = put(cache, 1)
    assert written.path is not None
    assert written.path.stat().st_mode & 0o077 == 0


def test_a_folder_that_others_can_read_is_made_private(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels").chmod(0o755)
    cache = BinaryCache(tmp_path / "kernels")
    assert folder(cache) == tmp_path / "kernels"
    assert folder(cache).stat().st_mode & 0o777 == 0o700
    assert caplog.records == []


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o770, 0o720])
def test_a_folder_that_others_can_write_is_not_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, mode: int
) -> None:
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels").chmod(mode)
    check_substitute(tmp_path / "kernels", caplog, "others can write to it")


def test_a_folder_of_another_user_is_not_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "kernels").mkdir(mode=0o700)
    disown(tmp_path / "kernels", monkeypatch)
    check_substitute(tmp_path / "kernels", caplog, "it belongs to user")


def check_substitute(asked: Path, caplog: pytest.LogCaptureFixture, reason: str) -> None:
    """A private temporary folder takes the place of the one asked for, with one warning."""
    cache = BinaryCache(asked)
    written = put(cache, 1)
    assert cache.get(key_of(1)) == written
    assert list(asked.iterdir()) == []
    assert folder(cache) != asked
    assert folder(cache).stat().st_mode & 0o777 == 0o700
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert reason in record.getMessage()
    assert str(asked) in record.getMessage()


def test_a_path_that_cannot_be_a_folder(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    cache = BinaryCache(tmp_path / "file" / "kernels")
    assert cache.get(key_of(1)) is None
    for number in range(3):
        assert put(cache, number).path is None
    stats = cache.stats()
    assert (stats.directory, stats.entries, cache.clear()) == (None, 0, 0)
    (record,) = caplog.records
    assert "not kept" in record.getMessage()
    assert str(tmp_path / "file" / "kernels") in record.getMessage()


@pytest.mark.parametrize("number", [errno.EROFS, errno.ENOSPC, errno.EACCES, errno.EDQUOT])
def test_a_folder_that_takes_no_files(
    cache: BinaryCache, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    kept = put(cache, 1)

    def refuse(*args: object, **named: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(PrivateFolder, "replace", refuse)
    assert put(cache, 2).path is None
    assert put(cache, 3).path is None
    assert cache.get(key_of(1)) == kept
    (record,) = caplog.records
    assert os.strerror(number) in record.getMessage()


def test_a_disk_that_fills_up_leaves_no_rest(
    cache: BinaryCache, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder(cache)

    def refuse(source: str, target: str, **folders: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "replace", refuse)
    assert put(cache, 1).path is None
    assert list(folder(cache).iterdir()) == []


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser may write anywhere")
def test_a_read_only_folder_is_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    written = put(BinaryCache(tmp_path / "kernels"), 1)
    (tmp_path / "kernels").chmod(0o500)
    cache = BinaryCache(tmp_path / "kernels")
    assert cache.get(key_of(1)) == written
    assert put(cache, 2).path is None
    assert len(caplog.records) == 1


def test_default_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MIOFIND_CACHE_DIR", str(tmp_path / "chosen"))
    assert default_directory() == tmp_path / "chosen" / "kernels"
    assert folder(BinaryCache()) == tmp_path / "chosen" / "kernels"
    monkeypatch.delenv("MIOFIND_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert default_directory() == tmp_path / "xdg" / "miofind" / "kernels"
