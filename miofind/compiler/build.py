"""The compiler: steps in, binaries and kernels out, each made once.

A key covers the source with all its includes, the defines and options, the architecture and the toolchain's version.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import os
import re
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from types import MappingProxyType

from miofind.compiler.cache import Binary, BinaryCache
from miofind.compiler.cubin import complaint, max_threads, parameter_bytes
from miofind.compiler.host_sources import host_hash
from miofind.compiler.load import Kernel, load_kernel
from miofind.compiler.nvrtc import compile_options, compile_source, toolchain
from miofind.compiler.resources import parse_resources
from miofind.compiler.sources import VARIANT, KernelSource, read_source
from miofind.device.device import Device
from miofind.errors import CompileError, MissingLibraryError, SolutionFileError
from miofind.process.forks import follow_forks
from miofind.process.threads import Results, in_threads
from miofind.solver.steps import Argument, ConvSolution, EpilogueArgument, HostStep, KernelStep, Scalar, TensorMap
from miofind.solver.structs import Struct

logger = logging.getLogger(__name__)

_KEY_FORMAT = 1
_POINTER_BYTES = 8
_TENSOR_MAP_BYTES = 128
# How many processes of a distributed run this host has: each would start as many compilers.
_LOCAL_RANKS = "LOCAL_WORLD_SIZE"
# Binaries that are kept in memory until they are loaded, so that the cache is read once: some 100 KB each.
_MOST_FRESH = 256

BuildResult = tuple[KernelStep, Binary | CompileError]


def kernel_hash(solution: ConvSolution) -> str:
    """Hash of what a solution runs.

    It is of sources, entries, defines and options of its kernels, of its host functions with the source of their
    modules, and of the kinds of its other steps.

    Raises:
        CompileError: a source is missing or unreadable.
    """
    parts: list[object] = []
    for step in solution.steps:
        if isinstance(step, KernelStep):
            digest = _source(step).digest
            parts.append([digest, step.entry, step.defines, step.options])
        elif isinstance(step, HostStep):
            parts.append([host_hash(step.module), step.module, step.function])
        else:
            parts.append(type(step).__name__)
    return _digest(parts)


class Compiler:
    """Builds kernels once, whoever asks and from whatever thread, and loads them.

    Args:
        cache: where binaries are kept; by default the user's cache.
    """

    def __init__(self, cache: BinaryCache | None = None) -> None:
        self.cache = cache if cache is not None else BinaryCache()
        self._lock = threading.RLock()
        self._key_locks: dict[str, threading.Lock] = {}
        self._in_memory: dict[str, Binary] = {}
        self._fresh: dict[str, Binary] = {}
        self._kernels: dict[tuple[str, str, int], Kernel] = {}
        follow_forks(self)

    def leave_parent(self) -> None:
        """Make the locks anew in a forked child: a thread of the parent may have been compiling."""
        self._lock = threading.RLock()
        self._key_locks = {}

    def key(self, step: KernelStep, arch: str) -> str:
        """Name of the binary that holds a step's kernel: 64 hexadecimal digits.

        Raises:
            CompileError: the source is missing or unreadable.
        """
        return _key(_source(step), step, arch)

    def is_at_hand(self, step: KernelStep, device: Device) -> bool:
        """Whether a step's kernel need not be compiled: it is loaded, or its binary in memory or in the cache.

        Raises:
            CompileError: the source is missing or unreadable, or has no such entry, or that takes other parameters or
                no such block.
        """
        key = self.key(step, device.arch)
        if (key, step.entry, device.index) in self._kernels:
            return True
        known = self._known(key)
        return known is not None and bool(_with_entry(known, step, device.arch))

    def build(self, step: KernelStep, arch: str) -> Binary:
        """The binary that holds a step's kernel, from the cache or compiled; needs no GPU.

        Raises:
            CompileError: NVRTC refuses the source, it has no such entry, or that takes other parameters or no such
                block.
            MissingLibraryError: NVRTC, cuda-bindings or the CUDA headers are not installed.
        """
        return _with_entry(self._build(step, arch), step, arch)

    def build_all(self, steps: Iterable[KernelStep], arch: str, *, workers: int | None = None) -> Iterator[BuildResult]:
        """Each step with its binary or the error it met, in the order given.

        Work starts at once, in `workers` threads (by default one a processor that this process may use). Steps with
        equal sources, defines and options are compiled once. What comes first can be used while the rest compiles;
        closing the iterator cancels what has not begun.

        Raises:
            MissingLibraryError: NVRTC, cuda-bindings or the CUDA headers are not installed.
        """
        listed = list(steps)
        firsts = {step.binary: step for step in reversed(listed)}
        once = [step for step in listed if firsts[step.binary] is step]

        def built(step: KernelStep) -> Binary | CompileError:
            try:
                return self._build(step, arch)
            except CompileError as error:
                return error

        return _results(listed, once, in_threads(built, once, workers or processors(), "miofind-compile"), arch)

    def load(self, step: KernelStep, device: Device) -> Kernel:
        """A step's kernel, ready to be launched on the device with the step's shared memory; loaded once a device.

        Raises:
            CompileError: NVRTC refuses the source, or it has no such entry.
            ForkedProcessError: this process was forked from one that had used CUDA.
            LaunchError: the driver refuses the binary, or the device has too little shared memory.
            MissingLibraryError: CuPy, NVRTC, cuda-bindings or the CUDA headers are not installed.
            NoDeviceError: the device is virtual or the CPU place.
        """
        slot = (self.key(step, device.arch), step.entry, device.index)
        kernel = self._kernels.get(slot)
        if kernel is None:
            binary = self.build(step, device.arch)
            with self._lock:
                kernel = self._kernels.get(slot) or load_kernel(binary, step.entry, device)
                self._kernels[slot] = kernel
                self._fresh.pop(slot[0], None)
        if step.shared_bytes:
            with self._lock:
                kernel.allow_shared_bytes(step.shared_bytes)
        return kernel

    def adopt(self, step: KernelStep, arch: str, cubin: bytes) -> None:
        """Take a step's binary from elsewhere, such as a saved solution, for the life of this compiler.

        It answers for the step whoever asks, so the compiler is to serve that solution alone; and it stays in memory:
        nobody knows what made it, so it must not answer for this machine's own in the cache.

        Raises:
            CompileError: the step's source is missing or unreadable.
            SolutionFileError: it is no binary, is damaged, or has no such entry.
        """
        key = self.key(step, arch)
        reason = complaint(cubin)
        if reason:
            raise SolutionFileError(f"the saved binary of {step.source} is damaged, {reason}: save anew")
        binary = Binary(key=key, cubin=cubin, path=None, resources=MappingProxyType({}), log="")
        if not binary.has_entry(step.entry):
            raise SolutionFileError(f"the saved binary of {step.source} has no kernel {step.entry}: save anew")
        with self._lock:
            self._in_memory.setdefault(key, binary)

    def _build(self, step: KernelStep, arch: str) -> Binary:
        source = _source(step)
        key = _key(source, step, arch)
        with self._lock:
            key_lock = self._key_locks.setdefault(key, threading.Lock())
        with key_lock:
            return self._known(key) or self._compile(source, step, arch, key)

    def _known(self, key: str) -> Binary | None:
        """The binary of that key, from memory or the cache."""
        known = self._in_memory.get(key) or self._fresh.get(key)
        if known is None:
            known = self.cache.get(key)
            if known is not None:
                self._keep(known)
        return known

    def _keep(self, binary: Binary) -> None:
        """Have a binary in memory until it is loaded, or many others have come."""
        with self._lock:
            self._fresh[binary.key] = binary
            while len(self._fresh) > _MOST_FRESH:
                del self._fresh[next(iter(self._fresh))]

    def _compile(self, source: KernelSource, step: KernelStep, arch: str, key: str) -> Binary:
        began = time.monotonic()
        compiled = compile_source(source, compile_options(step.options, step.defines, arch), arch)
        defines = " ".join(f"-D{name}={value}" for name, value in step.defines)
        logger.debug("compiled in %.2f s for sm_%s: %s %s", time.monotonic() - began, arch, step.source, defines)
        binary = self.cache.put(key, compiled.cubin, parse_resources(compiled.log), compiled.log)
        if binary.path is None:
            self._in_memory[key] = binary
        else:
            self._keep(binary)
        return binary


def _source(step: KernelStep) -> KernelSource:
    for name, _ in step.defines:
        if name.startswith(VARIANT):
            message = f"{step.source} is compiled without its variants: a source of its own must define {name}"
            raise CompileError(message, source=step.source, options=(), log="")
    return read_source(step.source, step.package, fused=step.is_fused)


def _key(source: KernelSource, step: KernelStep, arch: str) -> str:
    try:
        tools = toolchain()
        versions = [tools.version, tools.headers_version]
    except MissingLibraryError:  # a saved solution runs where nothing can be compiled
        versions = []
    options = compile_options(step.options, step.defines, arch)
    return _digest([_KEY_FORMAT, source.digest, options, arch, versions])


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, separators=(",", ":")).encode()).hexdigest()


def _with_entry(binary: Binary, step: KernelStep, arch: str) -> Binary:
    """The binary, if it has the step's kernel and that takes the step's arguments and its block."""
    message = _misfit(binary, step)
    if not message:
        return binary
    options = compile_options(step.options, step.defines, arch)
    raise CompileError(message, source=step.source, options=options, log=binary.log)


def _misfit(binary: Binary, step: KernelStep) -> str:
    """Why a step cannot launch what was compiled for it, "" if it can."""
    if not binary.has_entry(step.entry):
        known = ", ".join(sorted(binary.resources)) or "none"
        return f'{step.source} has no kernel {step.entry!r}, it has {known}: declare it extern "C" __global__'
    given, taken = tuple(map(_argument_bytes, step.args)), parameter_bytes(binary.cubin, step.entry)
    if taken is not None and taken != given:
        return f"{step.entry} of {step.source} {_difference(taken, given)}"
    threads, most = math.prod(step.block), max_threads(binary.cubin, step.entry)
    if most is not None and threads > most:
        bounds = f"its __launch_bounds__ allow {most} threads a block"
        return f"{step.entry} of {step.source}: {bounds}, its step launches {threads}"
    return ""


def _argument_bytes(argument: Argument) -> int:
    if isinstance(argument, Struct | EpilogueArgument):
        return argument.bytes
    if isinstance(argument, Scalar):
        return int(argument.ctype[-2:]) // 8
    return _TENSOR_MAP_BYTES if isinstance(argument, TensorMap) else _POINTER_BYTES


def _difference(taken: Sequence[int], given: Sequence[int]) -> str:
    if len(taken) != len(given):
        return f"takes {len(taken)} parameters, its step gives {len(given)}"
    at = next(at for at, sizes in enumerate(zip(taken, given, strict=True)) if len(set(sizes)) > 1)
    return f"takes {taken[at]} bytes as parameter {at + 1}, its step gives {given[at]}"


def _results(
    steps: Sequence[KernelStep], once: Sequence[KernelStep], built: Results[Binary | CompileError], arch: str
) -> Iterator[BuildResult]:
    """Each step with its result.

    Args:
        once: of steps that share a binary the first.
        built: the binaries of `once`, in order.
    """
    known: dict[object, Binary | CompileError] = {}
    with contextlib.closing(built):
        for step in steps:
            if step.binary not in known:
                known[step.binary] = next(built)
            yield step, _result(known[step.binary], step, arch)


def _result(built: Binary | CompileError, step: KernelStep, arch: str) -> Binary | CompileError:
    try:
        return built if isinstance(built, CompileError) else _with_entry(built, step, arch)
    except CompileError as error:
        return error


def processors() -> int:
    """Processors that this process may use: its share of them in a distributed run, as torchrun tells of it."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    ranks = os.environ.get(_LOCAL_RANKS, "")
    return max(1, allowed // int(ranks)) if re.fullmatch("[1-9][0-9]{0,5}", ranks) else allowed
