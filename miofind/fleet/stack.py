"""The software stack of a device: what times and rows depend on beside the device itself.

Rows of an older release that come late would void those of a newer one, and times under two drivers do not compare. So
a worker takes only jobs of its own stack.
"""

from __future__ import annotations

import functools
import hashlib

from miofind.device.device import Device, Place
from miofind.find.lookup.validity import current_environment, solver_hash
from miofind.fleet.values import Kind
from miofind.solver.registry import Registry

_CHARS = 12


def code_fingerprint(registry: Registry, place: Place) -> str:
    """Hash of the ids, versions and sources of the solvers of a place."""
    parts = [
        f"{solver.id} {solver.version} {solver_hash(solver)} {solver_hash(solver, fused=True)}"
        for solver in registry.values()
        if any(key.place is place for key in solver.keys)
    ]
    return hashlib.sha256("\n".join(sorted(parts)).encode()).hexdigest()


@functools.lru_cache(maxsize=64)
def stack_of(device: Device, registry: Registry) -> str:
    """Short hash of a device's driver and libraries and of the solvers' code."""
    told = f"{current_environment(device)} {code_fingerprint(registry, device.place)}"
    return hashlib.sha256(told.encode()).hexdigest()[:_CHARS]


def kind_of(device: Device, registry: Registry) -> Kind:
    """Whose jobs a device takes."""
    return Kind(device=device.identity, stack=stack_of(device, registry))
