"""ConvWinogradMma: Winograd's minimal filtering around the products of another solver, of miofind's own kernels.

The products are one convolution with filters of one tap, a group a place of a tile and group of the problem. Kernels:
kernels_src/winograd/batched.cu, and those of the other solver, which is known by its id alone.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from miofind.core.problem import DataType, Direction, Layout, MathMode, ProblemDescription
from miofind.device.device import Device, Library, Place
from miofind.errors import InvalidConfigError
from miofind.solver.delegating import DelegatingSolver, kernels_on
from miofind.solver.solver import APPLICABLE, Algorithm, Applicability, EstimatedConfig, KernelKey, Reach
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
from miofind.solvers.winograd.cost import transforms_ms
from miofind.solvers.winograd.steps import INPUTS, OTHERS, PRODUCTS, SOURCE, WinogradPlan

_FIXED = {"slices": 1, "vector": 1}  # of a plan; wider vectors of channels are no faster in float32
_NAMES = (PLAN_NAMES - set(_FIXED)) | {"product"}
_DEFAULTS = 8
_PRODUCTS_EACH = 4  # configurations of the other solver that a search tries with each plan
_RANKED_FLOPS_PER_S_AND_SM = 0.45e12  # of three products of TF32 each on an H200, to rank plans by
# Set against 2108 measurements of 304 problems on an H200. Of the other solver's estimate its start, and how much
# longer three products of TF32 take than the rest of it; milliseconds from a transform's start to the next step's.
_PRODUCT_START_MS, _IEEE_OVER_ESTIMATE, _TRANSFORM_START_MS = 0.002, 1.4, 0.001
_NARROW, _NARROW_SLOWER = 64, 1.15  # a block's rows or columns, and how much more three products take with fewer
_SMALL_SLOWER = 1.04  # likewise of a block with no more rows and columns than that
_SHALLOW, _SHALLOW_SLOWER = 32, 1.06  # likewise of the depth of a stage


class ConvWinogradMma(DelegatingSolver):
    """Winograd's minimal filtering F(tile, taps), float32, with products by ConvImplicitGemmMma.

    Configuration: as `ConvWinograd` has it, without slices, vectors and library, and `product`, the other solver's. The
    error bound is wider than direct summation's by the transforms' growth times the other solver's.

    Source: Lavin and Gray, Fast Algorithms for Convolutional Neural Networks, CVPR 2016, section 4.
    """

    id = "ConvWinogradMma"
    inner = "ConvImplicitGemmMma"
    inner_name = "product"
    algorithm = Algorithm.WINOGRAD
    applies_epilogues = True
    keys = (
        KernelKey(
            place=Place.CUDA,
            library=Library.PLAIN,
            dtypes=frozenset({DataType.FLOAT32}),
            layouts=frozenset(Layout),
            min_sm=80,
        ),
    )
    alignment_bytes = 16
    is_dynamic = True
    sources = (SOURCE, "implicit_gemm/mma.cu")

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
            conv(x=(2, 20, 30), w=(7, 20, 5), padding=2),
            conv(x=x, w=w, padding=odd, groups=2, epilogue="scale.bias.channel_bias.residual.silu"),
            conv(x=x, w=w, padding=odd, groups=2, layout=Layout.NHWC, epilogue="bias.relu.residual"),
            conv(x=(2, 20, 12, 20), w=(24, 20, 3, 3), padding=1, math="tf32", epilogue="bias.gelu"),
            conv(x=x, w=w, padding=odd, groups=2, direction="backward_data", epilogue="residual.drelu"),
        )

    def is_applicable(self, problem: ProblemDescription, device: Device) -> Applicability:
        if (answer := refuse_winograd(problem)).refused:
            return answer
        if problem.x.layout.channels_last != problem.y.layout.channels_last:
            return Applicability("needs one layout for x and y")
        if next(self._plans(problem, device), None) is None:
            return Applicability("has more tiles than one sum takes, or than the solver of its products")
        return APPLICABLE

    def error_reach(self, problem: ProblemDescription, config: Config) -> Reach:
        return Reach.INPUTS if self.plan(problem, config).is_local else Reach.TILE

    def spreads_nonfinite(self, problem: ProblemDescription, config: Config) -> bool:
        return True

    def default_configs(self, problem: ProblemDescription, device: Device) -> tuple[Config, ...]:
        """The likely best plans, of each tile one, and one of the smallest; the best with several products."""
        return tuple(each.config for each in self.estimated_defaults(problem, device))

    def estimated_defaults(self, problem: ProblemDescription, device: Device) -> tuple[EstimatedConfig, ...]:
        ranked = sorted(
            self._plans(problem, device),
            key=lambda plan: _transforms_ms(plan, device) + _ranked_ms(plan, device),
        )
        firsts = [next((plan for plan in ranked if plan.tile == tile), None) for tile in TILES]
        least = min(ranked, key=lambda plan: sum(region.bytes for region in plan.regions()))
        chosen = list(dict.fromkeys([*ranked[:1], *filter(None, firsts), *ranked[:3], least]))
        choices = [self._with_products(plan, device, _PRODUCTS_EACH) for plan in chosen]
        best = min(choices, key=lambda configs: configs[0].estimate_ms)
        return tuple(dict.fromkeys([best[0], *(configs[0] for configs in choices), *best]))[:_DEFAULTS]

    def configs(self, problem: ProblemDescription, device: Device) -> Iterator[Config]:
        found = dict.fromkeys(self.default_configs(problem, device))
        yield from found
        for plan in self._plans(problem, device):
            for each in self._with_products(plan, device, _PRODUCTS_EACH):
                if each.config not in found:
                    yield each.config

    def check_config(self, problem: ProblemDescription, device: Device, config: Config) -> None:
        if set(config) != _NAMES:
            raise InvalidConfigError(f"{self.id}: config {config.json} must have the parameters {sorted(_NAMES)}")
        check_plan(self.id, problem, {**config, **_FIXED})
        plan = self.plan(problem, config)
        if not self._serves(plan, device):
            raise InvalidConfigError(f"{self.id}: config {config.json} has no products of one sum for {problem}")
        self.check_inner_config(product_problem(plan), device, config)

    def is_valid_config(self, problem: ProblemDescription, device: Device, config: Config) -> bool:
        if not serves(problem, config["tile"]):
            return False
        plan = self.plan(problem, config)
        if refuse_plan(plan).refused or not self._serves(plan, device):
            return False
        return self.inner_solver.is_valid_config(product_problem(plan), device, self.inner_config(config))

    def estimate_ms(self, problem: ProblemDescription, device: Device, config: Config) -> float:
        plan = self.plan(problem, config)
        return _transforms_ms(plan, device) + plan.chunk_count * self._product_ms(plan, device, config["product"])

    def error_growth(self, problem: ProblemDescription, config: Config) -> float:
        return self.plan(problem, config).bound_growth * super().error_growth(problem, config)

    def is_exact(self, config: Config) -> bool:
        return int(config["tile"]) == EXACT_TILE and super().is_exact(config)

    def workspace_bytes(self, problem: ProblemDescription, device: Device, config: Config) -> int:
        plan = self.plan(problem, config)
        return _workspace(plan, self._products(plan, device, config)).bytes

    def packing(self, problem: ProblemDescription, device: Device, config: Config) -> Packing | None:
        return self.plan(problem, config).packing(self.solution(problem, device, config))

    def solution(self, problem: ProblemDescription, device: Device, config: Config) -> ConvSolution:
        plan = self.plan(problem, config)
        products = self._products(plan, device, config)
        names = product_tensors(plan) | {region.name: _own(region) for region in products.workspace.regions}
        steps = kernels_on(products, names)
        return ConvSolution(
            steps=tuple(plan.steps(lambda count, accumulate: steps)),
            workspace=_workspace(plan, products),
            deterministic=products.deterministic,
        )

    def plan(self, problem: ProblemDescription, config: Config) -> WinogradPlan:
        """What a configuration transforms, and how."""
        return replace(plan_of(problem, {**config, **_FIXED}), places_within=True)

    def inner_problem(self, problem: ProblemDescription, config: Config) -> ProblemDescription:
        return product_problem(self.plan(problem, config))

    def _plans(self, problem: ProblemDescription, device: Device) -> Iterator[WinogradPlan]:
        one_each = plans(problem, slices_of=(_FIXED["slices"],), vectors=(_FIXED["vector"],))
        return (plan for plan in one_each if self._serves(plan, device))

    def _serves(self, plan: WinogradPlan, device: Device) -> bool:
        """Whether its products are one convolution of the other solver; it adds to no earlier sum."""
        if plan.slices > 1 or plan.vector > 1 or (plan.is_weights and plan.chunk_count > 1):
            return False
        return bool(self.inner_solver.applicability(product_problem(plan), device))

    def _products(self, plan: WinogradPlan, device: Device, config: Config) -> ConvSolution:
        return self.inner_solver.solution(product_problem(plan), device, self.inner_config(config))

    def _with_products(self, plan: WinogradPlan, device: Device, count: int) -> list[EstimatedConfig]:
        """The likely best configurations with a plan."""
        values: dict[str, Any] = {name: value for name, value in values_of(plan).items() if name not in _FIXED}
        listed = self.inner_solver.estimated_defaults(product_problem(plan), device)
        times = [_slower_ms(plan, product.config, product.estimate_ms) for product in listed]
        around_ms = _transforms_ms(plan, device)
        return [
            EstimatedConfig(
                Config({**values, "product": dict(listed[place].config)}),
                around_ms + plan.chunk_count * times[place],
            )
            for place in sorted(range(len(listed)), key=times.__getitem__)[:count]
        ]

    def _product_ms(self, plan: WinogradPlan, device: Device, product: Mapping[str, Any]) -> float:
        """Of one chunk."""
        estimate = self.inner_solver.estimate_ms(product_problem(plan), device, Config(product))
        return _slower_ms(plan, product, estimate)


def _slower_ms(plan: WinogradPlan, product: Mapping[str, Any], estimate_ms: float) -> float:
    """What products by a configuration of the other solver's take, by its estimate."""
    if plan.problem.math is not MathMode.IEEE:
        return estimate_ms
    least, most = sorted((product["tile_m"], product["tile_n"]))
    narrow = _NARROW_SLOWER if least < _NARROW else _SMALL_SLOWER if most <= _NARROW else 1.0
    shallow = _SHALLOW_SLOWER if product["tile_k"] < _SHALLOW else 1.0
    slower = _IEEE_OVER_ESTIMATE * narrow * shallow
    return _PRODUCT_START_MS + slower * max(0.0, estimate_ms - _PRODUCT_START_MS)


