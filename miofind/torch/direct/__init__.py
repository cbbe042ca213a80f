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
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from miofind.compiler.directory import CACHE_VARIABLE, default_directory, private_folder
from miofind.errors import CompileError, LaunchError, MissingLibraryError, described
from miofind.launch.bound_steps import BasedAddress
from miofind.launch.flat import FlatConvolution, FlatKernel, FlatProduct, FlatStep
from miofind.libraries.cudnn_backend import CudnnFunctions
from miofind.process.forks import ForkedLock

logger = logging.getLogger(__name__)

VARIABLE = "MIOFIND_TORCH_DIRECT"
"""0 in the environment has all calls go through Python."""

NAMESPACE = "miofind_router"
"""Of the operators that calls go on to which it does not launch."""

SOURCE = Path(__file__).with_name("router.cpp")


_FORMS = ("convolution", "convolution_statistics", "convolution_backward_data", "convolution_backward_weights")
OPERATORS = (*_FORMS, *(f"short_{name}" for name in _FORMS))
"""Of the namespace miofind."""


class MadeTensor(NamedTuple):
    """A tensor that a launch makes: shape, strides, and a dtype of PyTorch."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: Any


class _Place(ctypes.Structure):
    """`Place` of router.cpp."""

    _fields_ = (("source", ctypes.c_int64), ("offset", ctypes.c_uint64))


class _Product(ctypes.Structure):
    """`ProductParts` of router.cpp."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("matmul", "set_attribute", "handle", "operation")),
        *((name, ctypes.c_void_p) for name in ("layout_a", "layout_b", "layout_c", "alpha", "beta", "algorithm")),
        ("workspace_bytes", ctypes.c_size_t),
        ("bias_attribute", ctypes.c_int64),
        *((name, _Place) for name in ("a", "b", "c", "d", "bias", "workspace")),
    )


_MOST_OPERANDS = 12


class _Convolution(ctypes.Structure):
    """`ConvolutionParts` of router.cpp."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in CudnnFunctions._fields),
        *((name, ctypes.c_void_p) for name in ("handle", "plan", "leases_ended")),
        ("leases_ended_before", ctypes.c_int64),
        ("count", ctypes.c_int64),
        ("ids", ctypes.c_int64 * _MOST_OPERANDS),
        ("operands", _Place * _MOST_OPERANDS),
        ("workspace", _Place),
    )


class DirectLaunch(NamedTuple):
    """What computes results of calls that look alike, without Python.

    Attributes:
        operands: which of a call's tensors it reads: of (x, w, bias), of (grad, x, w), or by the places of an
            operator's arguments.
        results: what it makes, in the operator's order.
        sources: what each of the steps' bases is: the operands' numbers first, then the results', then the
            workspace's; -1 nothing that has an address.
        workspace_bytes: of the workspace.
        alignment_bytes: that the operands' addresses need.
        steps: what is launched, one after another.
        packed: by their places, the tensors of a call that are read as packed copies, and how these lie.
    """

    operands: tuple[int, ...]
    results: tuple[MadeTensor, ...]
    sources: tuple[int, ...]
    workspace_bytes: int
    alignment_bytes: int
    steps: tuple[FlatStep, ...]
    packed: Mapping[int, MadeTensor]


class DirectPlan:
    """The launches of a call, where router.cpp finds them; PyTorch's own kernel computes results that have none."""

    def __init__(self, library: Any, launches: Sequence[tuple[int, DirectLaunch]]) -> None:
        self._library = library
        self._pointer = ctypes.c_void_p(library.miofind_plan())
        for which, launch in launches:
            self._add(which, launch)
        packed = {place: form for _, launch in launches for place, form in launch.packed.items()}
        for place, form in packed.items():  # once, whichever launches read it
            library.miofind_packed(self._pointer, place, *_form(form))

    def _add(self, which: int, launch: DirectLaunch) -> None:
        places = (ctypes.c_int32 * len(launch.operands))(*launch.operands)
        sizes = ctypes.c_int64(launch.workspace_bytes), ctypes.c_uint64(launch.alignment_bytes)
        self._library.miofind_launch(self._pointer, which, len(places), places, *sizes)
        for result in launch.results:
            self._library.miofind_result(self._pointer, which, *_form(result))
        for step in launch.steps:
            if isinstance(step, FlatKernel):
                self._add_kernel(which, step, launch.sources)
            elif isinstance(step, FlatProduct):
                self._library.miofind_product(self._pointer, which, ctypes.byref(_product(step, launch.sources)))
            else:
                parts = _convolution(step, launch.sources)
                self._library.miofind_convolution(self._pointer, which, ctypes.byref(parts))

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

    def without_memory(self, which: int) -> int:
        """In how many of them PyTorch computed what a launch does, for want of memory for its workspace."""
        return int(self._library.miofind_without_memory(self._pointer, which))

    def adopt(self) -> bool:
        """Run the calls to come that look like the one that this thread is in; False where plans were forgotten since.

        The call then goes by what was decided before, and the next one like it is asked anew.
        """
        return bool(self._library.miofind_adopt(self._pointer))

    def __del__(self) -> None:
        self._library.miofind_free(self._pointer)


