"""ConvChannelsLast: convolution of channels-first tensors by another solver's kernels for channels-last ones.

Kernel: kernels_src/transpose.cu, and those of the other solver. Operands are laid out anew in the workspace by one
launch, and the result is laid back. Knows the other solvers by their ids alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from miofind.device import Device, Library, Place
from miofind.errors import InvalidConfigError, UnknownSolverError
from miofind.problem import DataType, Direction, Layout, ProblemDescription
from miofind.solution import Config, ConvSolution, KernelStep, Pointer, Region, Scalar, TensorMap, WorkspacePlan
from miofind.solver import APPLICABLE, Algorithm, Applicability, KernelKey, Solver, solver_by_id
from miofind.tiling.turn import SOURCE, Turn, turning

_INNER = ("ConvImplicitGemmWgmma",)
_DEFAULTS_EACH = 4
_STEP_MS = 1.5e-3
_BANDWIDTH_SHARE = 0.73
_MAX_BLOCKS = 2**31 - 1
_TENSORS = ("x", "w", "y")


def _twin(problem: ProblemDescription) -> ProblemDescription:
    """The same convolution with channels last."""
    layout = Layout.of(problem.spatial_dims, channels_last=True)
    x, w, y = (replace(tensor, layout=layout) for tensor in (problem.x, problem.w, problem.y))
    return replace(problem, x=x, w=w, y=y)


def _turns(problem: ProblemDescription) -> dict[str, Turn]:
    """The tensors whose elements lie otherwise with channels last, by name: from channels first."""
    turns = {name: Turn.to_channels_last(problem, name) for name in _TENSORS}
    return {name: turn for name, turn in turns.items() if turn.is_needed}


def _before(problem: ProblemDescription) -> list[KernelStep]:
    """The launch that turns the operands, if any are turned."""
    turns = tuple(turn for name, turn in _turns(problem).items() if name != problem.direction.output)
    return [turning(turns)] if turns else []


def _after(problem: ProblemDescription) -> list[KernelStep]:
    """The launch that turns the result back, if it is turned."""
    return [turning((turn.back,)) for name, turn in _turns(problem).items() if name == problem.direction.output]


def _on_buffers(step: KernelStep, names: dict[str, str]) -> KernelStep:
    """The step with its tensors elsewhere."""

    def moved(pointer: Pointer) -> Pointer:
        return replace(pointer, buffer=names.get(pointer.buffer, pointer.buffer))

    args: list[Pointer | Scalar | TensorMap] = []
    for arg in step.args:
        if isinstance(arg, TensorMap):
            args.append(replace(arg, pointer=moved(arg.pointer)))
        else:
            args.append(moved(arg) if isinstance(arg, Pointer) else arg)
    return replace(step, args=tuple(args))


class ConvChannelsLast(Solver):
    """Channels-first convolution in three parts: operands to channels last, another solver's kernels, and back.

    Tensors whose order is the same either way, such as filters of one tap, stay where they are.
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
    sources = (SOURCE, "implicit_gemm_wgmma.cu")

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
        )

    def is_applicable(self, problem: ProblemDescription, device: Device) -> Applicability:
        refusals = [
            f"{name}: {inner.reason}" for name in _INNER if not (inner := self._inner_answer(name, problem, device))
        ]
        if len(refusals) == len(_INNER):
            return Applicability("; ".join(refusals))
        steps = [*_before(problem), *_after(problem)]
        if not steps:
            return Applicability("the order of elements is the same with channels last")
        if max(step.grid[0] for step in steps) > _MAX_BLOCKS:
            return Applicability("its tensors have too many tiles for one launch")
        return APPLICABLE

    def configs(self, problem: ProblemDescription, device: Device) -> Iterator[Config]:
        for name in self._served_by(problem, device):
            for config in solver_by_id(name).configs(_twin(problem), device):
                yield Config.of(solver=name, config=dict(config))

    def check_config(self, problem: ProblemDescription, device: Device, config: Config) -> None:
        if set(config) != {"solver", "config"} or config["solver"] not in _INNER:
            raise InvalidConfigError(
                f"{self.id}: config {config.json} must name a solver of {list(_INNER)} and its config"
            )
        if not isinstance(config["config"], dict):
            raise InvalidConfigError(f"{self.id}: config {config.json} has no configuration of {config['solver']}")
        inner = solver_by_id(config["solver"])
        answer = inner.applicability(_twin(problem), device)
        if not answer:
            raise InvalidConfigError(f"{self.id}: {inner.id} refuses the problem: {answer.reason}")
        inner.check_config(_twin(problem), device, Config(config["config"]))

    def default_configs(self, problem: ProblemDescription, device: Device) -> tuple[Config, ...]:
        return tuple(
            Config.of(solver=name, config=dict(config))
            for name in self._served_by(problem, device)
            for config in solver_by_id(name).default_configs(_twin(problem), device)[:_DEFAULTS_EACH]
        )

    def estimate_ms(self, problem: ProblemDescription, device: Device, config: Config) -> float:
        inner = solver_by_id(config["solver"])
        moved_bytes = sum(2 * turn.bytes for turn in _turns(problem).values())
        moved_ms = 1e3 * moved_bytes / (_BANDWIDTH_SHARE * device.bandwidth_bytes_per_s)
        inner_ms = inner.estimate_ms(_twin(problem), device, Config(config["config"]))
        return len([*_before(problem), *_after(problem)]) * _STEP_MS + moved_ms + inner_ms

    def solution(self, problem: ProblemDescription, device: Device, config: Config) -> ConvSolution:
        inner = solver_by_id(config["solver"]).solution(_twin(problem), device, Config(config["config"]))
        turns = _turns(problem)
        names = {name: turn.target for name, turn in turns.items()}
        steps = [_on_buffers(step, names) for step in inner.kernels]
        regions = [Region(name=turn.target, bytes=turn.bytes) for turn in turns.values()]
        return ConvSolution(
            steps=(*_before(problem), *steps, *_after(problem)),
            workspace=WorkspacePlan((*regions, *inner.workspace.regions)),
            deterministic=inner.deterministic,
        )

    def error_growth(self, problem: ProblemDescription, config: Config) -> float:
        return solver_by_id(config["solver"]).error_growth(_twin(problem), Config(config["config"]))

    def is_exact(self, config: Config) -> bool:
        return solver_by_id(config["solver"]).is_exact(Config(config["config"]))

    def _served_by(self, problem: ProblemDescription, device: Device) -> list[str]:
        return [name for name in _INNER if self._inner_answer(name, problem, device)]

    def _inner_answer(self, name: str, problem: ProblemDescription, device: Device) -> Applicability:
        try:
            return solver_by_id(name).applicability(_twin(problem), device)
        except UnknownSolverError as error:
            return Applicability(str(error))


SOLVERS = (ConvChannelsLast(),)
