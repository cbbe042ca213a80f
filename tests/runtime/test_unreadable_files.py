"""Files that are damaged, endless, special or cannot be written: one error, and what was there stays."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import io
import json
import os
import pickle
import re
import struct
import threading
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.commands.cli_runner import FORWARD, run_json, use_own_folders
from helpers.processes.waiting import LIMIT_S

import miofind
from miofind.compiler import BinaryCache, Compiler, kernel_hash
from miofind.compiler.cubin import complaint, parameter_bytes
from miofind.errors import DatabaseError, InvalidOptionError, InvalidProblemError, SolutionFileError
from miofind.files import replacing
from miofind.finddb import Store, shipped_paths, write_release
from miofind.runtime.solution import SolutionList, Source, alone
from miofind.solver.registry import Registry
from miofind.solvers.large.in_parts import ConvInParts
from miofind.suites import load_csv, load_lines
from miofind.suites.find_db_text import load_find_db

pytestmark = pytest.mark.sampled(2)

PROBLEM = miofind.ProblemDescription.convolution(x=(1, 4, 6, 5), w=(2, 4, 3, 3))
HEADER = "n,c,h,w,k,fy,fx"


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "solution.json"
    with miofind.Handle("cpu", database=tmp_path / "finddb.db") as handle:
        miofind.find_solutions(PROBLEM, handle=handle)[0].save(path)
    return path


def load(path: Path) -> miofind.Solution:
    with miofind.Handle("cpu", database=":memory:") as handle:
        return miofind.Solution.load(path, handle)


def rewrite(path: Path, **values: Any) -> None:
    """Other values in a saved solution, as if it had been saved with them."""
    document = json.loads(path.read_text())
    document["solution"] |= values
    text = json.dumps(document["solution"], sort_keys=True, separators=(",", ":"))
    document["sha256"] = hashlib.sha256(text.encode()).hexdigest()
    path.write_text(json.dumps(document))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("time_ms", float("nan")),
        ("time_ms", -1.0),
        ("max_error", "small"),
        ("source", "rumour"),
        ("source", ["measured"]),
        ("max_error", float("inf")),
        ("samples", "many"),
        ("cut_off", 1),
        ("contended", None),
    ],
)
def test_a_saved_solution_with_impossible_figures_is_refused(saved: Path, field: str, value: Any) -> None:
    rewrite(saved, **{field: value})
    with pytest.raises(SolutionFileError, match=field):
        load(saved)


def test_a_saved_solution_of_a_solver_for_other_problems_is_refused(saved: Path) -> None:
    """Whatever its configuration says: a solver need not know how to read one for a problem that it does not serve."""
    channels_last = miofind.ProblemDescription.convolution(
        x=(2, 64, 9, 9), w=(64, 64, 3, 3), layout="NHWC", dtype="float16"
    )
    solver, device = Registry.default()["ConvImplicitGemmWgmma"], miofind.Device.virtual("90a")
    config = dict(solver.default_configs(channels_last, device)[0])
    deep = miofind.ProblemDescription.convolution(x=(1, 16, 4, 4, 4), w=(16, 16, 3, 3, 3), dtype="float16")
    rewrite(saved, network_config=deep.network_config, solver_id=solver.id, config=config)
    with pytest.raises(SolutionFileError, match="ConvImplicitGemmWgmma does not serve its problem here: "):
        load(saved)


def test_a_volume_s_solution_of_before_volumes_were_images_is_refused(saved: Path) -> None:
    volume = miofind.ProblemDescription.convolution(x=(2, 64, 4, 9, 9), w=(64, 64, 1, 1, 1), dtype="float16")
    rewrite(saved, network_config=volume.network_config, solver_id="ConvImplicitGemmWgmmaVolume", config={})
    told = f"does not serve its problem here, which is computed as {re.escape(str(volume.flattened))}: .* Find again"
    with pytest.raises(SolutionFileError, match=told):
        load(saved)


def test_a_saved_solution_follows_links_and_the_users_mask(saved: Path, tmp_path: Path) -> None:
    link = tmp_path / "link.json"
    link.symlink_to(saved)
    load(saved).save(link)
    assert link.is_symlink()
    plain = tmp_path / "plain"
    plain.touch()
    assert saved.stat().st_mode == plain.stat().st_mode
    load(saved)


def test_what_is_no_regular_file_is_written_not_replaced(saved: Path, tmp_path: Path) -> None:
    pipe, read = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()))
    reader.start()
    load(saved).save(pipe)
    reader.join(timeout=LIMIT_S)
    assert pipe.is_fifo()
    assert json.loads(read[0])["format"] == "miofind-solution"


def test_links_in_a_loop_are_not_replaced(saved: Path, tmp_path: Path) -> None:
    """A release or an export took the place of one of them."""
    one, other = tmp_path / "one", tmp_path / "other"
    one.symlink_to(other)
    other.symlink_to(one)
    with pytest.raises(SolutionFileError, match="symbolic links"):
        load(saved).save(one)
    with Store(tmp_path / "finddb.db") as store, pytest.raises(DatabaseError, match="symbolic links"):
        write_release([store], one)
    assert one.is_symlink()
    assert other.is_symlink()


@pytest.mark.parametrize("name", ["missing/solution.json", "x" * 300, "nul\0"])
def test_a_path_that_cannot_be_written_is_named(saved: Path, tmp_path: Path, name: str) -> None:
    with pytest.raises(SolutionFileError, match="cannot be written"):
        load(saved).save(tmp_path / name)


READERS = {"--csv": load_csv, "--lines": load_lines, "--fdb": load_find_db}
needs_zero = pytest.mark.skipif(not Path("/dev/zero").exists(), reason="needs /dev/zero")


@needs_zero
@pytest.mark.parametrize("flag", READERS)
def test_an_endless_file_of_problems_is_refused(flag: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was read until memory ended."""
    monkeypatch.setattr("miofind.suites.text.MAX_FILE_BYTES", 2 << 20)
    with pytest.raises(InvalidOptionError, match="/dev/zero has more than 2 MiB"):
        READERS[flag]("/dev/zero")


