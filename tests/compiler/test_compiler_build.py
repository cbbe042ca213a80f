"""Building: keys, compilation, errors, resources, many kernels at once, binaries from elsewhere."""

from __future__ import annotations

import dataclasses
import os
import pickle
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from helpers.processes.waiting import LIMIT_S
from helpers.runs.cuda_package import SCALE, SCALE_ARGS, SCALE_HEADER, CudaPackage, make_package

from miofind.compiler import Binary, BinaryCache, Compiler, build, kernel_hash, nvrtc, nvrtc_version
from miofind.compiler.cubin import max_threads, parameter_bytes
from miofind.compiler.nvrtc import Compiled, compile_source, toolchain
from miofind.compiler.sources import KernelSource
from miofind.device.device import Device
from miofind.errors import CompileError, MissingLibraryError, NoDeviceError, SolutionFileError
from miofind.solver.steps import ConvSolution, HostStep, KernelStep, Pointer, Scalar

pytest.importorskip("cuda.bindings.nvrtc")

ARCH = "80"

SPILLING = """\
extern "C" __global__ void __launch_bounds__(1024, 2) spilling(float* p, int n) {
  __shared__ float shared[1024];
  float a[64];
#pragma unroll
  for (int i = 0; i < 64; ++i) a[i] = p[i * n + threadIdx.x];
  shared[threadIdx.x] = a[3];
  __syncthreads();
  for (int t = 0; t < n; ++t) {
#pragma unroll
    for (int i = 0; i < 64; ++i) a[i] = a[i] * a[(i + 1) % 64] + shared[(t + i) % 1024];
  }
#pragma unroll
  for (int i = 0; i < 64; ++i) p[i * n + threadIdx.x] = a[i];
}
extern "C" __global__ void plain(float* p) { p[threadIdx.x] = 1; }
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CudaPackage:
    return make_package(tmp_path, monkeypatch)


@pytest.fixture
def compiler(tmp_path: Path) -> Compiler:
    return Compiler(BinaryCache(tmp_path / "cache"))


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """Options of every compilation that NVRTC carries out."""
    seen: list[tuple[str, ...]] = []

    def counted(source: KernelSource, options: tuple[str, ...], arch: str) -> Compiled:
        seen.append(options)
        return compile_source(source, options, arch)

    monkeypatch.setattr(build, "compile_source", counted)
    return seen


def test_builds_once(compiler: Compiler, package: CudaPackage, compiled: list[tuple[str, ...]]) -> None:
    binary = compiler.build(package.step(), ARCH)
    assert binary.cubin.startswith(b"\x7fELF")
    assert binary.path is not None
    assert binary.resources["scale"].registers > 0
    assert binary.resources["scale"].spill_bytes == 0
    assert compiler.build(package.step(), ARCH) == binary
    assert Compiler(BinaryCache(compiler.cache.directory)).build(package.step(), ARCH) == binary
    assert len(compiled) == 1


def test_a_binary_is_read_once_until_many_others_came(
    compiler: Compiler, package: CudaPackage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "_MOST_FRESH", 2)
    steps = [package.step(defines=(("FACTOR", factor),)) for factor in (3, 4, 5)]
    binaries = [compiler.build(step, ARCH) for step in steps]
    read: list[str] = []
    get = compiler.cache.get
    monkeypatch.setattr(compiler.cache, "get", lambda key: (read.append(key), get(key))[1])
    assert [compiler.build(step, ARCH) for step in steps[1:]] == binaries[1:]
    assert read == []
    assert compiler.build(steps[0], ARCH).cubin == binaries[0].cubin
    assert read == [binaries[0].key]


@pytest.mark.parametrize("damage", ["cubin", "json"])
def test_a_damaged_entry_is_rebuilt(
    compiler: Compiler, package: CudaPackage, compiled: list[tuple[str, ...]], damage: str
) -> None:
    binary = compiler.build(package.step(), ARCH)
    assert binary.path is not None
    binary.path.with_suffix(f".{damage}").write_bytes(b"\x7fELF rubbish")
    assert Compiler(compiler.cache).build(package.step(), ARCH).cubin == binary.cubin
    assert len(compiled) == 2
    compiler.build(package.step(), ARCH)
    assert len(compiled) == 2


def test_an_evicted_entry_is_rebuilt(compiler: Compiler, package: CudaPackage) -> None:
    binary = compiler.build(package.step(), ARCH)
    compiler.cache.clear()
    assert compiler.build(package.step(), ARCH).cubin == binary.cubin


def test_without_a_disk_binaries_stay_in_memory(
    tmp_path: Path, package: CudaPackage, compiled: list[tuple[str, ...]], caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    compiler = Compiler(BinaryCache(tmp_path / "file" / "cache"))
    binary = compiler.build(package.step(), ARCH)
    assert binary.path is None
    assert compiler.build(package.step(), ARCH) is binary
    assert len(compiled) == 1
    assert len(caplog.records) == 1


@pytest.mark.parametrize(
    "fields",
    [
        {"defines": (("FACTOR", 3),)},
        {"defines": (("FACTOR", "2.5f"),)},
        {"options": ("--use_fast_math",)},
        {"options": ("--maxrregcount=32",)},
    ],
    ids=str,
)
def test_defines_and_options_change_the_key_and_the_hash(
    compiler: Compiler, package: CudaPackage, fields: dict[str, object]
) -> None:
    plain, changed = package.step(), package.step(**fields)
    assert compiler.key(plain, ARCH) != compiler.key(changed, ARCH)
    assert kernel_hash(ConvSolution(steps=(plain,))) != kernel_hash(ConvSolution(steps=(changed,)))
    assert compiler.build(plain, ARCH).cubin != compiler.build(changed, ARCH).cubin or fields == {
        "options": ("--maxrregcount=32",)
    }


def test_what_does_not_change_the_key(compiler: Compiler, package: CudaPackage) -> None:
    package.write(scale_cu=SCALE + 'extern "C" __global__ void other() {}')
    keys = {
        compiler.key(step, ARCH)
        for step in (
            package.step(),
            package.step(entry="other"),
            package.step(grid=(9, 1, 1), shared_bytes=1024),
        )
    }
    assert len(keys) == 1


def test_source_header_and_architecture_change_the_key(compiler: Compiler, package: CudaPackage) -> None:
    keys = [compiler.key(package.step(), ARCH), compiler.key(package.step(), "90a")]
    package.write(scale_cu=SCALE.replace("i < n", "i <= n"))
    keys.append(compiler.key(package.step(), ARCH))
    package.write(common__scale_cuh=SCALE_HEADER.replace("FACTOR *", "1 + FACTOR *"))
    keys.append(compiler.key(package.step(), ARCH))
    assert len(set(keys)) == 4


@pytest.mark.parametrize("change", [{"version": "99.0"}, {"headers_version": 99000}], ids=str)
def test_the_toolchain_changes_the_key(
    compiler: Compiler, package: CudaPackage, monkeypatch: pytest.MonkeyPatch, change: dict[str, object]
) -> None:
    before = compiler.key(package.step(), ARCH)
    other = dataclasses.replace(toolchain(), **change)  # type: ignore[arg-type]
    monkeypatch.setattr(build, "toolchain", lambda: other)
    assert compiler.key(package.step(), ARCH) != before


def test_where_the_headers_are_does_not_change_the_key(
    compiler: Compiler, package: CudaPackage, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = compiler.key(package.step(), ARCH)
    monkeypatch.setattr(nvrtc, "include_options", lambda: ("-I/elsewhere",))
    assert compiler.key(package.step(), ARCH) == before


def test_a_binary_of_the_cache_asks_for_no_headers_to_compile_with(
    compiler: Compiler, package: CudaPackage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that are not installed are searched for in a process of their own."""
    built = compiler.build(package.step(), ARCH)
    monkeypatch.setattr(nvrtc, "include_options", lambda: pytest.fail("it is compiled again"))
    asked = []
    monkeypatch.setattr(
        nvrtc, "_header_directory", lambda library, find=nvrtc._header_directory: asked.append(library) or find(library)
    )
    toolchain.cache_clear()
    assert Compiler(compiler.cache).build(package.step(), ARCH).cubin == built.cubin
    assert asked == ["cudart"]


