"""What solvers share that transpose channels-first tensors to channels last for another solver's kernels.

Kernel: kernels_src/implicit_gemm/transpose.cu, and those of the other solver. Operands are laid out anew in the
workspace by one launch, and the result is laid back if it must. Knows the other solvers by their ids alone.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace
from typing import ClassVar, NamedTuple

from miofind.core.problem import Direction, Layout, ProblemDescription
from miofind.device.device import Device
from miofind.errors import InvalidConfigError
from miofind.solver.delegating import DelegatingSolver, kernels_on
from miofind.solver.solver import APPLICABLE, Algorithm, Applicability, EstimatedConfig
from miofind.solver.steps import Config, ConvSolution, Region, WorkspacePlan
from miofind.solvers.implicit_gemm.transpose import BANDWIDTH_SHARE, Transposition, transpose_step

_DEFAULTS = 4
_STEP_MS = 1.5e-3
_MAX_BLOCKS = 2**31 - 1
_TENSORS = ("x", "w", "y")


def _with_last(problem: ProblemDescription, names: tuple[str, ...]) -> ProblemDescription:
    """The same convolution with the channels of those tensors last."""
    layout = Layout.of(problem.spatial_dims, channels_last=True)
    x, w, y = (
        replace(tensor, layout=layout) if name in names else tensor
        for name, tensor in ((name, problem.tensor(name)) for name in _TENSORS)
    )
    return replace(problem, x=x, w=w, y=y)


@functools.lru_cache(maxsize=64)  # every configuration's bounds ask
def _forms(problem: ProblemDescription, *, only_nchw_results: bool) -> tuple[ProblemDescription, ...]:
    """NHWC forms of a problem for the other solver: with one tensor less to transpose, if it may be, then with all.

    Args:
        only_nchw_results: whether the first alone will do.
    """
    kept, last = "x" if problem.direction is Direction.BACKWARD_DATA else "y", _with_last(problem, _TENSORS)
    if not Transposition.to_channels_last(problem, kept).is_needed:
        return (last,)
    first = _with_last(problem, tuple(name for name in _TENSORS if name != kept))
    return (first,) if only_nchw_results else (first, last)


def _transpositions(problem: ProblemDescription, form: ProblemDescription) -> dict[str, Transposition]:
    """The tensors whose elements lie otherwise in the other form, by name: from channels first."""
    names = [name for name in _TENSORS if problem.tensor(name).layout is not form.tensor(name).layout]
    transpositions = {name: Transposition.to_channels_last(problem, name) for name in names}
    output = problem.direction.output
    if output in transpositions and problem.epilogue.has_residual:
        transpositions["residual"] = replace(transpositions[output], source="residual", target="residual_last")
    return {name: transposition for name, transposition in transpositions.items() if transposition.is_needed}


def _before(problem: ProblemDescription, transpositions: dict[str, Transposition]) -> list[tuple[Transposition, ...]]:
    """What is launched to transpose the operands, two at a time."""
    operands = tuple(
        transposition for name, transposition in transpositions.items() if name != problem.direction.output
    )
    return [operands[first : first + 2] for first in range(0, len(operands), 2)]


def _after(problem: ProblemDescription, transpositions: dict[str, Transposition]) -> list[tuple[Transposition, ...]]:
    """What is launched to transpose the result back, if it is transposed."""
    return [(transposition.back,) for name, transposition in transpositions.items() if name == problem.direction.output]


@functools.lru_cache(maxsize=64)  # every configuration's estimate and solution asks
def _form(solver: ChannelsLastSolver, problem: ProblemDescription, device: Device) -> ProblemDescription | None:
    """The first form of a problem that a solver's inner one serves."""
    forms = _forms(problem, only_nchw_results=solver.only_nchw_results)
    return next((form for form in forms if solver.inner_solver.applicability(form, device)), None)


def _around_ms(problem: ProblemDescription, form: ProblemDescription, device: Device, inner_ms: float) -> float:
    """Milliseconds of the other solver's kernels and of all transpositions."""
    around = _Around.of(problem, form)
    moved_ms = 1e3 * around.bytes / (BANDWIDTH_SHARE * device.bandwidth_bytes_per_s)
    return around.launches * _STEP_MS + moved_ms + inner_ms


class _Around(NamedTuple):
    """The launches that transpose.

    Attributes:
        launches: how many.
        most_blocks: of the largest.
        bytes: that they move.
    """

    launches: int
    most_blocks: int
    bytes: int

    @staticmethod
    @functools.lru_cache(maxsize=64)  # whether they serve is asked, and every configuration's estimate
    def of(problem: ProblemDescription, form: ProblemDescription) -> _Around:
        transpositions = _transpositions(problem, form)
        launches = [*_before(problem, transpositions), *_after(problem, transpositions)]
        return _Around(
            launches=len(launches),
            most_blocks=max((sum(each.blocks for each in launch) for launch in launches), default=0),
            bytes=sum(2 * transposition.bytes for transposition in transpositions.values()),
        )


