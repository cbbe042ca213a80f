"""A network on a GPU: what is recorded of a step, tuned beside PyTorch, and explained as it runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from helpers.problems.small_networks import Mixed
from torch import nn

import miofind.torch
from miofind import FindOptions, Handle
from miofind.find.immediate.shipped import ranker_of
from miofind.find.likely import MOST
from miofind.torch import Recording, TuningReport
from miofind.torch.override.dispatcher import current

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def handle(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Handle]:
    with Handle(0, database=tmp_path_factory.mktemp("torch") / "finddb.db") as made:
        yield made


@pytest.fixture(scope="module")
def model() -> Any:
    layers = nn.Sequential(nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(), nn.Conv2d(64, 128, 1, bias=False))
    return layers.cuda().to(memory_format=torch.channels_last)


@pytest.fixture(scope="module")
def step() -> dict[str, Any]:
    return {"training": True, "amp": torch.bfloat16, "memory_format": torch.channels_last}


@pytest.fixture(scope="module")
def tuned(model: Any, step: dict[str, Any], handle: Handle) -> TuningReport:
    options = FindOptions(time_budget_s=20)
    return miofind.torch.tune(model, (8, 64, 28, 28), handle=handle, options=options, **step)


def run_step(model: Any, x: Any, amp: Any) -> None:
    with torch.autocast("cuda", dtype=amp, enabled=amp is not None):
        y = model(x)
    y.float().sum().backward()


def table(recording: Recording) -> Counter[tuple[str, str, str]]:
    calls = recording.calls
    return Counter({(c.layer, c.computed, str(c.problem or c.reason)): c.count for c in calls})


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("amp", [None, torch.bfloat16])
def test_a_network_s_problems_are_those_of_a_real_step(amp: Any, memory_format: Any) -> None:
    model = Mixed().cuda().to(memory_format=memory_format)
    x = torch.randn(2, 3, 8, 10, device="cuda").to(memory_format=memory_format)
    with miofind.torch.record() as recording:
        run_step(model, x, amp)
    found = miofind.torch.problems(model, x, training=True, amp=amp, memory_format=memory_format)
    assert table(found) == table(recording)
    assert len(found.calls) == 13


def test_both_sides_are_timed_and_nothing_is_left_changed(
    model: Any, step: dict[str, Any], tuned: TuningReport
) -> None:
    assert tuned.is_complete
    assert [row.message for row in tuned.rows] == [""] * len(tuned.rows)
    assert all(row.own_ms and row.torch_ms for row in tuned.rows)
    assert tuned.gain is not None
    assert tuned.gain >= 1
    assert "PyTorch ms" in str(tuned)
    assert (torch.backends.cudnn.benchmark, torch.backends.cudnn.benchmark_limit) == (False, 10)
    assert torch.backends.cudnn.allow_tf32
    assert current() is None
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_few_of_each_problem_are_measured_where_nothing_else_is_asked_for(
    model: Any, step: dict[str, Any], handle: Handle
) -> None:
    report = miofind.torch.tune(model, (4, 64, 26, 22), handle=handle, compare=False, **step)
    assert {(row.source, row.torch_ms, row.message) for row in report.rows} == {("tuned", None, "")}
    for row in report.rows:
        (history, *_) = handle.database.histories(handle.device.identity, row.problem.network_config)
        assert {scope.effort for scope in history.scopes} == {"likely"}
        own = [found for found in history.rows if found.library != "cudnn"]
        assert 1 <= len(own) <= MOST
        is_known = ranker_of(handle.device).reaches(row.problem.bare)
        assert len(own) == len(history.rows) or not is_known, "cuDNN is asked on a kind of device without a model"
    x = torch.randn(4, 64, 26, 22, device="cuda").to(memory_format=torch.channels_last)
    with miofind.torch.use("fallback", background=False, handle=handle) as override:
        run_step(model, x, step["amp"])
        counts = override.report()
    assert counts.own_calls == counts.calls


def test_the_override_runs_what_an_explanation_names(
    model: Any, step: dict[str, Any], tuned: TuningReport, handle: Handle
) -> None:
    x = torch.randn(8, 64, 28, 28, device="cuda").to(memory_format=torch.channels_last)
    with miofind.torch.use("fallback", background=False, handle=handle) as override:
        told = miofind.torch.explain(model, x, **step)
        run_step(model, x, step["amp"])
        counts = Counter({(count.problem, count.solver_id): 0 for count in override.report().counts})
        for count in override.report().counts:
            counts[count.problem, count.solver_id] += count.calls
    assert Counter({(row.problem, row.solver_id): row.count for row in told.rows}) == counts
    assert {row.source for row in told.rows} <= {"finddb", "measured", "pytorch"}
    assert not any("no FindDB" in row.reason for row in told.rows)
