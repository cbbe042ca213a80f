"""Compiles what the jobs that wait will want into a store of binaries, on hosts that need no GPU.

Several such hosts share the work through the store alone: each takes what is there already from it, and goes through a
page of jobs in an order of its own, so that two seldom compile the same at the same time. Nothing is written to the
server.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

from sqlalchemy import text

from miofind.compiler import Compiler, toolchain
from miofind.core.problem import ProblemDescription
from miofind.device.device import IDENTITY, Device
from miofind.errors import CompileError, DatabaseError, InvalidProblemError, NoDeviceError, raise_if_interrupted
from miofind.find.wanted_kernels import kernels_of, one_a_binary, solvers_with_kernels
from miofind.fleet.binary_store import SharedCache
from miofind.fleet.campaign_options import options_of
from miofind.fleet.database import FleetDatabase, UnreachableError
from miofind.solver.registry import Registry
from miofind.solver.steps import KernelStep
from miofind.tune.values import TuneOptions

logger = logging.getLogger(__name__)

_PAGE = 64
_IDLE_S = (2.0, 6.0)
_RETRY_S = (1.0, 10.0)

_WAITING = text("""
SELECT job.id, job.weight, job.device, job.network_config, campaign.id AS campaign, campaign.priority, campaign.options
FROM job JOIN campaign ON campaign.id = job.campaign_id
WHERE job.state = 'new' AND NOT campaign.paused
    AND (NOT :goes_on OR (campaign.priority, job.weight, job.id) < (:priority, :weight, :id))
ORDER BY campaign.priority DESC, job.weight DESC, job.id DESC LIMIT :most
""")
_TOP = {"goes_on": False, "priority": 0, "weight": 0.0, "id": 0}


@dataclass(frozen=True, slots=True, kw_only=True)
class FarmEnd:
    """What a compile host did.

    Attributes:
        problems: whose kernels it went through.
        kernels: that are in the store by its work or others'.
        failed: that cannot be compiled; agents find that out again.
    """

    problems: int
    kernels: int
    failed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """A problem whose kernels a kind of device will want."""

    device: Device
    problem: ProblemDescription
    options: TuneOptions


class CompileFarm:
    """Works until it is told to end.

    Args:
        compiler: over a `SharedCache`.
        workers: threads; one a processor if left out.
    """

    def __init__(self, database: FleetDatabase, compiler: Compiler, *, workers: int | None = None) -> None:
        self._database = database
        self._compiler = compiler
        self._workers = workers
        self._registry = Registry.default()
        self._seen: set[tuple[int, str, str]] = set()
        self._built: set[str] = set()
        self._failed: set[str] = set()
        self._problems = 0

    def run(self, *, until_idle_s: float | None = None, for_s: float | None = None) -> FarmEnd:
        """Compile until Ctrl-C, SIGTERM under `terminable`, or an end that was asked for.

        Raises:
            DatabaseError: the server refuses. MissingLibraryError: NVRTC is not installed.
        """
        began = busy_at = time.monotonic()
        try:
            while for_s is None or time.monotonic() - began < for_s:
                try:
                    worked = self.compile_waiting()
                except UnreachableError as error:
                    logger.warning("%s; it is asked again", error)
                    time.sleep(random.uniform(*_RETRY_S))
                    continue
                busy_at = time.monotonic() if worked else busy_at
                idle_s = time.monotonic() - busy_at
                if until_idle_s is not None and idle_s >= until_idle_s:
                    break
                left_s = _IDLE_S[1] if until_idle_s is None else until_idle_s - idle_s
                time.sleep(min(random.uniform(*_IDLE_S), left_s))
        except KeyboardInterrupt:
            logger.info("the compile host ends")
        return self.end

    @property
    def end(self) -> FarmEnd:
        """What was done so far."""
        return FarmEnd(problems=self._problems, kernels=len(self._built), failed=len(self._failed))

    def compile_waiting(self) -> bool:
        """Go through all jobs that wait, the heaviest of the first campaign first; whether any was new.

        Raises:
            UnreachableError: the server is away.
        """
        after, found_new = dict(_TOP), False
        while True:
            with self._database.statement() as connection:
                rows = connection.execute(_WAITING, after | {"most": _PAGE}).mappings().all()
            if not rows:
                return found_new
            last = rows[-1]
            after = {"goes_on": True} | {name: last[name] for name in ("priority", "weight", "id")}
            new = []
            for row in rows:
                name = (int(row["campaign"]), str(row["device"]), str(row["network_config"]))
                if name not in self._seen:
                    self._seen.add(name)
                    new.append(_wanted(row["device"], row["network_config"], row["options"]))
            found_new |= bool(new)
            self._compile([each for each in new if each is not None])

    def _compile(self, wanted: list[Wanted]) -> None:
        self._problems += len(wanted)
        by_arch: dict[str, dict[KernelStep, str]] = {}
        for each in wanted:
            by_arch.setdefault(each.device.arch, {}).update((step, "") for step in self._steps(each))
        for arch, steps in by_arch.items():
            by_key = {self._compiler.key(step, arch): step for step in one_a_binary(steps)}
            missing = [step for key, step in by_key.items() if key not in self._built | self._failed]
            random.shuffle(missing)
            for step, result in self._compiler.build_all(missing, arch, workers=self._workers):
                if isinstance(result, CompileError):
                    self._failed.add(self._compiler.key(step, arch))
                    logger.debug("%s", result)
                    continue
                self._built.add(result.key)
                if isinstance(self._compiler.cache, SharedCache):
                    self._compiler.cache.share(result)

    def _steps(self, wanted: Wanted) -> Iterator[KernelStep]:
        find = wanted.options.find
        for solver in solvers_with_kernels(wanted.problem, find, self._registry):
            try:
                most = find.trials if find.searches else None
                yield from kernels_of(solver, wanted.problem, wanted.device, search=find.searches, most=most)
            except BaseException as error:  # a solver's own code may raise anything
                raise_if_interrupted(error)
                logger.debug("no kernels of %s for %s", solver.id, wanted.problem, exc_info=True)


def _wanted(identity: object, network_config: object, options: object) -> Wanted | None:
    """What a job will want compiled; None where it is nothing, or this release or NVRTC cannot read it."""
    told = IDENTITY.fullmatch(str(identity))
    if told is None or told["major"] == "0":
        return None
    try:
        device = Device.virtual(f"{told['major']}{told['minor']}")
        read = options_of(options)
        problem = ProblemDescription.from_network_config(str(network_config)).flattened
    except (DatabaseError, InvalidProblemError, NoDeviceError) as error:
        logger.warning("a job is left out: %s", error)
        return None
    if read.stored or device.sm not in toolchain().sms:
        return None
    return Wanted(device=replace(device, sm_count=int(told["sm_count"])), problem=problem, options=read)
