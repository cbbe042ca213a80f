"""NVRTC: the toolchain that is installed, and one compilation from text to cubin.

Needs cuda-bindings, NVRTC and the CUDA runtime's headers, but neither a GPU nor a driver nor CuPy. NVRTC compiles in
the calling thread without the interpreter's lock, so that threads are enough to compile in parallel.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from miofind.compiler.sources import KernelSource
from miofind.device.device import INSTALL_CUDA, has_driver
from miofind.errors import CompileError, ForkedProcessError, MissingLibraryError

_INSTALL_WITHOUT_GPU = (
    "install miofind's extra compile: `pip install -e '.[compile]'` in its clone, `pip install 'FILE.whl[compile]'` "
    "for its wheel"
)

# -default-device makes constexpr functions and tables usable in device code without annotations.
_BASE_OPTIONS = ("--std=c++17", "-default-device", "--ptxas-options=-v")


@dataclass(frozen=True, slots=True, kw_only=True)
class Toolchain:
    """What compiles kernels here.

    Attributes:
        version: NVRTC's, such as "13.0".
        headers_version: CUDART_VERSION of the CUDA headers, such as 13000.
        sms: compute capabilities that NVRTC can compile for, as ints.
    """

    version: str
    headers_version: int
    sms: frozenset[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """Result of one compilation: the binary and NVRTC's log with the report of ptxas."""

    cubin: bytes
    log: str


def nvrtc_version() -> str:
    """Version of NVRTC, such as "13.0".

    Raises:
        MissingLibraryError: NVRTC, cuda-bindings or the CUDA headers are not installed.
    """
    return toolchain().version


@functools.cache
def toolchain() -> Toolchain:
    """The installed toolchain; probed once in a process.

    Raises:
        MissingLibraryError: NVRTC, cuda-bindings or the CUDA headers are not installed.
    """
    try:
        from cuda.bindings import nvrtc

        major, minor = _checked(nvrtc.nvrtcVersion())
        (sms,) = _checked(nvrtc.nvrtcGetSupportedArchs())
    except (ImportError, RuntimeError) as error:
        message = f"NVRTC cannot be used, so kernels cannot be compiled ({error}): {_how_to_install()}"
        raise MissingLibraryError(message) from error
    headers_version = _headers_version(_runtime_headers())
    return Toolchain(version=f"{major}.{minor}", headers_version=headers_version, sms=frozenset(sms))


def _how_to_install() -> str:
    """What brings NVRTC and the headers to this machine."""
    return INSTALL_CUDA if has_driver() else _INSTALL_WITHOUT_GPU


def compile_options(
    step_options: Sequence[str], defines: Sequence[tuple[str, str | int]], arch: str
) -> tuple[str, ...]:
    """NVRTC's options for a kernel, without the include paths of this machine."""
    values = [(name, int(value) if isinstance(value, bool) else value) for name, value in defines]
    return (f"-arch=sm_{arch}", *_BASE_OPTIONS, *step_options, *(f"-D{name}={value}" for name, value in values))


_compiling: set[int] = set()
"""Threads for which NVRTC is at work."""
_left_behind: set[int] = set()
"""Threads of a parent for which it was when this process was forked: the locks they held stay held here."""


def _leave_parent() -> None:
    _left_behind.update(_compiling)
    _compiling.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_parent)


@contextlib.contextmanager
def _at_work() -> Iterator[None]:
    """What NVRTC does for this thread.

    Raises:
        ForkedProcessError: this process was forked while NVRTC was at work.
    """
    if _left_behind:
        raise ForkedProcessError(
            f"process {os.getpid()} was forked while a thread of its parent compiled a kernel, and NVRTC does not "
            "survive that: start processes with multiprocessing's 'spawn' or 'forkserver' method"
        )
    thread = threading.get_ident()
    _compiling.add(thread)
    try:
        yield
    finally:
        _compiling.discard(thread)


