"""Rivals of fused problems: what PyTorch is asked for, what cuDNN's sides are, sums of networks."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import miofind.bench.comparison as comparison
import miofind.bench.rivals as module
from miofind import Handle, ProblemDescription, find_solutions
from miofind.bench.ceilings import Ceilings
from miofind.bench.comparison import BenchRow, bench, network_times
from miofind.bench.rivals import Rival
from miofind.bench.torch_rival import TorchRival
from miofind.cli import bench as command
from miofind.cli.bench import row_json
from miofind.device.device import Device
from miofind.errors import LaunchError, NoSolutionError
from miofind.options import FindOptions
from miofind.suites import SuiteProblem


def fused(epilogue: str | None, **arguments: Any) -> ProblemDescription:
    return ProblemDescription.convolution(x=(2, 8, 9, 9), w=(4, 8, 3, 3), epilogue=epilogue, **arguments)


class FakeTensor:
    """Records what is done to it."""

    def __init__(self, name: str, calls: list[str]) -> None:
        self.name, self._calls = name, calls

    def add_(self, other: FakeTensor) -> None:
        self._calls.append(f"add_ {other.name}")

    def __getitem__(self, number: int) -> FakeTensor:
        return self

    def mul_(self, other: FakeTensor) -> None:
        self._calls.append(f"mul_ {other.name}")


class FakeAten:
    """Records which functions of PyTorch's are asked for."""

    def __init__(self, calls: list[str]) -> None:
        self._calls = calls

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any, **keywords: Any) -> FakeTensor:
            told = [str(getattr(a, "name", a)) for a in arguments if isinstance(a, FakeTensor | float) or a is None]
            self._calls.append(" ".join([name, *told, *map(str, keywords.values())]))
            return FakeTensor("result", self._calls)

        return call


