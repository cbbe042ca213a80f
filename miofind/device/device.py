"""Where a problem runs: a CUDA device, or the CPU place.

`Device` is a value; probing is lazy and imports CuPy inside functions, so that this module needs no GPU.
`Device.virtual` describes an architecture that need not be present: compilation and estimates work on it.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import logging
import os
import re
import shutil
import sys
from dataclasses import dataclass, field
from enum import StrEnum
from numbers import Integral

from miofind.core.problem import DataType, MathMode
from miofind.errors import ForkedProcessError, MissingLibraryError, NoDeviceError, brief
from miofind.process.late_names import imported
from miofind.text.printable import printable_name

logger = logging.getLogger(__name__)

INSTALL_CUDA = (
    "install miofind's extra cuda12 or cuda13, whichever the driver supports: `pip install -e '.[cuda12]'` in its "
    "clone, `pip install 'FILE.whl[cuda12]'` for its wheel"
)

NO_DRIVER = 'this machine has no NVIDIA driver; the CPU place works: --device cpu, Handle("cpu")'

IDENTITY = re.compile(
    r"(?P<name>[^|]*)\|(?P<sm_count>\d{1,6})\|(?P<major>\d{1,2})\.(?P<minor>\d)\|(?P<mig_profile>[^|]*)", re.ASCII
)
"""What `Device.identity` looks like."""


class Place(StrEnum):
    """Kind of device."""

    CUDA = "cuda"
    CPU = "cpu"


class Library(StrEnum):
    """Who supplies the code that a solution launches."""

    PLAIN = "plain"
    CUBLAS = "cublas"
    CUFFT = "cufft"
    CUDNN = "cudnn"


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A device as the solvers see it.

    Attributes:
        place: CUDA or CPU.
        index: CUDA ordinal; -1 for the CPU place and for virtual devices.
        name: the driver's name of the GPU, or the processor's.
        sm: compute capability as an int, 90 for 9.0; 0 on the CPU place.
        sm_count: multiprocessors, or cores on the CPU place.
        mig_profile: such as "1g.18gb", empty without MIG.
        memory_bytes, l2_bytes, shared_bytes: device memory, L2 cache, largest shared memory of a block.
        clock_hz, bandwidth_bytes_per_s: nominal ceilings, for estimates only.
        uuid: of the GPU or MIG instance, as CUDA_VISIBLE_DEVICES and NVML take it: "GPU-..." or "MIG-..."; "" where
            there is none.
    """

    place: Place
    index: int = -1
    name: str = ""
    sm: int = 0
    sm_count: int = 1
    mig_profile: str = ""
    memory_bytes: int = 0
    l2_bytes: int = 0
    shared_bytes: int = 0
    clock_hz: float = 1e9
    bandwidth_bytes_per_s: float = 1e10
    uuid: str = field(default="", compare=False)

    def __hash__(self) -> int:
        return hash((self.place, self.index, self.name))

    def here(self) -> Device:
        """The same device as this process numbers it: a GPU that has come from another is found by its UUID.

        Raises:
            NoDeviceError: this process does not see it.
        """
        if not self.uuid:
            return self
        for index in range(cuda_device_count()):
            if (found := Device.cuda(index)).uuid == self.uuid:
                return found
        raise NoDeviceError(f"{self.name} ({self.uuid}) is not among the GPUs that this process sees")

    @property
    def identity(self) -> str:
        """What a measurement belongs to: name, multiprocessors, compute capability and MIG profile."""
        return "|".join((self.name, str(self.sm_count), f"{self.sm // 10}.{self.sm % 10}", self.mig_profile))

    @property
    def arch(self) -> str:
        """Architecture kernels are compiled for, such as "90a"; "" on the CPU place."""
        if self.place is Place.CPU:
            return ""
        return f"{self.sm}a" if self.sm >= 90 else str(self.sm)

    def peak_flops_per_s(self, dtype: DataType, math: MathMode = MathMode.IEEE, *, tensor_cores: bool) -> float:
        """Nominal arithmetic ceiling, a multiply-add counted as two; for estimates only."""
        if self.place is Place.CPU:
            return self.sm_count * self.clock_hz * (8 if dtype is DataType.FLOAT64 else 16)
        kind = dtype.itemsize if dtype is not DataType.FLOAT32 or math is MathMode.IEEE else 3
        per_clock = _flops_per_sm_clock(self.sm, kind, tensor_cores)
        return self.sm_count * self.clock_hz * per_clock

    def library_version(self, library: Library) -> str | None:
        """Version of a library, "" if present but unversioned, None if it is not installed here."""
        if library is Library.PLAIN or (self.place is Place.CUDA and self.index < 0):
            return ""
        if self.place is Place.CPU:
            return None
        return _library_version(library)

    @staticmethod
    def cpu() -> Device:
        """The CPU place of this machine."""
        return _cpu()

    @staticmethod
    def cuda(index: int = 0) -> Device:
        """The CUDA device with that ordinal.

        Raises:
            MissingLibraryError: CuPy is not installed.
            NoDeviceError: no driver, no GPU or no GPU of that index.
        """
        count = cuda_device_count()
        if not 0 <= index < count:
            raise NoDeviceError(f"CUDA device {index} does not exist: this machine has {count}")
        return _probe(index)

    @staticmethod
    def default() -> Device:
        """CuPy's current CUDA device, else the CPU place where CuPy or a GPU is missing.

        Raises:
            ForkedProcessError: this process was forked from one that had used CUDA.
        """
        if not has_cuda():
            return _cpu()
        check_fork()
        import cupy

        return _probe(int(cupy.cuda.runtime.getDevice()))

    @staticmethod
    def named(name: str | int) -> Device:
        """The device called 0, "cuda", "cuda:1" or "cpu".

        Raises:
            MissingLibraryError, NoDeviceError: no such device here.
        """
        if isinstance(name, str) and name == "cpu":
            return _cpu()
        match = re.fullmatch(r"(?:cuda:?)?(\d+)?", str(name) if isinstance(name, str | Integral) else "?")
        if match is None or name == "":
            raise NoDeviceError(f"device={brief(name)} is unknown: write cpu, cuda or cuda:0")
        return Device.cuda(int(match[1] or 0))

    @staticmethod
    def virtual(arch: str) -> Device:
        """A device of an architecture such as "80" or "90a" that need not be present.

        Raises:
            NoDeviceError: not the name of an architecture.
        """
        match = re.fullmatch(r"(?:sm_)?(\d{2,3})a?", arch)
        if match is None:
            raise NoDeviceError(f"arch={arch!r} is not an architecture: write 80, 90a, 120a ...")
        sm = int(match[1])
        return Device(
            place=Place.CUDA,
            name=f"sm_{sm}",
            sm=sm,
            sm_count=132 if sm in (90, 100) else 82,
            memory_bytes=24 << 30,
            l2_bytes=40 << 20,
            shared_bytes=_SHARED_BYTES.get(sm, 99 << 10),
            clock_hz=1.7e9,
            bandwidth_bytes_per_s=1e12,
        )


