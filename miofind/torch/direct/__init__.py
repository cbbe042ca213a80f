"""The direct path: calls that the override has seen are launched without Python.

It is built from source, once for each release of PyTorch.

Python decides what runs a call (plans.py); router.cpp then launches the calls that look like it. A call costs what
PyTorch's own convolution does, or less.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from miofind.compiler.directory import default_directory, private_folder
from miofind.errors import CompileError, MissingLibraryError, described
from miofind.launch.flat import FlatKernel

logger = logging.getLogger(__name__)

VARIABLE = "MIOFIND_TORCH_DIRECT"
"""0 in the environment has all calls go through Python."""

NAMESPACE = "miofind_router"
"""Of the operators that calls go on to which it does not launch."""

SOURCE = Path(__file__).with_name("router.cpp")


class DirectLaunch(NamedTuple):
    """What computes one result of calls that look alike, without Python.

    Attributes:
        shape, strides: of the result.
        operands: which two of a call's tensors it reads: of (x, w), or (grad, x, w).
        sources: what each of the kernels' bases is: 0 and 1 the operands, 2 the result, 3 the bias or its gradient, 4
            the workspace, -1 nothing that has an address.
        vector: 1 where it reads the bias, 2 where it writes its gradient, else 0.
        channels: of the bias.
        workspace_bytes: of the workspace.
        alignment_bytes: that the tensors' addresses need.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    operands: tuple[int, int]
    sources: tuple[int, ...]
    vector: int
    channels: int
    workspace_bytes: int
    alignment_bytes: int
    kernels: tuple[FlatKernel, ...]


class DirectPlan:
    """The launches of a call, where router.cpp finds them; none where PyTorch's own kernel is to run it."""

    def __init__(self, library: Any, launches: Sequence[tuple[int, DirectLaunch]]) -> None:
        self._library = library
        self._pointer = ctypes.c_void_p(library.miofind_plan())
        if not launches:
            library.miofind_leave(self._pointer)
        for which, launch in launches:
            self._add(which, launch)

    def _add(self, which: int, launch: DirectLaunch) -> None:
        rank = len(launch.shape)
        sizes = ctypes.c_int64 * rank
        self._library.miofind_launch(
            self._pointer,
            which,
            rank,
            sizes(*launch.shape),
            sizes(*launch.strides),
            *launch.operands,
            launch.vector,
            ctypes.c_int64(launch.channels),
            ctypes.c_int64(launch.workspace_bytes),
            ctypes.c_uint64(launch.alignment_bytes),
        )
        for kernel in launch.kernels:
            self._add_kernel(which, kernel, launch.sources)

    def _add_kernel(self, which: int, kernel: FlatKernel, sources: tuple[int, ...]) -> None:
        three, library, plan = ctypes.c_uint32 * 3, self._library, self._pointer
        function = ctypes.c_void_p(kernel.function)
        grid, block = three(*kernel.grid), three(*kernel.block)
        library.miofind_kernel(plan, which, function, grid, block, kernel.shared_bytes, int(kernel.pdl))
        for parameter in kernel.parameters:
            content, size = parameter.content, ctypes.c_size_t(len(parameter.content))
            library.miofind_parameter(plan, which, content, size, int(parameter.is_map))
            for at, where in ((fixup.at, fixup.where) for fixup in parameter.fixups):
                source, offset = sources[where.base], ctypes.c_uint64(where.offset)
                library.miofind_fixup(plan, which, ctypes.c_size_t(at), source, offset)

    @property
    def calls(self) -> int:
        """How many calls it ran."""
        return int(self._library.miofind_calls(self._pointer))

    def adopt(self) -> bool:
        """Run the calls to come that look like the one that this thread is in; False where plans were forgotten since.

        The call then goes by what was decided before, and the next one like it is asked anew.
        """
        return bool(self._library.miofind_adopt(self._pointer))

    def __del__(self) -> None:
        self._library.miofind_free(self._pointer)