class Nothing:
    """A context that does nothing."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


def asked_of_torch(monkeypatch: pytest.MonkeyPatch, problem: ProblemDescription) -> list[str]:
    """What one run asks of a PyTorch that computes nothing."""
    calls: list[str] = []
    torch = SimpleNamespace(
        ops=SimpleNamespace(aten=FakeAten(calls)),
        backends=SimpleNamespace(cudnn=SimpleNamespace(), cuda=SimpleNamespace(matmul=SimpleNamespace())),
        cuda=SimpleNamespace(ExternalStream=Nothing, stream=Nothing),
        no_grad=Nothing,
    )
    monkeypatch.setattr("miofind.bench.torch_rival._import_torch", lambda: torch)
    monkeypatch.setattr(TorchRival, "_tensor", lambda self, operand, address: FakeTensor(operand.name, calls))
    TorchRival(problem, 0).run(tuple(range(1, len(problem.operands) + 3)), 0)
    return calls


@pytest.mark.parametrize(
    ("epilogue", "calls"),
    [
        (None, ["convolution x w None"]),
        ("bias.relu", ["convolution x w bias", "relu_ result"]),
        ("bias.residual.relu", ["convolution x w bias", "add_ residual", "relu_ result"]),
        ("bias.silu.residual", ["convolution x w bias", "silu_ result", "add_ residual"]),
        ("bias.channel_bias", ["convolution x w bias", "add_ channel_bias"]),
        ("scale.bias.residual", ["convolution x w None", "mul_ scale", "add_ bias", "add_ residual"]),
        ("bias.clamp", ["convolution x w bias", "hardtanh_ result 0.0 6.0"]),
        ("bias.gelu_tanh", ["convolution x w bias", "gelu result tanh"]),
        ("leaky_relu", ["convolution x w None", "leaky_relu_ result 0.01"]),
        ("sigmoid", ["convolution x w None", "sigmoid_ result"]),
    ],
)
def test_eager_pytorch_takes_a_pass_for_each_part(
    monkeypatch: pytest.MonkeyPatch, epilogue: str | None, calls: list[str]
) -> None:
    assert asked_of_torch(monkeypatch, fused(epilogue)) == calls


@pytest.mark.parametrize(
    ("epilogue", "calls"),
    [
        ("", []),
        ("residual.drelu", ["add_ residual", "threshold_backward result saved"]),
        ("dclamp", ["hardtanh_backward result saved 0.0 6.0"]),
        ("dleaky_relu", ["leaky_relu_backward result saved 0.01"]),
        ("dgelu_tanh", ["gelu_backward result saved tanh"]),
        ("residual.dsilu", ["add_ residual", "silu_backward result saved"]),
    ],
)
def test_eager_pytorch_takes_a_pass_behind_backward_data(
    monkeypatch: pytest.MonkeyPatch, epilogue: str, calls: list[str]
) -> None:
    monkeypatch.setattr(TorchRival, "_shape_only", lambda self, name: f"like {name}")
    asked = asked_of_torch(monkeypatch, fused(epilogue, direction="backward_data"))
    assert asked == ["convolution_backward y w None", *calls]


def test_pytorchs_convolution_takes_no_bias_of_another_type(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = fused("float32.bias", dtype="float16")
    assert asked_of_torch(monkeypatch, problem) == ["convolution x w None", "add_ bias"]


class FakeHandle:
    """Says which invoker was asked for."""

    def invoker(self, problem: ProblemDescription, solver_id: str, config: str) -> str:
        return f"{solver_id} {config} {problem.spatial_dims}-d {problem.epilogue}"


def choose(monkeypatch: pytest.MonkeyPatch, rival: Rival, problem: ProblemDescription, found: int = 2) -> Any:
    def look_up(asked: ProblemDescription, options: FindOptions, handle: Any) -> list[Any]:
        assert [name.lower() for name in options.only] == ["convcudnn"]
        assert options.exclude == ()
        own = SimpleNamespace(prepare=lambda: f"own {asked.spatial_dims}-d {asked.epilogue}")
        passed = SimpleNamespace(solver_id="ConvCudnn+Pointwise", config=f"best {asked.spatial_dims}-d", runner=None)
        return [passed, SimpleNamespace(solver_id="ConvCudnn", config=f"best {asked.spatial_dims}-d", runner=own)][
            :found
        ]

    monkeypatch.setattr(module.records, "look_up", look_up)
    options = FindOptions(only="plain", exclude="ConvDirectNaive")
    return module.runnable(rival, problem, options, FakeHandle())  # type: ignore[arg-type]


def test_one_pass_is_cudnns_best_bare_solution_and_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose(monkeypatch, Rival.ONE_PASS, fused("bias.relu")) == "ConvCudnn+Pointwise best 2-d 2-d bias.relu"
    assert choose(monkeypatch, Rival.ONE_PASS, fused(None)) == "own 2-d ", "a bare problem needs no pass"
    assert choose(monkeypatch, Rival.CUDNN, fused("bias.relu")) == "own 2-d bias.relu"
    with pytest.raises(NoSolutionError, match=r"no kernel that applies epilogue bias\.relu"):
        choose(monkeypatch, Rival.CUDNN, fused("bias.relu"), found=1)


def test_cudnn_is_asked_for_what_its_configuration_then_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A volume of slices is images, but with a channel bias, a row of which is of a whole volume."""
    volume = {"x": (2, 8, 4, 9, 9), "w": (4, 8, 1, 3, 3), "layout": "NDHWC"}
    for epilogue, dims in (("bias.relu", 2), ("channel_bias.relu", 3)):
        problem = ProblemDescription.convolution(**volume, epilogue=epilogue)  # type: ignore[arg-type]
        composed = f"ConvCudnn+Pointwise best {dims}-d {dims}-d {epilogue}"
        assert choose(monkeypatch, Rival.ONE_PASS, problem) == composed
        assert choose(monkeypatch, Rival.CUDNN, problem) == f"own {dims}-d {epilogue}"


