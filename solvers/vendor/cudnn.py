"""cuDNN's engines as one solver: each configuration is an engine with its knobs, as the heuristics proposed it.

Source: cuDNN's graph API, https://docs.nvidia.com/deeplearning/cudnn/backend/latest/api/cudnn-graph-library.html
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from miofind.core.problem import DataType, Direction, Layout, MathMode, ProblemDescription
from miofind.device.device import Device, Library, Place
from miofind.errors import InvalidConfigError, LaunchError
from miofind.libraries.cudnn import HEURISTIC, EnginePlan, engine_plans
from miofind.libraries.cudnn_epilogue import refused
from miofind.libraries.cudnn_graph import Knob
from miofind.libraries.cudnn_notes import (
    Note,
    growth,
    is_deterministic,
    is_exact,
    known_fault,
    notes_text,
    parsed_notes,
    refused_notes,
)
from miofind.libraries.cudnn_tensor import TENSOR_ALIGNMENT
from miofind.solver.solver import (
    APPLICABLE,
    MAX_DEFAULT_CONFIGS,
    Algorithm,
    Applicability,
    KernelKey,
    Reach,
    Solver,
    first_refusal,
)
from miofind.solver.steps import Config, ConvSolution, CudnnStep, Region, WorkspacePlan

_PARAMETERS = frozenset({"engine", "knobs", "notes", "workspace_bytes"})
# On an H200 the heuristics' first eight direct plans held the fastest or came within 0.7 % of it (geometric mean of 27
# problems, cuDNN 9.19), but were 18 % off at worst, where PyTorch's benchmark mode has the best: hence twice as many.
_DEFAULTS = MAX_DEFAULT_CONFIGS
# Engines that fuse are compiled for each plan, for a tenth of a second to a second.
_FUSED_DEFAULTS = 4
_HEURISTIC_WORKSPACE_BYTES = 32 << 20
_FIRST_LAYERS = 63
_MAX_ENGINE = 9999
_MAX_KNOBS = 32
_MAX_CHOICE = 2**31 - 1
_MAX_WORKSPACE_BYTES = 1 << 40
_MAX_ELEMENTS = 2**31 - 1
_LAUNCH_MS = 2.5e-3

_LATER_KNOB = re.compile(r"KNOB_([1-9]\d{1,2})")


def _knob_name(knob: int) -> str:
    """Name of a knob type; one that a later cuDNN adds goes by its number."""
    return Knob(knob).name if knob in _KNOB_VALUES else f"KNOB_{knob}"


def _knob_type(name: str) -> int | None:
    """Value of a knob type, None for a name that is none."""
    if name in Knob.__members__:
        return Knob[name].value
    later = _LATER_KNOB.fullmatch(name)
    return int(later[1]) if later and int(later[1]) not in _KNOB_VALUES else None


_KNOB_VALUES = frozenset(knob.value for knob in Knob)


def _recorded(plan: EnginePlan) -> Config:
    return Config.of(
        engine=plan.engine,
        knobs={_knob_name(knob): choice for knob, choice in plan.knobs},
        notes=notes_text(plan.notes - {Note.STRICT_NAN_PROPAGATION}),
        workspace_bytes=plan.workspace_bytes,
    )


def _heuristic(problem: ProblemDescription) -> Config:
    """The first plan of the heuristics at run time that is exact, deterministic and within a modest workspace."""
    notes = frozenset({Note.TENSOR_CORE}) - refused_notes(problem)
    return Config.of(engine=HEURISTIC, knobs={}, notes=notes_text(notes), workspace_bytes=_HEURISTIC_WORKSPACE_BYTES)


def _is_int(value: object, least: int, most: int) -> bool:
    return type(value) is int and least <= value <= most


class ConvCudnn(Solver):
    """Any convolution that cuDNN has an engine for.

    A configuration is {"engine": global index, "knobs": {type: choice}, "notes": the engine's numerical notes joined
    by "+", "workspace_bytes": what the plan needs}. It says all that a caller must know without the library; a plan
    that turns out to differ is refused when it is built. Engine -1 stands for the heuristics' first plan with no other
    notes and no more workspace.
    """

    id = "ConvCudnn"
    algorithm = Algorithm.LIBRARY
    keys = (
        KernelKey(
            place=Place.CUDA,
            library=Library.CUDNN,
            dtypes=frozenset({DataType.FLOAT32, DataType.FLOAT16, DataType.BFLOAT16}),
            layouts=frozenset(Layout),
            min_sm=75,
        ),
    )
    alignment_bytes = TENSOR_ALIGNMENT

    def examples(self) -> tuple[ProblemDescription, ...]:
        base = ProblemDescription.convolution
        x, w = (4, 32, 14, 14), (32, 32, 3, 3)
        return (
            base(x=x, w=w, padding=1, dtype="float16", layout="NHWC"),
            base(x=x, w=w, padding=1, direction="backward_data"),
            base(x=x, w=w, padding=1, direction="backward_weights", math="tf32"),
            base(x=x, w=(32, 8, 3, 3), padding=1, groups=4, dtype="bfloat16", layout="NHWC"),
            base(x=(4, 32, 50), w=(16, 32, 5), padding=((2, 1),), dtype="float16"),
            base(x=(2, 16, 6, 8, 8), w=(16, 16, 3, 3, 3), padding=1, dtype="float16", layout="NDHWC"),
        )

    def fuses(self, problem: ProblemDescription) -> Applicability:
        """Where an engine may fuse it; which ones do says cuDNN when it is asked for plans."""
        return Applicability(refused(problem.epilogue))

    def is_applicable(self, problem: ProblemDescription, device: Device) -> Applicability:
        tensors = (problem.x, problem.w, problem.y)
        dtypes = {tensor.dtype for tensor in tensors}
        if len(dtypes) > 1:
            return Applicability(f"wants one data type, the problem has {', '.join(sorted(dtypes))}")
        if device.sm < 80 and DataType.BFLOAT16 in dtypes:
            return Applicability(f"bfloat16 needs compute capability 8.0, {device.name} has {device.sm / 10:.1f}")
        if any(tensor.size > _MAX_ELEMENTS for tensor in tensors):
            return Applicability(f"serves tensors of at most {_MAX_ELEMENTS} elements, {problem} has a larger one")
        return APPLICABLE

    def error_reach(self, problem: ProblemDescription, config: Config) -> Reach:
        """Tiles for Winograd's and FFT's plans: of a Winograd plan, cuDNN does not say which transforms it has."""
        return Reach.PRODUCTS if self.error_growth(problem, config) <= 1 else Reach.TILE

    def spreads_nonfinite(self, problem: ProblemDescription, config: Config) -> bool:
        """Winograd's and FFT's plans do; others multiply by zeros of other groups, between strided gradients, or of
        channels that are not there (engine 63 of forward problems, made for first layers).
        """
        is_for_first_layers = problem.direction is Direction.FORWARD and config["engine"] == _FIRST_LAYERS
        multiplies_zeros = (
            problem.groups > 1
            or (problem.direction is Direction.BACKWARD_DATA and max(problem.conv.stride) > 1)
            or (is_for_first_layers and not problem.epilogue)
        )
        return multiplies_zeros or self.error_growth(problem, config) > 1

    def default_configs(self, problem: ProblemDescription, device: Device) -> tuple[Config, ...]:
        """The heuristics' best plans, direct ones first; the heuristics' choice on a device that is not there."""
        plans = sorted(self._plans(problem, device), key=lambda plan: plan.growth > 1)
        if problem.epilogue:
            plans = plans[:_FUSED_DEFAULTS]
        return tuple(map(_recorded, plans[:_DEFAULTS])) or (_heuristic(problem),)

    def configs(self, problem: ProblemDescription, device: Device) -> Iterator[Config]:
        plans = self._plans(problem, device)
        yield from map(_recorded, plans)
        if not plans:
            yield _heuristic(problem)

    def check_config(self, problem: ProblemDescription, device: Device, config: Config) -> None:
        if set(config) != _PARAMETERS:
            raise InvalidConfigError(f"{self.id}: config {config.json} must have the parameters {sorted(_PARAMETERS)}")
        answer = first_refusal(
            _refuse_engine(config, problem), _refuse_knobs(config["knobs"]), _refuse_notes(config["notes"], problem)
        )
        if answer.refused:
            raise InvalidConfigError(f"{self.id}: config {config.json}: {answer.reason}")

    def workspace_bytes(self, problem: ProblemDescription, device: Device, config: Config) -> int:
        return self.solution(problem, device, config).workspace.bytes

    def error_growth(self, problem: ProblemDescription, config: Config) -> float:
        return growth(parsed_notes(config["notes"]), problem)

    def is_exact(self, config: Config) -> bool:
        return is_exact(parsed_notes(config["notes"]))

    def solution(self, problem: ProblemDescription, device: Device, config: Config) -> ConvSolution:
        size = config["workspace_bytes"]
        step = CudnnStep(
            engine=config["engine"],
            knobs=tuple(sorted((_knob_type(name) or 0, choice) for name, choice in config["knobs"].items())),
            notes=tuple(name for name in config["notes"].split("+") if name),
            workspace="workspace" if size else None,
            workspace_bytes=size,
            fused=bool(problem.epilogue),
        )
        regions = (Region(name="workspace", bytes=size),) if size else ()
        return ConvSolution(
            steps=(step,),
            workspace=WorkspacePlan(regions),
            deterministic=is_deterministic(parsed_notes(config["notes"])),
        )

    def estimate_ms(self, problem: ProblemDescription, device: Device, config: Config) -> float:
        """Roofline with the share of it that cuDNN reaches by class; the heuristics' order breaks ties."""
        notes = parsed_notes(config["notes"])
        math = MathMode.TF32 if Note.TENSOR_CORE in notes else problem.math
        peak = device.peak_flops_per_s(problem.x.dtype, math, tensor_cores=Note.TENSOR_CORE in notes)
        # Transforms save arithmetic and pay in traffic; 2.25 is what F(2x2, 3x3) saves.
        flops = problem.flops / (1 if is_exact(notes) else 2.25)
        scratch = 0 if config["engine"] == HEURISTIC else int(config["workspace_bytes"])
        moved = problem.bytes + 2 * scratch
        share = _shares(problem)
        arithmetic_ms = 1e3 * flops / (peak * share.arithmetic)
        traffic_ms = 1e3 * moved / (device.bandwidth_bytes_per_s * share.traffic)
        return max(arithmetic_ms, traffic_ms) + _LAUNCH_MS

    def _plans(self, problem: ProblemDescription, device: Device) -> tuple[EnginePlan, ...]:
        """What cuDNN offers; nothing on a device that is not there or for a bare problem that it refuses.

        Raises:
            LaunchError: it fuses the problem's epilogue in no engine.
        """
        if device.index < 0:
            return ()
        try:
            plans = engine_plans(problem, device)
            if problem.epilogue and not plans:
                raise LaunchError(f"cuDNN has no engine that fuses {problem}")
            return plans
        except LaunchError as error:
            if isinstance(error.__cause__, MemoryError) or problem.epilogue:
                raise
            return ()