def test_kernel_hash_covers_every_step(package: CudaPackage) -> None:
    package.write(scale_cu=SCALE + 'extern "C" __global__ void other() {}')
    host = HostStep(module="m", function="f")
    solutions = [
        ConvSolution(steps=steps)
        for steps in (
            (package.step(),),
            (package.step(entry="other"),),
            (package.step(), package.step(entry="other")),
            (package.step(), host),
            (host, package.step()),
            (host,),
        )
    ]
    assert len({kernel_hash(solution) for solution in solutions}) == len(solutions)
    again = ConvSolution(steps=(package.step(grid=(7, 1, 1)),))
    assert kernel_hash(again) == kernel_hash(solutions[0])
    other_function = ConvSolution(steps=(HostStep(module="m", function="g"),))
    assert kernel_hash(other_function) != kernel_hash(solutions[-1])


def test_a_define_may_be_a_bool(compiler: Compiler, package: CudaPackage) -> None:
    assert compiler.key(package.step(defines=(("FACTOR", True),)), ARCH) == compiler.key(
        package.step(defines=(("FACTOR", 1),)), ARCH
    )


def test_a_compile_error_tells_what_and_where(compiler: Compiler, package: CudaPackage) -> None:
    package.write(common__scale_cuh="#pragma once\n\n__device__ float scaled(float x) { return y; }\n")
    step = package.step(defines=(("FACTOR", 7),))
    with pytest.raises(CompileError, match=r"scale\.cu does not compile for sm_80 with NVRTC") as caught:
        compiler.build(step, ARCH)
    error = caught.value
    assert error.source == "scale.cu"
    assert {"-arch=sm_80", "-DFACTOR=7", "--std=c++17"} <= set(error.options)
    assert 'common/scale.cuh(3): error: identifier "y" is undefined' in error.log
    assert error.log in str(error)
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
    assert compiler.cache.stats().entries == 0


