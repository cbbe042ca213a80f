"""What all commands share: help with an example, JSON, exit codes, messages, options that collide with nothing."""

from __future__ import annotations

import errno
import logging
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from helpers.commands.cli_runner import FORWARD, run, run_json, use_own_folders
from helpers.processes.waiting import LIMIT_S

import miofind
from miofind.cli import main, options
from miofind.core.problem import Direction, ProblemDescription
from miofind.device.device import Device, Place
from miofind.driver.flags import FLAGS
from miofind.driver.shapes import NAMES as SHAPE_FLAGS
from miofind.errors import MissingLibraryError, NoDeviceError
from miofind.finddb import Row, Store, location
from miofind.process import interrupts
from miofind.solver.registry import Registry
from miofind.solvers.cpu.direct import ConvCpuDirect
from miofind.suites.short_text import short_problem

pytestmark = pytest.mark.sampled(2)

# These say for all problems of a command what the driver's flags of that name say for one, or how it is run.
SHARED_WITH_THE_DRIVER = {"direction", "dtype", "layout", "math", "search", "solution", "verify"}


@pytest.fixture(autouse=True)
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_own_folders(tmp_path, monkeypatch)


def commands(command: click.Command = main, name: str = "") -> Iterator[tuple[str, click.Command]]:
    """All commands by their whole name."""
    if not isinstance(command, click.Group):
        yield name, command
        return
    context = click.Context(command)
    for part in command.list_commands(context):
        found = command.get_command(context, part)
        assert found is not None
        yield from commands(found, f"{name} {part}".strip())


COMMANDS = dict(commands())


@pytest.mark.parametrize("name", ["", "db", *COMMANDS])
def test_help_ends_with_an_example(name: str) -> None:
    text = run(*name.split(), "--help").stdout
    head, _, examples = text.partition("Example:\n")
    assert "Usage:" in head
    lines = [line.strip() for line in examples.splitlines() if line.strip()]
    assert lines
    assert all(line.startswith(f"miofind {name}") for line in lines)


@pytest.mark.parametrize("name", ["", "db", "fleet"])
def test_a_group_alone_shows_its_help_in_lines(name: str) -> None:
    alone = run(*name.split(), code=None)
    assert (alone.stdout + alone.stderr).splitlines() == run(*name.split(), "--help").stdout.splitlines()


@pytest.mark.parametrize("name", ["", "db", "fleet"])
def test_a_list_of_commands_is_whole_in_eighty_columns(name: str) -> None:
    listed = run(*name.split(), "--help", terminal_width=80).stdout.partition("Commands:")[2].partition("Ex")[0]
    assert len(listed.splitlines()) > 8
    assert "..." not in listed


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_json(name: str) -> None:
    options = {option for parameter in COMMANDS[name].params for option in parameter.opts}
    assert {"--json", "--verbose"} <= options


@pytest.mark.parametrize("name", [name for name, c in COMMANDS.items() if any(p.name == "line" for p in c.params)])
def test_short_flags_belong_to_the_driver(name: str) -> None:
    command = COMMANDS[name]
    options = {
        option for parameter in command.params if isinstance(parameter, click.Option) for option in parameter.opts
    }
    assert all(option.startswith("--") for option in options)
    shared = {option[2:] for option in options} & {*FLAGS, *SHAPE_FLAGS}
    assert shared <= (
        SHARED_WITH_THE_DRIVER if name not in ("find", "run", "solvers") else {"search", "solution", "verify"}
    )


_OF_ONE = ("--only", "ConvDirectNaive")
"""For who asks whether a problem can be read: to list the configurations of all solvers takes a second."""


def test_examples_of_problems_can_be_read() -> None:
    text = "".join(run(*name.split(), "--help").stdout for name in COMMANDS)
    lines = re.findall(r"miofind (?:find|run|solvers|db show) (conv\w*(?: -{1,2}[A-Za-z_]+ \w+)+)", text)
    assert len(lines) >= 4
    shapes = re.findall(r"miofind find (--x(?: --[a-z]+| [\w,]+)+?)(?= --only|$)", text, re.MULTILINE)
    assert shapes
    for line in dict.fromkeys((*lines, *shapes)):
        run("solvers", *line.split(), *_OF_ONE)


