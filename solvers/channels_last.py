"""ConvChannelsLast: convolution of channels-first tensors by another solver's kernels for channels-last ones.

Kernel: kernels_src/transpose.cu, and those of the other solver. Operands are laid out anew in the workspace, and the
result is laid back. Knows the other solvers by their ids alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from miofind.device import Device, Library, Place
from miofind.errors import InvalidConfigError, UnknownSolverError
from miofind.problem import DataType, Direction, Layout, ProblemDescription
from miofind.solution import Config, ConvSolution, KernelStep, Pointer, Region, Scalar, TensorMap, WorkspacePlan
from miofind.solver import APPLICABLE, Algorithm, Applicability, KernelKey, Solver, solver_by_id
from miofind.tiling.correlation import ceil_div
from miofind.tiling.divisor import divisor

_SOURCE = "transpose.cu"
_INNER = ("ConvImplicitGemmWgmma",)
_DEFAULTS_EACH = 4
_TILE = 64
_STEP_MS = 2.0e-3
_MAX_BLOCKS = 2**31 - 1
_TENSORS = ("x", "w", "y")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Turn:
    """How one tensor's elements change their order: rows x columns, for each of a batch, to columns x rows."""

    name: str
    dtype: DataType
    batch: int
    rows: int
    columns: int

    @staticmethod
    def of(problem: ProblemDescription, name: str) -> _Turn:
        """From channels first to channels last."""
        tensor = problem.tensor(name)
        batch, channels, *spatial = tensor.shape
        return _Turn(name=name, dtype=tensor.dtype, batch=batch, rows=channels, columns=math.prod(spatial))

    @property
    def is_needed(self) -> bool:
        """Whether the order of elements differs at all."""
        return self.rows > 1 and self.columns > 1

    @property
    def buffer(self) -> str:
        """Where the tensor is with its channels last."""
        return f"{self.name}_last" if self.is_needed else self.name

    @property
    def bytes(self) -> int:
        return self.batch * self.rows * self.columns * self.dtype.itemsize

    @property
    def blocks(self) -> int:
        return self.batch * ceil_div(self.rows, _TILE) * ceil_div(self.columns, _TILE)

    @property
    def back(self) -> _Turn:
        """From channels last to channels first."""
        return replace(self, rows=self.columns, columns=self.rows)

    def step(self, source: str, target: str) -> KernelStep:
        """The launch that turns what is in one buffer into another."""
        widest = 16 // self.dtype.itemsize
        tiles = (ceil_div(self.rows, _TILE), ceil_div(self.columns, _TILE))
        return KernelStep(
            source=_SOURCE,
            entry="transpose",
            grid=(self.blocks, 1, 1),
            block=(256, 1, 1),
            defines=(
                ("ELEMENT", self.dtype.value),
                ("IN", math.gcd(widest, self.columns)),
                ("OUT", math.gcd(widest, self.rows)),
            ),
            args=(
                Pointer(buffer=source),
                Pointer(buffer=target),
                *(Scalar(ctype="int32", value=value) for value in (self.rows, self.columns)),
                *(scalar for count in tiles for scalar in divisor(count)),
            ),
        )


def _twin(problem: ProblemDescription) -> ProblemDescription:
    """The same convolution with channels last."""
    layout = Layout.of(problem.spatial_dims, channels_last=True)
    x, w, y = (replace(tensor, layout=layout) for tensor in (problem.x, problem.w, problem.y))
    return replace(problem, x=x, w=w, y=y)


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
    sources = (_SOURCE, "implicit_gemm_wgmma.cu")

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
        turns = [_Turn.of(problem, name) for name in _TENSORS]
        if not any(turn.is_needed for turn in turns):
            return Applicability("the order of elements is the same with channels last")
        if max(turn.blocks for turn in turns) > _MAX_BLOCKS:
            return Applicability("a tensor has too many tiles for one launch")
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
        turns = [turn for name in _TENSORS if (turn := _Turn.of(problem, name)).is_needed]
        moved_ms = 1e3 * sum(2 * turn.bytes for turn in turns) / device.bandwidth_bytes_per_s
        inner_ms = inner.estimate_ms(_twin(problem), device, Config(config["config"]))
        return len(turns) * _STEP_MS + moved_ms + inner_ms

    def solution(self, problem: ProblemDescription, device: Device, config: Config) -> ConvSolution:
        inner = solver_by_id(config["solver"]).solution(_twin(problem), device, Config(config["config"]))
        turns = {name: _Turn.of(problem, name) for name in _TENSORS}
        output = problem.direction.output
        names = {name: turn.buffer for name, turn in turns.items()}
        before = [turn.step(name, turn.buffer) for name, turn in turns.items() if turn.is_needed and name != output]
        steps = [*before, *(_on_buffers(step, names) for step in inner.kernels)]
        if turns[output].is_needed:
            steps.append(turns[output].back.step(turns[output].buffer, output))
        regions = [Region(name=turn.buffer, bytes=turn.bytes) for turn in turns.values() if turn.is_needed]
        return ConvSolution(
            steps=tuple(steps),
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
