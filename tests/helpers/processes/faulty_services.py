"""Services of child processes that go wrong as modules say which are imported there alone, since they change others.

A child imports what its own service takes: a tuning's takes a FindDB, half of what starting such a child costs.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from miofind.errors import InvalidOptionError
from miofind.process.parent import Parent

if TYPE_CHECKING:
    from miofind.compiler import BinaryCache
    from miofind.evaluate.measuring_child import MeasuringSetup
    from miofind.tune.device_process import DeviceProcessSetup


def measure(parent: Parent, setup: MeasuringSetup) -> None:
    """As the child of `Isolated`, with the faults of faulty_solver.py."""
    from miofind.evaluate import measuring_child

    importlib.import_module("helpers.processes.faulty_solver")
    measuring_child.serve(parent, setup)


def tune(parent: Parent, setup: DeviceProcessSetup) -> None:
    """As a device's process of a tuning, with the faults of faulty_device_process.py."""
    from miofind.tune import device_process

    importlib.import_module("helpers.processes.faulty_device_process")
    device_process.serve(parent, setup)


def compile_kernels(parent: Parent, cache: BinaryCache) -> None:
    """As a process of a `CompilePool`, with the faults of faulty_compiler.py."""
    from miofind.compiler import worker

    importlib.import_module("helpers.processes.faulty_compiler")
    worker.serve(parent, cache)


def say_process_and_compile(parent: Parent, cache: BinaryCache) -> None:
    """The same, behind a module that a test wrote."""
    importlib.import_module("says_its_process")
    compile_kernels(parent, cache)


def refuse(parent: Parent, setup: object) -> None:
    raise InvalidOptionError("the service is refused")
