"""Convolutions as column matrices, made by kernels_src/vendor/im2col.cu chunk by chunk, times filters by cuBLASLt.

Serves any filter, stride, padding, dilation and group count. Backward data sums float32 columns, so that the result is
rounded once; backward weights sums chunks in float32.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from miofind.core.problem import DataType, Layout, ProblemDescription
from miofind.device.device import Device, Library, Place
from miofind.libraries.matmul_choice import TENSOR_ALIGNMENT, WORKSPACE_BYTES, check_int
from miofind.solver.solver import APPLICABLE, Algorithm, Applicability, EstimatedConfig, KernelKey, Solver
from miofind.solver.steps import Config, ConvSolution
from miofind.solvers.vendor.column_configs import (
    NAMES,
    check_column_config,
    check_plan,
    column_plans,
    column_solution,
    heuristic_config,
    recorded_configs,
    refuse_plan,
)
from miofind.solvers.vendor.columns import SOURCE, ColumnPlan

_CHUNK_BYTES = 256 << 20
_RECORDED = 6
_LAYOUTS = frozenset(Layout)


class ConvIm2colGemm(Solver):
    """im2col and a cuBLASLt product: the columns of some images at a time lie in a workspace."""

    id = "ConvIm2colGemm"
    algorithm = Algorithm.IM2COL_GEMM
    keys = (
        KernelKey(
            place=Place.CUDA,
            library=Library.CUBLAS,
            dtypes=frozenset({DataType.FLOAT32, DataType.FLOAT16}),
            layouts=_LAYOUTS,
            min_sm=75,
        ),
        KernelKey(
            place=Place.CUDA,
            library=Library.CUBLAS,
            dtypes=frozenset({DataType.BFLOAT16}),
            layouts=_LAYOUTS,
            min_sm=80,
        ),
    )
    alignment_bytes = TENSOR_ALIGNMENT
    is_dynamic = True
    sources = (SOURCE,)

    def examples(self) -> tuple[ProblemDescription, ...]:
        conv = ProblemDescription.convolution
        asymmetric = ((1, 2), (0, 1))
        return (
            conv(x=(3, 16, 9, 8), w=(24, 16, 3, 3), padding=1, stride=2, dtype="float16", layout="NHWC"),
            conv(
                x=(3, 16, 9, 8),
                w=(24, 16, 3, 3),
                padding=1,
                dtype="bfloat16",
                layout="NHWC",
                epilogue="residual.relu",
            ),
            conv(x=(5, 6, 7, 7), w=(8, 3, 3, 2), groups=2, padding=asymmetric, direction="backward_data"),
            conv(x=(5, 8, 20), w=(8, 8, 5), dilation=3, dtype="bfloat16", direction="backward_weights"),
            conv(x=(2, 3, 5, 6, 7), w=(4, 3, 3, 3, 3), padding=1, layout="NDHWC"),
        )

    def fuses(self, problem: ProblemDescription) -> Applicability:
        return _plan(problem, 1).refuse_epilogue()

    def is_applicable(self, problem: ProblemDescription, device: Device) -> Applicability:
        if problem.is_1x1:
            return Applicability("serves filters of several taps or with padding; ConvGemm1x1 serves this one")
        tensors = (problem.x, problem.w, problem.y)
        if len({tensor.dtype for tensor in tensors}) > 1:
            return Applicability("serves tensors of one dtype")
        if len({tensor.layout for tensor in tensors}) > 1:
            return Applicability("serves tensors of one layout")
        if not any(column_plans(problem, device, images) for images in _chunks(problem)):
            return refuse_plan(_plan(problem, 1))
        return APPLICABLE

    def least_ms(self, problem: ProblemDescription, device: Device) -> float:
        return _plan(problem, 1).least_ms(device)

    def default_configs(self, problem: ProblemDescription, device: Device) -> tuple[Config, ...]:
        return tuple(each.config for each in self.estimated_defaults(problem, device))

    def estimated_defaults(self, problem: ProblemDescription, device: Device) -> tuple[EstimatedConfig, ...]:
        budgets = (_CHUNK_BYTES, device.l2_bytes // 2)
        likely = [(_largest(problem, device, budget), WORKSPACE_BYTES) for budget in budgets]
        chosen = dict.fromkeys([*likely, (_smallest(problem, device), 0)])
        return tuple(
            EstimatedConfig(
                heuristic_config(plan, workspace_bytes, images=plan.images), plan.estimate_ms(device, workspace_bytes)
            )
            for plan, workspace_bytes in chosen
        )

    def configs(self, problem: ProblemDescription, device: Device) -> Iterator[Config]:
        defaults = self.default_configs(problem, device)
        yield from defaults
        yield from recorded_configs(_largest(problem, device, _CHUNK_BYTES), defaults[0], device, _RECORDED)
        for images in _chunks(problem):
            for plan in column_plans(problem, device, images)[:2]:
                config = heuristic_config(plan, images=images)
                if config not in defaults:
                    yield config

    def check_config(self, problem: ProblemDescription, device: Device, config: Config) -> None:
        check_column_config(self.id, config, NAMES | {"images"})
        check_int(self.id, config, "images", 1, problem.n)
        check_int(self.id, config, "slots", 1, config["images"])
        check_plan(self.id, _plan_of(problem, config), config)

    def is_valid_config(self, problem: ProblemDescription, device: Device, config: Config) -> bool:
        return not refuse_plan(_plan_of(problem, config)).refused

    def estimate_ms(self, problem: ProblemDescription, device: Device, config: Config) -> float:
        return _plan_of(problem, config).estimate_ms(device, config["workspace_bytes"])

    def solution(self, problem: ProblemDescription, device: Device, config: Config) -> ConvSolution:
        return column_solution(_plan_of(problem, config), config)


def _plan(problem: ProblemDescription, images: int, slots: int = 1) -> ColumnPlan:
    return ColumnPlan(problem=problem, images=images, slots=slots)


def _plan_of(problem: ProblemDescription, config: Config) -> ColumnPlan:
    return _plan(problem, config["images"], config["slots"])


def _chunks(problem: ProblemDescription) -> list[int]:
    """Images of chunks: powers of two and all, few first."""
    return sorted({1 << i for i in range(problem.n.bit_length())} | {problem.n})


def _best(problem: ProblemDescription, device: Device, chunks: Iterable[int]) -> Iterator[ColumnPlan]:
    """The likely best plan of each of some chunks that can run."""
    return (plan for images in chunks for plan in column_plans(problem, device, images)[:1])


def _smallest(problem: ProblemDescription, device: Device) -> ColumnPlan:
    """The plan of fewest images."""
    return next(_best(problem, device, _chunks(problem)))


def _largest(problem: ProblemDescription, device: Device, budget: int) -> ColumnPlan:
    """The plan of most images whose columns fit, else that of fewest."""
    column_bytes = _plan(problem, 1).column_bytes
    fitting = (images for images in reversed(_chunks(problem)) if images * column_bytes <= budget)
    return next(_best(problem, device, fitting), None) or _smallest(problem, device)


SOLVERS = (ConvIm2colGemm(),)