def test_a_wrong_option_is_a_compile_error(compiler: Compiler, package: CudaPackage) -> None:
    with pytest.raises(CompileError, match="NVRTC_ERROR_INVALID_OPTION") as caught:
        compiler.build(package.step(options=("--no-such-option",)), ARCH)
    assert "--no-such-option" in caught.value.log


@pytest.mark.parametrize("arch", ["20", "999a"])
def test_an_architecture_that_nvrtc_does_not_know(compiler: Compiler, package: CudaPackage, arch: str) -> None:
    with pytest.raises(CompileError, match=f"cannot compile for sm_{arch}, only for .*90") as caught:
        compiler.build(package.step(), arch)
    assert nvrtc_version() in str(caught.value)


def test_a_missing_entry(compiler: Compiler, package: CudaPackage) -> None:
    with pytest.raises(CompileError, match=r"scale\.cu has no kernel 'gone', it has scale"):
        compiler.build(package.step(entry="gone"), ARCH)


@pytest.mark.parametrize(("driver", "extra"), [(True, "cuda12"), (False, "compile")], ids=["driver", "no driver"])
@pytest.mark.parametrize("module", ["cuda.bindings", "cuda.bindings.nvrtc"])
def test_without_nvrtc_the_error_says_what_to_install(
    compiler: Compiler, package: CudaPackage, monkeypatch: pytest.MonkeyPatch, module: str, driver: bool, extra: str
) -> None:
    toolchain.cache_clear()
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, module, None)
        patch.delattr("cuda.bindings.nvrtc", raising=False)
        patch.setattr(nvrtc, "has_driver", lambda: driver)
        with pytest.raises(MissingLibraryError, match=rf"pip install -e '\.\[{extra}\]'"):
            compiler.build(package.step(), ARCH)
        with pytest.raises(MissingLibraryError):
            list(compiler.build_all([package.step()], ARCH))
    compiler.build(package.step(), ARCH)


def test_without_headers_the_error_says_what_to_install(
    compiler: Compiler, package: CudaPackage, monkeypatch: pytest.MonkeyPatch
) -> None:
    toolchain.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(nvrtc, "_header_directory", lambda library: None)
        with pytest.raises(MissingLibraryError, match="headers are not installed"):
            compiler.build(package.step(), ARCH)
    assert toolchain().headers_version >= 12000


@pytest.mark.parametrize("header", ["cuda_fp16.h", "cuda_bf16.h", "cuda_fp8.h", "mma.h", "cuda_pipeline.h"])
def test_toolkit_headers_are_found(
    compiler: Compiler, package: CudaPackage, monkeypatch: pytest.MonkeyPatch, header: str
) -> None:
    """Those that miofind's own kernels include without a search in a process of its own."""
    if header != "mma.h":
        monkeypatch.setattr(nvrtc, "further_include_options", lambda: pytest.fail("further folders are searched for"))
    package.write(scale_cu=f"#include <{header}>\n{SCALE}")
    assert compiler.build(package.step(), "90a").resources["scale"].registers > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (SCALE_ARGS[:2], "scale of scale.cu takes 3 parameters, its step gives 2"),
        ((*SCALE_ARGS[:2], Scalar(ctype="int64", value=1)), "takes 4 bytes as parameter 3, its step gives 8"),
        ((SCALE_ARGS[0], *SCALE_ARGS[:0:-1]), "takes 8 bytes as parameter 2, its step gives 4"),
    ],
)
def test_arguments_that_the_kernel_does_not_take(
    compiler: Compiler, package: CudaPackage, arguments: tuple[Pointer | Scalar, ...], message: str
) -> None:
    with pytest.raises(CompileError, match=message):
        compiler.build(package.step(args=arguments), ARCH)
    [(_, result)] = compiler.build_all([package.step(args=arguments)], ARCH)
    assert isinstance(result, CompileError)


