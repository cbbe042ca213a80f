"""Services of child processes that go wrong as modules say which are imported there alone, since they change others."""

from __future__ import annotations

import importlib

from miofind.compiler import BinaryCache, worker
from miofind.errors import InvalidOptionError
from miofind.evaluate import measuring_child
from miofind.process.parent import Parent
from miofind.tune import device_process


def measure(parent: Parent, setup: measuring_child.MeasuringSetup) -> None:
    """As the child of `Isolated`, with the faults of faulty_solver.py."""
    importlib.import_module("faulty_solver")
    measuring_child.serve(parent, setup)


def tune(parent: Parent, setup: device_process.DeviceProcessSetup) -> None:
    """As a device's process of a tuning, with the faults of faulty_device_process.py."""
    importlib.import_module("faulty_device_process")
    device_process.serve(parent, setup)


def compile_kernels(parent: Parent, cache: BinaryCache) -> None:
    """As a process of a `CompilePool`, with the faults of faulty_compiler.py."""
    importlib.import_module("faulty_compiler")
    worker.serve(parent, cache)


def say_process_and_compile(parent: Parent, cache: BinaryCache) -> None:
    """The same, behind a module that a test wrote."""
    importlib.import_module("says_its_process")
    compile_kernels(parent, cache)


def refuse(parent: Parent, setup: object) -> None:
    raise InvalidOptionError("the service is refused")
