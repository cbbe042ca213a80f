"""Configurations that name the algorithms that cuBLASLt lists for a solution's products. Knows no solver."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

from miofind.device import Device, Library, Place
from miofind.errors import MiofindError
from miofind.problem import ProblemDescription
from miofind.solution import Config, ConfigValue, MatmulStep, Step

logger = logging.getLogger(__name__)


def listed_configs(
    problem: ProblemDescription, steps: Sequence[Step], config: Config, device: Device, limit: int
) -> Iterator[Config]:
    """`config` with each algorithm that cuBLASLt lists for the first product; none without a live device.

    Args:
        steps: of the problem's solution with that configuration, which has an "algorithm" and "workspace_bytes".
        limit: algorithms at most.
    """
    if device.place is not Place.CUDA or device.index < 0 or device.library_version(Library.CUBLAS) is None:
        return
    from miofind.libraries.cublaslt import matmul_algorithms

    first = next(step for step in steps if isinstance(step, MatmulStep))
    try:
        found = matmul_algorithms(first, device, limit)
    except MiofindError as error:
        logger.warning("cuBLASLt lists no algorithms for %s: %s", problem, error)
        return
    for algorithm in found:
        chosen: dict[str, ConfigValue] = dict(config)
        chosen["algorithm"] = dict(algorithm.algorithm)
        chosen["workspace_bytes"] = algorithm.workspace_bytes
        yield Config(chosen)