@pytest.mark.parametrize("arch", [ARCH, "90a"])
def test_a_block_larger_than_the_kernel_s_bounds_is_refused(
    compiler: Compiler, package: CudaPackage, arch: str
) -> None:
    """The driver refused the launch, on a GPU alone."""
    package.write(scale_cu=SCALE.replace("__global__ void scale", "__global__ void __launch_bounds__(64) scale"))
    fitting, large = package.step(block=(8, 4, 2)), package.step(block=(8, 4, 3))
    binary = compiler.build(fitting, arch)
    assert max_threads(binary.cubin, "scale") == 64
    with pytest.raises(CompileError, match=r"__launch_bounds__ allow 64 threads a block, its step launches 96"):
        compiler.build(large, arch)
    results = [result for _, result in compiler.build_all([fitting, large], arch)]
    assert results[0] == binary
    assert isinstance(results[1], CompileError)


def test_a_kernel_without_bounds_takes_any_block(compiler: Compiler, package: CudaPackage) -> None:
    assert max_threads(compiler.build(package.step(block=(1024, 1, 1)), ARCH).cubin, "scale") is None


def test_parameters_of_what_is_no_cubin() -> None:
    cubin = b"\x7fELF" + bytes(60)
    for content in (cubin, b""):
        assert parameter_bytes(content, "scale") is None
        assert max_threads(content, "scale") is None


def test_resources_of_a_kernel_that_spills(compiler: Compiler, package: CudaPackage) -> None:
    package.write(spilling_cu=SPILLING)
    binary = compiler.build(package.step("spilling.cu", "spilling", args=SCALE_ARGS[1:]), ARCH)
    spilling, plain = binary.resources["spilling"], binary.resources["plain"]
    assert spilling.registers == 32
    assert spilling.spill_bytes > 100
    assert spilling.stack_bytes > 100
    assert spilling.shared_bytes == 4096
    assert (plain.spill_bytes, plain.stack_bytes, plain.shared_bytes) == (0, 0, 0)
    assert "bytes spill stores" in binary.log
    assert compiler.build(package.step("spilling.cu", "plain", args=SCALE_ARGS[:1]), ARCH) == binary


def test_build_all_keeps_order_and_builds_once(
    compiler: Compiler, package: CudaPackage, compiled: list[tuple[str, ...]]
) -> None:
    package.write(scale_cu=SCALE + 'extern "C" __global__ void other() {}', bad_cu="no C++")
    steps = [package.step(defines=(("FACTOR", 1 + number % 5),)) for number in range(12)]
    steps[3] = package.step("bad.cu", "bad")
    steps[4] = package.step("gone.cu", "gone")
    steps[5] = package.step(entry="gone")
    steps[6] = package.step(entry="other", args=())
    results = list(compiler.build_all(steps, ARCH))
    assert [step for step, _ in results] == steps
    errors = {number: str(result) for number, (_, result) in enumerate(results) if isinstance(result, CompileError)}
    assert sorted(errors) == [3, 4, 5]
    assert "bad.cu(1): error" in errors[3]
    assert "cannot be read" in errors[4]
    assert "no kernel 'gone', it has other, scale" in errors[5]
    binaries = {number: result for number, (_, result) in enumerate(results) if isinstance(result, Binary)}
    assert binaries[0] == binaries[10]
    assert binaries[0].cubin != binaries[1].cubin
    assert len(compiled) == 1 + 1 + 5
    assert [result for _, result in compiler.build_all([steps[0]], ARCH, workers=1)] == [binaries[0]]
    assert len(compiled) == 1 + 1 + 5


def test_build_all_of_nothing(compiler: Compiler) -> None:
    assert list(compiler.build_all([], ARCH)) == []


def test_build_all_can_be_left(compiler: Compiler, package: CudaPackage) -> None:
    steps = [package.step(defines=(("FACTOR", number),)) for number in range(40)]
    for step, result in compiler.build_all(iter(steps), ARCH, workers=2):
        assert step == steps[0]
        assert isinstance(result, Binary)
        break
    assert compiler.build(steps[-1], ARCH).resources


