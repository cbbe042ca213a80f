"""A campaign on one GPU and on all GPUs of a host, each with an agent of its own, as if they were hosts.

    python benchmarks/fleet_gpus.py --json benchmarks/results/fleet_gpus_4xh200.json
    python benchmarks/fleet_gpus.py --gpus 0,1 -- --suite resnet50 --batch 32 --dtype float16 --layout NHWC

The words behind -- say what is tuned. Agents share nothing but the server, which is started here, and the binaries: a
first tuning compiles them and is not timed (--warm-only does it in a run of its own). Plans are made in each agent.
Agents wait with their canaries measured; the seconds are the server's, from the first claim of a job to the end of the
last one, its rows merged. The host's processors are shared by all agents and the server; those of real hosts are not.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import script
from finddb_figures import provenance
from sqlalchemy import text

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from helpers.finddb.postgres_server import new_database, new_server

from miofind.device.device import cuda_device_count
from miofind.errors import NoDeviceError
from miofind.fleet.database import FleetDatabase

DEFAULT = ("--suite", "yardstick", "--dtype", "float16", "--layout", "NHWC")
LIMIT_S = 540.0
_LOOK_S = 0.02
_ENDS_S = 60.0

_READY = text("SELECT count(*) FROM gpu WHERE worker_id IS NOT NULL AND (NOT :canaries OR canaries <> '{}')")
_BEGUN = text("SELECT now() FROM (SELECT FROM job WHERE state <> 'new' LIMIT 1) AS first")
_LEFT = text("SELECT count(*) FROM job WHERE state IN ('new', 'leased')")
_END = text("SELECT extract(epoch FROM max(finished_at) - CAST(:began AS timestamptz))::float8 FROM job")
_BY_AGENT = text("SELECT count(*), sum(seconds), extract(epoch FROM max(finished_at) - CAST(:began AS timestamptz))"
                 "::float8 FROM job GROUP BY worker_id ORDER BY 1")  # fmt: skip
_BY_STATE = text("SELECT state, count(*) FROM job GROUP BY state")
_DEVICES = text("SELECT string_agg(DISTINCT device, ', ') FROM gpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class Folders:
    """Where FindDBs and binaries are."""

    finddbs: Path
    cache: Path


def run(folders: Folders, places: Sequence[tuple[str, ...]], asked: Sequence[str], limit_s: float) -> dict[str, Any]:
    """Figures of one campaign over agents of these places, which are options of `miofind fleet worker`."""
    with ExitStack() as stack:
        url = stack.enter_context(new_database(stack.enter_context(new_server()).url))
        database = stack.enter_context(closing(FleetDatabase(url)))
        database.create()
        environment = _environment(folders, url)
        for number, place in enumerate(places):
            stack.enter_context(_agent(place, folders.finddbs / f"agent{len(places)}_{number}.db", environment))
        canaries = places[0][0] == "--gpus"
        _until(lambda: _scalar(database, _READY, canaries=canaries) >= (len(places) if canaries else 1), limit_s)
        time.sleep(1.0)  # their threads are idle
        submit = [sys.executable, "-m", "miofind", "fleet", "submit", *asked, "--name", "scaling", "--json"]
        told = subprocess.run(submit, env=environment, stdout=subprocess.PIPE, text=True, check=True)
        began = _until(lambda: _scalar(database, _BEGUN), limit_s, every_s=_LOOK_S)
        _until(lambda: not _scalar(database, _LEFT), limit_s)
        with database.transaction() as connection:
            by_agent = [list(map(float, row)) for row in connection.execute(_BY_AGENT, {"began": began}).all()]
            states = {row[0]: row[1] for row in connection.execute(_BY_STATE).all()}
        return {
            "agents": len(places),
            "devices": _scalar(database, _DEVICES),
            "problems": json.loads(told.stdout)["problems"],
            "states": states,
            "seconds": _scalar(database, _END, began=began),
            "gpu_seconds": sum(seconds for _, seconds, _ in by_agent),
            "problems_seconds_end_by_agent": by_agent,
        }


def _environment(folders: Folders, url: str) -> dict[str, str]:
    alone = {"MIOFIND_DB": url, "MIOFIND_SYSTEM_DB": "", "MIOFIND_CACHE_DIR": str(folders.cache)}
    return os.environ | alone


@contextmanager
def _agent(place: tuple[str, ...], finddb: Path, environment: dict[str, str]) -> Iterator[None]:
    """An agent with a FindDB of its own, which drains at the end."""
    command = [sys.executable, "-m", "miofind", "fleet", "worker", *place, "--db", str(finddb)]
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL) as process:
        try:
            yield
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(_ENDS_S)
            except subprocess.TimeoutExpired:
                process.kill()


def _scalar(database: FleetDatabase, statement: Any, **values: object) -> Any:
    with database.statement() as connection:
        return connection.execute(statement, values).scalar()


def _until(look: Callable[[], Any], limit_s: float, *, every_s: float = 0.1) -> Any:
    """What is looked for, once it is there."""
    deadline = time.monotonic() + limit_s
    while not (found := look()):
        if time.monotonic() > deadline:
            raise SystemExit(f"it was not done within {limit_s:.0f} s: give more by --limit")
        time.sleep(every_s)
    return found


def _warm(folders: Folders, places: Sequence[tuple[str, ...]], asked: Sequence[str]) -> None:
    """Compile what the campaign needs."""
    ordinals = ",".join(place[1] for place in places)
    where = ("--gpus", ordinals) if places[0][0] == "--gpus" else ("--device", "cpu")
    command = [sys.executable, "-m", "miofind", "tune", *asked, *where, "--json"]
    environment = _environment(folders, "") | {"MIOFIND_DB": str(folders.finddbs / "warm.db")}
    done = subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, check=False)
    if done.returncode not in (0, 1):
        raise SystemExit(f"{shlex.join(command)} ended with {done.returncode}")


def _places(gpus: str, cpu_agents: int) -> list[tuple[str, ...]]:
    if cpu_agents:
        return [("--device", "cpu")] * cpu_agents
    ordinals = [str(number) for number in range(cuda_device_count())] if gpus == "all" else gpus.split(",")
    if not ordinals:
        raise NoDeviceError("this machine has no GPU that CUDA sees: check `nvidia-smi`")
    return [("--gpus", ordinal) for ordinal in ordinals]


def main() -> None:
    """Run the script."""
    parser = script.parser(__doc__)
    parser.add_argument("--gpus", default="all", help="one agent each; the first one is the one that is alone")
    parser.add_argument("--cpu-agents", type=int, default=0, metavar="N", help="agents of the CPU place instead")
    parser.add_argument("--limit", type=script.seconds, default=LIMIT_S, metavar="S", help="of each campaign")
    parser.add_argument("--cache", type=Path, metavar="FOLDER", help="keep the binaries there")
    parser.add_argument("--warm-only", action="store_true", help="compile into --cache, and measure nothing")
    parser.add_argument("--warmed", action="store_true", help="an earlier run has compiled into --cache")
    parser.add_argument("--json", type=script.output, default=None, metavar="FILE")
    parser.add_argument("asked", nargs="*", help="words of `miofind fleet submit`, behind --")
    arguments = parser.parse_args()
    if (arguments.warm_only or arguments.warmed) and arguments.cache is None:
        parser.error("--warm-only and --warmed need --cache")
    asked = arguments.asked or list(DEFAULT)
    places = _places(arguments.gpus, arguments.cpu_agents)
    with tempfile.TemporaryDirectory() as name:
        folders = Folders(finddbs=Path(name), cache=arguments.cache or Path(name) / "cache")
        if not arguments.warmed:
            _warm(folders, places, asked)
        if arguments.warm_only:
            return
        one = run(folders, places[:1], asked, arguments.limit)
        all_ = run(folders, places, asked, arguments.limit)
    for found in (one, all_):
        print(f"{found['agents']} agents: {found['problems']} problems in {found['seconds']:.1f} s, "
              f"{found['gpu_seconds']:.1f} s of their devices")  # fmt: skip
        for problems, seconds, end in found["problems_seconds_end_by_agent"]:
            print(f"  {problems:.0f} problems, {seconds:.1f} s of work, the last one's end at {end:.1f} s")
    speed_up = one["seconds"] / all_["seconds"]
    print(f"speed-up {speed_up:.2f} of {len(places)}")
    if arguments.json is not None:
        told = provenance() | {"gpu": all_["devices"], "campaign": shlex.join(asked)}
        told |= {"one": one, "all": all_, "speed_up": speed_up}
        arguments.json.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    script.run(main)
