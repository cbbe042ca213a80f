"""ConvChannelsLast: convolution of channels-first tensors by another solver's kernels for channels-last ones.

Kernel: kernels_src/transpose.cu, and those of the other solver. Operands are laid out anew in the workspace by one
launch, and the result is laid back if it must. Knows the other solvers by their ids alone.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import replace

from miofind.device import Device, Library, Place
from miofind.errors import InvalidConfigError, UnknownSolverError
from miofind.problem import DataType, Direction, Layout, MathMode, ProblemDescription
from miofind.solution import Config, ConvSolution, KernelStep, Region, WorkspacePlan
from miofind.solver import APPLICABLE, Algorithm, Applicability, KernelKey, Solver, solver_by_id
from miofind.tiling.turn import BANDWIDTH_SHARE, SOURCE, Turn, turning

_INNER = ("ConvImplicitGemmWgmma", "ConvImplicitGemmMma")
_DEFAULTS_EACH = 4
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


def _forms(problem: ProblemDescription) -> tuple[ProblemDescription, ...]:
    """What another solver may be asked instead: with one tensor less to turn if there is one, then with all turned."""
    kept, last = "x" if problem.direction is Direction.BACKWARD_DATA else "y", _with_last(problem, _TENSORS)
    if not Turn.to_channels_last(problem, kept).is_needed:
        return (last,)
    return _with_last(problem, tuple(name for name in _TENSORS if name != kept)), last


def _turns(problem: ProblemDescription, form: ProblemDescription) -> dict[str, Turn]:
    """The tensors whose elements lie otherwise in the other form, by name: from channels first."""
    names = [name for name in _TENSORS if problem.tensor(name).layout is not form.tensor(name).layout]
    turns = {name: Turn.to_channels_last(problem, name) for name in names}
    return {name: turn for name, turn in turns.items() if turn.is_needed}


def _before(problem: ProblemDescription, turns: dict[str, Turn]) -> list[KernelStep]:
    """The launch that turns the operands, if any are turned."""
    operands = tuple(turn for name, turn in turns.items() if name != problem.direction.output)
    return [turning(operands)] if operands else []


def _after(problem: ProblemDescription, turns: dict[str, Turn]) -> list[KernelStep]:
    """The launch that turns the result back, if it is turned."""
    return [turning((turn.back,)) for name, turn in turns.items() if name == problem.direction.output]


def _suits(name: str, problem: ProblemDescription) -> bool:
    """Whether turning may pay: ConvImplicitGemmMma takes channels first as they lie, well but for strided gradients."""
    if name == "ConvImplicitGemmMma":
        strided = max(problem.conv.stride) > 1
        ieee = problem.x.dtype is DataType.FLOAT32 and problem.math is MathMode.IEEE
        return problem.direction is Direction.BACKWARD_DATA and strided and ieee
    return True


@functools.lru_cache(maxsize=64)  # every configuration's estimate and solution asks
def _form(inner: Solver, problem: ProblemDescription, device: Device) -> ProblemDescription | None:
    """The first form of a problem that another solver serves."""
    return next((form for form in _forms(problem) if inner.applicability(form, device)), None)


class ConvChannelsLast(Solver):
    """Channels-first convolution in three parts: operands to channels last, another solver's kernels, and back.

    Tensors whose order is the same either way, such as filters of one tap, stay where they are, and so does one that
    the other solver takes with its channels first: the result, or y for backward weights.
    """

    id = "ConvChannelsLast"
    algorithm = Algorithm.IMPLICIT_GEMM
    keys = (
        KernelKey(
            place=Place.CUDA,
            library=Library.PLAIN,
            dtypes=frozenset({DataType.FLOAT16, DataType.BFLOAT16, DataType.FLOAT32}),
            layouts=frozenset({Layout.NCW, Layout.NCHW}),
            min_sm=90,
            archs=("90a",),
        ),
    )
    alignment_bytes = 16
    sources = (SOURCE, "implicit_gemm_wgmma.cu", "implicit_gemm_mma.cu")

    def examples(self) -> tuple[ProblemDescription, ...]:
        def conv(direction: Direction = Direction.FORWARD, **values: object) -> ProblemDescription:
            given = {"dtype": DataType.FLOAT16, "direction": direction} | values
            return ProblemDescription.convolution(**given)  # type: ignore[arg-type]

        data, weights = Direction.BACKWARD_DATA, Direction.BACKWARD_WEIGHTS
        return (
            conv(x=(2, 64, 14, 14), w=(128, 64, 3, 3), padding=1),
            conv(x=(3, 24, 15, 9), w=(40, 24, 1, 1), stride=2, dtype=DataType.BFLOAT16),
            conv(data, x=(2, 72, 12, 11), w=(64, 72, 5, 3), padding=(2, 1)),
            conv(weights, x=(2, 64, 14, 13), w=(72, 64, 3, 3), padding=1, dilation=2),
            conv(data, x=(2, 48, 14, 13), w=(40, 48, 3, 3), padding=1, stride=2, dtype=DataType.FLOAT32),
        )

    def is_applicable(self, problem: ProblemDescription, device: Device) -> Applicability:
        forms = self._served(problem, device)
        if not forms:
            asked = [name for name in _INNER if _suits(name, problem)]
            answers = {name: self._answer(name, _with_last(problem, _TENSORS), device) for name in asked}
            return Applicability("; ".join(f"{name}: {answer.reason}" for name, answer in answers.items()))
        for form in forms.values():
            turns = _turns(problem, form)
            steps = [*_before(problem, turns), *_after(problem, turns)]
            if not steps:
                return Applicability("the order of elements is the same with channels last")
            if max(step.grid[0] for step in steps) > _MAX_BLOCKS:
                return Applicability("its tensors have too many tiles for one launch")
        return APPLICABLE

    def form(self, name: str, problem: ProblemDescription, device: Device) -> ProblemDescription:
        """What the other solver of that name is asked instead of a problem that this one serves.

        Raises:
            InvalidConfigError: it refuses it.
        """
        form = self._served(problem, device).get(name)
        if form is None:
            reason = self._answer(name, _with_last(problem, _TENSORS), device).reason
            raise InvalidConfigError(f"{self.id}: {name} refuses the problem: {reason}")
        return form

    def configs(self, problem: ProblemDescription, device: Device) -> Iterator[Config]:
        for name, form in self._served(problem, device).items():
            for config in solver_by_id(name).configs(form, device):
                yield Config.of(solver=name, config=dict(config))

    def check_config(self, problem: ProblemDescription, device: Device, config: Config) -> None:
        if set(config) != {"solver", "config"} or config["solver"] not in _INNER:
            raise InvalidConfigError(
                f"{self.id}: config {config.json} must name a solver of {list(_INNER)} and its config"
            )
        if not isinstance(config["config"], dict):
            raise InvalidConfigError(f"{self.id}: config {config.json} has no configuration of {config['solver']}")
        form = self.form(config["solver"], problem, device)
        solver_by_id(config["solver"]).check_config(form, device, Config(config["config"]))

    def default_configs(self, problem: ProblemDescription, device: Device) -> tuple[Config, ...]:
        return tuple(
            Config.of(solver=name, config=dict(config))
            for name, form in self._served(problem, device).items()
            for config in solver_by_id(name).default_configs(form, device)[:_DEFAULTS_EACH]
        )

    def estimate_ms(self, problem: ProblemDescription, device: Device, config: Config) -> float:
        form = self.form(config["solver"], problem, device)
        turns = _turns(problem, form)
        moved_bytes = sum(2 * turn.bytes for turn in turns.values())
        moved_ms = 1e3 * moved_bytes / (BANDWIDTH_SHARE * device.bandwidth_bytes_per_s)
        inner_ms = solver_by_id(config["solver"]).estimate_ms(form, device, Config(config["config"]))
        return len([*_before(problem, turns), *_after(problem, turns)]) * _STEP_MS + moved_ms + inner_ms

    def solution(self, problem: ProblemDescription, device: Device, config: Config) -> ConvSolution:
        form = self.form(config["solver"], problem, device)
        inner = solver_by_id(config["solver"]).solution(form, device, Config(config["config"]))
        turns = _turns(problem, form)
        names = {name: turn.target for name, turn in turns.items()}
        steps = [step.on_buffers(names) for step in inner.kernels]
        regions = [Region(name=turn.target, bytes=turn.bytes) for turn in turns.values()]
        return ConvSolution(
            steps=(*_before(problem, turns), *steps, *_after(problem, turns)),
            workspace=WorkspacePlan((*regions, *inner.workspace.regions)),
            deterministic=inner.deterministic,
        )

    def error_growth(self, problem: ProblemDescription, config: Config) -> float:
        last = _with_last(problem, _TENSORS)
        return solver_by_id(config["solver"]).error_growth(last, Config(config["config"]))

    def spreads_nonfinite(self, problem: ProblemDescription, config: Config) -> bool:
        last = _with_last(problem, _TENSORS)
        return solver_by_id(config["solver"]).spreads_nonfinite(last, Config(config["config"]))

    def is_exact(self, config: Config) -> bool:
        return solver_by_id(config["solver"]).is_exact(Config(config["config"]))

    def _served(self, problem: ProblemDescription, device: Device) -> dict[str, ProblemDescription]:
        """The forms that other solvers serve, by their ids."""
        served: dict[str, ProblemDescription] = {}
        for name in (name for name in _INNER if _suits(name, problem)):
            with contextlib.suppress(UnknownSolverError):
                if (form := _form(solver_by_id(name), problem, device)) is not None:
                    served[name] = form
        return served

    def _answer(self, name: str, form: ProblemDescription, device: Device) -> Applicability:
        try:
            return solver_by_id(name).applicability(form, device)
        except UnknownSolverError as error:
            return Applicability(str(error))


SOLVERS = (ConvChannelsLast(),)