@pytest.mark.parametrize("flag", READERS)
def test_a_line_that_does_not_end_is_refused(flag: str, tmp_path: Path) -> None:
    file = tmp_path / "problems.txt"
    file.write_text(f"{HEADER}\n" + "conv " * 60_000, encoding="utf-8")
    with pytest.raises(InvalidOptionError, match=r"problems.txt, line 2 has 300000 characters, more than 262144"):
        READERS[flag](file)


def test_problems_come_through_pipes_and_stdin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_own_folders(tmp_path, monkeypatch)
    line = " ".join(FORWARD)
    os.mkfifo(tmp_path / "pipe")
    writer = threading.Thread(target=(tmp_path / "pipe").write_text, args=(f"{line}\n",))
    writer.start()
    asked = ("tune", "--device", "cpu", "--dry-run", "--db", ":memory:")
    piped = run_json(*asked, "--lines", str(tmp_path / "pipe"))
    writer.join()
    assert piped == run_json(*asked, "--lines", "-", input=f"{line}\n")
    assert piped["forecasts"][0]["problems"] == 1


@needs_zero
def test_an_endless_file_is_no_saved_solution(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("miofind.runtime.solution_file.MAX_FILE_BYTES", 1000)
    with pytest.raises(SolutionFileError, match="larger than 1000 bytes"):
        load(Path("/dev/zero"))


def test_a_replacement_that_fails_leaves_the_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("before")

    def fail() -> None:
        with replacing(path) as target:
            target.write("after")
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]