@pytest.mark.parametrize("document", ["README.md", "docs/command-line.md"])
def test_problems_of_the_documents_can_be_read(document: str) -> None:
    text = (Path(__file__).parents[2] / document).read_text(encoding="utf-8")
    lines = re.findall(r"(?:^\$ |`)miofind find ((?:conv|--x)[^`.\n]*)`?", text, re.MULTILINE)
    assert len(lines) >= 2
    for line in dict.fromkeys(lines):
        run("solvers", *line.split(), *_OF_ONE)


@pytest.mark.parametrize("name", ["", "db", *COMMANDS])
def test_h_is_help_everywhere(name: str) -> None:
    assert run(*name.split(), "-h").stdout == run(*name.split(), "--help").stdout


def test_the_help_of_a_problem_explains_the_flags() -> None:
    text = run("find", "conv", "--help").stdout
    explained = [flag for flag in FLAGS.values() if flag.name in ("batchsize", "in_channels", "out_channels", "in_h")]
    explained += [flag for name, flag in FLAGS.items() if name[:-1] in ("fil_", "pad_", "conv_stride_", "dilation_")]
    for flag in explained:
        name = f"-{flag.short} {flag.default}" if flag.short.isalpha() else f"--{flag.name}"
        assert name in text
    assert [name for name in SHAPE_FLAGS if f"--{name} " not in text] == []
    assert max(map(len, text.partition("Example")[0].splitlines())) <= 80


def test_version() -> None:
    assert run("--version").stdout.startswith("miofind, version ")


