"""A PostgreSQL server for tests: one for all workers of a session, or one of a test's own, and an empty database each.

The server named in MIOFIND_TEST_POSTGRES, a URL of a role that may make databases and roles, else a new one of what is
installed: pg_ctl's, Debian's, the package pgserver's. A new one listens on a Unix socket alone and does not survive its
users: a keeper, a process in the background, ends it and removes its files once the last connection to the keeper is
closed, which the kernel does for a worker that is killed.

Run as a script, this is the keeper: `postgres_server.py FOLDER SETTING...` returns when the server is ready.
"""

from __future__ import annotations

import fcntl
import os
import pwd
import secrets
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

_LIMIT_S = 900.0
_IDLE_S = 60.0
"""How long a keeper waits for its first user."""

_SETTINGS = (
    *("listen_addresses=", "max_connections=200", "shared_buffers=32MB", "jit=off"),
    "deadlock_timeout=50ms",
)
_PASSING = ("fsync=off", "full_page_writes=off")
_KEEPER = "keeper.sock"


class PostgresServer:
    """A server, for as long as this is open.

    Attributes:
        url: of its database `postgres`, as the role that may do anything.
    """

    def __init__(self, folder: Path) -> None:
        self.url = f"postgresql://postgres@/postgres?host={folder}"
        self._keeper = socket.socket(socket.AF_UNIX)
        try:
            self._keeper.connect(str(folder / _KEEPER))
        except BaseException:
            self._keeper.close()
            raise

    def kill(self) -> None:
        """End the server as a power cut would."""
        self._order("kill")

    def start(self) -> None:
        """Start it again, where it was ended; returns once it answers."""
        self._order("start")

    def close(self) -> None:
        """Let it go. It ends with its last user."""
        self._keeper.close()

    def _order(self, order: str) -> None:
        self._keeper.sendall(f"{order}\n".encode())
        assert self._keeper.recv(100) == b"done\n", f"the server did not {order}: see its log"


@contextmanager
def new_server(*settings: str) -> Iterator[PostgresServer]:
    """A server of one's own, which may be killed and started again.

    Args:
        settings: such as "fsync=on"; a server for tests writes nothing to the disk for good.
    """
    server = _started(settings=settings)
    try:
        yield server
    finally:
        server.close()


@contextmanager
def new_database(server_url: str, template: str = "template1") -> Iterator[str]:
    """The URL of a new database of a server, which goes with the block whoever is connected to it."""
    import psycopg

    name = f"miofind_test_{secrets.token_hex(6)}"
    with psycopg.connect(server_url, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name} TEMPLATE {template}")
    try:
        yield of_database(server_url, name)
    finally:
        with psycopg.connect(server_url, autocommit=True) as connection:
            connection.execute(f"DROP DATABASE {name} WITH (FORCE)")


def of_database(server_url: str, name: str) -> str:
    """The URL of another database of a server."""
    address, _, settings = server_url.partition("?")
    return f"{address.rpartition('/')[0]}/{name}?{settings}".removesuffix("?")


@pytest.fixture(scope="session")
def postgres_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a server that all workers share: kill none of its processes but those of a database of your own."""
    named = os.environ.get("MIOFIND_TEST_POSTGRES")
    if named:
        yield named
        return
    base = tmp_path_factory.getbasetemp()
    server = _shared(base.parent if "PYTEST_XDIST_WORKER" in os.environ else base)
    try:
        yield server.url
    finally:
        server.close()


@pytest.fixture
def postgres_url(postgres_server: str) -> Iterator[str]:
    """The URL of an empty database."""
    with new_database(postgres_server) as url:
        yield url


@pytest.fixture(scope="session")
def _finddb_of_worker(postgres_server: str) -> Iterator[str]:
    from miofind.finddb import Store

    with new_database(postgres_server) as url:
        with Store(url) as store:
            store.open()
        yield url


@pytest.fixture
def finddb_url(_finddb_of_worker: str) -> str:
    """The URL of a FindDB with nothing in it: one of a worker's that is emptied, which takes less than a new one."""
    import psycopg

    from miofind.finddb import schema

    tables = [*schema.metadata.sorted_tables, *schema.server_metadata.sorted_tables]
    with psycopg.connect(_finddb_of_worker) as connection:
        connection.execute(f"TRUNCATE {', '.join(table.name for table in tables)} RESTART IDENTITY CASCADE")
    return _finddb_of_worker


