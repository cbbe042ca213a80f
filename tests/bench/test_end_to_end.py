"""The benchmark of whole networks in PyTorch: a case on the CPU, processes that fail, its files and its table."""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import sys
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from helpers.processes.waiting import LIMIT_S

import miofind
import miofind.torch

FOLDER = Path(__file__).parents[2] / "benchmarks"
# By PyTorch's own folding of batch norms.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.*. is deprecated:DeprecationWarning")
MODULES = ("end_to_end", "torch_forms", "torch_networks", "figures", "script", "commit", "turns")


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> dict[str, ModuleType]:
    monkeypatch.syspath_prepend(FOLDER)
    for name in MODULES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    return {name: importlib.import_module(name) for name in MODULES}


@pytest.fixture
def end_to_end(scripts: dict[str, ModuleType]) -> ModuleType:
    return scripts["end_to_end"]


def arguments(end_to_end: ModuleType, folder: Path, **changed: Any) -> argparse.Namespace:
    values = {
        "networks": ["tiny"],
        "kinds": end_to_end.KINDS,
        "kernels": 0,
        "layouts": ["channels_last"],
        "batches": ["2", "1"],
        "forms": ["eager"],
        "tune": False,
        "db": None,
        "device": "cpu",
        "gpus": 1,
        "beside": 1,
        "case_limit": 1e3,
        "stop_after": 1e3,
        "folder": folder,
        "commit": "abc",
        "cores": None,
    }
    return argparse.Namespace(**values | changed)


def row(**changed: Any) -> dict[str, Any]:
    ms = {"torch eager": 4.0, "torch compile": 3.0, "miofind eager": 3.5, "miofind fused graph": 1.5}
    told = {"network": "tiny", "kind": "inference", "layout": "channels_last", "batch": "2", "size": 2, "ms": ms}
    return {**told, "calls": 4, "own_calls": 3, "failures": {}} | changed


def test_a_training_step_has_the_large_batch_alone(end_to_end: ModuleType, tmp_path: Path) -> None:
    found = [case.key for case in end_to_end.cases(arguments(end_to_end, tmp_path))]
    assert found == [
        "tiny inference channels_last 2",
        "tiny inference channels_last 1",
        "tiny training channels_last 2",
    ]


@pytest.mark.parametrize("kind", ["inference", "training"])
def test_a_network_s_forms_on_the_cpu(scripts: dict[str, ModuleType], kind: str) -> None:
    forms, network = scripts["torch_forms"], scripts["torch_networks"].NETWORKS["tiny"]
    forms.BLOCK_S, forms.ROUNDS, forms.WARM_UP_CALLS = 1e-3, 1, 1
    with miofind.Handle("cpu") as handle:
        setting = forms.Setting(kind=kind, channels_last=True, device="cpu", handle=handle, forms=["eager"])
        *_, outcome = forms.timed_network(network.build, (2, *network.shape), setting)
    fused = ["miofind fused eager", "torch folded eager"] if kind == "inference" else []
    assert sorted(outcome.ms) == sorted(["miofind eager", "torch eager", *fused])
    assert not outcome.failures
    assert all(ms > 0 for ms in outcome.ms.values())
    assert outcome.calls > 0


@pytest.mark.parametrize("kind", ["inference", "training"])
def test_a_network_is_compiled_and_tuned_before_it_is_timed(scripts: dict[str, ModuleType], kind: str) -> None:
    forms, network = scripts["torch_forms"], scripts["torch_networks"].NETWORKS["tiny"]
    forms.BLOCK_S, forms.ROUNDS, forms.WARM_UP_CALLS = 1e-3, 1, 1
    with miofind.Handle("cpu", database=":memory:") as handle:
        chosen = {"kind": kind, "channels_last": True, "device": "cpu", "forms": ["eager"], "is_tuned": True}
        setting = forms.Setting(handle=handle, **chosen)
        *_, outcome = forms.timed_network(network.build, (2, *network.shape), setting)
    assert list(outcome.seconds)[:2] == ["compile", "tune"]
    assert outcome.own_calls > 0
    assert not outcome.failures


