"""The PostgreSQL server that tests run against: databases of their own, and nothing left behind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psycopg
import pytest
from helpers.finddb.postgres_server import new_database, new_server
from helpers.processes.waiting import wait_until

USER = """
from helpers.finddb.postgres_server import new_server
with new_server() as server:
    print(server.url.partition("host=")[2], flush=True)
    input()
"""


def test_databases_are_apart(postgres_server, postgres_url):
    with new_database(postgres_server) as other, psycopg.connect(postgres_url) as connection:
        connection.execute("CREATE TABLE mine (x int)")
        connection.commit()
        with psycopg.connect(other) as elsewhere, pytest.raises(psycopg.errors.UndefinedTable):
            elsewhere.execute("SELECT * FROM mine")
    with pytest.raises(psycopg.OperationalError, match="does not exist"):
        psycopg.connect(other)


def test_a_server_of_ones_own_can_be_killed_and_started_again():
    with new_server() as server:
        with psycopg.connect(server.url) as connection:
            connection.execute("CREATE TABLE kept AS SELECT 1 AS x")
        server.kill()
        with pytest.raises(psycopg.OperationalError):
            psycopg.connect(server.url)
        server.start()
        with psycopg.connect(server.url) as connection:
            assert connection.execute("SELECT x FROM kept").fetchone() == (1,)


def test_a_server_ends_with_a_user_that_is_killed():
    path = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    with subprocess.Popen([sys.executable, "-c", USER], stdin=-1, stdout=-1, text=True, env=path) as user:
        assert user.stdout is not None
        folder = Path(user.stdout.readline().strip())
        assert (folder / "data" / "postmaster.pid").exists()
        user.kill()
    wait_until(lambda: not folder.exists(), "the folder of the server is removed")
