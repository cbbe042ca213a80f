"""The binary cache among other users: files, links and folders that they own or can write to are not used."""

from __future__ import annotations

import gc
import hashlib
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from helpers.finddb.foreign_files import STRANGER, disown
from helpers.processes.waiting import LIMIT_S

import miofind
from miofind.compiler import BinaryCache, directory
from miofind.compiler.folder import NotPrivateError, PrivateFolder

KEY = hashlib.sha256(b"key").hexdigest()
OURS, THEIRS = b"\x7fELF ours", b"\x7fELF theirs"
Patch = pytest.MonkeyPatch


@pytest.fixture(autouse=True)
def own_substitute(tmp_path: Path, monkeypatch: Patch) -> None:
    """Take the place of the temporary folder that a process makes but once."""
    substitute = tmp_path / "substitute"
    substitute.mkdir(mode=0o700)
    monkeypatch.setattr(directory, "_temporary_directory", lambda: substitute)


def planted(folder: Path) -> list[Path]:
    """A whole entry with its own checksum, as the cache writes it; its files."""
    cache = BinaryCache(folder)
    assert cache.put(KEY, THEIRS, {}, "").path is not None
    return sorted(folder.iterdir())


def hard_link(file: Path, monkeypatch: Patch) -> None:
    os.link(file, file.parents[1] / f"other-name-{file.name}")


def soft_link(file: Path, monkeypatch: Patch) -> None:
    elsewhere = file.parents[1] / f"elsewhere-{file.name}"
    file.rename(elsewhere)
    file.symlink_to(elsewhere)


def loosen(file: Path, monkeypatch: Patch) -> None:
    file.chmod(0o620)


def make_pipe(file: Path, monkeypatch: Patch) -> None:
    file.unlink()
    os.mkfifo(file)


FOREIGN: dict[str, tuple[Callable[[Path, Patch], None], str]] = {
    "another user's": (disown, f"belongs to user {STRANGER}"),
    "a hard link": (hard_link, "has 2 names"),
    "a symbolic link": (soft_link, "is a link"),
    "writable by others": (loosen, r"can be written by others \(mode 620\)"),
    "a pipe": (make_pipe, "is no file"),
}


