"""`miofind doctor`: missing parts, devices, libraries, FindDBs, models, coverage; it never fails and writes nothing."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import platform
import re
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import TypeVar

import click

from miofind import __version__
from miofind.cli.coverage import DeviceCoverage, SuiteLayers, answered_finds, coverage, suite_layers
from miofind.cli.coverage_table import show_device, show_suites
from miofind.cli.options import example, json_option
from miofind.cli.output import bytes_text, count_text, print_json, print_text
from miofind.cli.session import verbose_option
from miofind.compiler import BinaryCache, CacheStats, nvrtc_version
from miofind.device.device import (
    INSTALL_CUDA,
    NO_DRIVER,
    Device,
    Library,
    cuda_device_count,
    device_text,
    has_driver,
)
from miofind.device.environment import versions
from miofind.errors import DatabaseError, MiofindError
from miofind.find.immediate.model import read_model
from miofind.find.immediate.ranker import Ranker
from miofind.find.immediate.shipped import model_paths
from miofind.finddb import (
    MEMORY,
    ProblemKey,
    Store,
    network_file_system,
    server_url,
    system_addresses,
    told_address,
    user_path,
)
from miofind.solver.registry import Registry
from miofind.text.printable import printable

Result = TypeVar("Result")

_OTHER_PACKAGES = {
    "cuda_bindings": "cuda-bindings",
    "nvmath": "nvmath-python",
    "torch": "torch",
    "sqlalchemy": "sqlalchemy",
}
_CUPY_BUILDS = {"cupy-cuda12x": "12", "cupy-cuda13x": "13"}
_OPTIONAL = {
    "onnx": ("onnx", "networks in .onnx files"),
    "psycopg": ("server", "FindDBs on a PostgreSQL server"),
    "altair": ("report", "`miofind report`"),
    "lightgbm": ("train", "`miofind train`"),
    "torch": ("torch", "miofind.torch, networks in .pt2 files"),
}
"""Modules that nothing but what is named needs, each with the extra that brings it."""

_SAMPLE = 64
"""Finds tried of each device's problems: a FindDB of some thousand has them tried for seconds."""

