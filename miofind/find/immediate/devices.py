"""Devices that need not be here, with the figures that estimates use."""

from __future__ import annotations

from dataclasses import dataclass, replace

from miofind.device.device import Device
from miofind.errors import NoDeviceError
from miofind.find.row_check import device_of


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ceilings:
    """Nominal figures of a kind of GPU.

    Attributes:
        sm_count: multiprocessors.
        clock_hz: boost clock.
        memory_hz: clock of the memory, which moves two bits a cycle on each line of its bus.
        bus_bits: lines of that bus.
        l2_mib: L2 cache.
    """

    sm_count: int
    clock_hz: float
    memory_hz: float
    bus_bits: int
    l2_mib: int

    def given_to(self, device: Device) -> Device:
        """A device with these: bandwidth and L2 in proportion to its multiprocessors."""
        share = device.sm_count / self.sm_count
        return replace(
            device,
            clock_hz=self.clock_hz,
            bandwidth_bytes_per_s=2 * self.memory_hz * self.bus_bits / 8 * share,
            l2_bytes=int((self.l2_mib << 20) * share),
        )


# The driver's figures for the H200; for the others those of the vendor's datasheets and white papers: boost clock,
# memory by its clock and width, L2. Of the B200 the driver tells memory and L2, and the datasheet 2.25 PFLOP/s in 16
# bits, which make the clock.
_CEILINGS = {
    "NVIDIA H200": _Ceilings(sm_count=132, clock_hz=1.98e9, memory_hz=3.201e9, bus_bits=6144, l2_mib=60),
    "NVIDIA H100 80GB HBM3": _Ceilings(sm_count=132, clock_hz=1.98e9, memory_hz=2.619e9, bus_bits=5120, l2_mib=50),
    "NVIDIA H100 PCIe": _Ceilings(sm_count=114, clock_hz=1.755e9, memory_hz=1.593e9, bus_bits=5120, l2_mib=50),
    "NVIDIA A100-SXM4-80GB": _Ceilings(sm_count=108, clock_hz=1.41e9, memory_hz=1.593e9, bus_bits=5120, l2_mib=40),
    "NVIDIA A100 80GB PCIe": _Ceilings(sm_count=108, clock_hz=1.41e9, memory_hz=1.512e9, bus_bits=5120, l2_mib=40),
    "NVIDIA A100-SXM4-40GB": _Ceilings(sm_count=108, clock_hz=1.41e9, memory_hz=1.215e9, bus_bits=5120, l2_mib=40),
    "NVIDIA A100-PCIE-40GB": _Ceilings(sm_count=108, clock_hz=1.41e9, memory_hz=1.215e9, bus_bits=5120, l2_mib=40),
    "NVIDIA B200": _Ceilings(sm_count=148, clock_hz=1.856e9, memory_hz=3.996e9, bus_bits=7680, l2_mib=126),
    "NVIDIA L40S": _Ceilings(sm_count=142, clock_hz=2.52e9, memory_hz=9.001e9, bus_bits=384, l2_mib=96),
    "NVIDIA L4": _Ceilings(sm_count=58, clock_hz=2.04e9, memory_hz=6.251e9, bus_bits=192, l2_mib=48),
    "NVIDIA A10": _Ceilings(sm_count=72, clock_hz=1.695e9, memory_hz=6.251e9, bus_bits=384, l2_mib=6),
    "Tesla T4": _Ceilings(sm_count=40, clock_hz=1.59e9, memory_hz=5.001e9, bus_bits=256, l2_mib=4),
    "NVIDIA GeForce RTX 3090": _Ceilings(sm_count=82, clock_hz=1.695e9, memory_hz=9.751e9, bus_bits=384, l2_mib=6),
    "NVIDIA GeForce RTX 4090": _Ceilings(sm_count=128, clock_hz=2.52e9, memory_hz=10.501e9, bus_bits=384, l2_mib=72),
    "NVIDIA GeForce RTX 5090": _Ceilings(sm_count=170, clock_hz=2.407e9, memory_hz=14.001e9, bus_bits=512, l2_mib=96),
}
_EXAMPLE = "NVIDIA H200|132|9.0|"
"""The identity of a device: name, multiprocessors, compute capability and MIG profile."""

_TYPICAL = {
    75: "Tesla T4",
    80: "NVIDIA A100-SXM4-80GB",
    86: "NVIDIA A10",
    89: "NVIDIA L40S",
    90: "NVIDIA H100 80GB HBM3",
    100: "NVIDIA B200",
    103: "NVIDIA B200",
    120: "NVIDIA GeForce RTX 5090",
}
"""By compute capability, the kind that unknown GPUs and MIG instances are taken to be like."""


def described(identity: str) -> Device:
    """The device with an identity, as the FindDB writes it: the one here, else with the figures of its kind.

    A kind that is not known has those of another of its compute capability, by multiprocessor.

    Raises:
        NoDeviceError: the text is no identity.
    """
    device = device_of(identity)
    if device is None:
        raise NoDeviceError(f"device {identity!r:.80} is none that can be described: one is {_EXAMPLE!r}")
    name = device.name if device.name in _CEILINGS else _TYPICAL.get(device.sm)
    return device if device.index >= 0 or name is None else _CEILINGS[name].given_to(device)
