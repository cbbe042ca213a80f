"""Configurations of the solvers that compute by columns: partial sums, algorithms of the library, and their checks.

A configuration has "slots" (partial sums of backward weights kept side by side; 1 where images merge into one
product) and the library's choice of `matmul_choice`; a solver may add parameters of its own.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator

from miofind.core.problem import ProblemDescription
from miofind.device.device import Device, Library, Place
from miofind.errors import InvalidConfigError, MiofindError
from miofind.libraries.matmul_choice import (
    WORKSPACE_BYTES,
    WORKSPACE_REGION,
    check_library_choice,
    with_library_choice,
)
from miofind.solver.solver import Applicability
from miofind.solver.steps import Config, ConfigValue, ConvSolution, MatmulStep, Region, WorkspacePlan
from miofind.solvers.vendor.columns import ColumnPlan

logger = logging.getLogger(__name__)

MAX_STEPS = 4096
MAX_COLUMN_BYTES = 8 << 30
MAX_PARTIAL_BYTES = 1 << 30
NAMES = frozenset({"slots", "algorithm", "workspace_bytes"})


def column_solution(plan: ColumnPlan, config: Config) -> ConvSolution:
    """The solution of a plan with the configuration's algorithm and workspace."""
    regions = list(plan.regions())
    if config["workspace_bytes"]:
        regions.append(Region(name=WORKSPACE_REGION, bytes=config["workspace_bytes"]))
    steps = with_library_choice(tuple(plan.steps()), config)
    return ConvSolution(steps=steps, workspace=WorkspacePlan(tuple(regions)))


def heuristic_config(plan: ColumnPlan, workspace_bytes: int = WORKSPACE_BYTES, **own: ConfigValue) -> Config:
    """The configuration of a plan that leaves the algorithm to the library's heuristics."""
    return Config.of(slots=plan.slots, algorithm={}, workspace_bytes=workspace_bytes, **own)


@functools.lru_cache(maxsize=64)  # whether there are any is asked before which
def column_plans(problem: ProblemDescription, device: Device, images: int) -> tuple[ColumnPlan, ...]:
    """Plans for chunks of `images` that can run, the likely best first; () where none can.

    They differ in the number of partial sums, powers of two and `images`: each product reads and writes every one, and
    the last step reads them once more, so that few mean many small products and many mean traffic.
    """
    plan = ColumnPlan(problem=problem, images=images)
    if not plan.needs_slots:
        return () if refuse_plan(plan).refused else (plan,)
    counts = sorted({1 << i for i in range(images.bit_length())} | {images})
    plans = [ColumnPlan(problem=problem, images=images, slots=count) for count in counts]
    return tuple(
        sorted(
            (plan for plan in plans if not refuse_plan(plan).refused),
            key=lambda plan: plan.estimate_ms(device, WORKSPACE_BYTES),
        )
    )


def refuse_plan(plan: ColumnPlan) -> Applicability:
    """Why a plan is out of bounds; APPLICABLE if it is not."""
    if plan.step_count > MAX_STEPS:
        return Applicability(f"takes up to {plan.step_count} steps, at most {MAX_STEPS} are allowed")
    size = plan.images * plan.column_bytes
    if size > MAX_COLUMN_BYTES:
        return Applicability(
            f"the columns of {plan.images} images take {size} bytes, at most {MAX_COLUMN_BYTES} are allowed"
        )
    if plan.slots > (plan.images if plan.needs_slots else 1):
        return Applicability(f"{plan.slots} partial sums are more than the products that can be kept apart")
    if plan.slots > 1 and plan.split_k.bytes > MAX_PARTIAL_BYTES:
        return Applicability(f"{plan.slots} partial sums take more than {MAX_PARTIAL_BYTES} bytes")
    return plan.refuse_sizes()


def recorded_configs(plan: ColumnPlan, config: Config, device: Device, limit: int) -> Iterator[Config]:
    """`config` with each algorithm that cuBLASLt lists for the plan's first product; none without a live device."""
    if device.place is not Place.CUDA or device.index < 0 or device.library_version(Library.CUBLAS) is None:
        return
    from miofind.libraries.cublaslt import matmul_algorithms

    steps = column_solution(plan, config).steps
    first = next(step for step in steps if isinstance(step, MatmulStep))
    try:
        found = matmul_algorithms(first, device, limit)
    except MiofindError as error:
        logger.warning("cuBLASLt lists no algorithms for %s: %s", plan.problem, error)
        return
    for algorithm in found:
        chosen: dict[str, ConfigValue] = dict(config)
        chosen["algorithm"] = dict(algorithm.algorithm)
        chosen["workspace_bytes"] = algorithm.workspace_bytes
        yield Config(chosen)


def check_column_config(solver_id: str, config: Config, names: frozenset[str]) -> None:
    """Do nothing for a configuration with exactly these parameters and a valid choice of the library's.

    Raises:
        InvalidConfigError: a parameter is missing, unknown or out of bounds.
    """
    if set(config) != names:
        raise InvalidConfigError(f"{solver_id}: config {config.json} must have the parameters {sorted(names)}")
    check_library_choice(solver_id, config)


def check_plan(solver_id: str, plan: ColumnPlan, config: Config) -> None:
    """Do nothing for a plan that can run.

    Raises:
        InvalidConfigError: it is out of bounds.
    """
    if (answer := refuse_plan(plan)).refused:
        raise InvalidConfigError(f"{solver_id}: config {config.json} cannot run {plan.problem}: {answer.reason}")