def test_unknown_command_is_a_usage_error() -> None:
    assert "No such command 'fnid'. Did you mean find?" in run("fnid", code=2).stderr
    assert "There are doctor, find" in run("frobnicate", code=2).stderr


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("find",), 2, "give a problem: conv, convfp16, convbfp16, CBAInfer"),
        (("find",), 2, "or --x n,c,h,w and --w k,c/groups,y,x"),
        (
            ("find", "--suite", "resnet50"),
            2,
            "No such option or flag: --suite. `miofind tune`, `miofind compile`, `miofind bench` and "
            "`miofind fleet submit` take it",
        ),
        (("find", "conv", "--lines=x"), 2, "No such option or flag: --lines. `miofind tune`, "),
        (("find", "--solution", "x"), 2, "--solution is no option here (`miofind run` takes it), and a problem"),
        (("find", "conv", "--bogus-option", "2"), 2, "--bogus-option is unknown: `miofind find --help` has"),
        (("find", "conv2d-rubbish"), 2, "is not a network_config: its form is that of conv2d-forward-n32-c64-"),
        (("tune", "--csv", "missing.csv"), 2, "missing.csv cannot be read: No such file or directory: correct the"),
        (("tune", "--suite", "missing.pt2"), 2, "missing.pt2 cannot be read: No such file or directory"),
        (("compile", *FORWARD, "--arch", "999"), 2, "--arch 999: NVRTC"),
        (("db", "mirror", "good.db", "m.db"), 2, "good.db is a file, and a mirror is of a server"),
        (("db", "path", "--db", "/"), 2, "/ is a folder: name a file in it"),
        (
            ("compile", *FORWARD, "--arch", "80", "--store", "/tmp/none", "--store-secret", "missing.secret"),
            2,
            "--store-secret missing.secret: there is no such file: correct the path",
        ),
        (
            ("fleet", "up", "--ssh", "missing.hosts", "--database", "postgresql://h/x"),
            2,
            "there is no file missing.hosts: correct the path",
        ),
        (("find", "conv", "--bias", "-F", "3"), 2, "3 asks for backward_data, and epilogue bias is of forward"),
        (("find", "conv", "--bais"), 2, "No such option or flag: --bais. Did you mean --bias"),
        (
            ("tune", "--suite", "vgg16_fused", "--direction", "backward_data"),
            2,
            "--direction backward_data: all rows have an epilogue",
        ),
        (("tune", "--suite", "vgg16", "--epilogue", "relu"), 2, "--epilogue is of a driver line or of --x and --w"),
        (("find", "conv", "-D", "5"), 2, "--dout_data (-D) 5 names a file of MIOpenDriver's: depth is --in_d with"),
        (("find", "conv", "-d", "2"), 2, "--in_data (-d) 2 names a file of MIOpenDriver's: dilations are -l and -j"),
        (
            ("find", "conv", "-s", "2"),
            2,
            "--search (-s) '2' is not supported: it must be '0' or '1'; strides are -u",
        ),
        (("find", "conv", "--in_d", "5"), 2, "--in_d (-!) 5 does not fit --spatial_dim 2: leave it out, or raise"),
        (("find", "conv", "--find-mod", "fast"), 2, "No such option or flag: --find-mod. Did you mean --find-mode"),
        (("find", "conv", "--layuot", "NHWC"), 2, "No such option or flag: --layuot. Did you mean --layout"),
        (("find", "conv", "--layout", "NHCW"), 2, "Did you mean N"),
        (("find", "--x", "1,4,6,6", "--w", "2,4,3,3", "--pading", "1"), 2, "--pading. Did you mean --padding"),
        (("find", "--x", "1,4,6,6"), 2, "--w is missing: a problem has both --x n,c,h,w and --w k,c/groups,y,x"),
        (("find", "--x", "1,4,6,6", "--w", "2,4,3,y"), 2, "--w 'y' must be a whole number"),
        (("find", "--x", "1,4", "--w", "2,4"), 2, "--x 1,4 has 2 sizes"),
        (("find", "--x", "1,4,6,6", "--w", "2,4,3,3", "--padding", "1:2"), 2, "padding"),
        (("find", "--x", "1,4,6,6", "--w", "2,4,3,3", "--stride", "1", "--stride", "2"), 2, "--stride is given twice"),
        (("find", "--x", "1,4,6,6", "--w", "2,4,3,3", "--groups"), 2, "--groups needs a value"),
        (("find", "--x", "1,4,6,6", "--w", "2,4,3,3", "-p", "1"), 2, "-p is no flag beside --x and --w"),
        (("tune", "--x", "1,4,6,6", "--w", "2,4,3,3", "--batch", "2"), 2, "--batch 2 is for suites and files"),
        (("find", "conv", "-n", "0"), 2, "--batchsize (-n) 0 must be between 1"),
        (("find", "conv", "--frob", "1"), 2, "--frob"),
        (("find", "-n", "1"), 2, "-n is no option here"),
        (("find", "conv3"), 2, "'conv3' is not an operation"),
        (("find", "mine.db"), 2, "a FindDB is named by --db mine.db"),
        (("find", "conv2d-forward-n1"), 2, "is not a network_config"),
        (("find", *FORWARD, "--only", "ConvNone"), 2, "'--only': 'ConvNone' is no solver"),
        (("find", *FORWARD, "--device", "tpu"), 2, "'tpu' is no device"),
        (("find", *FORWARD, "--order", "name"), 2, "'name' is not one of"),
        (("find", *FORWARD, "--workspace-limit", "12X"), 2, "'12X' is no size"),
        (("find", *FORWARD, "--time-budget", "-1"), 2, "-1.0 is not in the range"),
        (("find", *FORWARD, "--find-mode", "slow"), 2, "'slow' is not one of"),
        (("find", *FORWARD, "--find-mode", "hybird"), 2, "Did you mean hybrid"),
        (("tune",), 2, "--suite NAME"),
        (("tune", "--suite", "resnet5"), 2, "suite 'resnet5' is neither a file nor a shipped suite"),
        (("tune", "--suite", "resnet5"), 2, "Did you mean resnet50"),
        (("tune", "--suit", "resnet50"), 2, "No such option or flag: --suit. Did you mean --suite"),
        (("db", "stat"), 2, "No such command 'stat'. Did you mean stats"),
        (("db", "stats", "--jsn"), 2, "--json"),
        (("solvers", "--only", "ConvCudn"), 2, "Did you mean ConvCudnn"),
        (("tune", "--csv", "missing.csv"), 2, "missing.csv cannot be read"),
        (("tune", "--lines", "missing.txt"), 2, "missing.txt cannot be read"),
        (("tune", "--suite", "resnet50", "--dtype", "int8"), 2, "'int8' is not one of"),
        (("tune", "--suite", "yardstick", "--batch", "2"), 2, "a batch of 2"),
        (("tune", "--suite", "resnet50", "--direction", "sideways"), 2, "'sideways' is not one of"),
        (("tune", "--suite", "resnet50", "--direction", "forwards"), 2, "Did you mean forward"),
        (("tune", "--suite", "resnet50", "--class", "deptwise"), 2, "Did you mean depthwise"),
        (("compile", "--suite", "resnet50", "--arch", "hopper"), 2, "arch='hopper' is not an architecture"),
        (("run",), 2, "give a problem"),
    ],
    ids=lambda value: " ".join(value[:6]) if isinstance(value, tuple) else None,
)
def test_bad_input_is_one_message(arguments: tuple[str, ...], code: int, message: str) -> None:
    result = run(*arguments, code=code)
    assert message in " ".join(result.stderr.split())
    assert result.stdout == ""
    assert "Traceback" not in result.stderr