@functools.lru_cache(maxsize=1 << 12)  # few serve all problems, and to write one as JSON takes longest
def _config_around(inner: str, config: Config) -> Config:
    """The configuration that has another solver's in it."""
    return Config.of(solver=inner, config=dict(config))


class ChannelsLastSolver(DelegatingSolver):
    """Channels-first convolution in three parts: operands to channels last, another solver's kernels, and back.

    Tensors whose order is the same either way, such as filters of one tap, stay where they are, and so does one that
    the other solver takes with its channels first: the result, or y for backward weights.

    Class attributes:
        only_nchw_results: whether it serves no problem whose result would have to be transposed back.
    """

    only_nchw_results: ClassVar[bool] = False
    inner_name = "config"
    algorithm = Algorithm.IMPLICIT_GEMM
    alignment_bytes = 16

    def fuses(self, problem: ProblemDescription) -> Applicability:
        return self.inner_solver.fuses(problem)

    def fuses_training(self, problem: ProblemDescription) -> Applicability:
        if problem.epilogue.outputs or self.only_nchw_results:
            return self.inner_solver.fuses_training(problem)
        return super().fuses_training(problem)  # more tensors of pixels would have to be transposed

    def is_applicable(self, problem: ProblemDescription, device: Device) -> Applicability:
        form = _form(self, problem, device)
        if form is None:
            return Applicability(self._refusal(problem, device))
        around = _Around.of(problem, form)
        if not around.launches:
            return Applicability("the order of elements is the same with channels last")
        if around.most_blocks > _MAX_BLOCKS:
            return Applicability("its tensors have too many tiles for one launch")
        return APPLICABLE

    def inner_problem(self, problem: ProblemDescription, config: Config) -> ProblemDescription:
        return _forms(problem, only_nchw_results=self.only_nchw_results)[-1]

    def form(self, problem: ProblemDescription, device: Device) -> ProblemDescription:
        """What the other solver is asked instead of a problem that this one serves.

        Raises:
            InvalidConfigError: it refuses it.
        """
        form = _form(self, problem, device)
        if form is None:
            raise InvalidConfigError(f"{self.id}: {self._refusal(problem, device)}")
        return form

    def configs(self, problem: ProblemDescription, device: Device) -> Iterator[Config]:
        for config in self.inner_solver.configs(self.form(problem, device), device):
            yield self._outer(config)

    def drawn_configs(
        self, problem: ProblemDescription, device: Device, points: int, seed: int | str = 0
    ) -> Iterator[Config]:
        return map(self._outer, self.inner_solver.drawn_configs(self.form(problem, device), device, points, seed))

    def check_config(self, problem: ProblemDescription, device: Device, config: Config) -> None:
        if set(config) != {"solver", "config"} or config["solver"] != self.inner:
            raise InvalidConfigError(
                f"{self.id}: config {config.json} must name the solver {self.inner} and its config"
            )
        self.check_inner_config(self.form(problem, device), device, config)

    def default_configs(self, problem: ProblemDescription, device: Device) -> tuple[Config, ...]:
        return tuple(each.config for each in self.estimated_defaults(problem, device))

    def estimated_defaults(self, problem: ProblemDescription, device: Device) -> tuple[EstimatedConfig, ...]:
        form = self.form(problem, device)
        return tuple(
            EstimatedConfig(self._outer(each.config), _around_ms(problem, form, device, each.estimate_ms))
            for each in self.inner_solver.estimated_defaults(form, device)[:_DEFAULTS]
        )

    def estimate_ms(self, problem: ProblemDescription, device: Device, config: Config) -> float:
        form = self.form(problem, device)
        inner_ms = self.inner_solver.estimate_ms(form, device, self.inner_config(config))
        return _around_ms(problem, form, device, inner_ms)

    def solution(self, problem: ProblemDescription, device: Device, config: Config) -> ConvSolution:
        form = self.form(problem, device)
        inner = self.inner_solver.solution(form, device, self.inner_config(config))
        transpositions = _transpositions(problem, form)
        names = {name: transposition.target for name, transposition in transpositions.items()}
        regions = [
            Region(name=transposition.target, bytes=transposition.bytes) for transposition in transpositions.values()
        ]
        before, after = (map(transpose_step, each(problem, transpositions)) for each in (_before, _after))
        return ConvSolution(
            steps=(*before, *kernels_on(inner, names), *after),
            workspace=WorkspacePlan((*regions, *inner.workspace.regions)),
            deterministic=inner.deterministic,
        )

    def _outer(self, config: Config) -> Config:
        return _config_around(self.inner, config)

    def _refusal(self, problem: ProblemDescription, device: Device) -> str:
        answer = self.inner_solver.applicability(self.inner_problem(problem, Config()), device)
        return f"{self.inner}: {answer.reason}"