def test_a_link_in_the_place_of_the_temporary_file_is_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In /tmp anybody can put one there."""
    monkeypatch.setattr("secrets.token_hex", lambda count: "0" * 2 * count)
    victim = tmp_path / "victim"
    victim.write_text("mine")
    link = tmp_path / f".file.{'0' * 16}.tmp"
    link.symlink_to(victim)
    with pytest.raises(FileExistsError), replacing(tmp_path / "file") as target:
        target.write("theirs")
    assert victim.read_text() == "mine"
    assert link.is_symlink()


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        (f"{HEADER}\n1,2,3,4,5,1,{'1' * 5000}\n", "line 2, column fx"),
        (f"{HEADER}\n1,2,3,4,5,1,{'1' * 200_000}\n", "line 2: it is no line of a table"),
        (f'{HEADER}\n1,2,3,4,5,1,"1\n', "it is no line of a table"),
        (f"{HEADER}\n1,2,3,4,5,1,-\n", "column fx: '-' must be"),
    ],
    ids=["digits", "field", "quote", "minus"],
)
def test_a_bad_table_names_the_line(tmp_path: Path, rows: str, told: str) -> None:
    path = tmp_path / "table.csv"
    path.write_text(rows)
    with pytest.raises(InvalidProblemError, match=told) as caught:
        load_csv(path)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("version", [0, -5])
def test_an_export_has_a_version(version: int) -> None:
    lines = io.StringIO(json.dumps({"format": "miofind-finddb", "schema_version": version}))
    with Store(":memory:") as store, pytest.raises(DatabaseError, match="does not name the format"):
        store.import_jsonl(lines)


def test_an_import_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "export.jsonl"
    path.write_text("{}\n")
    with Store(":memory:") as store, path.open() as lines, pytest.raises(DatabaseError, match=r"export\.jsonl, line 1"):
        store.import_jsonl(lines)


def test_the_folders_of_unknown_users_are_refused() -> None:
    with pytest.raises(DatabaseError, match="MIOFIND_SYSTEM_DB='~no_such_user'"):
        shipped_paths({"MIOFIND_SYSTEM_DB": "~no_such_user"})


def test_a_cache_of_an_unknown_user_keeps_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MIOFIND_CACHE_DIR", "~no_such_user/cache")
    assert BinaryCache().directory is None
    assert list(tmp_path.iterdir()) == []


GPU = miofind.Device.virtual("90a")


def solution_of(
    problem: miofind.ProblemDescription, handle: miofind.Handle, solver_id: str = "ConvDirectNaive"
) -> miofind.Solution:
    """A solution by a solver, the naive one if left out, as a find would give it, on a GPU that need not be here."""
    solver = handle.registry[solver_id]
    config = solver.default_configs(problem, handle.device)[0]
    steps = solver.solution(problem, handle.device, config)
    solution = miofind.Solution(
        problem=problem,
        device=handle.device,
        solver_id=solver.id,
        algorithm=solver.algorithm,
        library=solver.library,
        config=config,
        time_ms=1.0,
        workspace_bytes=steps.workspace.bytes,
        deterministic=True,
        max_error=None,
        source=Source.MEASURED,
        kernel_hash=kernel_hash(steps),
        solution_list=SolutionList(handle),
    )
    return alone(solution)


def binary_of(problem: miofind.ProblemDescription, handle: miofind.Handle) -> bytes:
    """The binary that a solution of a handle would load, of the first kernel."""
    solver = Registry.default()["ConvDirectNaive"]
    config = solver.default_configs(problem, handle.device)[0]
    step = solver.solution(problem, handle.device, config).kernels[0]
    return handle.compiler.build(step, handle.device.arch).cubin


def binaries_in(path: Path) -> list[bytes]:
    return [base64.b64decode(item["cubin"]) for item in json.loads(path.read_text())["solution"]["binaries"]]


def with_binary(path: Path, cubin: bytes) -> None:
    """Another first binary in a saved solution, with the hashes that belong to it."""
    binaries = json.loads(path.read_text())["solution"]["binaries"]
    binaries[0] = {"sha256": hashlib.sha256(cubin).hexdigest(), "cubin": base64.b64encode(cubin).decode()}
    rewrite(path, binaries=binaries)


@pytest.fixture
def gpu(tmp_path: Path) -> Iterator[miofind.Handle]:
    pytest.importorskip("cuda.bindings.nvrtc")
    compiler = Compiler(BinaryCache(tmp_path / "cache"))
    with miofind.Handle(GPU, database=":memory:", compiler=compiler) as handle:
        yield handle


@pytest.mark.parametrize("is_built", [False, True], ids=["before", "after"])
def test_a_loaded_solutions_binary_answers_for_no_other(is_built: bool, tmp_path: Path, gpu: miofind.Handle) -> None:
    """It answered for every problem of the process with that kernel, and went into the files that were saved later."""
    file, other = tmp_path / "solution.json", tmp_path / "other.json"
    fresh = miofind.Handle(GPU, database=":memory:", compiler=Compiler(BinaryCache(tmp_path / "fresh")))
    solution_of(PROBLEM, fresh).save(file)
    own = binary_of(PROBLEM, fresh)
    foreign = own + b"foreign"
    with_binary(file, foreign)
    if is_built:
        assert binary_of(PROBLEM, gpu) == own
    loaded = miofind.Solution.load(file, gpu)
    assert binary_of(PROBLEM, loaded.solution_list.handle) == foreign
    assert binary_of(PROBLEM, gpu) == own
    assert binary_of(PROBLEM, miofind.Solution.load(file, gpu).solution_list.handle) == foreign
    assert loaded.solution_list.handle.invokers is not gpu.invokers
    solution_of(PROBLEM, gpu).save(other)
    assert foreign not in binaries_in(other)
    loaded.save(file)
    assert foreign in binaries_in(file)
    assert binary_of(PROBLEM, miofind.Handle(GPU, compiler=Compiler(BinaryCache(tmp_path / "cache")))) == own
    assert not any(foreign == kept.read_bytes() for kept in (tmp_path / "cache").iterdir())


@pytest.mark.parametrize("is_first_file", [False, True], ids=["now", "first files"])
def test_launches_of_one_kernel_share_a_binary_in_a_file(
    is_first_file: bool, tmp_path: Path, gpu: miofind.Handle
) -> None:
    """Each part's launches had binaries of their own: the files of some hundred parts were too large to be loaded."""
    file = tmp_path / "solution.json"
    registry = Registry.default().with_solvers(ConvInParts(1 << 13))
    handle = miofind.Handle(GPU, database=":memory:", compiler=gpu.compiler, registry=registry)
    problem = miofind.ProblemDescription.convolution(
        x=(9, 8, 32, 32), w=(8, 8, 3, 3), padding=1, dtype="float16", layout="NHWC"
    )
    solution = solution_of(problem, handle, "ConvInParts")
    kernels = registry["ConvInParts"].solution(problem, GPU, solution.config).kernels
    solution.save(file)
    binary, last = json.loads(file.read_text())["solution"]["binaries"]
    assert len(set(kernels)) == 9
    if is_first_file:
        rewrite(file, binaries=[*[binary] * 8, last])
    loaded = miofind.Solution.load(file, handle)
    assert loaded.config == solution.config
    built = {loaded.solution_list.handle.compiler.build(step, GPU.arch).cubin for step in kernels}
    assert built == {base64.b64decode(each["cubin"]) for each in (binary, last)}


