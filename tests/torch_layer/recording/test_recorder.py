"""Recorded convolutions are those that ran: forward and backward, with their layers, types, formats and counts."""

from __future__ import annotations

import contextlib
import multiprocessing
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.problems.small_networks import Mixed, OneAndThree, mixed_input
from torch import nn
from torch.utils.checkpoint import checkpoint

import miofind.torch
from miofind.core.problem import ProblemDescription
from miofind.errors import InvalidOptionError
from miofind.suites import load
from miofind.torch.recording import recording as recordings
from miofind.torch.recording.recording import RecordedCall, Recording, saved_at_last

PROBLEM = ProblemDescription.convolution(x=(1, 4, 6, 5), w=(2, 4, 3, 3))

STEM = "conv2d-{}-n2-c3-i8x10-k8-f3x3-p1x1-float32-NCHW"
DEPTHWISE = "conv2d-{}-n2-c8-i8x10-k8-f3x3-p1x1-g8-float32-NCHW"
FROZEN = "conv2d-{}-n2-c8-i8x10-k8-f1x1-s2x2-float32-NCHW"
UP = "conv2d-{}-n2-c4-i10x12-k8-f3x3-s2x2-float32-NCHW"
FUNCTIONAL = "conv2d-{}-n2-c4-i10x12-k2-f2x3-d2x2-float32-NCHW"


def table(recording: Recording) -> Counter[tuple[str, str, str]]:
    calls = recording.calls
    return Counter({(call.layer, call.computed, call.problem.network_config): call.count for call in calls})


def test_a_step_s_calls_by_layer() -> None:
    with miofind.torch.record() as recording:
        Mixed()(mixed_input()).sum().backward()
    assert table(recording) == {
        ("stem.0", "y", STEM.format("forward") + "-e.bias"): 1,
        ("depthwise", "y", DEPTHWISE.format("forward")): 2,
        ("frozen", "y", FROZEN.format("forward") + "-e.bias"): 1,
        ("up", "y", UP.format("backward_data")): 1,
        ("Mixed", "y", FUNCTIONAL.format("forward")): 1,
        ("Mixed", "dx", FUNCTIONAL.format("backward_data")): 1,
        ("Mixed", "dw", FUNCTIONAL.format("backward_weights")): 1,
        ("up", "dx", UP.format("forward")): 1,
        ("up", "dw", UP.format("backward_weights")): 1,
        ("frozen", "dx", FROZEN.format("backward_data")): 1,
        ("depthwise", "dx", DEPTHWISE.format("backward_data")): 2,
        ("depthwise", "dw", DEPTHWISE.format("backward_weights")): 2,
        ("stem.0", "dw", STEM.format("backward_weights") + "-e.bias_gradient"): 1,
    }


def test_recording_changes_no_result() -> None:
    model, x = Mixed(), mixed_input()
    expected = model(x)
    compiled = torch.compile(model.forward, backend="eager")
    compiled(x)
    with miofind.torch.record() as eager:
        torch.testing.assert_close(model(x), expected)
    with miofind.torch.record() as recording:  # a compiled function's graphs have calls that nobody sees
        torch.testing.assert_close(compiled(x), expected)
    assert recording.problems
    assert {each.problem: each.count for each in recording.problems} == {
        each.problem: each.count for each in eager.problems
    }


def test_the_override_records_the_same_problems() -> None:
    model, x = Mixed(), mixed_input()
    with miofind.torch.record() as recording:
        model(x).sum().backward()
    with miofind.torch.use("record", devices="cpu") as override:
        model(x).sum().backward()
        noted = Counter({count.problem: 0 for count in override.report().counts})
        for count in override.report().counts:
            noted[count.problem] += count.calls
    assert noted == {each.problem: each.count for each in recording.problems}