def test_threads_that_want_the_same_kernel(
    compiler: Compiler, package: CudaPackage, compiled: list[tuple[str, ...]]
) -> None:
    with ThreadPoolExecutor(8) as pool:
        binaries = list(pool.map(lambda _: compiler.build(package.step(), ARCH), range(32)))
    assert all(binary == binaries[0] for binary in binaries)
    assert len(compiled) == 1


CHILD = """
import sys
from pathlib import Path
from miofind.compiler import BinaryCache, Compiler
from miofind.solver.steps import KernelStep, Pointer, Scalar
compiler = Compiler(BinaryCache(Path(sys.argv[1])))
for factor in (1, 2, 3):
    step = KernelStep(source="scale.cu", entry="scale", package=sys.argv[2], grid=(1, 1, 1), block=(1, 1, 1),
                      args=(*2 * (Pointer(buffer="x"),), Scalar(ctype="int32", value=1)), defines=(("FACTOR", factor),))
    binary = compiler.build(step, "80")
    assert binary.path.read_bytes() == binary.cubin
    print(binary.key, hash(binary.cubin))
"""


def test_processes_that_want_the_same_kernels(compiler: Compiler, package: CudaPackage, tmp_path: Path) -> None:
    folders = [str(Path(build.__file__).parents[2]), str(package.root.parent)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(folders), "PYTHONHASHSEED": "0"}
    command = [sys.executable, "-c", CHILD, str(tmp_path / "cache"), package.name]
    children = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(6)
    ]
    results = [child.communicate(timeout=LIMIT_S) for child in children]
    assert [child.returncode for child in children] == [0] * 6, results
    assert len({output for output, _ in results}) == 1
    assert compiler.cache.directory is not None
    assert len(list(compiler.cache.directory.iterdir())) == 6
    assert compiler.cache.get(compiler.key(package.step(defines=(("FACTOR", 3),)), ARCH)) is not None


def test_an_adopted_binary_answers_without_a_compilation(
    compiler: Compiler, package: CudaPackage, tmp_path: Path, compiled: list[tuple[str, ...]]
) -> None:
    cubin = compiler.build(package.step(), ARCH).cubin
    other = Compiler(BinaryCache(tmp_path / "other"))
    other.adopt(package.step(), ARCH, cubin)
    assert other.build(package.step(), ARCH).cubin == cubin
    assert len(compiled) == 1
    assert other.cache.stats().entries == 0


def test_an_adopted_binary_needs_no_nvrtc(
    compiler: Compiler, package: CudaPackage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cubin = compiler.build(package.step(), ARCH).cubin

    def missing() -> nvrtc.Toolchain:
        raise MissingLibraryError("NVRTC is not installed")

    monkeypatch.setattr(build, "toolchain", missing)
    other = Compiler(BinaryCache(tmp_path / "other"))
    other.adopt(package.step(), ARCH, cubin)
    assert other.build(package.step(), ARCH).cubin == cubin


def test_rubbish_is_not_adopted(compiler: Compiler, package: CudaPackage) -> None:
    cubin = compiler.build(package.step(), ARCH).cubin
    for step, content in ((package.step(), b"rubbish"), (package.step(entry="gone"), cubin)):
        with pytest.raises(SolutionFileError, match=r"the saved binary of scale\.cu"):
            compiler.adopt(step, ARCH, content)


@pytest.mark.parametrize("device", [Device.virtual("90a"), Device.cpu()], ids=["virtual", "cpu"])
def test_load_needs_a_device_of_this_machine(compiler: Compiler, package: CudaPackage, device: Device) -> None:
    compiler.adopt(package.step(), device.arch, compiler.build(package.step(), ARCH).cubin)
    with pytest.raises(NoDeviceError, match="scale cannot be loaded on"):
        compiler.load(package.step(), device)


def test_steps_are_hashable(package: CudaPackage) -> None:
    steps: set[KernelStep] = {package.step(), package.step()}
    assert len(steps) == 1


@pytest.mark.parametrize(
    ("ranks", "share"),
    [(None, 12), ("1", 12), ("5", 2), ("64", 1), ("0", 12), ("-2", 12), ("many", 12), ("9" * 5000, 12)],
)
def test_processes_of_a_distributed_run_share_the_processors(
    ranks: str | None, share: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(12)), raising=False)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if ranks is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    assert build.processors() == share