READ = {
    **dict.fromkeys(("tune", "compile", "bench"), ("--csv", "missing")),
    **{f"{name} --lines": ("--lines", "missing") for name in ("tune", "compile", "bench")},
    **{f"{name} --fdb": ("--fdb", "missing") for name in ("tune", "compile", "bench")},
    **{f"{name} --suite": ("--suite", "missing") for name in ("tune", "compile", "bench")},
    "run": ("--solution", "missing"),
    **{f"db {name}": ("--db", "missing") for name in ("stats", "show", "check", "prune", "upgrade")},
    **{f"db {name} ": ("missing",) for name in ("check", "merge", "import", "code", "diff")},
    "db export": ("--db", "missing", "-"),
    "db release": ("missing", "out.db"),
    "db restamp": ("missing", "out.db", "--code", "missing"),
}
"""By command, arguments that name a file that is not there."""

WRITTEN = {
    **dict.fromkeys(("find", "run", "tune", "bench", "db import -", "db merge {db}"), ("--db", "no/folder/f.db")),
    "find --save": ("no/folder/best.json",),
    "bench --json": ("no/folder/out.json",),
    "db export": ("no/folder/f.jsonl",),
    "db release {db}": ("no/folder/f.db",),
    "db restamp {db}": ("no/folder/f.db", "--code", "{db}"),
}
"""By command, arguments that name a file in a folder that is not there."""


