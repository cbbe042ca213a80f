"""Whole networks in PyTorch: the best form of PyTorch's own against the best of miofind's, side by side.

    python benchmarks/end_to_end.py --gpus 4 --tune --stop-after 540
    python benchmarks/end_to_end.py --networks resnet50,timm/densenet121 --kinds inference --batches 64

Inference in float16, and training steps under autocast to bfloat16; `torch.backends.cudnn.benchmark = True` and
`benchmark_limit = 0`. Forms are the network as it is, in a CUDA graph and under torch.compile, in inference with its
batch norms folded, too; on miofind's side with `enable()`, with `fuse()` in inference, and with `inductor_options()`.
Each network has a process of its own, which a time limit ends; what it had found by then is kept. miofind's answers are
those of the shipped FindDB and of --db; with --tune what they lack is measured before. With --beside that is done alone
on the GPU, as all that is timed is; what graphs lack yet is found beside others. Rows are added to the files of
--folder as they come: the same command goes on with what is left. Each row names its commit; what is asked for and is
of another is measured anew, and the others stay. The last lines are a table, and the geometric means of its ratios.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import os
import queue
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import figures
import script
from commit import commit
from turns import Turns, signal_sessions

import miofind
from miofind.device.device import Device, Place, cuda_device_count
from miofind.device.environment import versions
from miofind.errors import NoDeviceError
from miofind.files import replacing
from miofind.finddb import MEMORY

NAME = "end_to_end"
KINDS = ("inference", "training")
LAYOUTS = ("channels_last", "contiguous")
FORMS = ("eager", "graph", "compile")
LARGE = "large"
"""The batch that fills a GPU, which each network has its own of."""

PROCESS = "process"
"""Under what name a row's failures say that its process did not end well; such a case is tried again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A network in one kind of use."""

    network: str
    kind: str
    layout: str
    batch: str

    @property
    def key(self) -> str:
        """What names its row."""
        return f"{self.network} {self.kind} {self.layout} {self.batch}"

    def size(self) -> int:
        """The number of images."""
        from torch_networks import network_named

        of_network = network_named(self.network)
        large = of_network.batch if self.kind == "inference" else of_network.training_batch
        return large if self.batch == LARGE else int(self.batch)

    def file_of(self, gpu: str) -> str:
        """The name of the file that keeps its row."""
        device = gpu.removeprefix("NVIDIA ").lower().replace(" ", "_")
        return f"{NAME}_{self.kind}_{self.layout}_{device}.json"


def cases(arguments: argparse.Namespace) -> list[Case]:
    """All cases that are asked for, the larger batch first; a training step has that one alone."""
    return [
        Case(network=network, kind=kind, layout=layout, batch=batch)
        for layout in arguments.layouts
        for kind in arguments.kinds
        for batch in arguments.batches
        for network in arguments.networks
        if kind == "inference" or batch != "1"
    ]


def time_case(case: Case, arguments: argparse.Namespace) -> None:
    """Time a case in this process; its row is written anew after each step of the work."""
    os.sched_setaffinity(0, arguments.cores or os.sched_getaffinity(0))
    import torch
    from torch_forms import Setting, timed_network
    from torch_networks import network_named

    arguments.turns.join()
    torch.backends.cudnn.allow_tf32 = False  # float32 is what results are held to
    device = Device.cuda() if arguments.device == "cuda" else Device.cpu()
    network = network_named(case.network)
    with miofind.Handle(device, database=arguments.db or MEMORY) as handle:
        setting = Setting(
            kind=case.kind,
            channels_last=case.layout == "channels_last",
            device=arguments.device,
            handle=handle,
            forms=arguments.forms,
            is_tuned=arguments.tune,
            kernels=arguments.kernels,
            turns=arguments.turns,
        )
        told = {"gpu": device.name, "versions": {**versions(device), "torch": torch.__version__}}
        with torch_builds(device):
            for outcome in timed_network(network.build, (case.size(), *network.shape), setting):
                row = {"size": case.size(), **asdict(case), **asdict(outcome), "beside": arguments.beside}
                append(arguments.rows, {**told, "row": row})


