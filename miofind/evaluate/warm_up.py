"""What the first jobs of a process would wait for, loaded while it waits for them: half a second on an H200's host."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator

from miofind.compiler import Compiler
from miofind.core.tensor import DataType
from miofind.device.device import Device, Library, Place
from miofind.errors import described, raise_if_interrupted
from miofind.evaluate.harness_kernels import usual_harness_steps
from miofind.measure.gpu_monitor import gpu_monitor
from miofind.measure.timer import load_backend
from miofind.solver.registry import Registry
from miofind.solver.steps import MatmulStep, Pointer
from miofind.verify.verifier import load_harness

logger = logging.getLogger(__name__)

_SIDE = 64
_PRODUCT = MatmulStep(
    m=_SIDE,
    n=_SIDE,
    k=_SIDE,
    lda=_SIDE,
    ldb=_SIDE,
    ldc=_SIDE,
    transpose_a=False,
    transpose_b=False,
    a=Pointer(buffer="a"),
    b=Pointer(buffer="b"),
    c=Pointer(buffer="c"),
    dtype_ab=DataType.FLOAT16,
    dtype_c=DataType.FLOAT16,
)


def warm_up(device: Device, compiler: Compiler, registry: Registry, is_wanted: Callable[[], bool]) -> None:
    """Load what measuring on a GPU will need, a part of some ten milliseconds after another, while that is wanted.

    What cannot be loaded fails again where it is needed, which says so.
    """
    parts = _parts(device, compiler, registry)
    while is_wanted():
        try:
            part = next(parts, None)
            if part is None:
                return
            part()
        except BaseException as error:  # a solver's own module may raise anything
            raise_if_interrupted(error)
            logger.debug("not loaded ahead: %s", described(error))


def _parts(device: Device, compiler: Compiler, registry: Registry) -> Iterator[Callable[[], object]]:
    if device.place is not Place.CUDA:
        return
    yield functools.partial(load_harness, device.place)
    yield functools.partial(load_backend, device.place)
    yield functools.partial(gpu_monitor, device)
    yield functools.partial(_load_matmul, device)
    for step in usual_harness_steps(DataType.FLOAT16, device, trains=False):
        yield functools.partial(compiler.key, step, device.arch)  # reads its source with all that this includes
    for name, facts in registry.facts.items():
        if any(key.place is device.place and key.library is not Library.CUDNN for key in facts.keys):
            yield functools.partial(registry.__getitem__, name)


def _load_matmul(device: Device) -> None:
    """Have cuBLASLt choose among its kernels, which loads them: 0.1 s."""
    from miofind.libraries.cublaslt import matmul_plan

    matmul_plan(_PRODUCT, device)