_SHARED_BYTES = {75: 64 << 10, 80: 163 << 10, 87: 163 << 10, 90: 227 << 10, 100: 227 << 10}


def _flops_per_sm_clock(sm: int, kind: int, tensor_cores: bool) -> int:
    """Multiply-adds times two a multiprocessor and clock; `kind` is the element size, 3 for tf32.

    Source: NVIDIA's architecture white papers.
    """
    if kind == 8:
        return 128 if sm in (80, 90, 100) else 4
    if not tensor_cores or kind == 4:
        return 128 if sm in (75, 80) else 256
    sixteen_bit = {75: 1024, 80: 2048, 90: 4096, 100: 8192}.get(sm, 1024)
    return sixteen_bit if kind == 2 else sixteen_bit // 2


@functools.cache
def has_driver() -> bool:
    """Whether NVIDIA's driver is installed, asked as scripts/pick_extra.py does; starts no CUDA."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return shutil.which("nvidia-smi") is not None
    return True


def require_cupy() -> None:
    """Do nothing where CuPy is installed.

    Raises:
        NoDeviceError: it is not, and without a driver it would be of no use.
        MissingLibraryError: it is not.
    """
    if has_cupy():
        return
    if not has_driver():
        raise NoDeviceError(NO_DRIVER)
    raise MissingLibraryError(f"CuPy is not installed, so CUDA devices cannot be used: {INSTALL_CUDA}")


@functools.cache
def has_cupy() -> bool:
    """Whether CuPy is installed; does not import it."""
    try:
        return importlib.util.find_spec("cupy") is not None
    except ImportError:
        return False


@functools.cache
def has_cuda() -> bool:
    """Whether this process can use a CUDA device."""
    if not has_cupy():
        return False
    try:
        return cuda_device_count() > 0
    except MissingLibraryError as error:
        logger.warning("%s. The CPU place is used.", error)
        return False
    except NoDeviceError:
        return False


def cuda_device_count() -> int:
    """Number of CUDA devices.

    Raises:
        MissingLibraryError: CuPy is not installed, or cannot be imported.
        NoDeviceError: there is no usable driver.
    """
    require_cupy()
    check_fork()
    try:
        if "cupy" not in sys.modules:  # calls by the hundred need not wait for what another thread imports late
            imported("cupy")
        import cupy
    except Exception as error:  # a damaged installation may raise anything; CuPy makes its cache folder on import
        raise MissingLibraryError(
            f"CuPy is installed but cannot be imported ({type(error).__name__}: {error}): repair it, or, where its "
            "cache folder is at fault, set CUPY_CACHE_DIR to a folder that can be written"
        ) from error

    try:
        return int(cupy.cuda.runtime.getDeviceCount())
    except cupy.cuda.runtime.CUDARuntimeError as error:
        if not has_driver():
            raise NoDeviceError(NO_DRIVER) from error
        raise NoDeviceError(f"the CUDA driver cannot be used ({error}): check `nvidia-smi`") from error


@functools.cache
def _cuda_process() -> int:
    """The process that touched CUDA first."""
    return os.getpid()


def check_fork() -> None:
    """Do nothing in the process that touched CUDA first.

    Raises:
        ForkedProcessError: this process was forked from one that had used CUDA.
    """
    if _cuda_process() != os.getpid():
        raise ForkedProcessError(
            f"process {os.getpid()} was forked from {_cuda_process()}, which had used CUDA already, and CUDA does not "
            "survive a fork: start processes with multiprocessing's 'spawn' or 'forkserver' method"
        )


def device_text(identity: str) -> str:
    """A device as people read it, such as "NVIDIA H200, 132 SMs, sm_90"; what is no identity stays as it is."""
    told = IDENTITY.fullmatch(identity)
    if told is None:
        return printable_name(identity)
    name, count = printable_name(told["name"]), told["sm_count"]
    if told["major"] == "0":
        return f"{name}, {count} cores"
    mig = f"MIG {printable_name(told['mig_profile'])}"
    named = name if not told["mig_profile"] or name.endswith(mig) else f"{name} {mig}"
    return f"{named}, {count} SMs, sm_{told['major']}{told['minor']}"


@functools.cache
def _cpu() -> Device:
    return Device(place=Place.CPU, name=_processor_name(), sm_count=os.cpu_count() or 1, clock_hz=2.5e9)


def _processor_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass
    import platform

    return platform.processor() or platform.machine()


@functools.cache
def _probe(index: int) -> Device:
    import cupy

    runtime = cupy.cuda.runtime
    properties = runtime.getDeviceProperties(index)
    name = properties["name"].decode()
    mig = re.search(r" MIG (\S+)$", name)
    memory_khz = runtime.deviceGetAttribute(36, index)  # cudaDevAttrMemoryClockRate
    bus_bits = runtime.deviceGetAttribute(37, index)  # cudaDevAttrGlobalMemoryBusWidth
    return Device(
        place=Place.CUDA,
        index=index,
        name=name,
        sm=10 * properties["major"] + properties["minor"],
        sm_count=properties["multiProcessorCount"],
        mig_profile=mig[1] if mig else "",
        memory_bytes=properties["totalGlobalMem"],
        l2_bytes=properties["l2CacheSize"],
        shared_bytes=properties["sharedMemPerBlockOptin"],
        clock_hz=1e3 * runtime.deviceGetAttribute(13, index),  # cudaDevAttrClockRate
        bandwidth_bytes_per_s=2e3 * memory_khz * bus_bits / 8 or 1e12,
        uuid=_uuid(index, is_mig=mig is not None),
    )


def _uuid(index: int, *, is_mig: bool) -> str:
    """The driver's UUID of a device, "" where it cannot be asked; CuPy's properties cut it off at a zero byte."""
    try:
        from cuda.bindings import driver
    except ImportError:
        return ""
    error, handle = driver.cuDeviceGet(index)
    if error != driver.CUresult.CUDA_SUCCESS:
        return ""
    ask = getattr(driver, "cuDeviceGetUuid_v2", driver.cuDeviceGetUuid)  # CUDA 13 has one, and no suffix
    error, answer = ask(handle)
    if error != driver.CUresult.CUDA_SUCCESS:
        return ""
    import uuid

    return f"{'MIG' if is_mig else 'GPU'}-{uuid.UUID(bytes=bytes(answer.bytes)[:16])}"


_PACKAGES = {
    Library.CUBLAS: ("nvmath", "nvidia-cublas"),
    Library.CUFFT: ("nvmath", "nvidia-cufft"),
    Library.CUDNN: ("nvidia.cudnn", "nvidia-cudnn-cu13"),
}


@functools.cache
def _library_version(library: Library) -> str | None:
    """Version of an importable library; reads package metadata and imports nothing, which nvmath's parts would cost."""
    module, package = _PACKAGES[library]
    try:
        if importlib.util.find_spec(module) is None:
            return None
    except ModuleNotFoundError:
        return None
    from importlib import metadata

    for name in (package, f"{package.removesuffix('-cu13')}-cu12"):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return ""
