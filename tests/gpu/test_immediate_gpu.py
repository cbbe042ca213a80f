"""Answers without measuring on a GPU: they run, and the device is the one that models were trained for."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import miofind
from miofind.device.device import Device
from miofind.find.immediate import devices
from miofind.reference.convolution import reference_on_host
from miofind.runtime.solution import Source

cupy = pytest.importorskip("cupy")
pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("direction", list(miofind.Direction))
def test_predictions_run_and_are_right(direction: miofind.Direction) -> None:
    """A shape that no FindDB knows; none of its predictions is cuDNN's."""
    problem = miofind.ProblemDescription.convolution(
        x=(3, 24, 13, 11), w=(40, 24, 3, 3), padding=1, direction=direction, dtype="float16", layout="NHWC"
    )
    random = np.random.default_rng(0)
    given = {name: random.standard_normal(problem.tensor(name).shape).astype(np.float16) for name in ("x", "w", "y")}
    expected = reference_on_host(problem, **given)
    arrays = {name: cupy.asarray(given[name]) for name in direction.inputs}
    last = {name: cupy.ascontiguousarray(array.transpose(0, 2, 3, 1)) for name, array in arrays.items()}
    named = {"dy" if name == "y" else name: array.transpose(0, 3, 1, 2) for name, array in last.items()}
    with miofind.Handle("cuda:0", database=":memory:") as handle:
        found = miofind.find_solutions(problem, options=miofind.FindOptions(find_mode="fast"), handle=handle)
        assert {solution.source for solution in found} == {Source.PREDICTED}
        assert "ConvCudnn" not in {solution.solver_id for solution in found}
        for solution in (found[0], found[-1]):
            result = cupy.asnumpy(miofind.run_solution(solution, **named)).astype(np.float64)
            np.testing.assert_allclose(result, expected, rtol=2e-2, atol=1e-1)


def test_a_described_device_has_the_figures_of_the_one_that_is_here(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Models learn from estimates for the described device and correct those for this one."""
    if device.name not in devices._CEILINGS:
        pytest.skip(f"nobody has described {device.name}")
    monkeypatch.setattr(devices, "device_of", _absent)
    told = devices.described(device.identity)
    assert told.index < 0
    for name in ("clock_hz", "bandwidth_bytes_per_s", "l2_bytes", "shared_bytes", "sm_count", "sm"):
        assert getattr(told, name) == pytest.approx(getattr(device, name), rel=0.03), name


def _absent(identity: str) -> Device:
    """The device with an identity as a machine without a GPU tells it."""
    name, count, sm, _ = identity.split("|")
    return replace(Device.virtual(sm.replace(".", "")), name=name, sm_count=int(count))