_VARIABLES = (
    "MIOFIND_DB",
    "MIOFIND_SYSTEM_DB",
    "MIOFIND_CACHE_DIR",
    "MIOFIND_FIND_MODE",
    "MIOFIND_TORCH",
    "MIOFIND_TORCH_DIRECT",
    "MIOFIND_TORCH_RECORD",
    "MIOFIND_LOG",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Database:
    """One FindDB in force: its counts, or the reason why it cannot be used."""

    path: str
    kind: str
    usable: bool = True
    note: str = ""
    problems: int = 0
    rows: int = 0
    bytes: int = 0
    devices: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Model:
    """One model in force: what held-out problems showed of it, and the solvers that changed since."""

    path: str
    device: str
    problems: int
    regrets: dict[str, float]
    changed: list[str]


@dataclass(slots=True)
class _Examination:
    """The findings; `missing` says what to do, `notes` and `not_installed` what is so and no fault."""

    devices: list[Device] = field(default_factory=list)
    libraries: dict[str, str] = field(default_factory=dict)
    not_installed: list[str] = field(default_factory=list)
    databases: list[_Database] = field(default_factory=list)
    suites: list[SuiteLayers] = field(default_factory=list)
    known: set[ProblemKey] = field(default_factory=set)
    coverage: list[DeviceCoverage] = field(default_factory=list)
    models: list[_Model] = field(default_factory=list)
    cache: CacheStats | None = None
    missing: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def attempt(self, what: str, examine: Callable[[], Result]) -> Result | None:
        """The result of `examine`; None where it fails, with a line in `missing`."""
        try:
            return examine()
        except MiofindError as error:
            if str(error) not in self.missing:  # several ask for the FindDBs' addresses
                self.missing.append(str(error))
        except Exception as error:  # whatever is broken here is what the user wants to read about
            self.missing.append(f"{what}: {type(error).__name__}: {error}")
        return None


@click.command(epilog=example("miofind doctor", "miofind doctor --all --json"))
@click.option(
    "--all", "asks_all", is_flag=True, help="Try a find of every known problem, not of a sample: takes seconds."
)
@json_option
@verbose_option
def doctor(asks_all: bool, as_json: bool) -> None:
    """Show missing parts, devices, libraries and FindDBs.

    Missing parts come first, then devices, libraries, FindDBs in the order they are asked, their coverage of the
    suites, and the binary cache. The command never fails and writes nothing.
    """
    found = _Examination()
    found.devices = _devices(found)
    found.libraries = found.attempt("libraries", _libraries) or {}
    found.not_installed = found.attempt("libraries", _not_installed) or []
    found.attempt("NVRTC", nvrtc_version)
    _find_missing_libraries(found)
    found.attempt("CUDA versions", lambda: _find_two_cudas(found))
    found.suites = found.attempt("suites", suite_layers) or []
    found.databases = [_database(user_path(), "user", found.known), *_shipped_databases(found)]
    sample = None if asks_all else _SAMPLE
    with _databases_not_warned_of():
        covered = found.attempt("coverage", lambda: coverage(found.known, found.suites, answered_finds, sample))
    found.coverage = covered or []
    found.missing += [f"{db.kind} FindDB {db.path}: {db.note}" for db in found.databases if db.note and not db.usable]
    for path in found.attempt("models", model_paths) or ():
        if (model := found.attempt(f"model {path}", lambda path=path: _model(path))) is not None:  # type: ignore[misc]
            found.models.append(model)
    _find_changed_solvers(found)
    found.cache = found.attempt("binary cache", lambda: BinaryCache().stats())
    if found.cache is not None and found.cache.directory is None:
        found.missing.append("binary cache: the disk cannot be used, kernels are compiled in every process")
    if covered is not None:
        _find_unknown_devices(found)
    found.missing = _each_once(found.missing)
    if as_json:
        print_json(_json(found))
    else:
        _show(found)


def _devices(found: _Examination) -> list[Device]:
    if not has_driver():
        found.notes.append(NO_DRIVER)
        return [Device.cpu()]
    count = found.attempt("CUDA devices", cuda_device_count)
    if count == 0:
        found.missing.append("the CUDA driver knows no GPU: check `nvidia-smi`; the CPU place is used")
    gpus = (found.attempt(f"device cuda:{i}", lambda i=i: Device.cuda(i)) for i in range(count or 0))  # type: ignore[misc]
    return [*(gpu for gpu in gpus if gpu is not None), Device.cpu()]


def _libraries() -> dict[str, str]:
    found = dict(versions(Device.default()))
    installed = {name: _version_of(package) for name, package in _OTHER_PACKAGES.items()}
    return found | {name: version for name, version in installed.items() if version}


@contextlib.contextmanager
def _databases_not_warned_of() -> Iterator[None]:
    """Have finds that are tried not warn of databases that cannot be used: those stand among what is missing."""

    def refuse(record: logging.LogRecord) -> bool:
        return record.levelno != logging.WARNING

    logger = logging.getLogger("miofind")  # of the FindDBs; other modules have their own below it
    logger.addFilter(refuse)
    try:
        yield
    finally:
        logger.removeFilter(refuse)


def _not_installed() -> list[str]:
    """What is optional and absent: each library with its extra, and what needs it."""
    return [
        f"{module} (extra {extra}): {use}"
        for module, (extra, use) in _OPTIONAL.items()
        if importlib.util.find_spec(module) is None
    ]


def _each_once(missing: list[str]) -> list[str]:
    """The lines without those that another says with more about it, such as which FindDB it is of."""
    return [line for line in missing if not any(other != line and other.endswith(f": {line}") for other in missing)]


def _find_missing_libraries(found: _Examination) -> None:
    for device in found.devices[:1]:
        for library in (Library.CUBLAS, Library.CUDNN):
            if device.index >= 0 and device.library_version(library) is None:
                found.missing.append(f"{library.value} is not installed, its solvers are left out: {INSTALL_CUDA}")


def _find_two_cudas(found: _Examination) -> None:
    """Say where PyTorch and CuPy are built for different CUDA versions: a process would load the libraries of both."""
    installed = {name for name in _CUPY_BUILDS if _version_of(name)}
    built_for = {_CUPY_BUILDS[name] for name in installed}
    of_torch = _cuda_of_torch()
    if of_torch and built_for and of_torch.partition(".")[0] not in built_for:
        found.missing.append(
            f"PyTorch is built for CUDA {of_torch}, which {' and '.join(sorted(installed))} is not: install the extra "
            "of miofind for PyTorch's version (cuda12 or cuda13), or a PyTorch for the other"
        )


def _cuda_of_torch() -> str:
    """The CUDA version that the installed PyTorch is built for, "" for none; to import PyTorch takes seconds."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return ""
    text = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
    told = re.search(r"""^cuda\b[^=]*=\s*['"]([0-9.]+)['"]""", text, re.MULTILINE)
    return told.group(1) if told else ""


def _version_of(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _find_unknown_devices(found: _Examination) -> None:
    device = found.devices[0]
    if device.identity not in {held.device for held in found.coverage}:
        found.missing.append(
            f"no FindDB knows {device.name}, so first calls measure: tune it with `miofind tune --suite resnet50`"
        )


def _shipped_databases(found: _Examination) -> list[_Database]:
    """The FindDBs below the user's; one that cannot be used where MIOFIND_SYSTEM_DB names none."""
    named = os.environ.get("MIOFIND_SYSTEM_DB", "")
    addresses = found.attempt("FindDBs", system_addresses)
    if addresses == () and named:
        found.missing.append(f"MIOFIND_SYSTEM_DB={named!r} is a folder without FindDBs (*.db): correct it or unset it")
    if not addresses and named:
        return [_Database(path=told_address(named), kind="shipped", usable=False)]
    return [_database(str(each), "shipped", found.known) for each in addresses or ()]


def _database(path: str, kind: str, known: set[ProblemKey]) -> _Database:
    """One FindDB, opened as a find would open it; a missing one is not made.

    Args:
        known: a set; the problems that the FindDB has solutions of are added.
    """
    shown = told_address(path)
    try:
        if kind == "user" and not _exists(path):
            return _Database(path=shown, kind=kind, note="made when the first find is recorded")
        with Store(path, read_only=kind == "shipped") as store:
            if kind == "user":
                store.add(())  # what a find would do: refused where the file cannot be written
            known.update(store.solved_problems())
            release = store.release()
            if release is not None and store.path is not None:  # it says of itself what else takes a second to count
                devices, rows, size = release.problems, sum(release.rows.values()), store.path.stat().st_size
            else:
                stats = store.stats()
                devices, rows, size = stats.by_device, stats.rows, stats.file_bytes
    except Exception as error:
        return _Database(path=shown, kind=kind, usable=False, note=str(error))
    return _Database(
        path=shown, kind=kind, problems=sum(devices.values()), rows=rows, bytes=size, devices=dict(devices)
    )


def _model(path: Path) -> _Model:
    """One model, read as a find would read it."""
    model = read_model(path)
    ranker = Ranker(model)
    suffix = " regret"
    return _Model(
        path=str(path),
        device=model.device,
        problems=int(model.report.get("problems", 0)),
        regrets={name.removesuffix(suffix): value for name, value in model.report.items() if name.endswith(suffix)},
        changed=sorted(solver.id for solver in Registry.default().values() if ranker.is_stale(solver)),
    )


def _find_changed_solvers(found: _Examination) -> None:
    """Say which solvers models know in another version: their plain estimates stand in."""
    for model in found.models:
        if model.changed:
            found.missing.append(
                f"model {model.path}: {', '.join(model.changed)} changed since it was trained, so that their estimates "
                "are not corrected: train it anew with `miofind train`"
            )


def _exists(path: str) -> bool:
    """Whether the user's FindDB exists.

    Raises:
        DatabaseError: the FindDB does not exist and cannot be made.
    """
    if path == MEMORY:
        return True
    if server_url(path) is not None:
        with Store(path) as store:
            return store.exists
    file = Path(path).expanduser()
    if file.exists():
        return True
    folder = next(parent for parent in file.absolute().parents if parent.exists())
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        raise DatabaseError(f"{folder} cannot be written: set MIOFIND_DB to a file that can be made")
    kind = network_file_system(folder)
    if kind:
        raise DatabaseError(f"{folder} is on a network file system ({kind}): set MIOFIND_DB to a local file")
    return False


def _show(found: _Examination) -> None:
    print_text(f"miofind {__version__}, Python {platform.python_version()}, {platform.platform()}")
    _section("Missing", found.missing or [_nothing_missing(found)])
    _section("Devices", [*map(_device_line, found.devices), *found.notes])
    names = [f"{name} {version}" for name, version in found.libraries.items() if name not in ("miofind", "python")]
    optional_lines = [f"not installed: {line}" for line in found.not_installed]
    _section("Libraries", [", ".join(names) or "none", *optional_lines])
    _section("FindDBs, in the order they are asked", [_database_line(database) for database in found.databases])
    _show_coverage(found)
    if found.models:
        _section("Models of times, for what no FindDB knows", [_model_line(model) for model in found.models])
    _section("Binary cache", [_cache_line(found.cache)])
    variables = [f"{name}={value}" for name, value in _environment().items()]
    if variables:
        _section("Environment", variables)


def _nothing_missing(found: _Examination) -> str:
    """What is said where nothing is wrong: what is absent and need not be there is named."""
    absent = [] if any(device.index >= 0 for device in found.devices) else ["a GPU (see Devices)"]
    absent += ["optional libraries (see Libraries)"] if found.not_installed else []
    return f"nothing but {' and '.join(absent)}" if absent else "nothing"


def _environment() -> dict[str, str]:
    """The variables that are set; a server's URL without who asks."""
    return {name: told_address(os.environ[name]) for name in _VARIABLES if name in os.environ}


def _section(title: str, lines: list[str]) -> None:
    print_text(title)
    for line in lines:
        print_text(f"  {line}")


def _device_line(device: Device) -> str:
    if device.index < 0:
        return f"cpu     {device.name}, {device.sm_count} cores"
    return (
        f"cuda:{device.index}  {device.name}, sm_{device.arch}, {device.sm_count} multiprocessors, "
        f"{bytes_text(device.memory_bytes)}, L2 {bytes_text(device.l2_bytes)}"
    )


def _database_line(database: _Database) -> str:
    if not database.usable:
        return f"{database.kind:7} {database.path}: CANNOT BE USED, see above"
    counts = f"{count_text(database.problems, 'problem')}, {count_text(database.rows, 'measurement')}"
    told = f"{counts}, {bytes_text(database.bytes)}"
    return f"{database.kind:7} {database.path}: {database.note or told}"


def _model_line(model: _Model) -> str:
    regrets = ", ".join(f"{printable(name)} {100 * value:.1f} %" for name, value in sorted(model.regrets.items()))
    of = f"{device_text(model.device)}, {count_text(model.problems, 'problem')}"
    return f"{model.path}: {of}; off the best: {regrets or 'unknown'}"


def _show_coverage(found: _Examination) -> None:
    """Print the coverage of all FindDBs together: in full for the GPUs here, or for every device where no GPU is."""
    nothing = "nothing yet" if all(database.usable for database in found.databases) else "CANNOT BE TOLD, see above"
    _section("Coverage", [] if found.coverage else [nothing])
    here = {device.identity for device in found.devices if device.index >= 0}
    for held in found.coverage:
        show_device(held)
        if not here or held.device in here:
            show_suites(held)


def _cache_line(cache: CacheStats | None) -> str:
    if cache is None or cache.directory is None:
        return "CANNOT BE USED, see above"
    return f"{cache.directory}: {cache.entries} binaries, {bytes_text(cache.bytes)} of {bytes_text(cache.max_bytes)}"


def _json(found: _Examination) -> dict[str, object]:
    return {
        "miofind": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "devices": [{"identity": device.identity} | asdict(device) for device in found.devices],
        "libraries": found.libraries,
        "not_installed": found.not_installed,
        "databases": [asdict(database) for database in found.databases],
        "suites": {suite.name: len(suite) for suite in found.suites},
        "coverage": [_coverage_json(held) for held in found.coverage],
        "models": [asdict(model) for model in found.models],
        "binary_cache": None if found.cache is None else _cache_json(found.cache),
        "environment": _environment(),
        "missing": found.missing,
        "notes": found.notes,
    }


def _coverage_json(held: DeviceCoverage) -> dict[str, object]:
    suites = [
        {"suite": suite.suite, "layers": suite.layers} | asdict(variant) | {"answered": count}
        for suite in held.suites
        for variant, count in suite.answered.items()
    ]
    counts = {"problems": held.problems, "asked": held.asked, "answered": held.answered}
    return {"device": held.device} | counts | {"types": dict(held.types), "suites": suites}


def _cache_json(cache: CacheStats) -> dict[str, object]:
    return asdict(cache) | {"directory": None if cache.directory is None else str(cache.directory)}
