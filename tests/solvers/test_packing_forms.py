"""Forms of packed weights: what problems of equal forms pack is the same, byte for byte."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from helpers.problems.other_sizes import SIZES, with_other
from numpy.typing import NDArray

from miofind.compiler import BinaryCache, Compiler
from miofind.core.problem import Direction, ProblemDescription
from miofind.device.device import Device, Place
from miofind.launch.invoker import bases_of, make_invoker
from miofind.solver.registry import Registry
from miofind.solver.solver import Solver
from miofind.solver.steps import Config, Packing
from miofind.solvers.cpu.winograd import ConvCpuWinograd

CPU, GPU = Device.cpu(), Device.virtual("90a")
SHARED = {"ConvCpuWinograd", "ConvWinograd", "ConvWinogradFused", "ConvWinogradMma"}
"""Those whose packed weights problems share."""


def packings(problem: ProblemDescription, solver: Solver) -> Iterator[tuple[Config, Packing]]:
    device = CPU if solver.keys[0].place is Place.CPU else GPU
    for config in solver.default_configs(problem, device) if solver.applicability(problem, device) else ():
        packing = solver.packing(problem, device, config)
        if packing is not None:
            yield config, packing


def test_who_shares_packed_weights() -> None:
    formed = {
        solver.id
        for solver in Registry.default().values()
        for problem in solver.examples()
        for _, packing in packings(problem, solver)
        if packing.form
    }
    assert formed == SHARED


@pytest.mark.parametrize("name", sorted(SHARED))
@pytest.mark.parametrize("size", ["n", "spatial sizes", "padding"])
def test_other_images_have_the_same_forms(name: str, size: str) -> None:
    solver, checked = Registry.default()[name], 0
    for problem in solver.examples():
        forms = {packing.form: packing.bytes for _, packing in packings(problem, solver)}
        for other in with_other(SIZES[size], problem)[:2]:
            for _, packing in packings(other, solver):
                assert forms.get(packing.form, packing.bytes) == packing.bytes
                checked += packing.form in forms
    assert checked


def packed(problem: ProblemDescription, config: Config, w: NDArray[np.float32]) -> bytes:
    solver, compiler = ConvCpuWinograd(), Compiler(BinaryCache())
    packing = solver.packing(problem, CPU, config)
    assert packing is not None
    made = np.zeros(packing.bytes, np.uint8)
    invoker = make_invoker(problem, CPU, solver, config, compiler, packing.pack)
    invoker.run(bases_of(problem, {"w": w, "y": made}, None), 0)
    return made.tobytes()


@pytest.mark.parametrize("direction", [Direction.FORWARD, Direction.BACKWARD_DATA])
def test_equal_forms_are_equal_bytes(direction: Direction) -> None:
    seen: dict[str, bytes] = {}
    w = np.random.default_rng(5).standard_normal((32, 16, 3, 3)).astype(np.float32)
    for x, groups in (((1, 16, 9, 9), 1), ((4, 16, 12, 7), 1), ((2, 32, 9, 9), 2), ((3, 32, 5, 8), 2)):
        problem = ProblemDescription.convolution(x=x, w=w.shape, groups=groups, direction=direction)
        for config, packing in packings(problem, ConvCpuWinograd()):
            made = packed(problem, config, w)
            assert seen.setdefault(packing.form, made) == made
    tiles = len(ConvCpuWinograd.parameters["tile"])
    assert len(seen) == 2 * tiles
    assert len({each for form, each in seen.items() if form.endswith(" 1")}) == tiles