@pytest.mark.parametrize(("factor", "told"), [(1.1, "relative error 0.1"), (float("nan"), "not finite")])
def test_a_wrong_form_is_a_failure_and_has_no_time(
    scripts: dict[str, ModuleType], monkeypatch: Any, factor: float, told: str
) -> None:
    forms, network = scripts["torch_forms"], scripts["torch_networks"].NETWORKS["tiny"]
    forms.BLOCK_S, forms.ROUNDS, forms.WARM_UP_CALLS = 1e-3, 1, 1
    monkeypatch.setattr(forms, "folded", lambda model: lambda x: factor * model(x))
    with miofind.Handle("cpu") as handle:
        setting = forms.Setting(kind="inference", channels_last=False, device="cpu", handle=handle, forms=["eager"])
        *_, outcome = forms.timed_network(network.build, (2, *network.shape), setting)
    assert [*outcome.failures] == ["torch folded eager"]
    assert told in outcome.failures["torch folded eager"]
    json.dumps(asdict(outcome), allow_nan=False)
    assert "torch folded eager" not in outcome.ms
    assert {"torch eager", "miofind eager"} <= set(outcome.ms)


def test_a_form_that_goes_wrong_as_it_is_timed_is_a_failure(scripts: dict[str, ModuleType], monkeypatch: Any) -> None:
    forms, network = scripts["torch_forms"], scripts["torch_networks"].NETWORKS["tiny"]
    forms.BLOCK_S, forms.ROUNDS, forms.WARM_UP_CALLS = 1e-3, 1, 1
    calls = itertools.count()
    monkeypatch.setattr(forms, "folded", lambda model: lambda x: (1.0 if next(calls) < 3 else 1.1) * model(x))
    with miofind.Handle("cpu") as handle:
        setting = forms.Setting(kind="inference", channels_last=False, device="cpu", handle=handle, forms=["eager"])
        *_, outcome = forms.timed_network(network.build, (2, *network.shape), setting)
    assert [*outcome.failures] == ["torch folded eager"]
    assert "torch folded eager" not in outcome.ms
    assert {"torch eager", "miofind eager"} <= set(outcome.ms)


def deep(scripts: dict[str, ModuleType]) -> Any:
    """So many convolutions and norms one after the other that rounding decides what the last one gives."""
    conv_bn = scripts["torch_networks"].conv_bn
    torch.manual_seed(2)
    layers = [conv_bn(3 if number == 0 else 8, 8, 3) for number in range(16)]
    return torch.nn.Sequential(*layers, torch.nn.Conv2d(8, 4, 1), torch.nn.Flatten(), torch.nn.Linear(256, 4))


def training_of(scripts: dict[str, ModuleType], network: Any) -> tuple[Any, Any]:
    """The check of a network's gradients, which PyTorch's eager step has passed, and that step."""
    forms = scripts["torch_forms"]
    with miofind.Handle("cpu") as handle:
        setting = forms.Setting(kind="training", channels_last=False, device="cpu", handle=handle, forms=["eager"])
        found, check = forms._training(network, torch.randn(8, 3, 8, 8), setting, forms.Outcome())
    check.of(found[0])
    return found[0], check


def refused(scripts: dict[str, ModuleType], check: Any, step: Any, parameter: Any, factor: float) -> str:
    """Why gradients are refused of which one is so many times as large; "" where they are not."""

    def scale() -> None:
        parameter.grad *= factor

    try:
        check.of(scripts["torch_forms"].Form(name="eager", is_ours=True, run=step.run, shows=scale))
    except AssertionError as error:
        return str(error)
    return ""


def test_no_wrong_gradient_of_any_layer_passes(scripts: dict[str, ModuleType]) -> None:
    network = deep(scripts)
    step, check = training_of(scripts, network)
    assert check.outcome.untold == []
    assert refused(scripts, check, step, network[0].conv.weight, 1.0) == "", "PyTorch's own passes again"
    assert refused(scripts, check, step, network[0].conv.weight, float("nan")) == "not finite"
    for name, parameter in network.named_parameters():
        if parameter.dim() > 1 or name.startswith("18"):
            for factor in (0.0, 0.5, 2.0, -1.0):
                told = refused(scripts, check, step, parameter, factor)
                assert told.startswith(f"{name}: relative error"), (name, factor)


