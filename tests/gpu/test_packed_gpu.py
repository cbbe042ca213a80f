"""Weights packed once on a GPU: the same bits as from plain weights, on other streams and in captured graphs, too."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from helpers.problems.other_sizes import SIZES, with_other
from helpers.runs.device_buffers import Buffer, addresses, download, upload

import miofind
from miofind import Handle
from miofind.compiler import Compiler
from miofind.core.problem import ProblemDescription
from miofind.device.device import Device, Place
from miofind.launch.invoker import bases_of, make_invoker
from miofind.runtime.solution import Solution, SolutionList, Source
from miofind.solver.registry import Registry
from miofind.solver.solver import Solver

cupy = pytest.importorskip("cupy")
pytestmark = pytest.mark.gpu


def cases() -> Iterator[tuple[Solver, ProblemDescription]]:
    """The examples of each solver that packs weights on a GPU, and whether it does for any."""
    virtual = Device.virtual("90a")
    for solver in Registry.default().values():
        for problem in solver.examples():
            if solver.applicability(problem, virtual) and packs(solver, problem, virtual):
                yield solver, problem


def packs(solver: Solver, problem: ProblemDescription, device: Device) -> bool:
    return device.place is Place.CUDA and any(
        solver.packing(problem, device, config) is not None for config in solver.default_configs(problem, device)
    )


CASES = list(cases())


def test_every_solver_that_transforms_weights_is_tried() -> None:
    assert {solver.id for solver, _ in CASES} == {
        "ConvFft",
        "ConvFftDepthwise",
        "ConvFftTiles",
        "ConvWinograd",
        "ConvWinogradFused",
        "ConvWinogradMma",
    }


@pytest.mark.parametrize(("solver", "problem"), CASES, ids=lambda case: getattr(case, "id", None) or str(case))
def test_packed_weights_give_the_same_bits(
    solver: Solver, problem: ProblemDescription, device: Device, compiler: Compiler
) -> None:
    for config in solver.default_configs(problem, device):
        packing = solver.packing(problem, device, config)
        if packing is None:
            continue
        generator = np.random.default_rng(3)
        inputs = {name: generator.standard_normal(problem.tensor(name).shape) for name in problem.direction.inputs}
        stream = cupy.cuda.get_current_stream().ptr
        want, got = upload(problem, inputs), upload(problem, inputs)
        whole = make_invoker(problem, device, solver, config, compiler)
        whole.run(bases_of(problem, addresses(want), Buffer(whole.workspace_bytes).address), stream)
        pack = make_invoker(problem, device, solver, config, compiler, packing.pack)
        packed = Buffer(packing.bytes)
        into = {"w": got["w"].address, "y": packed.address}
        pack.run(bases_of(problem, into, Buffer(pack.workspace_bytes).address), stream)
        run = make_invoker(problem, device, solver, config, compiler, packing.run)
        given = addresses(got) | {"w": packed.address}
        run.run(bases_of(problem, given, Buffer(run.workspace_bytes).address), stream)
        np.testing.assert_array_equal(download(problem, got), download(problem, want), config.json)


@pytest.mark.parametrize(("solver", "problem"), CASES, ids=lambda case: getattr(case, "id", None) or str(case))
def test_equal_forms_are_equal_bytes(
    solver: Solver, problem: ProblemDescription, device: Device, compiler: Compiler
) -> None:
    others = [other for size in ("n", "spatial sizes") for other in with_other(SIZES[size], problem)[:1]]
    w = {"w": np.random.default_rng(3).standard_normal(problem.w.shape)}
    seen: dict[str, np.ndarray] = {}
    for each in (problem, *filter(lambda other: solver.applicability(other, device), others)):
        for config in solver.default_configs(each, device)[:2]:
            packing = solver.packing(each, device, config)
            if packing is None or not packing.form:
                continue
            pack = make_invoker(each, device, solver, config, compiler, packing.pack)
            given, packed = upload(each, w), Buffer(packing.bytes)
            into = {"w": given["w"].address, "y": packed.address}
            pack.run(bases_of(each, into, 0), cupy.cuda.get_current_stream().ptr)
            made = packed.read(np.dtype(np.uint8))
            np.testing.assert_array_equal(made, seen.setdefault(packing.form, made), config.json)


def solution_of(handle: Handle) -> Solution:
    """ConvWinogradMma's, without a find."""
    problem = ProblemDescription.convolution(x=(2, 32, 14, 14), w=(48, 32, 3, 3), padding=1)
    solver = Registry.default()["ConvWinogradMma"]
    found = SolutionList(handle)
    solution = Solution(
        problem=problem,
        device=handle.device,
        solver_id=solver.id,
        algorithm=solver.algorithm,
        library=solver.keys[0].library,
        config=solver.default_configs(problem, handle.device)[0],
        time_ms=1.0,
        workspace_bytes=0,
        deterministic=True,
        max_error=None,
        source=Source.PREDICTED,
        solution_list=found,
    )
    found.solutions.append(solution)
    return solution


@pytest.mark.parametrize("library", ["cupy", "torch"])
def test_a_packed_solution_is_captured(library: str, device: Device, compiler: Compiler) -> None:
    solution = solution_of(Handle(device, compiler=compiler))
    generator = np.random.default_rng(3)
    x, w = (generator.standard_normal(solution.problem.tensor(n).shape).astype(np.float32) for n in ("x", "w"))
    xs, ws = cupy.asarray(x), cupy.asarray(w)
    if library == "torch":
        torch = pytest.importorskip("torch")
        xs, ws = torch.from_numpy(x).cuda(), torch.from_numpy(w).cuda()
    packed = solution.pack(ws)
    want = miofind.run_solution(solution, xs, ws)
    assert bool((packed.run(xs) == want).all())
    assert packed.packed_bytes > ws.nbytes
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    out = want * 0
    workspace = cupy.empty(packed.workspace_bytes, cupy.uint8)
    cupy.cuda.Device().synchronize()
    with stream:
        stream.begin_capture()
        assert packed.run(xs, out=out, workspace=workspace, stream=stream) is out
        graph = stream.end_capture()
        graph.launch(stream)
        stream.synchronize()
    assert bool((out == want).all())
