"""`miofind train`: a model of candidates' times, learnt from FindDBs."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import click

from miofind import __version__
from miofind.cli.db_release import one_device
from miofind.cli.options import FindDBFile, OutputFile, choice, example, json_option
from miofind.cli.output import Sheet, bytes_text, count_text, print_json, print_note, print_text
from miofind.cli.session import verbose_option
from miofind.device.device import Device, device_text
from miofind.errors import InvalidOptionError, ModelError, unwritable
from miofind.files import replacing
from miofind.find.immediate.devices import described
from miofind.find.immediate.model import MAGIC, Model, model_bytes, write_model
from miofind.find.immediate.training.boosting import require_lightgbm
from miofind.find.immediate.training.fit import Judged, Training
from miofind.find.immediate.training.groups import Holdout
from miofind.find.immediate.training.samples import lessons
from miofind.finddb import Store, told_address
from miofind.solver.registry import Registry

_TOPS = ("top 1", "top 2", "top 4", "top 8")


@click.command(epilog=example("miofind train finddb/prebuilt/nvidia_h200.db nvidia_h200.model --report report.json"))
@click.argument("sources", nargs=-1, required=True, metavar="SOURCE...", type=FindDBFile(must_exist=True))
@click.argument("out", metavar="OUT", type=OutputFile())
@click.option("--device", "name", metavar="NAME", default="", help="Part of the name of the kind of device.")
@click.option(
    "--beside",
    "besides",
    metavar="NAME",
    multiple=True,
    help="Part of the name of another kind of GPU of the same architecture, whose times teach, too.",
)
@click.option(
    "--holdout",
    type=choice(Holdout),
    callback=lambda _context, _parameter, value: Holdout(value),
    default=Holdout.NETWORK.value,
    help="What leaves training together to judge the model: the problems of a network that a suite names, or of a "
    "shape.",
    show_default=True,
)
@click.option("--report", metavar="FILE", type=OutputFile(), help="Write the regrets of held-out problems as JSON.")
@click.option("--table-only", is_flag=True, help="Learn the table of medians alone; needs no LightGBM.")
@json_option
@verbose_option
def train(
    sources: tuple[str, ...],
    out: Path,
    name: str,
    besides: tuple[str, ...],
    holdout: Holdout,
    report: Path | None,
    table_only: bool,
    as_json: bool,
) -> None:
    """Learn from FindDBs how long candidates take.

    OUT corrects the solvers' estimates, for `--find-mode fast`: it lies beside a FindDB that ships, under its name, and
    is of one kind of device. It is written only where it is better on problems that it has not seen: than the table of
    medians that is part of it, or than the estimates with --table-only, and in no class of problems more than half
    worse than the estimates. Equal sources make equal files.

    A kind of GPU of which little is measured learns from what others of its architecture measured (--beside): estimates
    and features are those of the GPU that measured, and what is judged is of the model's own kind alone.
    """
    _check_out(out)
    if not table_only:
        require_lightgbm()
    with contextlib.ExitStack() as stack:
        stores = [stack.enter_context(Store(source, read_only=True)) for source in sources]
        for store in stores:
            stack.enter_context(store.one_instant())
        device = described(one_device(stores, name))
        others = _others(stores, device, besides)
        learnt = [each for one in (device, *others) for each in lessons(stores, one, Registry.default())]
    training = Training(device, Registry.default(), has_trees=not table_only)
    judged = training.held_out(learnt, holdout)
    told = _report(judged, (device, *others), holdout, sources)
    if report is not None:
        _write_report(report, told)
    if not as_json:
        _show(judged, device.identity, holdout)
    if reason := judged.refuse():
        raise ModelError(f"{out.name} is not written: {reason}")
    model = training.model(learnt, judged, holdout)
    try:
        write_model(model, out)
    except ModelError as error:
        raise InvalidOptionError(str(error)) from error
    if as_json:
        print_json(told | {"model": str(out), "bytes": out.stat().st_size, "trained_on": model.trained_on})
    else:
        _show_model(out, model)


def _write_report(path: Path, told: dict[str, Any]) -> None:
    try:
        with replacing(path) as file:
            json.dump(told, file, indent=1, sort_keys=True)
            file.write("\n")
    except OSError as error:
        raise unwritable(f"--report {path}", error) from error


def _others(stores: Sequence[Store], device: Device, names: Iterable[str]) -> tuple[Device, ...]:
    """The other kinds of GPU with these in their names, each once.

    Raises:
        InvalidOptionError: the sources know several with one of the names, or none, or it is of another architecture.
    """
    own = device_text(device.identity)
    others = tuple(dict.fromkeys(described(one_device(stores, name, "--beside")) for name in names))
    for other in others:
        told = device_text(other.identity)
        if other == device:
            raise InvalidOptionError(f"--beside: {told} is what the model is of")
        if (other.place, other.sm) != (device.place, device.sm):
            raise InvalidOptionError(f"--beside: {told} is of another architecture than {own}")
    return others


def _check_out(out: Path) -> None:
    """Do nothing where the model's file is new or a model.

    Raises:
        InvalidOptionError: it is something else.
    """
    if not out.exists():
        return
    with out.open("rb") as file:
        if file.read(len(MAGIC)) != MAGIC:
            raise InvalidOptionError(f"{out} is there and no model of this version: name another file, or remove it")


def _report(judged: Judged, devices: tuple[Device, ...], holdout: Holdout, sources: tuple[str, ...]) -> dict[str, Any]:
    """What held-out problems showed.

    Args:
        devices: what the model is of, then those beside it.
    """
    gpu, *beside = (device_text(device.identity) for device in devices)
    return {
        "miofind": __version__,
        "gpu": gpu,
        **({"beside": beside} if beside else {}),
        "holdout": holdout.value,
        "sources": [Path(told_address(source)).name for source in sources],
        "problems": len(judged.lessons),
        "regrets": judged.report,
    }


def _show(judged: Judged, device: str, holdout: Holdout) -> None:
    """Print the regrets of each chooser: measuring some of its first candidates, then by class."""
    report: dict[str, Any] = judged.report
    problems = count_text(len(judged.lessons), "problem")
    print_text(f"{device_text(device)}: {problems}, each predicted without those of its {holdout}")
    whole = Sheet("Off the best known, geometric mean", ["chooser", *_TOPS, "p95", "worst"], right=(*_TOPS, "p95"))
    for name, found in report.items():
        tops = [_percent(found[top]["mean"]) for top in _TOPS]
        whole.add(name, *tops, _percent(found["top 1"]["p95"]), _percent(found["top 1"]["worst"]))
    whole.print()
    names = tuple(judged.choosers)
    classes = Sheet("By class", ["class", "problems", *names], right=("problems", *names))
    for name, plain in report["estimates"]["class"].items():
        means = [_percent(report[chooser]["class"][name]["mean"]) for chooser in names]
        classes.add(name, str(plain["problems"]), *means)
    classes.print()


def _show_model(out: Path, model: Model) -> None:
    size = len(model_bytes(model))
    trees = 0 if model.trees is None else len(model.trees.time.roots) + len(model.trees.rank.roots)
    corrections = len(model.table.corrections)
    print_note("a running process reads a model once: it takes effect in the next one")
    print_text(f"{out}: {bytes_text(size)}, {corrections} corrections, {trees} trees")


def _percent(share: float) -> str:
    return "-" if math.isnan(share) else f"{100 * share:.1f} %"