@pytest.mark.parametrize(("command", "arguments"), READ.items(), ids=READ)
def test_a_missing_file_is_an_error_of_usage(
    command: str, arguments: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was 1, 2 or 4, by command."""
    monkeypatch.chdir(tmp_path)
    told = run(*command.split()[: 2 if command.startswith("db") else 1], *arguments, code=2)
    assert "missing" in told.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("command", "arguments"), WRITTEN.items(), ids=WRITTEN)
def test_a_mistyped_path_makes_no_folder(
    command: str, arguments: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "some.db").touch()
    words = [word.format(db="some.db") for word in (*command.split(), *arguments)]
    problem = FORWARD if command.split()[0] in ("find", "run", "tune", "bench") else ()
    told = run(words[0], *problem, *words[1:], code=2).stderr
    assert "there is no folder no/folder: correct the path, or make the folder first" in told
    assert [path.name for path in tmp_path.iterdir()] == ["some.db"]


def test_exit_codes_are_in_the_help() -> None:
    text = " ".join(run("--help").stdout.split())
    assert "0 done, 1 failed, 2 wrong usage or an unusable file, 3 no GPU or library, 4 unusable FindDB" in text


@pytest.mark.parametrize("arguments", [("find", *FORWARD), ("tune", *FORWARD), ("run", *FORWARD)], ids=lambda a: a[0])
def test_no_gpu_is_an_error_of_the_environment(arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("miofind.device.device.cuda_device_count", lambda: 0)
    assert "CUDA device 0 does not exist" in run(*arguments, "--device", "cuda", code=3).stderr


@pytest.mark.parametrize("driver", [False, True], ids=["no driver", "no CuPy"])
def test_cuda_without_its_parts_says_which_is_missing(driver: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver is asked first: no extra of CUDA helps a machine without one."""
    monkeypatch.setattr("miofind.device.device.has_cupy", lambda: False)
    monkeypatch.setattr("miofind.device.device.has_driver", lambda: driver)
    kind, told = (MissingLibraryError, "CuPy is not installed") if driver else (NoDeviceError, "has no NVIDIA driver")
    assert told in run("find", *FORWARD, "--device", "cuda", code=3).stderr
    with pytest.raises(kind, match=told):
        miofind.Handle("cuda")


def test_an_unknown_log_level_is_a_usage_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MIOFIND_LOG", "loud")
    assert "MIOFIND_LOG='loud' is no level" in run("solvers", code=2).stderr


@pytest.mark.parametrize(
    "arguments", [("-v", "find", *FORWARD), ("find", *FORWARD, "--verbose")], ids=["group", "command"]
)
def test_verbose_logs_to_stderr(arguments: tuple[str, ...]) -> None:
    result = run(*arguments, "--device", "cpu", "--json")
    assert "info: find: conv -n 1 -c 4" in result.stderr
    assert "info:" not in result.stdout
    logger = logging.getLogger("miofind")
    assert (logger.level, logger.propagate) == (logging.NOTSET, True)
    assert not any("Stderr" in type(handler).__name__ for handler in logger.handlers)


def test_twice_verbose_tells_of_each_candidate(tmp_path: Path) -> None:
    database = ("--db", str(tmp_path / "finddb.db"))
    first = run("-vv", "find", *FORWARD, "--device", "cpu", *database).stderr
    assert "debug: without their place or library here: " in first
    assert "debug: not measured: ConvCpuGemm1x1: serves unpadded filters of one tap" in first
    assert "debug: planned: ConvCpuDirect:{}, estimated at " in first
    assert re.search(r"debug: ConvCpuDirect:\{\}: ok, [0-9.e-]+ ms \(", first)
    again = run("-vv", "find", *FORWARD, "--device", "cpu", *database).stderr
    assert re.search(r"debug: the FindDB has [0-9]+ solutions: conv2d-forward", again)
    assert "debug" not in run("-v", "find", *FORWARD, "--device", "cpu", "--find-mode", "normal", *database).stderr


def test_ctrl_c_ends_any_command(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("miofind.cli.find.find_solutions", interrupt)
    result = run("find", *FORWARD, "--device", "cpu", code=130)
    assert result.stderr == "interrupted\n"


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ("solvers", 0),
        pytest.param("solvers --json", 0, marks=pytest.mark.full_matrix),
        pytest.param("db export -", 0, marks=pytest.mark.full_matrix),
        ("db check", 1),
        pytest.param("solvers --only Nope", 2, marks=pytest.mark.full_matrix),
    ],
)
def test_a_broken_pipe_is_silent_and_no_failure(
    words: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scripts with pipefail ended over `miofind ... | head`; what an exit code tells is still told."""
    use_own_folders(tmp_path, monkeypatch)
    unsound = Row(solver_id="ConvNone", solver_version=1, config="{}", status="crashed")
    with Store(tmp_path / "finddb.db") as store:
        store.record("no device", "no problem", [unsound])
    reader = f"{sys.executable} -c 'import sys; sys.stdin.close()'"
    command = f"(sleep 0.5; {sys.executable} -m miofind {words}) | {reader}; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False, timeout=LIMIT_S)
    assert done.returncode == code
    assert done.stderr == "" or code == 2


def test_help_needs_no_gpu_library() -> None:
    script = (
        "import sys; from click.testing import CliRunner; from miofind.cli import main;"
        "assert CliRunner().invoke(main, ['--help']).exit_code == 0;"
        "sys.exit(', '.join({'cupy', 'cudnn', 'nvmath', 'torch'} & set(sys.modules)) or None)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=LIMIT_S)
    assert done.stderr == ""
    assert done.returncode == 0


def test_solvers_are_listed() -> None:
    listed = run("solvers").stdout
    assert "ConvCpuDirect" in listed
    printed = run_json("solvers", "--only", "plain")["solvers"]
    assert {solver["library"] for solver in printed} == {"plain"}


def test_solvers_fit_eighty_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    text = run("solvers").stdout
    assert max(map(len, text.splitlines()[:-1])) <= 80
    header, _, *lines = text.splitlines()
    assert header.split() == ["solver", "runs", "on", "directions", "layouts", "dims"]
    for solver in Registry.default().values():
        at = next(number for number, line in enumerate(lines) if line.startswith(f"{solver.id} "))
        assert lines[at + 1].startswith("    dtypes: float")
        assert lines[at + 2].startswith("    about: "), "a solver's class has a docstring"
    assert re.search(r"\nConvDepthwiseBands +sm_80 +fwd data +NCHW +1-2\n", text)


def test_a_solvers_description_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `miofind solvers` says of one is its docstring's first sentence, not what fits the first line of it."""
    told = {solver["id"]: solver["about"] for solver in run_json("solvers")["solvers"]}
    assert [name for name, about in told.items() if not about.endswith(".") or about.count(". ")] == []
    assert told["ConvImplicitGemmHalo"].endswith(": taps are other addresses in it.")
    solver = type("Two", (ConvCpuDirect,), {"__doc__": "One sentence\n    of F(2.5) on lines. And more.\n\n    Rest."})
    monkeypatch.setattr(Registry, "_default", Registry([solver()]))
    assert [each["about"] for each in run_json("solvers")["solvers"]] == ["One sentence of F(2.5) on lines."]


def test_a_solvers_examples_have_all_its_directions() -> None:
    for solver in run_json("solvers")["solvers"]:
        own = Registry.default()[solver["id"]]
        key = next(iter(own.keys))
        archs = sorted(key.archs) or [str(key.min_sm)]
        device = Device.cpu() if key.place is Place.CPU else Device.virtual(archs[0])
        served = {
            direction.value
            for example in own.examples()
            for direction in Direction
            if own.applicability(example.bare.in_direction(direction), device)
        }
        assert served <= set(solver["directions"]) != set()


def test_solvers_say_why_not() -> None:
    printed = run_json("solvers", *FORWARD, "--device", "cpu")["problems"]
    reasons = {solver["id"]: solver["reason"] for solver in printed[0]["solvers"]}
    assert reasons["ConvCpuDirect"] == ""
    assert reasons["ConvDirectNaive"] == "runs on cuda, not on cpu"
    assert "serves unpadded filters of one tap" in run("solvers", *FORWARD, "--device", "cpu").stdout


@pytest.mark.parametrize(
    ("where", "kind", "told"),
    [
        (("--device", "cpu"), "cuda", "need a GPU: --arch 90a asks for one"),
        (("--arch", "90a"), "cpu", "need the CPU place: --device cpu asks for it"),
    ],
)
def test_solvers_of_the_other_place_are_one_line(where: tuple[str, ...], kind: str, told: str) -> None:
    others = [solver["id"] for solver in run_json("solvers")["solvers"] if solver["places"] == [kind]]
    lines = run("solvers", *FORWARD, *where).stdout.splitlines()
    assert others
    assert f"{len(others)} more {told}" in lines
    assert {line.partition(" ")[0] for line in lines}.isdisjoint(others)


def test_a_narrow_terminal_tells_defaults_from_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    text = run("solvers", *FORWARD, "--device", "cpu").stdout
    assert re.search(r"\nConvCpuDirect .*\n +defaults: \(no parameters\)\n", text)
    assert re.search(r"\nConvCpuGemm1x1 .*\n +no: serves unpadded filters of one tap", text)


def test_solvers_of_an_architecture_that_is_not_here() -> None:
    printed = run_json("solvers", *FORWARD, "--arch", "90a", "--arch", "80")["problems"]
    assert [item["device"].split("|")[0] for item in printed] == ["sm_90", "sm_80"]
    naive = next(solver for solver in printed[0]["solvers"] if solver["id"] == "ConvDirectNaive")
    assert naive["applicable"]
    assert naive["configs"] >= len(naive["defaults"]) >= 1


@pytest.mark.parametrize(
    ("words", "ours"),
    [
        (["miofind", "doctor"], True),
        (["python", "-m", "miofind", "doctor"], True),
        (["python", "-X", "dev", "-m", "miofind"], True),
        (["python", "-m", "mypackage", "--library", "miofind"], False),
        (["python", "miofind.py"], False),
        (["mytool", "miofind"], False),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else str(value),
)
def test_ctrl_c_is_taken_over_in_our_own_program_alone(
    monkeypatch: pytest.MonkeyPatch, words: list[str], ours: bool
) -> None:
    monkeypatch.setattr(sys, "orig_argv", words)
    # Python has -m in the module's place until that is imported.
    monkeypatch.setattr(sys, "argv", words[words.index("-m") :] if "-m" in words else words[words[0] == "python" :])
    assert interrupts.is_program() is ours


@pytest.mark.parametrize(
    "words",
    [
        ("--x", "2,4,6,6", "--w", "8,4,3,3", "--bias", "--residual", "before", "--activation", "relu"),
        ("--x", "2,4,6,6", "--w", "8,4,3,3", "--epilogue", "bias.residual.relu"),
        ("conv", "-n", "2", "-c", "4", "-H", "6", "-W", "6", "-k", "8", "--epilogue=bias.residual.relu"),
        ("conv2d-forward-n2-c4-i6x6-k8-f3x3-float32-NCHW-e.bias.residual.relu",),
    ],
    ids=lambda words: " ".join(words[:1] + words[-1:]),
)
def test_commands_take_fused_problems(words: tuple[str, ...]) -> None:
    (shown,) = run_json("solvers", *words, "--device", "cpu")["problems"]
    assert shown["network_config"] == "conv2d-forward-n2-c4-i6x6-k8-f3x3-float32-NCHW-e.bias.residual.relu"
    assert shown["driver_line"].endswith("--epilogue bias.residual.relu -m conv -g 1 -F 1")
    problem = ProblemDescription.from_network_config(shown["network_config"])
    assert short_problem(problem) == "4x6x6 > 8, 3x3 bias.residual.relu"
    assert [each["id"] for each in shown["solvers"] if each["composes"]][:1] == ["ConvCpuDirect"]


def test_solvers_say_which_serve_a_fused_problem_with_a_pass() -> None:
    fused, bare = (run("solvers", *FORWARD, *more, "--device", "cpu").stdout for more in (("--bias",), ()))
    assert "serve it with a pass behind their bare form, such as ConvCpuDirect+Pointwise" in fused
    assert "with a pass" not in bare


@pytest.mark.parametrize(
    "arguments",
    [
        ("find", *FORWARD, "--save"),
        ("db", "export"),
        ("report", "--output"),
        ("bench", *FORWARD, "--json"),
        ("db", "release", "own.db"),
        ("train", "own.db"),
        ("tune", *FORWARD, "--db"),
    ],
    ids=" ".join,
)
def test_what_cannot_be_written_is_refused_beforehand(
    arguments: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Codes were 1, 2 and 4, after minutes of measuring; a new FindDB was first said to begin there."""

    def refuse(**settings: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.chdir(tmp_path)
    Store("own.db").open().close()
    before = sorted(tmp_path.iterdir())
    monkeypatch.setattr(options.tempfile, "TemporaryFile", refuse)
    result = run(*arguments, "new.file", code=2)
    told = "new.file cannot be written: Permission denied in its folder: correct the permissions, or name another file"
    assert told in " ".join(result.stderr.split())
    assert "begins there" not in result.stderr
    assert result.stdout == ""
    assert sorted(tmp_path.iterdir()) == before


def test_errors_name_a_finddb_as_it_was_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was ".../folder/damaged.db", which cannot be copied."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a" / "b").mkdir(parents=True)
    for path in (tmp_path / "a" / "b" / "damaged.db", Path("a/b/damaged.db")):
        path.write_bytes(b"no database" * 1000)
        assert f"error: {path} cannot be used: " in run("db", "stats", "--db", str(path), code=4).stderr
    assert location.shown(tmp_path / "a" / "b" / "damaged.db").startswith("...")


def test_a_library_that_is_missing_for_a_server_is_3(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was 4, and named an index of packages that has no miofind."""
    monkeypatch.setitem(sys.modules, "psycopg", None)
    told = run("db", "stats", "--db", "postgresql://host/results", code=3).stderr
    assert "install miofind's extra server: `pip install -e '.[server]'` in its clone" in told
    monkeypatch.setenv("MIOFIND_DB", "postgresql://host/results")
    assert "Going on in memory" in run("find", *FORWARD, "--device", "cpu").stderr


def test_a_missing_file_comes_before_a_missing_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnx", None)
    assert "missing.onnx cannot be read: No such file" in run("tune", "--suite", "missing.onnx", code=2).stderr


def test_a_file_that_is_no_exported_program_is_one_line(tmp_path: Path) -> None:
    """PyTorch logged a traceback of twelve lines before it."""
    (tmp_path / "garbage.pt2").write_bytes(b"garbage" * 500)
    command = [sys.executable, "-m", "miofind", "tune", "--suite", "garbage.pt2"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("error: garbage.pt2 cannot be read as an exported program")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("path", ["~a-user-that-there-is-not/x", "a" * 300], ids=["no user", "too long"])
@pytest.mark.parametrize(
    "command",
    ["db path --db", "find conv -n 1 -c 4 -H 8 -W 8 -k 4 -y 1 -x 1 -F 1 --save", "report --output page.html"],
)
def test_what_no_file_can_be_named_is_wrong_usage(command: str, path: str) -> None:
    """It was called a defect of miofind."""
    assert "cannot be" in run(*command.split(), path, code=2).stderr