def test_a_loaded_solution_that_was_pickled_leaves_its_binaries(tmp_path: Path, gpu: miofind.Handle) -> None:
    file = tmp_path / "solution.json"
    solution_of(PROBLEM, gpu).save(file)
    foreign = binary_of(PROBLEM, gpu) + b"foreign"
    with_binary(file, foreign)
    assert b"foreign" not in pickle.dumps(miofind.Solution.load(file, gpu))


def repeating(count: int, size: int, *, kind: int = 1, ident: bytes = b"\x7fELF\x02\x01") -> bytes:
    """A cubin whose sections all are the whole file but a byte, each with a name of its own."""
    names = b"".join(b"s%d\0" % number for number in range(count))
    table = 64 + len(names)
    total = max(size, table + 64 * count)
    at, headers = 0, []
    for number in range(count):
        offset, length = (64, len(names)) if number == 1 else (1, total - 1)
        headers.append(struct.pack("<IIQQQQIIQQ", at, 3 if number == 1 else kind, 0, 0, offset, length, 0, 0, 0, 0))
        at += len(b"s%d\0" % number)
    head = ident.ljust(16, b"\0") + struct.pack("<HHIQQQIHHHHHH", 2, 190, 1, 0, 0, table, 0, 64, 56, 0, 64, count, 1)
    return (head + names + b"".join(headers)).ljust(total, b"\0")


def segments_of(cubin: bytes, size: int) -> bytes:
    """The cubin with one segment, of that size in memory."""
    segment = struct.pack("<IIQQQQQQ", 1, 0, 0, 0, 0, 0, size, 0)
    head = bytearray(cubin)
    struct.pack_into("<Q", head, 0x20, len(cubin))
    struct.pack_into("<HH", head, 0x36, 56, 1)
    return bytes(head) + segment


