"""From a `KernelStep` to a kernel: source reading, NVRTC, the binary cache on disk and loading.

Building needs no GPU and no CuPy. It knows steps, not solvers, problems or what a kernel computes.
"""

from miofind.compiler.build import Compiler, kernel_hash, processors
from miofind.compiler.cache import Binary, BinaryCache, CacheStats
from miofind.compiler.cubin import machine_code
from miofind.compiler.host_sources import host_hash
from miofind.compiler.load import Kernel
from miofind.compiler.nvrtc import nvrtc_version, toolchain
from miofind.compiler.pool import CompilePool, CompileTimeoutError
from miofind.compiler.resources import KernelResources
from miofind.compiler.sources import source_hash

__all__ = [
    "Binary",
    "BinaryCache",
    "CacheStats",
    "CompilePool",
    "CompileTimeoutError",
    "Compiler",
    "Kernel",
    "KernelResources",
    "host_hash",
    "kernel_hash",
    "machine_code",
    "nvrtc_version",
    "processors",
    "source_hash",
    "toolchain",
]