def _form(tensor: MadeTensor) -> tuple[Any, ...]:
    """As router.cpp's `form_of` takes it."""
    numbers = ctypes.c_int64 * len(tensor.shape)
    is_bfloat16 = int(tensor.dtype is torch.bfloat16)
    return len(tensor.shape), numbers(*tensor.shape), numbers(*tensor.strides), tensor.dtype.itemsize, is_bfloat16


def _product(step: FlatProduct, sources: Sequence[int]) -> _Product:
    call = step.call
    return _Product(
        call.matmul,
        call.set_attribute,
        call.handle,
        call.operation,
        call.layout_a,
        call.layout_b,
        call.layout_c,
        call.alpha,
        call.beta,
        call.algorithm,
        call.workspace_bytes,
        call.bias_attribute,
        *(_place(where, sources) for where in (step.a, step.b, step.c, step.d, step.bias, step.workspace)),
    )


def _convolution(step: FlatConvolution, sources: Sequence[int]) -> _Convolution:
    """As router.cpp takes it.

    Raises:
        LaunchError: it has too many operands.
    """
    call, count = step.call, len(step.operands)
    if count > _MOST_OPERANDS:
        raise LaunchError(f"a convolution of cuDNN has {count} operands")
    return _Convolution(
        *call.functions,
        call.handle,
        call.plan,
        call.leases_ended,
        call.leases_ended_before,
        count,
        (ctypes.c_int64 * _MOST_OPERANDS)(*call.ids),
        (_Place * _MOST_OPERANDS)(*(_place(where, sources) for where in step.operands)),
        _place(step.workspace, sources),
    )


def _place(where: BasedAddress | None, sources: Sequence[int]) -> _Place:
    return _Place(-1, 0) if where is None else _Place(sources[where.base], where.offset)


class DirectPath:
    """router.cpp, loaded.

    Attributes:
        generation: how often its plans were forgotten.
    """

    def __init__(self, path: Path) -> None:
        torch.ops.load_library(str(path))
        self._library = ctypes.CDLL(str(path))
        self._library.miofind_plan.restype = ctypes.c_void_p
        for counter in ("miofind_calls", "miofind_without_memory"):
            getattr(self._library, counter).restype = ctypes.c_uint64
        for name, structure in (("product", _Product), ("convolution", _Convolution)):
            size = getattr(self._library, f"miofind_bytes_of_{name}")
            size.restype = ctypes.c_size_t
            if size() != ctypes.sizeof(structure):
                raise RuntimeError(f"router.cpp has another structure for a {name}")
        for name in ("miofind_define", "miofind_enable", "miofind_enable_own"):
            getattr(self._library, name).restype = ctypes.c_char_p
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

    def use_streams(self, key: str, current: Any, is_capturing: Any) -> None:
        """Launch into the stream that is current on a device of a dispatcher's key, unless a graph is captured on it.

        Args:
            current: aoti_torch_get_current_cuda_stream of PyTorch, or what stands for it; None for a CPU's default one.
            is_capturing: cuStreamIsCapturing of the driver, or what stands for it; None likewise.
        """
        addresses = (ctypes.cast(function, ctypes.c_void_p) for function in (current, is_capturing))
        self._library.miofind_use_streams(key.encode(), *addresses)

    def enable(self, key: str) -> None:
        """Put its kernels before PyTorch's at a key of the dispatcher.

        Raises:
            RuntimeError: PyTorch refuses them.
        """
        _refused(self._library.miofind_enable(key.encode()))

    def disable(self, key: str) -> None:
        """Take its kernels away again."""
        self._library.miofind_disable(key.encode())

    def enable_own(self, key: str) -> None:
        """Put its kernels before Python's of miofind's own operators at a key of the dispatcher.

        Raises:
            RuntimeError: PyTorch refuses them.
        """
        names = (ctypes.c_char_p * (len(OPERATORS) + 1))(*(name.encode() for name in OPERATORS), None)
        _refused(self._library.miofind_enable_own(names, key.encode()))

    def disable_own(self, key: str) -> None:
        """Take those away again."""
        self._library.miofind_disable_own(key.encode())

    def forget(self) -> None:
        """Have all calls go on to Python, until plans are adopted anew."""
        self._library.miofind_clear()
        self.generation += 1  # afterwards: a plan that is offered in between is refused, and offered once more

    def plan(self, launches: Sequence[tuple[int, DirectLaunch]]) -> DirectPlan:
        """A plan of launches, each with its place: 0 of y or dx, 1 of dw.

        Raises:
            LaunchError: router.cpp has no room for one.
        """
        return DirectPlan(self._library, launches)


