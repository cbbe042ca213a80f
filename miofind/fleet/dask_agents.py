"""Dask as the fleet's launcher: an agent on every Dask worker that has room for one.

Dask places agents and shows them; it holds no state. An agent is a child process of a Dask worker, and what it measures
is in its own files and on the FindDB's server. A worker that closes has its agent drain. One that is killed, or that
ends because its scheduler is gone, takes nothing along: the kernel sends the agent SIGTERM, and it drains by itself.

A worker has room for an agent by its resources: `dask worker tls://... --resources miofind=1`.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from miofind.errors import InvalidOptionError, MissingEnvironmentError, MissingLibraryError, described

try:
    from distributed import Client, Security, WorkerPlugin
except ImportError as error:
    raise MissingLibraryError(f"Dask cannot be imported ({error}): install miofind[fleet]") from error

logger = logging.getLogger(__name__)

RESOURCE = "miofind"
"""Of Dask workers: how many agents one has room for; at least 1 means one, which has all of the host's GPUs."""
TOPIC = "miofind-agents"
"""Of Dask's events: what became of agents."""

_PLUGIN = "miofind-agent"
_DRAINS_S = 30.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0
_CONNECTS_S = 30
_MOST_FAILURES = 5
_USAGE_ERROR = 2
_START = (
    "import sys; from miofind.process.parent import run_told_of_parent; "
    "run_told_of_parent(int(sys.argv[1]), sys.argv[2:])"
)


@dataclass(frozen=True, slots=True)
class Agent:
    """The process to start on a host.

    Attributes:
        arguments: of the Python that runs the Dask worker.
        environment: variables besides the worker's own.
    """

    arguments: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsFiles:
    """Paths of PEM files for connections to a Dask scheduler.

    Attributes:
        ca: the certificate authority's certificate.
        cert, key: the client's own.
    """

    ca: str
    cert: str
    key: str


class AgentPlugin(WorkerPlugin):
    """Keeps an agent running beside a Dask worker, for as long as the worker is there.

    One that ends is started again after a pause that doubles, unless its arguments are wrong.
    """

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._process: asyncio.subprocess.Process | None = None
        self._keeper: asyncio.Task[None] | None = None

    async def setup(self, worker: Any) -> None:
        """Start the agent where the worker has room for one."""
        if worker.state.total_resources.get(RESOURCE, 0) >= 1:
            self._keeper = asyncio.create_task(self._keep(worker))

    async def teardown(self, worker: Any) -> None:
        """Have the agent drain, and end it where it does not."""
        if self._keeper is None:
            return
        self._keeper.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._keeper
        process = self._process
        if process is None or process.returncode is not None:
            return
        process.terminate()
        try:
            await asyncio.wait_for(process.wait(), _DRAINS_S)
        except TimeoutError:
            process.kill()
            await process.wait()
        _tell(worker, "drained", code=process.returncode)

    async def _keep(self, worker: Any) -> None:
        pause_s, failures = _FIRST_PAUSE_S, 0
        while True:
            began = asyncio.get_running_loop().time()
            process = self._process = await self._started()
            _tell(worker, "started", pid=process.pid)
            code = await process.wait()
            has_run = asyncio.get_running_loop().time() - began > _LONGEST_PAUSE_S
            failures = 0 if code == 0 or has_run else failures + 1
            _tell(worker, "ended", code=code, failures=failures)
            if code == _USAGE_ERROR:
                logger.error("the agent's arguments are wrong, it is not started again: %s", self._agent.arguments)
                return
            pause_s = _FIRST_PAUSE_S if has_run else min(2 * pause_s, _LONGEST_PAUSE_S)
            await asyncio.sleep(pause_s)

    async def _started(self) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            sys.executable,
            "-c",
            _START,
            str(os.getpid()),
            *self._agent.arguments,
            env={**os.environ, **self._agent.environment},
            stdin=asyncio.subprocess.DEVNULL,
        )


def _tell(worker: Any, what: str, **facts: Any) -> None:
    """One more of Dask's events; a scheduler that is gone hears nothing."""
    try:
        worker.log_event(TOPIC, {"what": what, **facts})
    except Exception as error:  # whatever Dask raises, the agent goes on
        logger.debug("no event: %s", described(error))