def unstored(size: int, *, kind: int = 8) -> bytes:
    """A cubin with a section of that size which the file does not have."""
    cubin = bytearray(repeating(3, 1000, kind=kind))
    (table,) = struct.unpack_from("<Q", cubin, 0x28)
    struct.pack_into("<Q", cubin, table + 2 * 64 + 0x20, size)
    return bytes(cubin)


CRAFTED = {
    "whole file": lambda: repeating(5000, 1_400_000),
    "most sections": lambda: repeating(0xFFFF, 6_000_000),
    "nothing stored": lambda: unstored(1 << 33),
    "beyond the file": lambda: unstored(1 << 20, kind=1),
    "a large segment": lambda: segments_of(repeating(2, 1000), 1 << 33),
    "no sections": lambda: repeating(2, 1000)[:0x3C] + bytes(2) + repeating(2, 1000)[0x3E:],
    "table outside": lambda: repeating(2, 1000)[:0x28] + b"\xff" * 8 + repeating(2, 1000)[0x30:],
    "other entries": lambda: repeating(2, 1000)[:0x3A] + bytes(2) + repeating(2, 1000)[0x3C:],
    "32 bits": lambda: repeating(2, 1000, ident=b"\x7fELF\x01\x01"),
    "another machine": lambda: repeating(2, 1000)[:0x12] + b"\x3e\0" + repeating(2, 1000)[0x14:],
    "empty": lambda: b"",
    "ELF alone": lambda: b"\x7fELF",
    "a fat binary": lambda: b"\x50\xed\x55\xba" + bytes(100),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", CRAFTED)
def test_a_crafted_binary_is_refused_in_little_memory(kind: str, tmp_path: Path, gpu: miofind.Handle) -> None:
    """One of 1.4 MB took 6.7 GB: each of its sections was the whole file."""
    cubin = CRAFTED[kind]()
    file = tmp_path / "solution.json"
    solution_of(PROBLEM, gpu).save(file)
    with_binary(file, cubin)
    with peak_below(max(16 << 20, 16 * len(cubin))), pytest.raises(SolutionFileError, match=r"direct/naive\.cu"):
        miofind.Solution.load(file, gpu)
    with peak_below(max(16 << 20, 16 * len(cubin))):
        assert parameter_bytes(cubin, "direct_naive_forward") is None
    solution_of(PROBLEM, gpu).save(file)
    miofind.Solution.load(file, gpu)


@contextlib.contextmanager
def peak_below(limit_bytes: int) -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < limit_bytes
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("unit", ["{},", "[],", "0,", "[[1,2],"], ids=["objects", "lists", "numbers", "nested"])
def test_a_file_of_many_values_is_no_saved_solution(unit: str, saved: Path) -> None:
    """JSON makes of two characters an object of sixty bytes."""
    count = (8 << 20) // len(unit)
    saved.write_text(f'{{"format": "miofind-solution", "version": 1, "solution": [{unit * count}0]}}')
    with peak_below(32 << 20), pytest.raises(SolutionFileError, match="has more than 10000 values"):
        load(saved)


def test_every_kernels_binary_is_as_a_compiler_writes_it(gpu: miofind.Handle) -> None:
    """No saved solution of this release is refused."""
    steps = {}
    for solver_id in (
        "ConvDirectNaive",
        "ConvImplicitGemmWgmma",
        "ConvImplicitGemmMma",
        "ConvFft",
        "ConvWinogradFused",
    ):
        solver = Registry.default().named(solver_id)
        problem = next(problem for problem in solver.examples() if solver.applicability(problem, GPU))
        for step in solver.solution(problem, GPU, solver.default_configs(problem, GPU)[0]).kernels:
            steps[step] = gpu.compiler.build(step, GPU.arch).cubin
    assert len(steps) >= 5
    for step, cubin in steps.items():
        assert complaint(cubin) == "", step.source
        assert parameter_bytes(cubin, step.entry)


def test_a_header_of_the_current_folder_is_not_compiled(
    tmp_path: Path, gpu: miofind.Handle, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("common/types.cuh", "types.cuh", "cuda_fp16.h", "cuda_fp16.hpp", "cuda_bf16.h"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("#error foreign")
    monkeypatch.chdir(tmp_path)
    assert binary_of(PROBLEM, gpu)