@contextlib.contextmanager
def torch_builds(device: Device) -> Iterator[None]:
    """The direct path in place, where there is a GPU and a compiler to build it with."""
    import miofind.torch

    if device.place is Place.CUDA:
        with contextlib.suppress(miofind.MiofindError):
            miofind.torch.build()
    yield


def append(file: Path, line: Mapping[str, Any]) -> None:
    """Add an object to a file of JSON lines, which a crash right after leaves there."""
    with file.open("a", encoding="utf-8") as opened:
        opened.write(json.dumps(line) + "\n")
        opened.flush()
        os.fsync(opened.fileno())


def time_all(left: Sequence[Case], arguments: argparse.Namespace) -> None:
    """Time cases, some at once on each GPU of which one measures at a time, and keep their rows."""
    gpus = visible_gpus(arguments)
    waiting: queue.SimpleQueue[Case] = queue.SimpleQueue()
    for case in left:
        waiting.put(case)
    deadline, lock = time.monotonic() + arguments.stop_after, threading.Lock()

    def work(number: int, turns: Turns) -> None:
        with contextlib.suppress(queue.Empty):
            while (allowed := min(arguments.case_limit, deadline - time.monotonic())) > 0:
                case = waiting.get_nowait()
                command = case_command(case, number, len(gpus), turns, arguments)
                told = timed_by_child(command, allowed, gpus[number], turns)
                with lock:
                    print(f"{case.key}: {summary(told)}", flush=True)
                    keep(case, told, arguments)

    with contextlib.ExitStack() as stack:
        shared = [Turns(Path(stack.enter_context(tempfile.TemporaryDirectory()))) for _ in gpus]
        workers = [(number, turns) for number, turns in enumerate(shared) for _ in range(arguments.beside)]
        threads = [threading.Thread(target=work, args=worker) for worker in workers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def visible_gpus(arguments: argparse.Namespace) -> list[str]:
    """What CUDA_VISIBLE_DEVICES is to be for each worker."""
    if arguments.device == "cpu":
        return [""]
    visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    gpus = visible or list(map(str, range(cuda_device_count())))
    if len(gpus) < arguments.gpus:
        raise NoDeviceError(f"--gpus {arguments.gpus}: this machine has {len(gpus)}")
    return gpus[: arguments.gpus]


def case_command(case: Case, number: int, gpus: int, turns: Turns, arguments: argparse.Namespace) -> list[str]:
    """The command of a case's process, which has its GPU's share of the processors."""
    cores = sorted(os.sched_getaffinity(0))
    words = [sys.executable, str(Path(__file__)), "--case", json.dumps(asdict(case)), "--device", arguments.device]
    words += ["--forms", ",".join(arguments.forms), *(["--tune"] if arguments.tune else [])]
    words += ["--kernels", str(arguments.kernels), "--beside", str(arguments.beside), "--turns", str(turns.folder)]
    words += ["--cores", ",".join(map(str, cores[number::gpus] or cores))]
    return words + (["--db", str(arguments.db)] if arguments.db else [])


def timed_by_child(command: Sequence[str], limit_s: float, gpu: str, turns: Turns) -> dict[str, Any]:
    """The last line that a process wrote before it ended, with what ended it where that was no success."""
    with tempfile.TemporaryDirectory() as folder:
        rows, log = Path(folder) / "rows.jsonl", Path(folder) / "log"
        with log.open("wb") as output:
            environment = os.environ | {"CUDA_VISIBLE_DEVICES": gpu}
            child = subprocess.Popen(
                [*command, "--rows", str(rows)], stdout=output, stderr=output, env=environment, start_new_session=True
            )
            ending = awaited(child, limit_s)
            turns.leave(child.pid)
        lines = rows.read_text(encoding="utf-8").split("\n")[:-1] if rows.exists() else []
        told: dict[str, Any] = json.loads(lines[-1]) if lines else {}
        last_words = log.read_text(encoding="utf-8", errors="replace").strip().split("\n")[-1]
    if ending:
        told.setdefault("row", {}).setdefault("failures", {})[PROCESS] = f"{ending}: {last_words}"[:400]
    return told


def awaited(child: subprocess.Popen[bytes], limit_s: float) -> str:
    """How a process ended, "" for well; it and its children are killed when they are late."""
    try:
        code = child.wait(limit_s)
        return "" if code == 0 else f"ended with {code}"
    except subprocess.TimeoutExpired:
        return f"stopped after {limit_s:.0f} s"
    finally:
        signal_sessions(signal.SIGKILL, [child.pid])
        child.wait()


def keep(case: Case, told: Mapping[str, Any], arguments: argparse.Namespace) -> None:
    """Put a case's row into its file; one of a process that told nothing goes without GPU into none."""
    if "gpu" not in told:
        return
    path = arguments.folder / case.file_of(told["gpu"])
    kept = kept_rows(arguments.folder).get(told["gpu"], {})
    kept[case.key] = told["row"] | {"commit": arguments.commit}
    rows = [row for row in kept.values() if case_of(row).file_of(told["gpu"]) == path.name]
    content = {
        "gpu": told["gpu"],
        "commit": arguments.commit,
        "command": shlex.join(["python", f"benchmarks/{NAME}.py", *sys.argv[1:]]),
        "versions": told["versions"],
        "means": mean_ratios(rows),
        "rows": rows,
    }
    with replacing(path) as file:
        file.write(json.dumps(content, indent=1, allow_nan=False) + "\n")


def kept_rows(folder: Path) -> dict[str, dict[str, dict[str, Any]]]:
    """The rows of a folder's files, by GPU and key."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for path in sorted(folder.glob(f"{NAME}_*.json")):
        content = json.loads(path.read_text(encoding="utf-8"))
        rows = {case_of(row).key: {"commit": content["commit"]} | row for row in content["rows"]}
        found.setdefault(content["gpu"], {}).update(rows)
    return found


def case_of(row: Mapping[str, Any]) -> Case:
    """The case that a row is of."""
    return Case(network=row["network"], kind=row["kind"], layout=row["layout"], batch=row["batch"])


def best(row: Mapping[str, Any], side: str) -> tuple[str, float] | None:
    """The fastest form of a side, "torch" or "miofind", and its milliseconds."""
    times = {key.removeprefix(f"{side} "): ms for key, ms in row.get("ms", {}).items() if key.startswith(f"{side} ")}
    return min(times.items(), key=lambda item: item[1]) if times else None


def ratio(row: Mapping[str, Any]) -> float | None:
    """PyTorch's best time over miofind's."""
    torchs, ours = best(row, "torch"), best(row, "miofind")
    return torchs[1] / ours[1] if torchs and ours else None


def mean_ratios(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The geometric mean of the ratios at each batch."""
    found: dict[str, list[float]] = {}
    for row in rows:
        if (value := ratio(row)) is not None:
            found.setdefault(row["batch"], []).append(math.log(value))
    return {batch: round(math.exp(statistics.fmean(logs)), 4) for batch, logs in found.items()}


def summary(told: Mapping[str, Any]) -> str:
    """One row in a line."""
    row = told.get("row", {})
    cells = [f"{side} {found[1]:.3f} ({found[0]})" for side in ("torch", "miofind") if (found := best(row, side))]
    value = ratio(row)
    cells += [f"{value:.2f}x"] if value else []
    cells += [f"{row['own_calls']}/{row['calls']} calls"] if row.get("calls") else []
    cells += [f"{len(row['untold'])} gradients are noise"] if row.get("untold") else []
    return ", ".join([*cells, *(f"{form}: {why}" for form, why in row.get("failures", {}).items())])


def table(arguments: argparse.Namespace) -> str:
    """The rows of the folder's files, and their geometric means, of each GPU."""
    lines = []
    for gpu, kept in kept_rows(arguments.folder).items():
        rows = [*kept.values()]
        lines += [
            gpu,
            *(f"{case_of(row).key + ' (' + str(row['size']) + ')':52} {summary({'row': row})}" for row in rows),
        ]
        for kind, layout in itertools.product(KINDS, LAYOUTS):
            some = [row for row in rows if (row["kind"], row["layout"]) == (kind, layout)]
            for batch, mean in mean_ratios(some).items():
                lines.append(f"{kind}, {layout}, batch {batch}: {mean:.2f}x of PyTorch's best, geometric mean")
    return "\n".join(lines)


def networks(text: str) -> list[str]:
    """Names of networks from an option's text, each once."""
    from torch_networks import network_named

    names = text.split(",")
    for name in names:
        try:
            network_named(name)
        except miofind.MiofindError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
    return script.several(names)(text)


def main() -> None:
    from torch_networks import NETWORKS

    parser = script.parser(__doc__)
    names = tuple(name for name in NETWORKS if name != "tiny")
    others = "timm/NAME,torchvision/NAME (of 224 pixels)"
    parser.add_argument("--networks", type=networks, default=names, help=f"{','.join(NETWORKS)},{others}")
    parser.add_argument("--kinds", type=script.several(KINDS), default=KINDS, help=",".join(KINDS))
    parser.add_argument("--layouts", type=script.several(LAYOUTS), default=LAYOUTS, help=",".join(LAYOUTS))
    parser.add_argument("--batches", type=lambda text: text.split(","), default=[LARGE, "1"], help="numbers, or large")
    parser.add_argument("--forms", type=script.several(FORMS), default=FORMS, help=",".join(FORMS))
    parser.add_argument("--tune", action="store_true", help="measure what no FindDB answers, before anything is timed")
    parser.add_argument("--kernels", type=script.at_least(0), default=0, help="of a form, the slowest to tell")
    parser.add_argument("--db", type=Path, help="FindDB on top of the shipped one, which a tuning is recorded in")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="the CPU is for trials")
    parser.add_argument("--gpus", type=script.count, default=1, help="GPUs of this host")
    parser.add_argument("--beside", type=script.count, default=1, help="cases at once on a GPU; one measures at a time")
    parser.add_argument(
        "--case-limit",
        type=script.seconds,
        default=240.0,
        help="seconds that a case may take, its waiting for others included",
    )
    parser.add_argument("--stop-after", type=script.seconds, default=7200.0, help="end after so many seconds")
    parser.add_argument("--folder", type=script.folder, default=figures.RESULTS, help="where the files of figures are")
    parser.add_argument("--commit", default=commit(), help="of the code; by default git's")
    parser.add_argument("--table", action="store_true", help="time nothing, print the table of what is kept")
    parser.add_argument("--case", type=lambda text: Case(**json.loads(text)), help=argparse.SUPPRESS)
    parser.add_argument("--cores", type=lambda text: {*map(int, text.split(","))}, help=argparse.SUPPRESS)
    parser.add_argument("--turns", type=lambda text: Turns(Path(text)), default=Turns(), help=argparse.SUPPRESS)
    parser.add_argument("--rows", type=script.output, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.case:
        time_case(arguments.case, arguments)
        return
    if not arguments.table:
        device = Device.cuda() if arguments.device == "cuda" else Device.cpu()
        kept = kept_rows(arguments.folder).get(device.name, {})
        of_commit = {key: row for key, row in kept.items() if row["commit"] == arguments.commit}
        known = {key for key, row in of_commit.items() if PROCESS not in row["failures"]}
        time_all([case for case in cases(arguments) if case.key not in known], arguments)
    print(table(arguments))


if __name__ == "__main__":
    script.run(main)