def compile_source(source: KernelSource, options: tuple[str, ...], arch: str) -> Compiled:
    """The cubin of a source.

    Raises:
        CompileError: NVRTC refuses the source, an option or the architecture.
        ForkedProcessError: this process was forked while NVRTC was compiling.
        MissingLibraryError: NVRTC, cuda-bindings or the CUDA headers are not installed.
    """
    tools = toolchain()
    if int(arch.rstrip("af")) not in tools.sms:
        known = ", ".join(str(sm) for sm in sorted(tools.sms))
        message = f"NVRTC {tools.version} cannot compile for sm_{arch}, only for {known}: install a newer NVRTC"
        raise CompileError(message, source=source.name, options=options, log="")
    with _at_work():
        try:
            return _compiled(source, options, arch, include_options())
        except CompileError:
            further = further_include_options()
            if not further:
                raise
        return _compiled(source, options, arch, (*include_options(), *further))


def _compiled(source: KernelSource, options: tuple[str, ...], arch: str, includes: tuple[str, ...]) -> Compiled:
    from cuda.bindings import nvrtc

    names = [name.encode() for name in source.headers]
    texts = [text.encode() for text in source.headers.values()]
    (program,) = _checked(
        nvrtc.nvrtcCreateProgram(source.text.encode(), source.name.encode(), len(names), texts, names)
    )
    try:
        return _result(program, source, options, arch, includes)
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _result(
    program: Any, source: KernelSource, options: tuple[str, ...], arch: str, includes: tuple[str, ...]
) -> Compiled:
    from cuda.bindings import nvrtc

    tools = toolchain()
    given = [option.encode() for option in (*options, *includes)]
    (status,) = nvrtc.nvrtcCompileProgram(program, len(given), given)
    (size,) = _checked(nvrtc.nvrtcGetProgramLogSize(program))
    buffer = bytearray(size)
    _checked(nvrtc.nvrtcGetProgramLog(program, buffer))
    log = buffer.decode(errors="replace").rstrip("\0").rstrip()
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        message = f"{source.name} does not compile for sm_{arch} with NVRTC {tools.version} ({status.name})"
        raise CompileError(message, source=source.name, options=options, log=log)
    (size,) = _checked(nvrtc.nvrtcGetCUBINSize(program))
    cubin = bytearray(size)
    _checked(nvrtc.nvrtcGetCUBIN(program, cubin))
    return Compiled(cubin=bytes(cubin), log=log)


def _checked(result: tuple[Any, ...]) -> tuple[Any, ...]:
    """What an NVRTC call gives beside its status."""
    if result[0] != 0:
        raise RuntimeError(f"NVRTC failed: {result[0].name}")
    return result[1:]


@functools.cache
def include_options() -> tuple[str, ...]:
    """NVRTC's -I option for the CUDA runtime's headers: a path of this machine, so no part of a key.

    Raises:
        MissingLibraryError: they are not installed.
    """
    return (f"-I{_runtime_headers()}",)


@functools.cache
def further_include_options() -> tuple[str, ...]:
    """NVRTC's -I options for headers that kernels of other packages may include, such as cuda/std and mma.h.

    Asked for where a kernel does not compile without them: for headers that are not installed cuda-pathfinder starts a
    Python process, which takes 0.2 s, in each process that compiles.

    Raises:
        MissingLibraryError: the runtime's headers are not installed.
    """
    found = [_header_directory("cccl")]
    if not (_runtime_headers() / "crt").is_dir():  # mma.h includes crt/mma.h, which the wheels ship with nvcc
        found.append(_header_directory("nvcc"))
    return tuple(f"-I{directory}" for directory in found if directory is not None)


def _runtime_headers() -> Path:
    """Folder of the CUDA runtime's headers.

    Raises:
        MissingLibraryError: they are not installed.
    """
    runtime = _header_directory("cudart")
    if runtime is None:
        raise MissingLibraryError(
            f"the CUDA runtime's headers are not installed, so kernels cannot be compiled: {_how_to_install()}"
        )
    return runtime


def _header_directory(library: str) -> Path | None:
    from cuda.pathfinder import find_nvidia_header_directory

    try:
        directory = find_nvidia_header_directory(library)
    except RuntimeError:  # a release of cuda-pathfinder that does not know the library
        return None
    return Path(directory) if directory else None


def _headers_version(directory: Path) -> int:
    try:
        text = (directory / "cuda_runtime_api.h").read_bytes()
    except OSError:
        return 0
    match = re.search(rb"\n#define CUDART_VERSION\s+(\d+)", b"\n" + text)  # it begins as texts that are found fast do
    return int(match[1]) if match else 0
