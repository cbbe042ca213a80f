"""How long the steps of a `WinogradPlan` take: what transforms read and write, and products by the library."""

from __future__ import annotations

import functools
from dataclasses import replace

from miofind.device.device import Device
from miofind.libraries.gemm import STEP_MS, product_ms
from miofind.solvers.winograd.product import library_product
from miofind.solvers.winograd.steps import FEW_FLOATS, WinogradPlan

_BANDWIDTH_SHARES = {True: 0.82, False: 0.7}  # of the device's, that transforms of few floats and of many reach; H200


def estimate_ms(plan: WinogradPlan, device: Device) -> float:
    """Analytic milliseconds of all steps; the library splits no sums of products in batches."""
    plain = plan if plan.vector == 1 else replace(plan, vector=1)
    return plan.all_tiles / plan.tiles * _product_ms(plain, device) + transforms_ms(plan, device)


@functools.lru_cache(maxsize=256)  # plans that differ in vectors alone ask
def _product_ms(plan: WinogradPlan, device: Device) -> float:
    return product_ms(library_product(plan, plan.tiles), device, splits=False)


def transforms_ms(plan: WinogradPlan, device: Device, *, step_ms: float = STEP_MS) -> float:
    """Analytic milliseconds of what transforms read and write, and of each one's start."""
    inputs, others, products = (region.bytes for region in plan.regions())
    whole = plan.all_tiles / plan.tiles
    if plan.is_weights:
        again = 2 * (plan.chunk_count - 1) * products  # sums that later chunks add to
        moved = whole * (inputs + others) + products + again + plan.problem.bytes
    else:
        moved = whole * (inputs + products) + others + plan.problem.bytes
    steps = (1 if plan.is_weights else 2) * plan.chunk_count + 1
    traffic = moved / (_BANDWIDTH_SHARES[plan.floats <= FEW_FLOATS] * device.bandwidth_bytes_per_s)
    return 1e3 * traffic + step_ms * steps
