"""ConvInParts: a problem with a tensor of 2^31 elements or more, as several that other solvers' kernels reach.

By images or by rows (`parts.py`): each part is launched on a piece of the tensors, as PyTorch calls cuDNN
(aten/src/ATen/native/cudnn/Conv_v7.cpp, split_batch_dim_to_32bit_out). Gradients of weights are summed over all parts
before they are rounded (`partials.py`). Knows the other solvers by their ids alone.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from miofind.core.cached import cached_property
from miofind.core.problem import DataType, Direction, Layout, ProblemDescription
from miofind.device.device import Device, Library, Place
from miofind.errors import InvalidConfigError
from miofind.solver.registry import Registry
from miofind.solver.solver import (
    APPLICABLE,
    Algorithm,
    Applicability,
    EstimatedConfig,
    KernelKey,
    Reach,
    Solver,
)
from miofind.solver.steps import Config, ConvSolution, Region, WorkspacePlan
from miofind.solvers.common.limits import MAX_ELEMENTS
from miofind.solvers.common.split_k import SplitK
from miofind.solvers.large.partials import partials_of_all, sum_of_parts
from miofind.solvers.large.parts import Part, parts

_INNER = (
    "ConvImplicitGemmWgmma",
    "ConvImplicitGemmHalo",
    "ConvImplicitGemmHaloSwapped",
    "ConvImplicitGemmMma",
    "ConvChannelsLast",
    "ConvChannelsLastMma",
    "ConvDepthwiseChannelsLast",
    "ConvDepthwiseChannelsFirst",
    "ConvDepthwiseMma",
    "ConvGrouped",
    "ConvGroupedPlanes",
    "ConvFirstLayerWgmma",
    "ConvFirstLayer",
    "ConvFirstLayerDataWgmma",
    "ConvFirstLayerDataRows",
    "ConvFirstLayerData",
    "ConvDirectTiled",
    "ConvImplicitGemmWgmmaTurned",
    "ConvDepthwiseMmaWeights",
    "ConvDepthwiseChannelsLastWeights",
    "ConvGroupedWeights",
    "ConvGroupedPlanesWeights",
)
_DEFAULTS = 6


class ConvInParts(Solver):
    """Other solvers' convolutions of pieces of the tensors, one after another in one workspace.

    A configuration names the other solver and holds its configuration, which is the same for all parts.

    Args:
        most_elements: of a tensor that other solvers reach; what has none larger is refused.
    """

    id = "ConvInParts"
    algorithm = Algorithm.IMPLICIT_GEMM
    keys = (
        KernelKey(
            place=Place.CUDA,
            library=Library.PLAIN,
            dtypes=frozenset({DataType.FLOAT32, DataType.FLOAT16, DataType.BFLOAT16}),
            layouts=frozenset(Layout),
            min_sm=75,
        ),
    )
    alignment_bytes = 16
    is_for_large = True

    def __init__(self, most_elements: int = MAX_ELEMENTS) -> None:
        self._most_elements = most_elements
        if most_elements != MAX_ELEMENTS:
            vars(self)["is_for_large"] = False  # of the class otherwise: what is small to others is cut, too

    @cached_property
    def sources(self) -> tuple[str, ...]:
        """Those of all other solvers."""
        return tuple(dict.fromkeys(source for name in _INNER for source in Registry.default()[name].sources))

    def examples(self) -> tuple[ProblemDescription, ...]:
        conv, side = functools.partial(ProblemDescription.convolution, stride=8), 1 << 14
        last = functools.partial(conv, dtype="float16", layout="NHWC")
        x, w, many = (2, 8, side, side // 2), (8, 8, 3, 3), (2, 64, side, side // 16)
        return (
            last(x=x, w=w, padding=1),
            last(x=(1, 8, side, side), w=w, dtype="bfloat16"),
            conv(x=x, w=w, dtype="float32"),
            last(x=x, w=w, stride=2, direction=Direction.BACKWARD_DATA),
            last(x=many, w=(64, 64, 3, 3), direction=Direction.BACKWARD_WEIGHTS),
            last(x=x, w=w, epilogue="bias.residual.relu"),
        )

    def fuses(self, problem: ProblemDescription) -> Applicability:
        if problem.epilogue.outputs:
            return Applicability("each part would leave second outputs of its own")
        return APPLICABLE

    def fuses_training(self, problem: ProblemDescription) -> Applicability:
        return self.fuses(problem)

    def is_applicable(self, problem: ProblemDescription, device: Device) -> Applicability:
        if max(problem.x.size, problem.y.size) <= self._most_elements:
            return Applicability(f"serves tensors of more than {self._most_elements} elements")
        cut = self._cut(problem, device)
        if problem.w.size > self._most_elements or not cut.parts:
            return Applicability("its tensors cannot be cut by images, or channels last by rows, into smaller ones")
        return APPLICABLE if cut.defaults else Applicability("no solver serves its parts")

    def default_configs(self, problem: ProblemDescription, device: Device) -> tuple[Config, ...]:
        return tuple(each.config for each in self.estimated_defaults(problem, device))

    def estimated_defaults(self, problem: ProblemDescription, device: Device) -> tuple[EstimatedConfig, ...]:
        return self._cut(problem, device).defaults[:_DEFAULTS]

    def configs(self, problem: ProblemDescription, device: Device) -> Iterator[Config]:
        cut = self._cut(problem, device)
        for inner in cut.serving:
            every = inner.configs(cut.first, device)
            yield from (_outer(inner, config) for config in every if not cut.refuse(inner, config).refused)

    def check_config(self, problem: ProblemDescription, device: Device, config: Config) -> None:
        inner, inner_config = self._inner(config)
        cut = self._cut(problem, device)
        if inner not in cut.serving:
            raise InvalidConfigError(f"{self.id}: config {config.json}: {inner.id} does not serve all parts")
        if (answer := cut.refuse(inner, inner_config)).refused:
            raise InvalidConfigError(f"{self.id}: config {config.json}: {answer.reason}")

    def estimate_ms(self, problem: ProblemDescription, device: Device, config: Config) -> float:
        return self._cut(problem, device).estimate_ms(*self._inner(config))

    def solution(self, problem: ProblemDescription, device: Device, config: Config) -> ConvSolution:
        cut = self._cut(problem, device)
        found = cut.solutions(*self._inner(config))
        solutions = [(part, found[part.problem]) for part in cut.parts]
        if problem.direction is Direction.BACKWARD_WEIGHTS:
            whole = cut.partials(found)
            assert whole is not None, "what leaves nothing to be summed is refused"
            return sum_of_parts(solutions, whole)
        regions: dict[str, int] = {}  # of one part after another
        for region in itertools.chain.from_iterable(solution.workspace.regions for _, solution in solutions):
            regions[region.name] = max(region.bytes, regions.get(region.name, 0))
        return ConvSolution(
            steps=tuple(step.moved(part.offsets_bytes) for part, solution in solutions for step in solution.kernels),
            workspace=WorkspacePlan(tuple(Region(name=name, bytes=size) for name, size in regions.items())),
            deterministic=all(solution.deterministic for _, solution in solutions),
        )

    def error_growth(self, problem: ProblemDescription, config: Config) -> float:
        inner, inner_config = self._inner(config)
        return inner.error_growth(self._first(problem), inner_config)

    def error_reach(self, problem: ProblemDescription, config: Config) -> Reach:
        inner, inner_config = self._inner(config)
        return inner.error_reach(self._first(problem), inner_config)

    def spreads_nonfinite(self, problem: ProblemDescription, config: Config) -> bool:
        inner, inner_config = self._inner(config)
        return inner.spreads_nonfinite(self._first(problem), inner_config)

    def is_exact(self, config: Config) -> bool:
        inner, inner_config = self._inner(config)
        return inner.is_exact(inner_config)

    def _cut(self, problem: ProblemDescription, device: Device) -> _Cut:
        return _cut(problem, self._most_elements, device)

    def _first(self, problem: ProblemDescription) -> ProblemDescription:
        return parts(problem, self._most_elements)[0].problem

    def _inner(self, config: Config) -> tuple[Solver, Config]:
        """The other solver of a configuration, and its own.

        Raises:
            InvalidConfigError: the configuration has none.
        """
        if set(config) != {"solver", "config"} or config["solver"] not in _INNER:
            known = ", ".join(_INNER)
            raise InvalidConfigError(f"{self.id}: config {config.json} must name a solver, of {known}, and its config")
        if not isinstance(config["config"], dict):
            raise InvalidConfigError(f"{self.id}: config {config.json} has no configuration of {config['solver']}")
        return Registry.default()[config["solver"]], Config(config["config"])


def _outer(inner: Solver, config: Config) -> Config:
    return Config.of(solver=inner.id, config=dict(config))


@dataclass(frozen=True)
class _Cut:
    """A problem in parts on a device, and the other solvers that serve all of them."""

    problem: ProblemDescription
    parts: tuple[Part, ...]
    device: Device

    @property
    def first(self) -> ProblemDescription:
        """The problem of the first part."""
        return self.parts[0].problem

    @cached_property
    def counts(self) -> Counter[ProblemDescription]:
        """The problems of the parts, each once, and of how many: the first, those within, the last."""
        return Counter(part.problem for part in self.parts)

    @cached_property
    def serving(self) -> tuple[Solver, ...]:
        """The solvers that serve all parts."""
        known = (Registry.default()[name] for name in _INNER)
        return tuple(each for each in known if all(each.applicability(part, self.device) for part in self.counts))

    @cached_property
    def defaults(self) -> tuple[EstimatedConfig, ...]:
        """The solvers' default configurations for the first part that serve all parts, likely best first."""
        found = [
            EstimatedConfig(_outer(inner, config), self.estimate_ms(inner, config))
            for inner in self.serving
            for config in inner.default_configs(self.first, self.device)
            if not self.refuse(inner, config).refused
        ]
        return tuple(sorted(found, key=lambda each: each.estimate_ms))

    def refuse(self, inner: Solver, config: Config) -> Applicability:
        """Why a configuration of a solver that serves all parts does not."""
        try:
            for part in self.counts:
                inner.check_config(part, self.device, config)
        except InvalidConfigError as error:
            return Applicability(str(error))
        if self.problem.direction is not Direction.BACKWARD_WEIGHTS or self.partials(self.solutions(inner, config)):
            return APPLICABLE
        return Applicability(f"{inner.id} leaves no partials that could be summed")

    def solutions(self, inner: Solver, config: Config) -> dict[ProblemDescription, ConvSolution]:
        """What computes the problem of each part, on tensors of its own."""
        found = {part: inner.solution(part, self.device, config) for part in self.counts}
        assert all(len(each.kernels) == len(each.steps) for each in found.values()), "miofind's own kernels alone"
        return found

    def partials(self, solutions: Mapping[ProblemDescription, ConvSolution]) -> SplitK | None:
        """Those of all parts' gradients of weights; None where there are none that could be summed."""
        counted = ((self.counts[part], solution) for part, solution in solutions.items())
        return partials_of_all(counted, self.problem.w.size)

    def estimate_ms(self, inner: Solver, config: Config) -> float:
        """The sum of the parts' times."""
        return sum(count * inner.estimate_ms(part, self.device, config) for part, count in self.counts.items())


@functools.lru_cache(maxsize=16)  # asked for every configuration
def _cut(problem: ProblemDescription, most_elements: int, device: Device) -> _Cut:
    return _Cut(problem, parts(problem, most_elements), device)


SOLVERS = (ConvInParts(),)
