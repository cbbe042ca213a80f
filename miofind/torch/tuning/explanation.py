"""Which layer of a network is run by what, and why PyTorch's own kernel runs where it does; and what has run so far."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from miofind.core.problem import ProblemDescription
from miofind.text.printable import printable_name
from miofind.text.sheet import Sheet
from miofind.torch.fused import plans as fused_plans
from miofind.torch.fused.answers import answer
from miofind.torch.override.counts import CallReport
from miofind.torch.override.dispatcher import current, enabled
from miofind.torch.override.flags import Flags, state
from miofind.torch.override.plans import Part, Planner
from miofind.torch.override.settings import CPU_IS_PYTORCHS, MissPolicy, Settings
from miofind.torch.recording.network import problems, refuse_inputs
from miofind.torch.recording.recording import RecordedCall, Recording
from miofind.torch.tuning.tables import as_text, described, milliseconds, shortened

PYTORCH = "pytorch"


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerRun:
    """What runs one result of a layer's convolution.

    Attributes:
        layer: the module's path, "" outside of modules.
        computed: "y", "dx" or "dw".
        count: calls of a step.
        problem: what runs: with the bias where the kernel takes that along. None where miofind has no such problem.
        solver_id: of miofind's solution, "" where PyTorch's own kernel runs.
        source: where the solution comes from: "measured" or "finddb", "predicted", or "pytorch".
        time_ms: as measured or predicted, None for PyTorch's kernel.
        reason: why PyTorch's kernel runs.
    """

    layer: str
    computed: str
    count: int
    problem: ProblemDescription | None = None
    solver_id: str = ""
    source: str = PYTORCH
    time_ms: float | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """What runs a network's convolutions; printed, it is a table.

    Attributes:
        network: its name.
        device: PyTorch's name of the device.
        is_enabled: whether miofind is enabled there; if not, what would run with `enable` and its defaults.
        rows: by layer and result, in the order of their first calls.
    """

    network: str
    device: str
    is_enabled: bool
    rows: tuple[LayerRun, ...]

    @property
    def reasons(self) -> dict[str, int]:
        """Why PyTorch's kernels run calls, and how many, the most frequent first."""
        reasons: Counter[str] = Counter()
        for row in self.rows:
            if not row.solver_id:
                reasons[row.reason] += row.count
        return dict(reasons.most_common())

    def to_json(self) -> dict[str, object]:
        """The whole explanation, fit for `json.dumps`."""
        return {
            "network": self.network,
            "device": self.device,
            "enabled": self.is_enabled,
            "layers": [_row_json(row) for row in self.rows],
        }

    def __str__(self) -> str:
        return as_text(self.__rich__(), self._lines())

    def __rich__(self) -> Sheet:
        columns = ("layer", "result", "problem", "runs", "source", "count", "ms")
        title, fold = f"{self.network} on {self.device}", ("problem", "layer")
        made = Sheet(title, columns, right=("count", "ms"), fold=fold, spare=("source",))
        for row in self.rows:
            problem = "-" if row.problem is None else described(row.problem)
            runs = row.solver_id or "PyTorch's own"
            cells = (printable_name(row.layer) or "-", row.computed, problem, runs, row.source, str(row.count))
            made.add(*cells, milliseconds(row.time_ms))
        return made

    def _lines(self) -> Iterator[str]:
        """What stands below the table."""
        own = sum(row.count for row in self.rows if row.solver_id)
        runs = "runs" if self.is_enabled else "would run"
        yield f"miofind {runs} {own} of {sum(row.count for row in self.rows)} results"
        yield from shortened([f"left to PyTorch, {count}: {reason}" for reason, count in self.reasons.items()])
        if not self.is_enabled and self.device == "cpu":
            yield f"miofind is not enabled here: {CPU_IS_PYTORCHS}; this is what that would have run"
        elif not self.is_enabled:
            yield "miofind is not enabled here: this is what miofind.torch.enable() would have run"


