"""Convolutions with a filter of one tap and no padding as matrix products by cuBLASLt.

The tensors are the matrices: nothing is copied at stride 1, in any mix of layouts. With strides the pixels that are
read (or written, in backward data) are first gathered (scattered) by kernels_src/vendor/im2col.cu.
"""

from __future__ import annotations

from collections.abc import Iterator

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

_RECORDED = 8
_LAYOUTS = frozenset(Layout)


class ConvGemm1x1(Solver):
    """A 1x1 convolution by cuBLASLt: one product an image, or one in all where channels are last."""

    id = "ConvGemm1x1"
    algorithm = Algorithm.GEMM
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
        x, w = (2, 16, 7, 9), (24, 16, 1, 1)
        return (
            conv(x=x, w=w, dtype="float16", layout="NHWC"),
            conv(x=x, w=w, stride=2, dtype="float16", layout="NHWC", epilogue="bias.residual.relu"),
            conv(x=x, w=w, dtype="float16", layout={"x": "NHWC", "w": "NCHW", "y": "NCHW"}),
            conv(x=x, w=w, stride=2, dtype="bfloat16", direction="backward_data"),
            conv(x=(5, 16, 6, 6), w=(24, 4, 1, 1), groups=4, dtype="float16", direction="backward_weights"),
            conv(x=(2, 8, 30), w=(6, 8, 1), stride=3, math="tf32", layout="NWC"),
        )

    def fuses(self, problem: ProblemDescription) -> Applicability:
        return _plan(problem, 1).refuse_epilogue()

    def is_applicable(self, problem: ProblemDescription, device: Device) -> Applicability:
        if not problem.is_1x1:
            return Applicability("serves filters of one tap without padding")
        if len({problem.x.dtype, problem.w.dtype, problem.y.dtype}) > 1:
            return Applicability("serves tensors of one dtype")
        if not column_plans(problem, device, problem.n):
            return refuse_plan(_plan(problem, 1))
        return APPLICABLE

    def default_configs(self, problem: ProblemDescription, device: Device) -> tuple[Config, ...]:
        return tuple(each.config for each in self.estimated_defaults(problem, device))

    def estimated_defaults(self, problem: ProblemDescription, device: Device) -> tuple[EstimatedConfig, ...]:
        plans = column_plans(problem, device, problem.n)
        least = min(plans, key=lambda plan: plan.slots)
        return tuple(
            EstimatedConfig(heuristic_config(plan, workspace_bytes), plan.estimate_ms(device, workspace_bytes))
            for plan, workspace_bytes in ((plans[0], WORKSPACE_BYTES), (least, 0))
        )

    def configs(self, problem: ProblemDescription, device: Device) -> Iterator[Config]:
        yield from self.default_configs(problem, device)
        for rank, plan in enumerate(column_plans(problem, device, problem.n)):
            config = heuristic_config(plan)
            if rank > 0:
                yield config
            yield from recorded_configs(plan, config, device, _RECORDED if rank == 0 else _RECORDED // 2)

    def check_config(self, problem: ProblemDescription, device: Device, config: Config) -> None:
        check_column_config(self.id, config, NAMES)
        check_int(self.id, config, "slots", 1, problem.n)
        check_plan(self.id, _plan(problem, config["slots"]), config)

    def is_valid_config(self, problem: ProblemDescription, device: Device, config: Config) -> bool:
        return not refuse_plan(_plan(problem, config["slots"])).refused

    def estimate_ms(self, problem: ProblemDescription, device: Device, config: Config) -> float:
        return _plan(problem, config["slots"]).estimate_ms(device, config["workspace_bytes"])

    def solution(self, problem: ProblemDescription, device: Device, config: Config) -> ConvSolution:
        return column_solution(_plan(problem, config["slots"]), config)


def _plan(problem: ProblemDescription, slots: int) -> ColumnPlan:
    return ColumnPlan(problem=problem, images=problem.n, slots=slots)


SOLVERS = (ConvGemm1x1(),)