@pytest.mark.parametrize("suffix", [".cubin", ".json"])
@pytest.mark.parametrize("kind", FOREIGN)
def test_a_file_that_others_may_have_written_is_rebuilt(
    kind: str, suffix: str, tmp_path: Path, monkeypatch: Patch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its checksum stands beside it, and whoever writes the one writes the other."""
    make, told = FOREIGN[kind]
    folder = tmp_path / "kernels"
    planted(folder)
    make(folder / f"{KEY}{suffix}", monkeypatch)
    cache = BinaryCache(folder)
    assert cache.get(KEY) is None
    assert cache.get(KEY) is None
    (record,) = (record for record in caplog.records if record.levelno >= logging.WARNING)
    assert "empty that folder" in record.getMessage()
    with pytest.raises(NotPrivateError, match=told):
        PrivateFolder(folder).read(f"{KEY}{suffix}")
    monkeypatch.undo()
    cache.put(KEY, OURS, {}, "")
    found = cache.get(KEY)
    assert found is not None
    assert found.cubin == OURS


def test_what_is_linked_is_not_written_to(tmp_path: Path, monkeypatch: Patch) -> None:
    target = tmp_path / "target"
    target.write_text("mine")
    cache = BinaryCache(tmp_path / "kernels")
    assert cache.directory is not None
    (cache.directory / f"{KEY}.cubin").symlink_to(target)
    (cache.directory / f"{KEY}.json").symlink_to(tmp_path / "missing")
    cache.put(KEY, OURS, {}, "")
    assert target.read_text() == "mine"
    assert not (tmp_path / "missing").exists()
    assert not any(file.is_symlink() for file in cache.directory.iterdir())


@pytest.mark.parametrize("moment", ["before the first look", "after one"])
def test_a_folder_swapped_after_the_check_is_not_looked_at(moment: str, tmp_path: Path) -> None:
    """Neither read nor written."""
    folder, theirs = tmp_path / "kernels", tmp_path / "theirs"
    files = planted(theirs)
    contents = [file.read_bytes() for file in files]
    cache = BinaryCache(folder)
    assert cache.directory == folder
    if moment == "after one":
        cache.put(KEY, OURS, {}, "")
    folder.rename(tmp_path / "moved")
    theirs.rename(folder)
    found = cache.get(KEY)
    assert found is None or found.cubin == OURS
    assert (found is None) == (moment == "before the first look")
    cache.put(KEY, OURS, {}, "")
    assert [(folder / file.name).read_bytes() for file in files] == contents
    assert cache.clear() == 1
    assert [(folder / file.name).read_bytes() for file in files] == contents


def refused(folder: Path, caplog: pytest.LogCaptureFixture, told: str) -> None:
    """A cache goes on elsewhere, with one warning that says why, and neither reads nor writes in the folder."""
    before = {file: file.read_bytes() for file in folder.iterdir()} if folder.exists() else None
    caplog.clear()
    cache = BinaryCache(folder)
    assert cache.get(KEY) is None
    assert cache.put(KEY, OURS, {}, "").path is not None
    assert cache.directory != folder
    (record,) = caplog.records
    assert told in record.getMessage()
    assert before == ({file: file.read_bytes() for file in folder.iterdir()} if folder.exists() else None)


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702])
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_parent_that_others_can_write_is_not_trusted(
    depth: int, mode: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "a" / "b" / "c" / "kernels"
    planted(folder)
    above = folder.parents[depth]
    above.chmod(mode)
    refused(folder, caplog, f"others can write to {above} above it (mode {mode:o})")
    assert f"empty it and chmod go-w {above}" in caplog.text


@pytest.mark.parametrize("mode", [0o1777, 0o1770])
def test_a_parent_such_as_tmp_is_trusted(mode: int, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "tmp").mkdir()
    (tmp_path / "tmp").chmod(mode)
    folder = tmp_path / "tmp" / "kernels"
    planted(folder)
    found = BinaryCache(folder).get(KEY)
    assert found is not None
    assert caplog.records == []


def test_a_parent_of_another_user_is_not_trusted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: Patch
) -> None:
    """As a HOME that another user owns, in a container."""
    folder = tmp_path / "home" / ".cache" / "kernels"
    planted(folder)
    disown(tmp_path / "home", monkeypatch)
    refused(folder, caplog, f"{tmp_path / 'home'} above it belongs to user {STRANGER}")


def test_nothing_is_made_in_a_parent_that_is_not_trusted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: Patch
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    disown(home, monkeypatch)
    refused(home / ".cache" / "kernels", caplog, f"{home} above it belongs to user {STRANGER}")
    assert list(home.iterdir()) == []


def test_the_advice_for_a_folder_that_others_can_write_is_to_empty_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It was chmod alone, which keeps what they put there."""
    folder = tmp_path / "kernels"
    planted(folder)
    folder.chmod(0o777)
    refused(folder, caplog, "empty it and chmod 700 it")


def test_links_of_this_user_are_followed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As of ~/.cache to a larger disk."""
    (tmp_path / "disk" / "me").mkdir(parents=True)
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / ".cache").symlink_to("../second")
    (tmp_path / "second").symlink_to(tmp_path / "disk" / "." / "me")
    cache = BinaryCache(tmp_path / "home" / ".cache" / "kernels")
    written = cache.put(KEY, OURS, {}, "")
    assert written.path == tmp_path / "home" / ".cache" / "kernels" / f"{KEY}.cubin"
    assert (tmp_path / "disk" / "me" / "kernels" / f"{KEY}.cubin").read_bytes() == OURS
    assert caplog.records == []


def test_what_lies_above_the_target_of_a_link_is_checked(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    planted(tmp_path / "disk" / "me")
    (tmp_path / "disk").chmod(0o777)
    (tmp_path / "kernels").symlink_to(tmp_path / "disk" / "me")
    refused(tmp_path / "kernels", caplog, f"others can write to {tmp_path / 'disk'} above it")


def test_a_link_of_another_user_is_not_followed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: Patch
) -> None:
    planted(tmp_path / "theirs")
    link = tmp_path / "kernels"
    link.symlink_to(tmp_path / "theirs")
    disown(link, monkeypatch)
    refused(link, caplog, f"{link} is a link of user {STRANGER}")


def test_links_in_a_loop_end(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "one").symlink_to("other")
    (tmp_path / "other").symlink_to("one")
    assert BinaryCache(tmp_path / "one" / "kernels").put(KEY, OURS, {}, "").path is None
    (record,) = caplog.records
    assert "symbolic links" in record.getMessage()


def test_where_no_folder_is_private_nothing_is_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: Patch
) -> None:
    (tmp_path / "substitute").chmod(0o777)
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels").chmod(0o777)
    cache = BinaryCache(tmp_path / "kernels")
    assert cache.put(KEY, OURS, {}, "").path is None
    assert cache.get(KEY) is None
    assert cache.directory is None
    (record,) = caplog.records
    assert "others can write to it" in record.getMessage()


def test_folders_are_made_private_whatever_the_mask(tmp_path: Path) -> None:
    before = os.umask(0o002)
    try:
        planted(tmp_path / "deep" / "down" / "kernels")
    finally:
        os.umask(before)
    assert BinaryCache(tmp_path / "deep" / "down" / "kernels").get(KEY) is not None
    assert [(tmp_path / "deep" / name).stat().st_mode & 0o777 for name in (".", "down", "down/kernels")] == [0o700] * 3


def test_a_relative_folder_and_one_of_dots(tmp_path: Path, monkeypatch: Patch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    planted(tmp_path / "kernels")
    assert BinaryCache(Path("../kernels")).get(KEY) is not None
    assert BinaryCache(Path("./../here/.././kernels")).get(KEY) is not None


def test_a_folder_larger_than_any_binary_is_not_read(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr("miofind.compiler.folder._MAX_FILE_BYTES", 100)
    planted(tmp_path / "kernels")
    with (tmp_path / "kernels" / f"{KEY}.json").open("ab") as sidecar:
        sidecar.truncate(1 << 40)
    assert BinaryCache(tmp_path / "kernels").get(KEY) is None


def test_descriptors_end_with_their_cache(tmp_path: Path) -> None:
    """And threads that list the folder at a time each see all of it."""
    folder = tmp_path / "kernels"
    planted(folder)
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        assert BinaryCache(folder).get(KEY) is not None
        (tmp_path / "file").touch()
        BinaryCache(tmp_path / "file" / "kernels").get(KEY)
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= before
    private = PrivateFolder(folder)
    with ThreadPoolExecutor(8) as pool:
        assert {len(names) for names in pool.map(lambda _: private.names(), range(400))} == {2}


NAMESPACE = """
import sys
from pathlib import Path
from miofind.compiler import BinaryCache
print(BinaryCache(Path(sys.argv[1])).directory)
"""


@pytest.mark.skipif(shutil.which("unshare") is None or os.geteuid() != 0, reason="needs root and unshare")
def test_root_outside_of_a_container_is_root(tmp_path: Path) -> None:
    """In a container that does not map root, / and /tmp belong to the user that stands for all unmapped ones."""
    mine = tmp_path / "mine"
    mine.mkdir(mode=0o700)
    package = str(Path(miofind.__file__).parents[1])
    command = ["unshare", "--user", "--map-user=1000", sys.executable, "-c", NAMESPACE, str(mine / "kernels")]
    done = subprocess.run(
        command,
        env=os.environ | {"PYTHONPATH": package},
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT_S,
    )
    if "unshare" in done.stderr:
        pytest.skip(done.stderr)
    assert done.stdout.strip() == str(mine / "kernels"), done.stderr