def test_miofind_s_own_operators_are_recorded_with_what_they_fuse() -> None:
    layer = nn.Conv2d(3, 4, 3)
    x, residual = torch.randn(1, 3, 6, 6, requires_grad=True), torch.randn(1, 4, 4, 4)

    class Fused(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.inner = layer

        def forward(self, x: Any) -> Any:
            w, bias = self.inner.weight, self.inner.bias
            return miofind.torch.convolution(x, w, bias=bias, residual=residual, activation="relu")

    with miofind.torch.record() as recording:
        Fused()(x).sum().backward()
    found = [(call.layer, call.computed, call.problem.epilogue.text) for call in recording.calls if call.problem]
    assert found == [("Fused", "y", "bias.residual.relu"), ("Fused", "dx", ""), ("Fused", "dw", "bias_gradient")]


class _Higher(torch._ops.HigherOrderOperator):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__("miofind_test_higher")

    def __call__(self, x: Any) -> Any:
        return super().__call__(x)


def test_operators_of_higher_order_are_passed_on() -> None:
    operator = _Higher()
    operator.py_impl(torch._C.DispatchKey.CompositeExplicitAutograd)(lambda x: x + 1)
    with torch._C._AutoDispatchBelowAutograd(), miofind.torch.record() as recording:
        assert operator(torch.ones(1)) == 2
    assert recording.calls == ()


def test_autocast_and_memory_format_show() -> None:
    model = nn.Conv2d(4, 8, 3).to(memory_format=torch.channels_last)
    with miofind.torch.record() as recording, torch.autocast("cpu", dtype=torch.bfloat16):
        model(torch.randn(1, 4, 5, 5)).sum().backward()
    found = {call.problem.network_config.partition("-f3x3-")[2] for call in recording.calls if call.problem}
    assert found == {"bfloat16-NHWC-e.bias", "bfloat16-NHWC-e.bias_gradient"}


def test_inference_mode_and_padding_by_name_are_seen() -> None:
    model = nn.Conv1d(4, 4, 5, padding="same", bias=False).eval()
    with torch.inference_mode(), miofind.torch.record() as recording:
        model(torch.randn(4, 9))
    (call,) = recording.calls
    assert (call.layer, call.problem.network_config) == ("Conv1d", "conv1d-forward-n1-c4-i9-k4-f5-p2-float32-NCW")


def test_what_is_computed_again_counts_again() -> None:
    inner = nn.Sequential(nn.Conv2d(2, 2, 1), nn.ReLU())
    model = nn.Sequential(nn.Conv2d(2, 2, 1), inner)
    with miofind.torch.record() as recording:
        checkpoint(inner, model[0](torch.randn(1, 2, 3, 3)), use_reentrant=False).sum().backward()
        model(torch.randn(1, 2, 3, 3))
    forwards = {call.layer: call.count for call in recording.calls if call.computed == "y"}
    assert forwards == {"Conv2d": 1, "0": 3, "1.0": 1}


def test_calls_that_are_no_problems_have_a_reason() -> None:
    with miofind.torch.record() as recording:
        torch.conv2d(torch.randn(0, 1, 4, 4), torch.randn(1, 1, 2, 2))
    assert recording.problems == []
    reasons = " ".join(call.reason for call in recording.left_out)
    assert "empty" in reasons
    assert "left out" in repr(recording)


@pytest.mark.parametrize("ending", ["csv", "txt"])
def test_a_recording_is_a_suite(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"step.{ending}"
    model = OneAndThree()
    with miofind.torch.record(path) as recording:
        outputs = model(torch.randn(2, 4, 9), video=torch.randn(1, 2, 2, 7, 7))
        (outputs["sound"].sum() + outputs["video"].sum()).backward()
    read = load(str(path)).problems()
    assert {each.problem for each in read} == {each.problem for each in recording.problems}
    assert len(read) == 7
    if ending == "csv":
        expected = [(each.layer, each.count, "step") for each in recording.problems]
        assert [(each.layer, each.count, each.suite) for each in read] == expected


def test_a_step_that_fails_is_saved_up_to_there(tmp_path: Path) -> None:
    path = tmp_path / "step.csv"

    def step() -> None:
        with miofind.torch.record(path):
            Mixed()(mixed_input())
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        step()
    assert len(load(str(path)).problems()) == 5


def test_a_folder_that_cannot_be_made_is_told_before_anything_runs(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    ran: list[Any] = []
    with (
        pytest.raises(InvalidOptionError, match="folder cannot be made"),
        miofind.torch.record(tmp_path / "file/a.csv"),
    ):
        ran.append(1)
    assert ran == []


def test_the_folder_of_a_recording_is_made(tmp_path: Path) -> None:
    with miofind.torch.record(tmp_path / "new" / "step.csv"):
        nn.Conv2d(3, 4, 3)(torch.ones(1, 3, 5, 5))
    assert len(load(str(tmp_path / "new" / "step.csv")).problems()) == 1


@pytest.mark.parametrize("error", [ValueError("mine"), KeyboardInterrupt()], ids=repr)
def test_what_ends_a_block_is_raised_though_nothing_can_be_saved(
    tmp_path: Path, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recordings, "_unsaved", {})
    folder = tmp_path / "removed"

    def fails() -> None:
        folder.rmdir()
        raise error

    with pytest.raises(type(error)) as raised, miofind.torch.record(folder / "step.csv"):
        fails()
    assert raised.value is error
    assert "cannot be written" in raised.value.__notes__[0]
    assert list(recordings._unsaved) == [folder / "step.csv"]


def test_a_recording_that_was_saved_meanwhile_is_not_saved_over_another_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recordings, "_unsaved", {})
    path = tmp_path / "step.csv"
    path.mkdir()
    first, second = Recording("first"), Recording("second")
    for saved, at in ((first, tmp_path / "other.csv"), (second, path)):
        with pytest.raises(InvalidOptionError, match="cannot be written"):
            first.save_or_keep(path)
        if at == path:
            path.rmdir()
        saved.save(at)
        assert not recordings._unsaved


def keep_one(path: Path) -> None:
    recording = Recording()
    recording.note(RecordedCall(layer="conv", computed="y", problem=PROBLEM))
    path.mkdir()
    with contextlib.suppress(InvalidOptionError):
        recording.save_or_keep(path)
    path.rmdir()


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_worker_saves_at_its_end_what_it_kept(tmp_path: Path) -> None:
    """Such processes of multiprocessing end without what `atexit` knows."""
    worker = multiprocessing.get_context("fork").Process(target=keep_one, args=(tmp_path / "step.csv",))
    worker.start()
    worker.join(60)
    assert worker.exitcode == 0
    assert [each.problem for each in load(str(tmp_path / "step.csv")).problems()] == [PROBLEM]


class SavedByOthers(dict[Path, Recording]):
    """Recordings that other threads save while they are looked through."""

    def items(self) -> Any:
        found = list(super().items())
        self.clear()
        return found


def test_threads_may_save_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of them had a KeyError for what the other had saved."""
    recording, path = Recording(), tmp_path / "step.csv"
    monkeypatch.setattr(recordings, "_unsaved", SavedByOthers({path: recording}))
    recording.save(path)
    assert path.exists()


def test_problems_are_not_lost_for_a_name_that_no_file_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The temporary file had it, too."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with miofind.torch.record() as recording:
        nn.Conv2d(3, 4, 3)(torch.ones(1, 3, 5, 5))
    told = saved_at_last(recording, tmp_path / f"{'a' * 300}.csv")
    (path,) = tmp_path.glob("miofind_*/*.csv")
    assert told.endswith(f"miofind tune --suite {path}")
    assert len(load(str(path)).problems()) == 1


def test_another_ending_is_refused_before_anything_runs(tmp_path: Path) -> None:
    ran: list[Any] = []
    with pytest.raises(InvalidOptionError, match=r"step\.json.*\.csv"), miofind.torch.record(tmp_path / "step.json"):
        ran.append(1)
    assert ran == []


def test_a_path_that_is_none_is_refused() -> None:
    with pytest.raises(InvalidOptionError, match="path=3 must be a path"), miofind.torch.record(3):  # type: ignore[arg-type]
        pass