def _refused(told: bytes | None) -> None:
    """Raise RuntimeError where router.cpp tells why it cannot do something."""
    if told is not None:
        raise RuntimeError(told.decode(errors="replace"))


class DirectCalls(ABC):
    """Calls that look alike, which may come to do without Python.

    Attributes:
        python_calls: how many came through Python.
        generation: of the direct path when it was last offered them; None for calls that need Python.
    """

    __slots__ = ("direct_plans", "generation", "python_calls")

    def __init__(self, *, needs_python: bool) -> None:
        self.python_calls = 0
        self.direct_plans: list[DirectPlan] = []
        self.generation = None if needs_python else -1

    @property
    def calls(self) -> int:
        """How many calls there were."""
        return self.python_calls + sum(each.calls for each in self.direct_plans)

    def direct_without_memory(self, computed: str) -> int:
        """In how many of those that did without Python there was no memory for the workspace of a result."""
        return sum(each.without_memory(int(computed == "dw")) for each in self.direct_plans)

    @abstractmethod
    def direct_launches(self) -> Sequence[tuple[int, DirectLaunch]] | None:
        """What runs them, as `DirectPath.plan` takes it, but for results of PyTorch's own; None where they need Python.

        Raises:
            LaunchError: it needs Python, and why.
        """

    def offer(self, path: DirectPath) -> None:
        """Have calls that look like the one that this thread is in do without Python from now on, where they can."""
        if not path.takes:  # a call in a CUDA graph, perhaps: others like it may do without
            return
        self.generation = path.generation
        try:
            launches = self.direct_launches()
            made = None if launches is None else path.plan(launches)
        except LaunchError as error:
            logger.debug("a convolution goes through Python: %s", error)
            made = None
        if made is None:
            self.generation = None
        elif made.adopt():
            self.direct_plans.append(made)


_loading = ForkedLock()
_loaded: list[DirectPath] = []
_times_forgotten = 0


def direct_path() -> DirectPath | None:
    """The direct path, loaded and before miofind's own operators; None where it was not built, or cannot be loaded."""
    if os.environ.get(VARIABLE) == "0":
        return None
    with _loading:
        if not _loaded and (path := _path()).is_file():
            try:
                made = DirectPath(path)
                _use_cuda(made)
                for key in ("CPU", "CUDA"):
                    made.enable_own(key)
            except (OSError, RuntimeError) as error:
                logger.warning("%s cannot be loaded, convolutions in PyTorch go through Python: %s", path, error)
                return None
            _loaded.append(made)
    return loaded()


def loaded() -> DirectPath | None:
    """The direct path, where it was loaded."""
    return _loaded[0] if _loaded else None


def times_forgotten() -> int:
    """How often what runs calls was to be decided anew, whether a direct path is loaded or not."""
    return _times_forgotten


def forget() -> None:
    """Have all calls come to Python, since what runs them is decided anew."""
    global _times_forgotten
    _times_forgotten += 1
    if _loaded:
        _loaded[0].forget()


def build() -> Path:
    """Build the direct path for the PyTorch that is installed, unless that was done; returns its file.

    It takes half a minute, a C++ compiler and ninja. `enable` uses it from then on, in every process of this user; so
    do fused convolutions, in processes that begin later or call `enable` or `tune`.

    Raises:
        MissingLibraryError: there is no compiler, or no ninja.
        CompileError: it cannot be compiled, or kept.
    """
    path = _path()
    if path.is_file():
        return path
    from torch.utils import cpp_extension

    try:
        private_folder(path.parent)
    except OSError as error:
        told = f"the direct path is kept in {path.parent}, which cannot be made: {described(error)}"
        raise CompileError(
            f"{told}. Name another folder by {CACHE_VARIABLE}", source=SOURCE.name, options=(), log=""
        ) from error
    try:
        # Of its own: one that was killed leaves a lock behind, and nobody may load a file that is being written.
        with tempfile.TemporaryDirectory(prefix="build-", dir=path.parent) as folder:
            cpp_extension.load(
                name=path.stem,
                sources=[str(SOURCE)],
                extra_cflags=["-O2"],
                build_directory=folder,
                is_python_module=False,
                verbose=False,
            )
            os.replace(Path(folder) / path.name, path)
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


def _use_cuda(path: DirectPath) -> None:
    """Give it the functions of the driver and of PyTorch's part for GPUs; without them Python launches kernels."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        loaded_by_torch = ctypes.CDLL("libtorch_cuda.so", mode=os.RTLD_NOLOAD | os.RTLD_NOW)
        path.use_streams("CUDA", loaded_by_torch.aoti_torch_get_current_cuda_stream, driver.cuStreamIsCapturing)
        path.use_driver(driver.cuLaunchKernelEx, driver.cuTensorMapReplaceAddress)
    except (OSError, AttributeError) as error:
        logger.debug("no GPU on which calls do without Python: %s", error)
