"""How long the steps of a `FftPlan` take: a model of what they read and write, of products and of our own blocks."""

from __future__ import annotations

from miofind.device.device import Device
from miofind.solvers.common.correlation import ceil_div
from miofind.solvers.fft.steps import COMPLEX_BYTES, FftPlan

_STEP_MS = 0.002  # from the end of a small step to the end of the next
_BANDWIDTH_SHARE = 0.7  # of the device's, that steps are taken to reach
_ONE_PASS_BITS = 13  # of the points that the library is taken to transform in one pass over memory
_ANY_LENGTH = 64  # longer ones take it another pass each way unless they are powers of two


def estimate_ms(plan: FftPlan, device: Device) -> float:
    """Analytic milliseconds of all steps."""
    p = plan.problem
    count = ceil_div(plan.all_tiles, plan.at_once)
    tiles = min(plan.at_once, plan.all_tiles)
    product = count * plan.product.estimate_ms(device, plan.sizes(tiles), plan.frequencies, p.groups)
    planes = {"x": plan.all_tiles * p.c, "w": plan.filters, "y": plan.all_tiles * p.k}
    bandwidth = _BANDWIDTH_SHARE * device.bandwidth_bytes_per_s / 1e3
    plane = COMPLEX_BYTES * plan.frequencies
    if plan.is_weights:  # later chunks read the sums of earlier ones, and write them again
        product += 2 * (count - 1) * plane * plan.filters / bandwidth
    if plan.planes:
        least = plane * sum(planes.values()) / bandwidth
        transforms = sum(_own_ms(plan, device, name, number) for name, number in planes.items())
        read = (p.bytes - p.bare.bytes) / bandwidth  # by an epilogue
        return 3 * count * _STEP_MS + max(transforms, least) + product + read
    passes = 2 + sum(2 * ceil_div((n - 1).bit_length(), _ONE_PASS_BITS) for n in plan.lengths)
    if any(n > _ANY_LENGTH and n & (n - 1) for n in plan.lengths):
        passes += 2
    traffic = passes * plane * sum(planes.values()) + p.bytes
    return 5 * count * _STEP_MS + traffic / bandwidth + product


def _own_ms(plan: FftPlan, device: Device, name: str, planes: int) -> float:
    across, kept = plan.kept(name)
    return plan.own_block.estimate_ms(device, planes, kept // across)