def _shared(root: Path) -> PostgresServer:
    """The server of a session of tests: the one that another worker has started, or a new one."""
    noted = root / "postgres_server"
    with open(root / "postgres_server.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if noted.exists():
            with suppress(OSError):  # it has ended with those who used it
                return PostgresServer(Path(noted.read_text()))
        return _started(noted)


def _started(note: Path | None = None, settings: Sequence[str] = ()) -> PostgresServer:
    folder = Path(tempfile.mkdtemp(prefix="miofind-postgres-", dir="/tmp"))  # the path of a socket is short
    try:
        keeper = subprocess.run([sys.executable, __file__, str(folder), *settings], capture_output=True, text=True)
        assert keeper.returncode == 0, f"no PostgreSQL server: {keeper.stderr}"
        if note is not None:
            note.write_text(str(folder))
        return PostgresServer(folder)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


class _Keeper:
    """Makes, starts and ends the server in a folder."""

    def __init__(self, folder: Path, settings: Sequence[str]) -> None:
        self._folder = folder
        self._settings = settings
        self._user = None if os.geteuid() else _other_user()
        if self._user is not None:
            os.chown(folder, self._user.pw_uid, self._user.pw_gid)
        self._programs = self._usable(_programs())
        self._process: subprocess.Popen[bytes] | None = None

    def make(self) -> None:
        """Make its files. Its databases order texts as people do, not as C does: what needs that must say so."""
        always = ["--no-sync", "--auth=trust", "--encoding=UTF8", "--username=postgres", "--no-instructions"]
        with_icu = subprocess.run(self._initdb(*always, "--locale=C", "--locale-provider=icu", "--icu-locale=en-US"),
                                  **self._as_user, capture_output=True)  # fmt: skip
        if with_icu.returncode != 0:
            subprocess.run(self._initdb(*always, "--locale=C"), **self._as_user, check=True)

    def start(self) -> None:
        """Start it; returns once it answers."""
        settings = [word for setting in (*_SETTINGS, *_PASSING, *self._settings) for word in ("-c", setting)]
        command = [self._program("postgres"), "-D", str(self._data), "-k", str(self._folder), *settings]
        with open(self._folder / "log", "ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, **self._as_user)
        deadline = time.monotonic() + _LIMIT_S
        while not self._is_ready:
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError((self._folder / "log").read_text(errors="replace"))
            time.sleep(0.01)

    def kill(self) -> None:
        """End it at once. Harmless when repeated."""
        if self._process is not None:
            self._process.send_signal(signal.SIGQUIT)
            self._process.wait()
            (self._data / "postmaster.pid").unlink(missing_ok=True)
            self._process = None

    @property
    def _data(self) -> Path:
        return self._folder / "data"

    @property
    def _is_ready(self) -> bool:
        """Whether the server says so, in the eighth line of its lock file."""
        with suppress(FileNotFoundError):
            lines = (self._data / "postmaster.pid").read_text().splitlines()
            return len(lines) >= 8 and lines[7].strip() == "ready"
        return False

    @property
    def _as_user(self) -> dict[str, object]:
        """Settings of a process: PostgreSQL refuses to be run by root."""
        always: dict[str, object] = {"stdin": subprocess.DEVNULL, "cwd": self._folder}
        if self._user is None:
            return always
        return always | {"user": self._user.pw_uid, "group": self._user.pw_gid, "extra_groups": []}

    def _initdb(self, *arguments: str) -> list[str]:
        shutil.rmtree(self._data, ignore_errors=True)
        return [self._program("initdb"), "-D", str(self._data), *arguments]

    def _program(self, name: str) -> str:
        return str(self._programs / name)

    def _usable(self, programs: Path) -> Path:
        """The programs, or a copy of them where the user who runs them cannot enter their folder."""
        try:
            subprocess.run([str(programs / "initdb"), "--version"], **self._as_user, check=True, capture_output=True)
            return programs
        except PermissionError:
            package = programs.parents[1]
            for part in (package, package.with_name(f"{package.name}.libs")):
                if part.exists():
                    shutil.copytree(part, self._folder / "installed" / part.name, symlinks=True)
            return self._folder / "installed" / programs.relative_to(package.parent)


def _other_user() -> pwd.struct_passwd:
    """Who runs the server where that would be root."""
    with suppress(KeyError):
        return pwd.getpwnam("postgres")
    return pwd.getpwnam("nobody")


def _programs() -> Path:
    """The folder of the programs of PostgreSQL."""
    installed = [Path(os.path.realpath(named)) for named in [shutil.which("pg_ctl")] if named]
    installed += sorted(Path("/usr/lib/postgresql").glob("*/bin/pg_ctl"), key=lambda path: -float(path.parts[-3]))
    for pg_ctl in installed:
        if (pg_ctl.parent / "postgres").exists() and (pg_ctl.parent / "initdb").exists():
            return pg_ctl.parent
    from importlib.util import find_spec

    spec = find_spec("pgserver")
    if spec is None or spec.origin is None:
        raise RuntimeError("there is no PostgreSQL: install it (on Debian and Ubuntu postgresql), or pip's pgserver")
    return Path(spec.origin).parent / "pginstall" / "bin"


def _keep(keeper: _Keeper, listening: socket.socket) -> None:
    """Do what users order until the last of them has gone."""
    selector = selectors.DefaultSelector()
    selector.register(listening, selectors.EVENT_READ)
    had_users = False
    while len(selector.get_map()) > 1 or not had_users:
        ready = selector.select(None if had_users else _IDLE_S)
        if not ready:
            return
        for key, _ in ready:
            connection = key.fileobj
            assert isinstance(connection, socket.socket)
            if connection is listening:
                selector.register(connection.accept()[0], selectors.EVENT_READ)
                had_users = True
            elif order := connection.recv(100).decode().strip():
                (keeper.kill if order == "kill" else keeper.start)()
                with suppress(OSError):  # who ordered has gone
                    connection.sendall(b"done\n")
            else:
                selector.unregister(connection)
                connection.close()


def _main(folder: Path, settings: Sequence[str]) -> int:
    """Fork the keeper, and wait until its server is ready."""
    told, telling = os.pipe()
    if os.fork():
        os.close(telling)
        with os.fdopen(told) as pipe:
            complaint = pipe.read()
        print(complaint, end="", file=sys.stderr)
        return bool(complaint)
    os.setsid()  # Ctrl-C is its users' affair
    with open(folder / "keeper.log", "wb") as log:
        for stream in (1, 2):
            os.dup2(log.fileno(), stream)
    keeper = None
    try:
        keeper = _Keeper(folder, settings)
        keeper.make()
        keeper.start()
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(str(folder / _KEEPER))
            listening.listen(100)
            os.close(telling)
            _keep(keeper, listening)
    except Exception as error:
        with suppress(OSError):  # it was ready once
            os.write(telling, f"{type(error).__name__}: {error}\n".encode())
        return 1
    finally:
        if keeper is not None:
            keeper.kill()
        shutil.rmtree(folder, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(_main(Path(sys.argv[1]), sys.argv[2:]))