def test_rivals_are_timed_in_turn_and_what_fails_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """On the CPU place; a rival there is miofind's own solution once more."""

    def runs(rival: Rival, problem: ProblemDescription, options: FindOptions, handle: Handle) -> Any:
        if rival is Rival.TORCH:
            raise LaunchError("PyTorch takes none")
        if rival is Rival.CUDNN:
            raise NoSolutionError("no engine")
        return find_solutions(problem, options=options, handle=handle)[0].runner.prepare()

    found: list[Rival] = []
    ceilings = Ceilings(copy_bytes_per_s=1e12, flops_per_s={"float32": 1e12})
    monkeypatch.setattr(comparison, "measure_ceilings", lambda device: ceilings)
    monkeypatch.setattr(comparison, "runnable", runs)
    monkeypatch.setattr(comparison, "find_rival", lambda rival, *_: found.append(rival))
    entry = SuiteProblem(problem=fused(None), suite="a", layer="b", count=3)
    with Handle("cpu", database=tmp_path / "finddb.db") as handle:
        (row,) = bench([entry], handle, FindOptions(), against=list(Rival))
    assert found == list(Rival)
    assert row.time_ms is not None
    assert row.one_pass_ms is not None
    assert (row.rival_ms, row.cudnn_ms, row.message) == (None, None, "torch: PyTorch takes none")
    told = json.loads(json.dumps(row_json(row)))
    assert (told["count"], told["one_pass_ms"], told["torch_ms"]) == (3, row.one_pass_ms, None)


def row(suite: str, count: int, ours: float | None, one_pass: float | None) -> BenchRow:
    entry = SuiteProblem(problem=fused("bias.relu"), suite=suite, layer="b", count=count)
    return BenchRow(entry=entry, time_ms=ours, one_pass_ms=one_pass)


def test_sums_of_a_network_count_each_layer() -> None:
    rows = [row("a", 3, 1.0, 2.0), row("b", 1, 1.0, None), row("a", 1, 2.0, 16.0)]
    first, second = network_times(rows, [Rival.ONE_PASS])
    assert (first.name, first.layers) == ("a", 4)
    assert first.sums_ms == {"miofind": 5.0, "one-pass": 22.0}
    assert first.sum_ratio("one-pass") == pytest.approx(4.4)
    assert first.ratios == {"one-pass": pytest.approx(4.0)}, "each distinct problem counts once"
    assert second.sums_ms == {"miofind": 1.0, "one-pass": None}
    assert (second.sum_ratio("one-pass"), second.ratios["one-pass"]) == (None, None)


def test_one_pass_runs_the_solver_and_a_pass(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A solver of the CPU place stands for cuDNN's."""
    monkeypatch.setattr(module, "LIBRARY_SOLVER", "ConvCpuDirect")
    ceilings = Ceilings(copy_bytes_per_s=1e12, flops_per_s={"float32": 1e12})
    entries = [
        SuiteProblem(problem=fused(epilogue), suite="a", layer="b", count=1)
        for epilogue in ("scale.bias.channel_bias.residual.silu", None)
    ]
    searched = FindOptions(tuning=True, time_budget_s=1.0)
    with Handle("cpu", database=tmp_path / "finddb.db") as handle:
        rows = bench(
            entries,
            handle,
            FindOptions(),
            against=[Rival.ONE_PASS, Rival.CUDNN],
            rival_options=searched,
            ceilings=ceilings,
        )
    assert [row.message for row in rows] == ["", ""]
    assert all(row.time_ms and row.one_pass_ms for row in rows)
    assert [row.cudnn_ms is None for row in rows] == [True, False], "its kernels apply no epilogue"


def test_the_command_shows_each_side_and_sums(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    rows = [row("a", 3, 1.0, 2.0), row("a", 1, 2.0, 16.0), row("b", 1, 1.0, None)]
    against = [Rival.ONE_PASS, Rival.CUDNN]
    command._print(rows, comparison.class_means(rows), Device.cpu(), against)
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    header = next(line for line in lines if line[:1] == ["layer"])
    assert " ".join(header).endswith("ms one-pass ms one-pass ratio cudnn ms cudnn ratio of floor")
    sums = next(index for index, line in enumerate(lines) if line[:2] == ["suite", "layers"])
    assert lines[sums + 2] == ["a", "4", "5.000", "22.00", "4.40x", "4.00x", "-", "-", "-"]
    report = command._report(rows, [], Device.cpu(), Ceilings(copy_bytes_per_s=1e12, flops_per_s={}), against)
    assert json.loads(json.dumps(report))["networks"][0] == {
        "suite": "a",
        "layers": 4,
        "sums_ms": {"miofind": 5.0, "one-pass": 22.0, "cudnn": None},
        "sum_ratios": {"one-pass": 4.4, "cudnn": None},
        "mean_ratios": {"one-pass": pytest.approx(4.0), "cudnn": None},
    }
