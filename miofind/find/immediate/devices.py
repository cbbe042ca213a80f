"""Devices that need not be here, with the figures that estimates use."""

from __future__ import annotations

from dataclasses import replace

from miofind.device.device import Device
from miofind.errors import NoDeviceError
from miofind.find.row_check import device_of

_CEILINGS: dict[str, dict[str, float]] = {
    # Driver's figures: boost clock, HBM3e of 6144 bits at 3.201 GHz, L2; 141 GB as the datasheet has it.
    "NVIDIA H200": {"clock_hz": 1.98e9, "bandwidth_bytes_per_s": 2 * 3.201e9 * 6144 / 8, "l2_bytes": 60 << 20},
}


def described(identity: str) -> Device:
    """The device with an identity, as the FindDB writes it: the one here, else as it is described.

    Raises:
        NoDeviceError: the text is no identity.
    """
    device = device_of(identity)
    if device is None:
        raise NoDeviceError(f"device {identity!r:.80} is none that can be described: name,SMs,compute capability")
    if device.index >= 0 or device.name not in _CEILINGS:
        return device
    return replace(device, **_CEILINGS[device.name])  # type: ignore[arg-type]
