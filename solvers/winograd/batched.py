"""ConvWinograd: Winograd's minimal filtering around one batched product by cuBLASLt a chunk of tiles.

Kernels: kernels_src/winograd/batched.cu. The steps and their workspace are made by `miofind.solvers.winograd.steps`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from miofind.core.problem import DataType, Direction, Layout, ProblemDescription
from miofind.device.device import Device, Library, Place
from miofind.errors import InvalidConfigError
from miofind.libraries.matmul_choice import (
    TENSOR_ALIGNMENT,
    WORKSPACE_BYTES,
    WORKSPACE_REGION,
    check_library_choice,
    with_library_choice,
)
from miofind.solver.solver import Algorithm, Applicability, EstimatedConfig, KernelKey, Reach, Solver
from miofind.solver.steps import Config, ConvSolution, Packing, Region, WorkspacePlan
from miofind.solvers.winograd.choice import (
    EXACT_TILE,
    PLAN_NAMES,
    TILES,
    check_plan,
    plan_of,
    plans,
    refuse_plan,
    refuse_winograd,
    serves,
    values_of,
)
from miofind.solvers.winograd.cost import estimate_ms
from miofind.solvers.winograd.product import library_product
from miofind.solvers.winograd.steps import SOURCE, WinogradPlan

_DEFAULTS = 8
_LAYOUTS = frozenset(Layout)
_ROUNDOFF = {DataType.FLOAT16: 2.0**-11, DataType.BFLOAT16: 2.0**-8}
_ROUNDOFF_FLOAT32 = 2.0**-24
_NAMES = PLAN_NAMES | {"algorithm", "workspace_bytes"}


class ConvWinograd(Solver):
    """Winograd's minimal filtering F(tile, taps) along every axis of more than one tap, stride 1.

    Configuration: `tile`, the outputs of a tile along an axis, for backward weights its pixels of y; `tiles`, how many
    are transformed at once; `slices`, parts of their sum for backward weights; `vector`, channels a thread where they
    are last; the library's `workspace_bytes`. It is left the choice of its algorithm.
    Transformed data has the tensors' type, products and sums are float32. The error bound is direct summation's
    for F(2x2, 3x3), 10 times as wide for F(4x4, 3x3) and 46 times for F(6x6, 3x3) (`tiling.winograd.bound_growth`);
    16-bit operands are rounded once more.

    Source: Lavin and Gray, Fast Algorithms for Convolutional Neural Networks, CVPR 2016, section 4.
    """

    id = "ConvWinograd"
    algorithm = Algorithm.WINOGRAD
    applies_epilogues = True
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
        x, w, odd = (3, 32, 9, 8), (32, 16, 3, 3), ((1, 0), (0, 1))
        return (
            *(
                conv(x=x, w=w, padding=odd, groups=2, layout=layout, direction=direction)
                for direction in Direction
                for layout in (Layout.NCHW, Layout.NHWC)
            ),
            conv(x=(2, 18, 9, 8), w=(5, 18, 5, 1), padding=(2, 0), layout=Layout.NHWC),
            conv(x=(2, 6, 12, 20), w=(20, 6, 1, 3), padding=(0, 1), math="tf32", direction="backward_data"),
            conv(x=(1, 16, 20), w=(5, 16, 3), padding=1, dtype=DataType.FLOAT16),
            conv(x=(2, 16, 8, 8), w=(8, 16, 3, 3), padding=1, dtype=DataType.BFLOAT16, layout=Layout.NHWC),
            conv(x=(2, 20, 9, 9), w=(7, 20, 5, 5), padding=2, layout={"x": "NHWC", "w": "NCHW", "y": "NCHW"}),
            conv(x=x, w=w, padding=odd, groups=2, epilogue="scale.bias.channel_bias.residual.silu"),
            conv(x=x, w=w, padding=odd, groups=2, layout=Layout.NHWC, epilogue="bias.relu.residual"),
            conv(x=(1, 16, 20), w=(5, 16, 3), padding=1, dtype=DataType.FLOAT16, epilogue="bias.gelu"),
            conv(x=x, w=w, padding=odd, groups=2, direction="backward_data", epilogue="residual.drelu"),
        )

    def is_applicable(self, problem: ProblemDescription, device: Device) -> Applicability:
        return refuse_winograd(problem)

    def error_reach(self, problem: ProblemDescription, config: Config) -> Reach:
        return Reach.INPUTS if plan_of(problem, config).is_local else Reach.TILE

    def spreads_nonfinite(self, problem: ProblemDescription, config: Config) -> bool:
        return True

    def default_configs(self, problem: ProblemDescription, device: Device) -> tuple[Config, ...]:
        """The likely best, of every tile the best, so that a bound on the error leaves some, and the smallest."""
        return tuple(each.config for each in self.estimated_defaults(problem, device))

    def estimated_defaults(self, problem: ProblemDescription, device: Device) -> tuple[EstimatedConfig, ...]:
        times = {plan: estimate_ms(plan, device) for plan in plans(problem)}
        ranked = sorted(times, key=lambda plan: times[plan])
        firsts = [next((plan for plan in ranked if plan.tile == tile), None) for tile in TILES]
        best = list(dict.fromkeys([*ranked[:1], *filter(None, firsts), *ranked]))[: _DEFAULTS - 1]
        least = min(ranked, key=lambda plan: sum(region.bytes for region in plan.regions()))
        return (
            *(EstimatedConfig(_heuristic_config(plan), times[plan]) for plan in best),
            EstimatedConfig(Config({**_heuristic_config(least), "workspace_bytes": 0}), times[least]),
        )

    def configs(self, problem: ProblemDescription, device: Device) -> Iterator[Config]:
        defaults = self.default_configs(problem, device)
        yield from defaults
        yield from (config for config in map(_heuristic_config, plans(problem)) if config not in defaults)

    def check_config(self, problem: ProblemDescription, device: Device, config: Config) -> None:
        if set(config) != _NAMES:
            raise InvalidConfigError(f"{self.id}: config {config.json} must have the parameters {sorted(_NAMES)}")
        check_library_choice(self.id, config)
        check_plan(self.id, problem, config)

    def is_valid_config(self, problem: ProblemDescription, device: Device, config: Config) -> bool:
        return serves(problem, config["tile"]) and not refuse_plan(plan_of(problem, config)).refused

    def estimate_ms(self, problem: ProblemDescription, device: Device, config: Config) -> float:
        return estimate_ms(plan_of(problem, config), device)

    def error_growth(self, problem: ProblemDescription, config: Config) -> float:
        """That of the transforms; operands of 16 bits are rounded to them, which direct summation does not do.

        The bound of their errors is 8 * u of their type, whatever the length of the sum, as 8 * u * sqrt(length) is of
        float32 sums.
        """
        plan, roundoff = plan_of(problem, config), _ROUNDOFF.get(problem.x.dtype)
        if roundoff is None:
            return plan.bound_growth
        return plan.error_growth * (1 + roundoff / (_ROUNDOFF_FLOAT32 * math.sqrt(problem.reduction_length)))

    def is_exact(self, config: Config) -> bool:
        return int(config["tile"]) == EXACT_TILE

    def workspace_bytes(self, problem: ProblemDescription, device: Device, config: Config) -> int:
        return _workspace(plan_of(problem, config), config).bytes

    def packing(self, problem: ProblemDescription, device: Device, config: Config) -> Packing | None:
        return plan_of(problem, config).packing(self.solution(problem, device, config))

    def solution(self, problem: ProblemDescription, device: Device, config: Config) -> ConvSolution:
        plan = plan_of(problem, config)
        steps = plan.steps(lambda count, accumulate: library_product(plan, count, accumulate).steps())
        return ConvSolution(steps=with_library_choice(tuple(steps), config), workspace=_workspace(plan, config))


def _workspace(plan: WinogradPlan, config: Config) -> WorkspacePlan:
    size = config["workspace_bytes"]
    library = (Region(name=WORKSPACE_REGION, bytes=size),) if size else ()
    return WorkspacePlan((*plan.regions(), *library))


def _heuristic_config(plan: WinogradPlan) -> Config:
    """The configuration that leaves the algorithm to the library's heuristics."""
    return Config({**values_of(plan), "algorithm": {}, "workspace_bytes": WORKSPACE_BYTES})


SOLVERS = (ConvWinograd(),)
