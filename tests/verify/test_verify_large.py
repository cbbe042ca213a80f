"""On outputs too large to be checked whole on the CPU place, a wrong image, channel, row or column is always seen."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import miofind
from miofind.core.problem import Direction, ProblemDescription
from miofind.device.device import Device
from miofind.errors import NoSolutionError
from miofind.launch.invoker import Invoker, make_invoker
from miofind.solver.registry import Registry
from miofind.solvers.cpu import gemm1x1
from miofind.verify.claims import Claims
from miofind.verify.verifier import Verifier

# ResNet-50's layers of 3x3 taps, where a batch of three is sampled already; the last has few channels and long sums.
LAYERS = {
    f"{shape}-{layout}-{direction}": ProblemDescription.convolution(
        x=x, w=w, padding=1, direction=direction, layout=layout
    )
    for shape, (x, w) in {
        "56x56": ((3, 64, 56, 56), (64, 64, 3, 3)),
        "7x7": ((5, 512, 7, 7), (512, 512, 3, 3)),
        "few": ((5, 64, 48, 48), (3, 64, 5, 5)),
    }.items()
    for layout in ("NCHW", "NHWC")
    for direction in Direction
}


class Spoiled(Invoker):
    """Runs another invoker, then doubles a part of the output and adds 1, which shows in large numbers and in zeros."""

    def __init__(self, inner: Invoker) -> None:
        self._inner = inner
        self.part: tuple[Any, ...] | None = None
        self.problem, self.device = inner.problem, inner.device
        self.solver_id, self.config = inner.solver_id, inner.config
        self.workspace_bytes, self.alignment_bytes = inner.workspace_bytes, inner.alignment_bytes
        self.deterministic = True

    def run(self, bases: tuple[Any, ...], stream: int) -> None:
        self._inner.run(bases, stream)
        if self.part is not None:
            written = next(i for i, operand in enumerate(self.problem.operands) if not operand.is_input)
            part = bases[written][self.part]
            part[...] = 2 * part + 1


def middles(problem: ProblemDescription) -> Iterator[tuple[Any, ...]]:
    """For each axis of the output, everything at a coordinate that is neither first nor last."""
    for axis, size in enumerate(problem.output.shape):
        for coordinate in {size // 2, size // 3} - {0, size - 1}:
            yield (*(slice(None),) * axis, coordinate)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "name",
    [
        # Each shape has three directions: every second problem is of each shape, layout and direction.
        pytest.param(name, marks=pytest.mark.full_matrix if number % 2 else [])
        for number, name in enumerate(LAYERS)
    ],
)
def test_a_wrong_middle_of_any_axis_is_caught(name: str) -> None:
    problem = LAYERS[name]
    solver, device = Registry.default()["ConvCpuIm2colGemm"], Device.cpu()
    invoker = Spoiled(make_invoker(problem, device, solver, solver.default_configs(problem, device)[0], None))  # type: ignore[arg-type]
    with Verifier(problem, device, None) as verifier:  # type: ignore[arg-type]
        verdict = verifier.verify(invoker, Claims())
        assert verdict.ok, verdict.message
        assert verdict.bound_ratio is not None
        assert 0 < verdict.bound_ratio <= 1
        for part in middles(problem):
            invoker.part = part
            assert "exact gate" in verifier.verify(invoker, Claims()).message, part
            assert "numeric gate" in verifier.verify(invoker, Claims(exact=False)).message, part


def test_an_element_that_is_said_to_be_wrong_is_wrong() -> None:
    """Places in a sample are told as indices into the output."""
    problem = LAYERS["56x56-NHWC-forward"]
    solver, device = Registry.default()["ConvCpuIm2colGemm"], Device.cpu()
    invoker = Spoiled(make_invoker(problem, device, solver, solver.default_configs(problem, device)[0], None))  # type: ignore[arg-type]
    invoker.part = (1, 17)
    with Verifier(problem, device, None) as verifier:  # type: ignore[arg-type]
        assert "the worst at (1, 17, " in verifier.verify(invoker, Claims()).message


def test_the_gates_look_at_different_places_and_a_seed_repeats_them() -> None:
    problem = LAYERS["56x56-NCHW-forward"]
    solver, device = Registry.default()["ConvCpuIm2colGemm"], Device.cpu()
    inner = make_invoker(problem, device, solver, solver.default_configs(problem, device)[0], None)  # type: ignore[arg-type]
    seen = []
    for seed in (3, 3, 4):
        with Verifier(problem, device, None, seed=seed) as verifier:  # type: ignore[arg-type]
            assert verifier.verify(inner, Claims()).ok
            harness: Any = verifier._harness
            seen.append([np.unique(reference.indices) for reference in harness._references.values()])
    exact, numeric, nonfinite = seen[0]
    assert np.intersect1d(numeric, nonfinite).size < numeric.size / 2
    assert np.intersect1d(exact, numeric).size < exact.size / 2
    np.testing.assert_array_equal(seen[0][0], seen[1][0])
    np.testing.assert_array_equal(seen[0][1], seen[1][1])
    assert not np.array_equal(seen[0][0], seen[2][0])


def test_a_find_leaves_out_a_solver_that_is_wrong_in_the_middle_of_the_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = ProblemDescription.convolution(x=(5, 256, 56, 56), w=(64, 256, 1, 1))
    right = gemm1x1.multiply

    def wrong(problem: Any, config: Any, buffers: Any) -> None:
        right(problem, config, buffers)
        buffers["y"][2] += 1

    monkeypatch.setattr(gemm1x1, "multiply", wrong)
    options = miofind.FindOptions(only=("ConvCpuGemm1x1",))
    with (
        miofind.Handle("cpu", database=tmp_path / "finddb.db") as handle,
        pytest.raises(NoSolutionError, match="exact gate"),
    ):
        miofind.find_solutions(problem, options=options, handle=handle)