class Agents:
    """The agents that a Dask scheduler's workers keep.

    Workers that come later get one, too, as long as the scheduler lives.
    """

    def __init__(self, client: Any) -> None:
        self._client = client

    def hosts(self) -> tuple[str, ...]:
        """Addresses of the workers that have room for an agent."""
        workers = self._client.scheduler_info(n_workers=-1)["workers"]
        return tuple(sorted(name for name, worker in workers.items() if worker["resources"].get(RESOURCE, 0) >= 1))

    def start(self, agent: Agent) -> None:
        """Have every worker with room run an agent, in place of the one that it runs."""
        self._client.register_plugin(AgentPlugin(agent), name=_PLUGIN)

    def stop(self) -> None:
        """Have all agents drain; returns once they have."""
        self._client.unregister_worker_plugin(name=_PLUGIN)

    def check(self) -> None:
        """Do nothing while any worker's agent works, or may be about to.

        Raises:
            MissingEnvironmentError: each worker's has failed soon after its start, again and again.
        """
        try:
            events, hosts = self.events(), self.hosts()
        except (OSError, RuntimeError) as error:
            logger.warning("Dask's scheduler does not answer: %s", described(error))
            return
        last = {event["worker"]: event for event in events if event["what"] in ("ended", "drained")}
        codes = [last.get(host, {}).get("code") for host in hosts]
        failures = [last.get(host, {}).get("failures", 0) for host in hosts]
        if failures and all(n >= _MOST_FAILURES or c == _USAGE_ERROR for n, c in zip(failures, codes, strict=True)):
            told = f"the agents of all {len(codes)} of Dask's workers end at once, with exit code {codes[0]}"
            raise MissingEnvironmentError(f"{told}: what they say is on the stderr of `dask worker`")

    def events(self) -> tuple[dict[str, Any], ...]:
        """What became of agents, oldest first, as long as the scheduler remembers."""
        return tuple(event for _, event in self._client.get_events(TOPIC))


@contextlib.contextmanager
def connected(scheduler: str, tls: TlsFiles | None = None) -> Iterator[Agents]:
    """The agents of a Dask scheduler.

    Args:
        scheduler: its address, such as "tls://host:8786".
        tls: what to connect with; what Dask's configuration names if left out.

    Raises:
        InvalidOptionError: an address that is none, or one of another host without TLS.
        MissingEnvironmentError: no scheduler answers there.
    """
    refuse_open_address(scheduler)
    security = _security(scheduler, tls)
    try:
        client = Client(scheduler, security=security, timeout=_CONNECTS_S, set_as_default=False)
    except (OSError, ValueError, RuntimeError, TypeError) as error:
        told = f"no Dask scheduler answers at {scheduler}: {described(error)}"
        raise MissingEnvironmentError(f"{told}. Start one with `dask scheduler`, and workers on the hosts") from error
    try:
        yield Agents(client)
    finally:
        client.close()


def refuse_open_address(scheduler: str) -> None:
    """Do nothing for an address that may be connected to.

    A Dask scheduler runs whatever its clients send, and its workers whatever it sends.

    Raises:
        InvalidOptionError: an address that is none, or one of another host without TLS.
    """
    try:
        parts = urlsplit(scheduler)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise InvalidOptionError(f"scheduler={scheduler!r:.200} is no address: {error}") from error
    if parts.scheme not in ("tls", "tcp") or host is None or port is None:
        raise InvalidOptionError(f"scheduler={scheduler!r:.200} must be an address such as tls://host:8786")
    if parts.scheme == "tcp" and not _is_loopback(host):
        raise InvalidOptionError(
            f"scheduler={scheduler!r:.200} is another host without TLS, where anyone who reaches it can run programs: "
            f"start it with --tls-ca-file, --tls-cert and --tls-key, and use tls://{host}:{port}"
        )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _security(scheduler: str, tls: TlsFiles | None) -> Any:
    if not scheduler.startswith("tls:"):
        return None
    if tls is None:
        return Security(require_encryption=True)
    missing = next((path for path in (tls.ca, tls.cert, tls.key) if not os.path.isfile(path)), None)
    if missing is not None:
        raise InvalidOptionError(f"{missing!r:.200} is no file: name the CA's, the client's certificate and its key")
    return Security(require_encryption=True, tls_ca_file=tls.ca, tls_client_cert=tls.cert, tls_client_key=tls.key)