@dataclass(frozen=True, slots=True)
class _Shares:
    """Parts of the arithmetic and of the bandwidth ceiling that cuDNN typically reaches."""

    arithmetic: float
    traffic: float


def _shares(problem: ProblemDescription) -> _Shares:
    """By class, as measured on an H200 with float16 (PyTorch 2.11, cuDNN 9.19, all algorithms tried)."""
    if problem.groups > 1 and problem.groups in (problem.c, problem.k):
        return _Shares(0.25, 0.3)
    if problem.groups > 1 or problem.c <= 4:
        return _Shares(0.3, 0.3)
    if problem.n <= 2:
        return _Shares(0.38, 0.4)
    return _Shares(0.7, 0.55)


def _refuse_engine(config: Config, problem: ProblemDescription) -> Applicability:
    if not _is_int(config["engine"], HEURISTIC, _MAX_ENGINE):
        return Applicability(f"engine must be an integer from {HEURISTIC} to {_MAX_ENGINE}")
    if not _is_int(config["workspace_bytes"], 0, _MAX_WORKSPACE_BYTES):
        return Applicability(f"workspace_bytes must be an integer from 0 to {_MAX_WORKSPACE_BYTES}")
    if config["engine"] == HEURISTIC and config["knobs"]:
        return Applicability(f"knobs must be empty for engine {HEURISTIC}")
    known = known_fault(problem, config["engine"])
    return Applicability(f"engine {config['engine']} {known}") if known else APPLICABLE


def _refuse_knobs(knobs: object) -> Applicability:
    if not isinstance(knobs, dict) or len(knobs) > _MAX_KNOBS:
        return Applicability(f"knobs must be a mapping of at most {_MAX_KNOBS} choices")
    for name, choice in knobs.items():
        if not isinstance(name, str) or _knob_type(name) is None:
            return Applicability(f"knob {name!r} is unknown")
        if not _is_int(choice, -1, _MAX_CHOICE):
            return Applicability(f"{name}={choice!r} must be an integer from -1 to {_MAX_CHOICE}")
    return APPLICABLE


def _refuse_notes(text: object, problem: ProblemDescription) -> Applicability:
    if not isinstance(text, str):
        return Applicability("notes must be a string")
    try:
        notes = parsed_notes(text)
    except ValueError as error:
        return Applicability(str(error))
    less_precise = notes & refused_notes(problem)
    if less_precise:
        return Applicability(f"notes {notes_text(less_precise)} are less precise than {problem} allows")
    return APPLICABLE


SOLVERS = (ConvCudnn(),)