class DirectPath:
    """router.cpp, loaded.

    Attributes:
        generation: how often its plans were forgotten.
    """

    def __init__(self, path: Path) -> None:
        torch.ops.load_library(str(path))
        self._library = ctypes.CDLL(str(path))
        self._library.miofind_plan.restype = ctypes.c_void_p
        self._library.miofind_calls.restype = ctypes.c_uint64
        self._library.miofind_define.restype = self._library.miofind_enable.restype = ctypes.c_char_p
        _refused(self._library.miofind_define())
        self.generation = 0

    @property
    def takes(self) -> bool:
        """Whether calls that look like the one that this thread is in could do without Python."""
        return bool(self._library.miofind_is_missed())

    def use_driver(self, launch: Any, replace_address: Any) -> None:
        """Launch by cuLaunchKernelEx and cuTensorMapReplaceAddress of the driver, or what stands for them."""
        addresses = (ctypes.cast(function, ctypes.c_void_p) for function in (launch, replace_address))
        self._library.miofind_use_driver(*addresses)

    def enable(self, key: str) -> None:
        """Put its kernels before PyTorch's at a key of the dispatcher.

        Raises:
            RuntimeError: PyTorch refuses them.
        """
        _refused(self._library.miofind_enable(key.encode()))

    def disable(self, key: str) -> None:
        """Take its kernels away again."""
        self._library.miofind_disable(key.encode())

    def forget(self) -> None:
        """Have all calls go on to Python, until plans are adopted anew."""
        self._library.miofind_clear()
        self.generation += 1  # afterwards: a plan that is offered in between is refused, and offered once more

    def plan(self, launches: Sequence[tuple[int, DirectLaunch]]) -> DirectPlan:
        """A plan of launches, each with its place: 0 of y or dx, 1 of dw; without any, of PyTorch's own kernel."""
        return DirectPlan(self._library, launches)


def _refused(told: bytes | None) -> None:
    """Raise RuntimeError where router.cpp tells why it cannot do something."""
    if told is not None:
        raise RuntimeError(told.decode(errors="replace"))


_loading = threading.Lock()
_loaded: list[DirectPath] = []


def direct_path() -> DirectPath | None:
    """The direct path; None where it was not built, is switched off or cannot be loaded."""
    if os.environ.get(VARIABLE) == "0":
        return None
    with _loading:
        if not _loaded and (path := _path()).is_file():
            try:
                made = DirectPath(path)
                _use_cuda(made.use_driver)
            except (OSError, RuntimeError) as error:
                logger.warning("%s cannot be loaded, PyTorch's convolutions go through Python: %s", path, error)
                return None
            _loaded.append(made)
        return _loaded[0] if _loaded else None


def build() -> Path:
    """Build the direct path for the PyTorch that is installed, unless that was done; returns its file.

    It takes half a minute, a C++ compiler and ninja. `enable` uses it from then on, in every process of this user.

    Raises:
        MissingLibraryError: there is no compiler, or no ninja.
        CompileError: it cannot be compiled.
    """
    path = _path()
    if path.is_file():
        return path
    from torch.utils import cpp_extension

    private_folder(path.parent)
    try:
        cpp_extension.load(
            name=path.stem,
            sources=[str(SOURCE)],
            extra_cflags=["-O2"],
            build_directory=str(path.parent),
            is_python_module=False,
            verbose=False,
        )
    except OSError as error:
        raise MissingLibraryError(f"router.cpp needs a C++ compiler and ninja: {described(error)}") from error
    except RuntimeError as error:
        if "ninja" in str(error).lower() and not cpp_extension.is_ninja_available():
            raise MissingLibraryError("router.cpp is built by ninja: pip install ninja") from error
        told = f"router.cpp cannot be compiled for PyTorch {torch.__version__}"
        raise CompileError(told, source=SOURCE.name, options=("-O2",), log=str(error)) from error
    return path


@functools.cache
def _path() -> Path:
    """Where the direct path is for this PyTorch, a folder of the user's own."""
    text = SOURCE.read_bytes() + f"{torch.__version__} {torch.compiled_with_cxx11_abi()}".encode()
    name = f"miofind_router_{hashlib.sha256(text).hexdigest()[:16]}"
    return default_directory().with_name("torch") / f"{name}.so"


def _use_cuda(use_driver: Callable[[Any, Any], None]) -> None:
    """Give it the driver's functions, where there is a driver; without one nothing is adopted."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        use_driver(driver.cuLaunchKernelEx, driver.cuTensorMapReplaceAddress)
    except (OSError, AttributeError) as error:
        logger.debug("no driver that launches without Python: %s", error)