def test_a_gradient_that_is_missing_is_refused(scripts: dict[str, ModuleType]) -> None:
    network = deep(scripts)
    step, check = training_of(scripts, network)

    def lose() -> None:
        network[3].conv.weight.grad = None

    with pytest.raises(AssertionError, match=r"no 3\.conv\.weight"):
        check.of(scripts["torch_forms"].Form(name="eager", is_ours=True, run=step.run, shows=lose))


def test_gradients_that_are_noise_are_named_and_held_to_a_band(
    scripts: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those of deep networks are whose norms give what rounding turns from side to side of a ReLU."""
    monkeypatch.setattr(scripts["torch_forms"], "_calm", lambda model: None)
    network = deep(scripts)
    step, check = training_of(scripts, network)
    assert "0.conv.weight" in check.outcome.untold
    assert refused(scripts, check, step, network[0].conv.weight, 1.2) == ""
    for factor in (0.0, 0.5, 2.0):
        assert refused(scripts, check, step, network[0].conv.weight, factor).startswith("0.conv.weight: norm")
    assert "2 gradients are noise" in scripts["end_to_end"].summary({"row": row(untold=["a", "b"])})


def test_gradients_that_are_zero_but_for_rounding_are_no_noise(scripts: dict[str, ModuleType]) -> None:
    """Such as that of a bias before a batch norm."""
    nn = torch.nn
    network = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 1))
    step, check = training_of(scripts, network)
    assert check.outcome.untold == []
    assert refused(scripts, check, step, network[0].bias, 1.0) == ""
    assert refused(scripts, check, step, network[0].bias, -1.0) == ""
    assert refused(scripts, check, step, network[0].weight, 0.0).startswith("0.weight: relative error 1,")


def test_gradients_of_other_roundings_pass(scripts: dict[str, ModuleType]) -> None:
    """By miofind's kernels, in another memory order."""
    network = deep(scripts)
    step, check = training_of(scripts, network)
    network.to(memory_format=torch.channels_last)
    with miofind.torch.use("estimate", devices="cpu") as made:
        check.of(scripts["torch_forms"].Form(name="eager", is_ours=True, run=step.run))
    assert made.report().own_calls > 0
    assert len(set(check.outcome.layer_errors.values())) == 2, "they are others"


def test_chance_is_taken_out(scripts: dict[str, ModuleType]) -> None:
    model = scripts["torch_forms"].without_chance(torch.nn.Sequential(torch.nn.Dropout(0.5)))
    assert torch.equal(model(torch.ones(100)), torch.ones(100))


ENDS = {
    "import os; os._exit(9)": "ended with 9",
    "raise ValueError('no such network')": "ended with 1: ValueError: no such network",
}


@pytest.mark.parametrize("program", ENDS)
def test_a_process_that_fails_keeps_what_it_told(scripts: dict[str, ModuleType], program: str) -> None:
    tells = "import json, sys; open(sys.argv[-1], 'a').write(json.dumps({'gpu': 'G', 'row': {'size': 2}}) + chr(10)); "
    told = scripts["end_to_end"].timed_by_child(
        [sys.executable, "-c", tells + program], LIMIT_S, "", scripts["turns"].Turns()
    )
    assert told["gpu"] == "G"
    assert ENDS[program] in told["row"]["failures"]["process"]


def test_a_process_that_hangs_is_stopped(scripts: dict[str, ModuleType]) -> None:
    told = scripts["end_to_end"].timed_by_child(
        [sys.executable, "-c", "import time; time.sleep(1000)"], 0.1, "", scripts["turns"].Turns()
    )
    assert told["row"]["failures"]["process"].startswith("stopped after 0 s")


@pytest.mark.full_matrix
def test_the_whole_script_keeps_its_rows_and_goes_on(end_to_end: ModuleType, tmp_path: Path, capsys: Any) -> None:
    asked = arguments(end_to_end, tmp_path, kinds=["inference"], batches=["2"])
    end_to_end.time_all(end_to_end.cases(asked), asked)
    (file,) = tmp_path.iterdir()
    content = json.loads(file.read_text())
    assert content.keys() >= {"gpu", "versions", "commit", "command", "means", "rows"}
    assert content["means"]["2"] == pytest.approx(end_to_end.ratio(content["rows"][0]), abs=1e-4)
    assert [*end_to_end.kept_rows(tmp_path)[content["gpu"]]] == ["tiny inference channels_last 2"]
    assert "tiny inference channels_last 2: torch " in capsys.readouterr().out


def test_the_best_form_of_each_side_counts(end_to_end: ModuleType, tmp_path: Path) -> None:
    asked = arguments(end_to_end, tmp_path)
    for case, ours in (("2", 1.5), ("4", 6.0)):
        told = row(batch=case, ms={"torch eager": 4.0, "torch compile": 3.0, "miofind fused graph": ours})
        end_to_end.keep(end_to_end.case_of(told), {"gpu": "NVIDIA H200", "versions": {}, "row": told}, asked)
    asked.commit = "abd"
    told = row(batch="4", ms={"torch eager": 4.0, "torch compile": 3.0, "miofind fused graph": 6.0})
    end_to_end.keep(end_to_end.case_of(told), {"gpu": "NVIDIA H200", "versions": {}, "row": told}, asked)
    told = row(batch="4", ms={"torch eager": 4.0, "miofind fused graph": 1.0})
    end_to_end.keep(end_to_end.case_of(told), {"gpu": "NVIDIA H100", "versions": {}, "row": told}, asked)
    kept = end_to_end.kept_rows(tmp_path)
    assert [row["commit"] for row in kept["NVIDIA H200"].values()] == ["abc", "abd"]
    assert [row["commit"] for row in kept["NVIDIA H100"].values()] == ["abd"], "another GPU's rows are its own"
    text = end_to_end.table(asked)
    assert "torch 3.000 (compile), miofind 1.500 (fused graph), 2.00x, 3/4 calls" in text
    assert "inference, channels_last, batch 2: 2.00x" in text
    assert "inference, channels_last, batch 4: 0.50x" in text
    assert "inference, channels_last, batch 4: 4.00x" in text


def test_networks_of_other_libraries_are_named_by_their_own_names(
    scripts: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[tuple[str, bool]] = []

    def create_model(name: str, *, pretrained: bool) -> torch.nn.Module:
        made.append((name, pretrained))
        return torch.nn.Identity()

    timm = ModuleType("timm")
    monkeypatch.setattr(timm, "create_model", create_model, raising=False)
    monkeypatch.setitem(sys.modules, "timm", timm)
    network = scripts["torch_networks"].network_named("timm/densenet121")
    assert isinstance(network.build(), torch.nn.Identity)
    assert made == [("densenet121", False)]
    assert network.shape == (3, 224, 224)
    assert scripts["end_to_end"].networks("tiny,timm/densenet121") == ["tiny", "timm/densenet121"]


def test_a_network_that_is_named_twice_is_refused(end_to_end: ModuleType) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="'timm/vgg11' is named twice"):
        end_to_end.networks("timm/vgg11,tiny,timm/vgg11")


@pytest.mark.parametrize("name", ["tinny", "timm/", "keras/resnet", ""])
def test_a_name_of_no_network_or_library_is_refused(name: str, end_to_end: ModuleType) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=r"unknown: choose from resnet50,.*timm/NAME"):
        end_to_end.networks(f"tiny,{name}")


def test_one_image_is_calibrated_with_another(scripts: dict[str, ModuleType]) -> None:
    nn = torch.nn

    model, x = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.BatchNorm2d(3)), torch.full((1, 3, 8, 8), 100.0)
    scripts["torch_forms"]._calibrate(model, x)
    assert ((model[1].running_mean > 45) & (model[1].running_mean < 55)).all(), "half of it is the image"
    scripts["torch_forms"]._calibrate(model, torch.cat([x, x + 2]))
    torch.testing.assert_close(model[1].running_mean, torch.full((3,), 101.0))
