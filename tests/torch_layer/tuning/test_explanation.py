"""An explanation says what the override does: the same solutions for the same layers, and the same reasons."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import miofind.torch
from miofind import FindOptions, Handle, ProblemDescription, find_solutions
from miofind.errors import InvalidOptionError
from miofind.torch.override.comparisons import note
from miofind.torch.override.flags import Flags, state


@pytest.fixture(scope="module")
def model() -> Any:
    return nn.Sequential(nn.Conv2d(2, 3, 1), nn.Conv2d(3, 2, 1, bias=False), nn.ConvTranspose2d(2, 2, 1))


@pytest.fixture(scope="module")
def handle(tmp_path_factory: pytest.TempPathFactory, model: Any) -> Iterator[Handle]:
    """Knows the forward problems of the first two layers."""
    with Handle("cpu", database=tmp_path_factory.mktemp("explain") / "finddb.db") as made:
        miofind.torch.tune(model[:2], (1, 2, 3, 3), handle=made, options=FindOptions())
        yield made


def test_layers_are_explained_as_they_run(model: Any, handle: Handle) -> None:
    with miofind.torch.use("fallback", handle=handle, devices="cpu") as override:
        told = miofind.torch.explain(model, (1, 2, 3, 3), training=True)
        model(torch.randn(1, 2, 3, 3)).sum().backward()
        counts = Counter({(count.problem, count.solver_id, count.reason): 0 for count in override.report().counts})
        for count in override.report().counts:
            counts[count.problem, count.solver_id, count.reason] += count.calls
    assert Counter({(row.problem, row.solver_id, row.reason): row.count for row in told.rows}) == counts
    rows = {(row.layer, row.computed): row for row in told.rows}
    assert [rows[layer, "y"].source for layer in "012"] == ["finddb", "finddb", "pytorch"]
    assert rows["0", "y"].problem.epilogue.text == "bias"
    assert rows["0", "y"].time_ms is not None
    assert rows["2", "y"].reason == "no FindDB has an answer to it"
    assert told.is_enabled


def test_an_explanation_is_a_table_and_json(model: Any, handle: Handle) -> None:
    with miofind.torch.use("fallback", handle=handle, devices="cpu"):
        told = miofind.torch.explain(model, (1, 2, 3, 3))
    text = str(told)
    assert "miofind runs 2 of 3 results" in text
    assert "left to PyTorch, 1: no FindDB has an answer to it" in text
    assert "not enabled" not in text
    layers = json.loads(json.dumps(told.to_json()))["layers"]
    assert [(each["layer"], each["source"]) for each in layers] == [("0", "finddb"), ("1", "finddb"), ("2", "pytorch")]


def test_what_an_earlier_process_measured_pytorch_to_be_faster_at_is_told(
    model: Any, handle: Handle, tmp_path: Path
) -> None:
    with Handle("cpu", database=tmp_path / "finddb.db") as earlier:
        earlier.database.user.merge(handle.database.user)
        problem = ProblemDescription.convolution(x=(1, 2, 3, 3), w=(3, 2, 1, 1), epilogue="bias")
        found = find_solutions(problem, options=FindOptions(), handle=earlier)[0]
        note(found, earlier, Flags.of(state(), on_gpu=False), 0.6, 0.5)
    later = Handle("cpu", database=tmp_path / "finddb.db")
    with later, miofind.torch.use("fallback", handle=later, devices="cpu"):
        told = str(miofind.torch.explain(model, (1, 2, 3, 3)))
    assert "miofind runs 1 of 3 results" in told
    assert "left to PyTorch, 1: PyTorch's own kernel is 1.20 times as fast as Conv" in told
    assert ", measured 20" in told


def test_enabled_on_gpus_it_promises_nothing_of_cpu_tensors(model: Any, handle: Handle) -> None:
    """It said "runs", and named an enable() that had been called and would not have run it."""
    with miofind.torch.use("fallback", handle=handle) as override:
        told = miofind.torch.explain(model, (1, 2, 3, 3))
        model(torch.randn(1, 2, 3, 3))
        text = f"{override.report()}\n{miofind.torch.report()}"
    assert not told.is_enabled
    assert 'PyTorch\'s own, unless miofind.torch.enable(devices="cpu") asks for them' in str(told)
    counted = "miofind computed 0 of 0 results of convolutions"
    assert text.splitlines() == 2 * [
        counted,
        '  calls on CPU tensors are PyTorch\'s own, unless miofind.torch.enable(devices="cpu") asks for them',
    ]


@pytest.mark.parametrize("columns", [80, 60])
def test_it_fits_the_terminal(model: Any, handle: Handle, monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    with miofind.torch.use("fallback", handle=handle, devices="cpu"):
        told = str(miofind.torch.explain(model, (1, 2, 3, 3)))
    assert max(map(len, told.splitlines())) <= columns
    assert "    problem: n1 2x3x3 > 3, 1x1 bias float32 NCHW\n" in told
    assert "ConvCpu" in told


def test_settings_and_switches_are_reasons(model: Any, handle: Handle) -> None:
    def reasons(**settings: Any) -> dict[str, int]:
        with miofind.torch.use(handle=handle, devices="cpu", **settings):
            return miofind.torch.explain(model, (1, 2, 3, 3)).reasons

    assert list(reasons(directions=["backward_data"])) == ["forward is not among the directions asked for"]
    assert "measured at its first call" in next(iter(reasons(on_miss="find")))
    with torch.backends.cudnn.flags(enabled=False):
        assert reasons() == {"torch.backends.cudnn.enabled is False": 3}
    with miofind.torch.use("estimate", handle=handle, devices="cpu"):
        assert miofind.torch.explain(model, (1, 2, 3, 3)).rows[2].source == "predicted"


@pytest.mark.parametrize("settings", [{"directions": ["forward"]}, {"on_miss": "record"}], ids=str)
def test_calls_are_taken_as_they_are_made(handle: Handle, settings: dict[str, Any]) -> None:
    """A transposed convolution's forward pass is forward, whatever its problem's direction."""
    model = nn.Sequential(nn.Conv2d(2, 3, 1), nn.ConvTranspose2d(3, 2, 3, bias=False))
    with miofind.torch.use(**{"on_miss": "estimate", "handle": handle, "devices": "cpu", **settings}) as override:
        told = miofind.torch.explain(model, (1, 2, 3, 3))
        model(torch.randn(1, 2, 3, 3))
        counts = override.report().counts
    assert {row.computed: row.solver_id for row in told.rows} == {"y": counts[-1].solver_id}
    assert Counter((row.solver_id, row.reason) for row in told.rows) == Counter(
        (count.solver_id, count.reason) for count in counts
    )
    assert bool(told.rows[1].solver_id) == ("directions" in settings)


def test_without_the_override_it_says_so(model: Any) -> None:
    told = miofind.torch.explain(model[:1], (1, 2, 3, 3))
    assert not told.is_enabled
    *_, counted, _, why = str(told).splitlines()
    assert counted == "miofind would run 0 of 1 results"
    assert why == (
        "miofind is not enabled here: calls on CPU tensors are PyTorch's own, unless "
        'miofind.torch.enable(devices="cpu") asks for them; this is what that would have run'
    )
    with miofind.torch.record() as recording:
        torch.conv2d(torch.randn(0, 2, 3, 3), torch.randn(1, 2, 1, 1))
    (row,) = miofind.torch.explain(recording).rows
    assert (row.layer, row.problem, row.reason) == ("", None, "a tensor of it is empty")
    with pytest.raises(InvalidOptionError, match="takes no"):
        miofind.torch.explain(recording, (1, 2, 3, 3))