@functools.lru_cache(maxsize=256)  # every configuration asks, for each of its products' estimates
def product_problem(plan: WinogradPlan) -> ProblemDescription:
    """The products of a chunk as a convolution: x and y are tiles, places of tiles are groups."""
    p = plan.problem
    groups, c = plan.places * p.groups, p.w.shape[1]
    return ProblemDescription.convolution(
        x=(1, groups * c, plan.slice_tiles),
        w=(plan.places * p.k, c, 1),
        groups=groups,
        dtype=p.x.dtype,
        layout=Layout.of(1, channels_last=p.x.layout.channels_last),
        direction=p.direction,
        math=p.math,
    )


def _own(region: Region) -> str:
    """The name of a region of the products' solution among those of the plan."""
    return f"product_{region.name}"


def _workspace(plan: WinogradPlan, products: ConvSolution) -> WorkspacePlan:
    regions = (Region(name=_own(region), bytes=region.bytes) for region in products.workspace.regions)
    return WorkspacePlan((*plan.regions(), *regions))


def product_tensors(plan: WinogradPlan) -> dict[str, str]:
    """Where the tensors of the products' convolution are."""
    if plan.is_weights:
        return {"x": INPUTS, "y": OTHERS, "w": PRODUCTS}
    is_data = plan.problem.direction is Direction.BACKWARD_DATA
    return {"x": PRODUCTS if is_data else INPUTS, "w": OTHERS, "y": INPUTS if is_data else PRODUCTS}


def _transforms_ms(plan: WinogradPlan, device: Device) -> float:
    return transforms_ms(plan, device, step_ms=_TRANSFORM_START_MS)


def _ranked_ms(plan: WinogradPlan, device: Device) -> float:
    """Roughly the milliseconds of the products, without asking the other solver."""
    p = plan.problem
    rows = plan.chunk_count * max(64, plan.slice_tiles)
    flops = 2.0 * plan.places * rows * p.k * p.w.shape[1]
    return 1e3 * flops / (_RANKED_FLOPS_PER_S_AND_SM * device.sm_count)


SOLVERS = (ConvWinogradMma(),)
