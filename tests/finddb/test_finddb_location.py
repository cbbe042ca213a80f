"""Where FindDBs are looked for, and what is said of it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from miofind.errors import DatabaseError
from miofind.finddb import MEMORY, network_file_system, shipped_paths, system_addresses, user_path
from miofind.finddb.location import checked_path, shown

MOUNTS = """\
/dev/sda1 / ext4 rw 0 0
server:/home /home nfs4 rw 0 0
/dev/sdb1 /home/local\\040disk xfs rw 0 0
//server/share /mnt/share cifs rw 0 0
host:/x /mnt/ssh fuse.sshfs rw 0 0
tmpfs /mnt/ssh/tmp tmpfs rw 0 0
garbage
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/finddb.db", ""),
        ("/home/ann/finddb.db", "nfs4"),
        ("/homes/ann/finddb.db", ""),
        ("/home/local disk/finddb.db", ""),
        ("/mnt/share/a/b/finddb.db", "cifs"),
        ("/mnt/ssh/finddb.db", "fuse.sshfs"),
        ("/mnt/ssh/tmp/finddb.db", ""),
    ],
)
def test_network_file_systems(tmp_path, path, kind):
    mounts = tmp_path / "mounts"
    mounts.write_text(MOUNTS)
    assert network_file_system(Path(path), mounts) == kind


def test_links_are_followed_to_the_file_system(tmp_path):
    mounts = tmp_path / "mounts"
    remote = tmp_path / "remote"
    remote.mkdir()
    (tmp_path / "link").symlink_to(remote)
    mounts.write_text(f"/dev/sda1 / ext4 rw 0 0\nserver:/x {remote} nfs rw 0 0\n")
    assert network_file_system(tmp_path / "link" / "finddb.db", mounts) == "nfs"


def test_a_system_without_mounts_is_taken_for_local(tmp_path):
    assert network_file_system(tmp_path, tmp_path / "missing") == ""


def test_the_user_path():
    assert user_path({"MIOFIND_DB": "some.db"}) == "some.db"
    assert user_path({"MIOFIND_DB": MEMORY}) == MEMORY
    assert Path(user_path({})).name == "finddb.db"
    assert user_path({"MIOFIND_DB": ""}) == user_path({})


def test_the_shipped_paths(tmp_path):
    (tmp_path / "b.db").touch()
    (tmp_path / "a.db").touch()
    (tmp_path / "readme.txt").touch()
    assert shipped_paths({"MIOFIND_SYSTEM_DB": ""}) == ()
    assert shipped_paths({"MIOFIND_SYSTEM_DB": str(tmp_path)}) == (tmp_path / "a.db", tmp_path / "b.db")
    assert shipped_paths({"MIOFIND_SYSTEM_DB": str(tmp_path / "b.db")}) == (tmp_path / "b.db",)
    assert all(path.parent.name == "prebuilt" for path in shipped_paths({}))
    with pytest.raises(DatabaseError, match="MIOFIND_SYSTEM_DB"):
        shipped_paths({"MIOFIND_SYSTEM_DB": str(tmp_path / "missing")})


def test_the_system_finddb_may_be_on_a_server(tmp_path):
    (tmp_path / "a.db").touch()
    environ = {"MIOFIND_SYSTEM_DB": "postgresql://host/results"}
    assert system_addresses(environ) == ("postgresql://host/results",)
    assert shipped_paths(environ) == ()
    assert system_addresses({"MIOFIND_SYSTEM_DB": str(tmp_path)}) == (tmp_path / "a.db",)
    assert system_addresses({}) == shipped_paths({})
    with pytest.raises(DatabaseError, match="named by http"):
        system_addresses({"MIOFIND_SYSTEM_DB": "http://host/results"})


def test_paths_of_stores(tmp_path):
    assert checked_path(MEMORY) is None
    assert checked_path("~/finddb.db") == Path.home() / "finddb.db"
    assert checked_path(tmp_path) == tmp_path


def test_shown_paths_tell_little_of_the_machine(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", "/home/ann")
    assert shown(Path("/home/ann/data/finddb.db")) == os.path.join("~", "data", "finddb.db")
    assert shown(Path("/mnt/projects/secret/data/finddb.db")) == os.path.join("...", "data", "finddb.db")
    assert shown(None) == "the FindDB in memory"
