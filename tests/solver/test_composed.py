"""Composed solvers: where registries have them, what they take over from the other solver, and what they add."""

from __future__ import annotations

import pickle

import pytest

from miofind.core.problem import DataType, ProblemDescription
from miofind.device.device import Device, Library, Place
from miofind.errors import InvalidOptionError, UnknownSolverError
from miofind.find.lookup.validity import is_current, solver_hash
from miofind.options import FindOptions
from miofind.runtime.handle import Handle
from miofind.solver.registry import Registry, composed
from miofind.solver.solver import Solver
from miofind.solver.steps import ConvSolution, CudnnStep, KernelStep
from miofind.solvers.cpu.direct import ConvCpuDirect
from miofind.solvers.pointwise.composed import Composed

pytestmark = pytest.mark.sampled(3)

DEVICE = Device.virtual("90a")
DEFAULT = Registry.default()
FUSED = ProblemDescription.convolution(
    x=(8, 64, 28, 28), w=(64, 64, 3, 3), padding=1, dtype="float16", layout="NHWC", epilogue="bias.silu"
)
ON_GPU = [solver for solver in DEFAULT.values() if solver.keys[0].place is Place.CUDA]


class Theirs(ConvCpuDirect):
    """A sound solver of another package."""

    id = "vendor/Theirs"


def test_a_registry_gives_composed_forms_and_lists_none() -> None:
    name = "ConvDirectNaive+Pointwise"
    for found in (DEFAULT[name], DEFAULT.get(name), DEFAULT.named("convdirectnaive+POINTWISE")):
        assert isinstance(found, Composed)
        assert found == DEFAULT[name]
        assert hash(found) == hash(DEFAULT[name])
        assert found.id == name
    assert name in DEFAULT
    assert not any(solver_id.endswith("+Pointwise") for solver_id in DEFAULT)
    assert "+Pointwise" not in DEFAULT
    assert DEFAULT.get("ConvNobodys+Pointwise") is None
    assert DEFAULT.get(f"{name}+Pointwise") is None
    with pytest.raises(UnknownSolverError, match="is not registered"):
        DEFAULT.named("ConvNobodys+Pointwise")


def test_solvers_of_other_packages_have_composed_forms_in_other_processes_too() -> None:
    registry = DEFAULT.with_solvers(Theirs)
    arrived = pickle.loads(pickle.dumps(registry))
    assert arrived["vendor/Theirs+Pointwise"].id == "vendor/Theirs+Pointwise"
    options = FindOptions(only=("vendor/theirs+pointwise",))
    options.check_names(registry)
    with pytest.raises(UnknownSolverError):
        options.check_names(DEFAULT)
    with Handle("cpu", registry=registry) as handle:
        assert options.allows(handle.registry["vendor/Theirs+Pointwise"])
        assert not options.allows(handle.registry["vendor/Theirs"])


def test_no_solver_is_registered_under_the_id_of_a_composed_form() -> None:
    for solver in (composed(DEFAULT["ConvDirectNaive"]), type("Own", (Theirs,), {"id": "vendor/Own+Pointwise"})):
        with pytest.raises(InvalidOptionError, match=r"must not end with \+Pointwise"):
            Registry((solver,))


@pytest.mark.parametrize("solver", ON_GPU, ids=lambda solver: solver.id)
def test_a_composed_form_is_the_solver_and_passes(solver: Solver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Device, "library_version", lambda self, library: 1)
    whole = composed(solver)
    for problem in whole.examples():
        bare = problem.bare
        if not solver.applicability(bare, DEVICE):
            continue
        assert whole.applicability(problem, DEVICE)
        assert not whole.applicability(bare, DEVICE)
        assert whole.tensor_alignment(problem) >= 16
        if solver.library is Library.CUDNN:
            continue
        config = solver.default_configs(bare, DEVICE)[0]
        assert whole.default_configs(problem, DEVICE)[0] == config
        whole.check_config(problem, DEVICE, config)
        alone, steps = solver.solution(bare, DEVICE, config), whole.solution(problem, DEVICE, config).steps
        passes = steps[len(alone.steps) :]
        assert steps == ConvSolution(steps=(*alone.steps, *passes)).steps
        launched = [(step.entry, step.is_fused, step.pdl) for step in passes if isinstance(step, KernelStep)]
        own = whole.workspace_bytes(problem, DEVICE, config) - alone.workspace.bytes
        if problem.epilogue.outputs:
            assert launched == [("channel_sums", False, True), ("channel_sums_finish", False, True)]
            assert own >= 4 * problem.k * len(problem.epilogue.outputs)
        else:
            assert launched == [("epilogue_pass", True, True)]
            assert own == 0
        assert not any(step.is_fused for step in alone.kernels)
        assert whole.solution(problem, DEVICE, config).workspace.bytes == own + alone.workspace.bytes
        assert whole.estimate_ms(problem, DEVICE, config) > solver.estimate_ms(bare, DEVICE, config)
        packing, packed = solver.packing(bare, DEVICE, config), whole.packing(problem, DEVICE, config)
        assert (packing is None) == (packed is None)
        if packing and packed:
            assert packed.pack == packing.pack
            assert packed.run.steps == ConvSolution(steps=(*packing.run.steps, *passes)).steps
        rounds = problem.y.dtype in (DataType.FLOAT16, DataType.BFLOAT16) and problem.epilogue.changes_results
        assert whole.rounds_twice(problem, config) == rounds


def test_a_composed_forms_hash_is_of_both_parts() -> None:
    hashes = {name: solver_hash(DEFAULT[name]) for name in ("ConvDirectNaive", "ConvDirectTiled", "ConvCudnn")}
    own = {name: solver_hash(DEFAULT[f"{name}+Pointwise"], fused=True) for name in hashes}
    assert len({*hashes.values(), *own.values()}) == 6
    whole = DEFAULT["ConvDirectNaive+Pointwise"]
    assert is_current(whole, whole.version, own["ConvDirectNaive"], DEVICE)
    assert not is_current(whole, whole.version, hashes["ConvDirectNaive"], DEVICE)


def test_cudnn_computes_the_bare_problem_in_a_composed_form() -> None:
    whole, cudnn = DEFAULT["ConvCudnn+Pointwise"], DEFAULT["ConvCudnn"]
    config = cudnn.default_configs(FUSED.bare, DEVICE)[0]
    first, _ = whole.solution(FUSED, DEVICE, config).steps
    assert isinstance(first, CudnnStep)
    assert not first.fused