def explain(
    model: Any,
    *inputs: Any,
    training: bool = False,
    amp: Any = None,
    memory_format: Any = None,
    keywords: Mapping[str, Any] | None = None,
    device: Any = None,
) -> Explanation:
    """Which layer of a network is run by what, and why not by miofind, by the settings that are in force.

    Nothing is measured, and the network is not run; see `miofind.torch.problems`. Kernels that will run are made ready.

    Args:
        model: a module, or a `Recording` of `record` or `exported_problems`, which takes no inputs.
        inputs, training, amp, memory_format, keywords: as of `miofind.torch.problems`.
        device: where it is to run; by default where the model's weights are, else a GPU if there is one.

    Raises:
        InvalidOptionError: an argument is none of these, or the model cannot run on fake tensors.
    """
    place = _device_of(model) if device is None else torch.device(device)
    asked: dict[str, Any] = {"training": training, "amp": amp, "memory_format": memory_format}
    if isinstance(model, Recording):
        refuse_inputs(inputs, keywords, **asked)
        recording = model
    else:
        recording = problems(model, *inputs, device=place.type, keywords=keywords, **asked)
    override = current(place.type)
    decide = _Decisions(Settings() if override is None else override.settings, place)
    return Explanation(
        network=recording.name,
        device=str(place),
        is_enabled=override is not None,
        rows=tuple(map(decide.row, recording.calls)),
    )


def _device_of(model: Any) -> Any:
    parameters = model.parameters() if isinstance(model, torch.nn.Module) else ()
    kinds = {parameter.device.type: parameter.device for parameter in parameters}
    if torch.cuda.is_available() and "cpu" not in kinds:
        return kinds.get("cuda", torch.device("cuda", torch.cuda.current_device()))
    return kinds.get("cuda", torch.device("cpu"))


class _Decisions:
    """Decides as the override does, but measures nothing."""

    def __init__(self, settings: Settings, device: Any) -> None:
        self._device = device
        self._flags = Flags.of(state(), on_gpu=device.type == "cuda")
        self._settings = settings = replace(settings, background=False)
        known = Planner(replace(settings, on_miss=MissPolicy.FALLBACK))
        self._planner = Planner(settings) if settings.on_miss in (MissPolicy.ESTIMATE, MissPolicy.RECORD) else known
        self._known = self._planner if settings.on_miss is MissPolicy.RECORD else known

    def row(self, call: RecordedCall) -> LayerRun:
        """What runs a recorded call."""
        row = LayerRun(layer=call.layer, computed=call.computed, count=call.count, problem=call.problem)
        if call.problem is None:
            return replace(row, reason=call.reason)
        part = self._part(call, call.problem)
        row = replace(row, problem=part.problem)
        if part.solution is None:
            return replace(row, reason=self._reason(part))
        solution = part.solution
        return replace(row, solver_id=solution.solver_id, source=solution.source.value, time_ms=solution.time_ms)

    def _part(self, call: RecordedCall, problem: ProblemDescription) -> Part:
        """What becomes of a problem: with the bias where a FindDB has an answer to that, else without."""
        is_own = call.call is None  # an operator of miofind's, which has no form without its epilogue
        if problem.epilogue and not is_own:
            part = answer(problem, self._device, self._flags, self._known, call.computed).part
            if part.solution is not None:
                return part
        asked = problem if is_own else problem.bare
        return answer(asked, self._device, self._flags, self._planner, call.computed).part

    def _reason(self, part: Part) -> str:
        measures = part.is_missing and self._settings.measures(self._flags)
        return f"{part.reason}; it is measured at its first call" if measures else part.reason


def _row_json(row: LayerRun) -> dict[str, object]:
    return {
        "layer": row.layer,
        "computed": row.computed,
        "count": row.count,
        "problem": None if row.problem is None else row.problem.network_config,
        "solver_id": row.solver_id or None,
        "source": row.source,
        "time_ms": row.time_ms,
        "reason": row.reason,
    }


def report() -> CallReport:
    """What ran PyTorch's convolutions while miofind was enabled, and why, over all that is enabled now.

    With the calls of `miofind::convolution` that fused modules and graphs make, whether or not it is enabled. Where
    PyTorch computes one of them, it calls its own convolution, which counts as well.
    """
    overrides = enabled()
    devices = dict.fromkeys(device for override in overrides for device in override.devices)
    return CallReport.of((*(plan for override in overrides for plan in override.plans), *fused_plans.plans()), devices)
