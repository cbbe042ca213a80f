"""The cuDNN solver without a GPU: what it serves, its configurations, and the library's handles and errors."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from miofind.core.problem import Direction, ProblemDescription
from miofind.device.device import Device
from miofind.errors import InvalidConfigError, LaunchError, MissingLibraryError
from miofind.libraries import cudnn_backend as backend
from miofind.libraries.cudnn import EnginePlan, _fault
from miofind.libraries.cudnn_graph import Knob
from miofind.libraries.cudnn_notes import (
    Note,
    growth,
    is_exact,
    known_fault,
    notes_text,
    overdeclared_notes,
    parsed_notes,
    undeclared_notes,
)
from miofind.solver.solver import MAX_DEFAULT_CONFIGS, Reach, Solver
from miofind.solver.steps import Config, CudnnStep
from miofind.solvers.vendor import cudnn as module

SOLVER: Solver = module.SOLVERS[0]
HOPPER = Device.virtual("90a")
RECORD = {"engine": 62, "knobs": {"TILE_SIZE": 5, "TILEK": 1}, "notes": "tensor_core", "workspace_bytes": 4096}


def problem(**fields: Any) -> ProblemDescription:
    return ProblemDescription.convolution(**({"x": (2, 8, 9, 9), "w": (8, 8, 3, 3), "dtype": "float16"} | fields))


@pytest.fixture
def live(monkeypatch: pytest.MonkeyPatch) -> Device:
    """A device with an index, on a machine whose cuDNN offers nothing until a test says otherwise."""
    monkeypatch.setattr(module, "engine_plans", lambda problem, device: ())
    return Device(place=HOPPER.place, index=0, name="fake", sm=90)


def offer(engine: int, *notes: Note, workspace_bytes: int = 0) -> EnginePlan:
    wider = growth(frozenset(notes), problem())
    return EnginePlan(
        engine=engine, knobs=((2, 3),), notes=frozenset(notes), growth=wider, workspace_bytes=workspace_bytes
    )


@pytest.mark.parametrize("arch", ["80", "90a", "120a"])
@pytest.mark.parametrize("of", SOLVER.examples(), ids=str)
def test_examples_are_served(of: ProblemDescription, arch: str) -> None:
    assert SOLVER.applicability(of, Device.virtual(arch))


@pytest.mark.parametrize(
    ("of", "device", "reason"),
    [
        (problem(), Device.cpu(), "runs on cuda"),
        (problem(), Device.virtual("70"), "7.5"),
        (problem(dtype="float64"), HOPPER, "float64"),
        (problem(dtype={"x": "float16", "w": "float16", "y": "float32"}), HOPPER, "one data type"),
        (problem(dtype="bfloat16"), Device.virtual("75"), "bfloat16"),
        (problem(x=(2**20, 8, 20, 20)), HOPPER, "elements"),
    ],
    ids=["cpu", "sm70", "float64", "mixed-types", "bfloat16-sm75", "too-large"],
)
def test_others_are_refused_with_a_reason(of: ProblemDescription, device: Device, reason: str) -> None:
    assert reason in SOLVER.applicability(of, device).reason


def test_mixed_layouts_are_left_to_the_library() -> None:
    assert SOLVER.applicability(problem(layout={"x": "NHWC", "w": "NCHW", "y": "NHWC"}), HOPPER)


def test_a_virtual_device_gets_the_heuristics_choice_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "library", lambda: pytest.fail("the library was loaded"))
    for of in SOLVER.examples():
        (config,) = SOLVER.default_configs(of, HOPPER)
        assert config["engine"] == -1
        assert list(SOLVER.configs(of, HOPPER)) == [config]
        SOLVER.check_config(of, HOPPER, config)
        assert SOLVER.is_exact(config)
        assert SOLVER.error_growth(of, config) == 1
        assert SOLVER.workspace_bytes(of, HOPPER, config) == config["workspace_bytes"]
        assert SOLVER.solution(of, HOPPER, config).deterministic
        assert SOLVER.estimate_ms(of, HOPPER, config) > 0


def test_the_heuristics_choice_of_an_ieee_problem_allows_no_tensor_cores() -> None:
    (ieee,) = SOLVER.default_configs(problem(dtype="float32"), HOPPER)
    (tf32,) = SOLVER.default_configs(problem(dtype="float32", math="tf32"), HOPPER)
    assert ieee["notes"] == ""
    assert tf32["notes"] == "tensor_core"


def test_defaults_are_the_first_offers_with_direct_ones_first(live: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    offers = (offer(1, Note.FFT), offer(2, Note.NONDETERMINISTIC), *(offer(n) for n in range(3, 30)))
    monkeypatch.setattr(module, "engine_plans", lambda problem, device: offers)
    defaults = [config["engine"] for config in SOLVER.default_configs(problem(), live)]
    assert defaults == list(range(2, 2 + MAX_DEFAULT_CONFIGS))
    assert [config["engine"] for config in SOLVER.configs(problem(), live)] == list(range(1, 30))


def test_a_refusal_by_the_library_leaves_a_candidate_that_will_say_why(
    live: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(problem: ProblemDescription, device: Device) -> tuple[EnginePlan, ...]:
        raise LaunchError("CUDNN_STATUS_NOT_SUPPORTED")

    monkeypatch.setattr(module, "engine_plans", refuse)
    (config,) = SOLVER.default_configs(problem(), live)
    assert config["engine"] == -1


def test_an_offer_becomes_a_config_and_a_step(live: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    notes = frozenset({Note.WINOGRAD, Note.NONDETERMINISTIC, Note.STRICT_NAN_PROPAGATION})
    plan = EnginePlan(engine=7, knobs=((2, 5), (13, 0), (77, -1)), notes=notes, growth=8.0, workspace_bytes=300)
    monkeypatch.setattr(module, "engine_plans", lambda problem, device: (plan,))
    (config,) = SOLVER.default_configs(problem(), live)
    assert config.json == (
        '{"engine":7,"knobs":{"KNOB_77":-1,"TILEK":0,"TILE_SIZE":5},'
        '"notes":"nondeterministic+winograd","workspace_bytes":300}'
    )
    SOLVER.check_config(problem(), live, config)
    solution = SOLVER.solution(problem(), live, Config.from_json(config.json))
    assert solution.steps == (
        CudnnStep(
            engine=7,
            knobs=plan.knobs,
            notes=("nondeterministic", "winograd"),
            workspace="workspace",
            workspace_bytes=300,
        ),
    )
    assert solution.workspace.bytes == 512
    assert not solution.deterministic
    assert not SOLVER.is_exact(config)
    assert SOLVER.error_growth(problem(), config) > 1


def test_no_workspace_means_no_region() -> None:
    solution = SOLVER.solution(problem(), HOPPER, Config(RECORD | {"workspace_bytes": 0}))
    assert solution.workspace.regions == ()
    assert solution.steps[0].workspace is None  # type: ignore[union-attr]


def test_a_recorded_config_is_valid() -> None:
    SOLVER.check_config(problem(), HOPPER, Config(RECORD))


@pytest.mark.parametrize(
    "change",
    [
        {"engine": -2},
        {"engine": 10_000},
        {"engine": True},
        {"engine": "62"},
        {"engine": 62.0},
        {"engine": -1},
        {"knobs": 3},
        {"knobs": {"TILE": 1}},
        {"knobs": {"KNOB_2": 1}},
        {"knobs": {"KNOB_02": 1}},
        {"knobs": {"TILE_SIZE": -2}},
        {"knobs": {"TILE_SIZE": 2**31}},
        {"knobs": {"TILE_SIZE": True}},
        {"knobs": {f"KNOB_{n}": 1 for n in range(100, 140)}},
        {"notes": 1},
        {"notes": "precise"},
        {"notes": "winograd+fft"},
        {"notes": "fft+fft"},
        {"notes": "+fft"},
        {"notes": "reduced_precision_reduction"},
        {"workspace_bytes": -1},
        {"workspace_bytes": 2**41},
        {"workspace_bytes": 1.5},
        {"extra": 1},
    ],
    ids=str,
)
def test_a_config_from_elsewhere_is_checked(change: dict[str, Any]) -> None:
    with pytest.raises(InvalidConfigError, match="ConvCudnn"):
        SOLVER.check_config(problem(), HOPPER, Config(RECORD | change))


def test_a_config_without_a_parameter_is_refused() -> None:
    for name in RECORD:
        with pytest.raises(InvalidConfigError, match="must have the parameters"):
            SOLVER.check_config(problem(), HOPPER, Config({k: v for k, v in RECORD.items() if k != name}))


def test_tensor_cores_are_refused_for_ieee_float32_alone() -> None:
    config = Config(RECORD)
    SOLVER.check_config(problem(dtype="float32", math="tf32"), HOPPER, config)
    with pytest.raises(InvalidConfigError, match="less precise"):
        SOLVER.check_config(problem(dtype="float32"), HOPPER, config)


@pytest.mark.parametrize("direction", Direction)
def test_estimates_prefer_tensor_cores(direction: Direction) -> None:
    of = problem(x=(32, 256, 28, 28), w=(256, 256, 3, 3), direction=direction)
    with_cores = SOLVER.estimate_ms(of, HOPPER, Config(RECORD))
    assert with_cores < SOLVER.estimate_ms(of, HOPPER, Config(RECORD | {"notes": ""}))


@pytest.mark.parametrize(
    ("notes", "exact", "wider"),
    [
        ((), True, False),
        ((Note.TENSOR_CORE, Note.STRICT_NAN_PROPAGATION, Note.NONDETERMINISTIC), True, False),
        ((Note.FFT,), False, True),
        ((Note.WINOGRAD,), False, True),
        ((Note.WINOGRAD, Note.WINOGRAD_TILE_4X4, Note.TENSOR_CORE), False, True),
    ],
    ids=str,
)
def test_notes_say_how_exact_an_engine_is(notes: tuple[Note, ...], exact: bool, wider: bool) -> None:
    assert is_exact(frozenset(notes)) is exact
    assert (growth(frozenset(notes), problem()) > 1) is wider
    config = Config.of(engine=1, knobs={}, notes=notes_text(frozenset(notes)), workspace_bytes=0)
    assert SOLVER.error_reach(problem(), config) is (Reach.TILE if wider else Reach.PRODUCTS)
    assert SOLVER.keeps_bound(problem(), config) is not wider


def test_growth_follows_the_tile() -> None:
    tiles = [Note.WINOGRAD_TILE_4X4, Note.WINOGRAD_TILE_6X6, Note.WINOGRAD_TILE_13X13]
    growths = [growth(frozenset({Note.WINOGRAD, tile}), problem()) for tile in tiles]
    assert growths == sorted(growths)


def test_winograd_without_a_tile_is_judged_by_the_filter() -> None:
    bare = frozenset({Note.WINOGRAD})
    assert growth(bare, problem()) < growth(bare, problem(w=(8, 8, 5, 5)))


def test_engines_that_say_too_little_are_known() -> None:
    weights = problem(direction="backward_weights")
    assert undeclared_notes(weights, 17) == {Note.WINOGRAD}
    assert undeclared_notes(problem(), 17) == frozenset()
    assert undeclared_notes(weights, 61) == undeclared_notes(weights, 47) == {Note.REDUCED_PRECISION_REDUCTION}
    assert undeclared_notes(problem(direction="backward_weights", dtype="float32"), 61) == frozenset()


def test_an_engine_that_says_too_much_is_known() -> None:
    assert overdeclared_notes(problem(), 63) == {Note.REDUCED_PRECISION_REDUCTION}
    assert overdeclared_notes(problem(), 62) == frozenset()
    assert overdeclared_notes(problem(dtype="bfloat16"), 63) == frozenset()
    assert overdeclared_notes(problem(direction="backward_weights"), 63) == frozenset()


def test_engines_that_ignore_padding_are_known() -> None:
    uneven = problem(direction="backward_weights", padding=((0, 1), (1, 1)))
    assert known_fault(uneven, 1)
    assert not known_fault(uneven, 0)
    assert not known_fault(problem(direction="backward_weights", padding=1), 1)


def test_an_engine_that_loses_overflow_is_refused() -> None:
    """Engine 47 of float16 forward writes 0 for sums beyond float16 (cuDNN 9.19, H200: -192903 came out as 0)."""
    config = Config({**RECORD, "engine": 47})
    assert known_fault(problem(dtype="float16"), 47)
    assert not known_fault(problem(dtype="bfloat16"), 47)
    assert not known_fault(problem(dtype="float16", direction="backward_data"), 47)
    with pytest.raises(InvalidConfigError, match="engine 47 writes 0 for what exceeds float16"):
        SOLVER.check_config(problem(dtype="float16"), HOPPER, config)
    SOLVER.check_config(problem(dtype="bfloat16"), HOPPER, config)


@pytest.mark.parametrize("epilogue", ["bias.residual.relu", "bias.silu"])
def test_an_engine_that_reads_the_epilogues_tensors_early_is_refused(epilogue: str) -> None:
    config = Config({**RECORD, "engine": 4})
    fused = problem(layout="NHWC", epilogue=epilogue)
    assert known_fault(fused, 4)
    assert not known_fault(fused, 41)
    assert not known_fault(fused.bare, 4)
    assert not known_fault(problem(layout="NHWC", epilogue="relu"), 4), "it reads nothing"
    assert not known_fault(problem(layout="NHWC", direction="backward_data", epilogue="residual"), 4)
    assert "reads the epilogue's operands" in _fault(4, frozenset(), fused)
    assert _fault(4, frozenset({Note.TENSOR_CORE}), fused.bare) == ""
    with pytest.raises(InvalidConfigError, match="engine 4 reads the epilogue's operands"):
        SOLVER.check_config(fused, HOPPER, config)
    SOLVER.check_config(fused.bare, HOPPER, config)


def test_strided_backward_data_spreads_infinities() -> None:
    """Zeros between strided gradients are multiplied by infinities beside them (engines 40, 43, 56, 57 and 58)."""
    config = Config(RECORD)
    assert SOLVER.spreads_nonfinite(problem(direction="backward_data", stride=2), config)
    assert not SOLVER.spreads_nonfinite(problem(direction="backward_data"), config)
    assert not SOLVER.spreads_nonfinite(problem(stride=2), config)


def test_an_engine_for_first_layers_spreads_infinities() -> None:
    assert SOLVER.spreads_nonfinite(problem(), Config({**RECORD, "engine": 63}))
    assert not SOLVER.spreads_nonfinite(problem(direction="backward_data"), Config({**RECORD, "engine": 63}))


def test_notes_survive_their_text() -> None:
    assert parsed_notes(notes_text(frozenset(Note))) == frozenset(Note)
    assert parsed_notes("") == frozenset()


def test_knobs_have_the_values_of_the_c_header() -> None:
    values = {
        Knob.SPLIT_K: 0,
        Knob.TILE_SIZE: 2,
        Knob.TILEK: 13,
        Knob.STAGES: 14,
        Knob.WORKSPACE: 25,
        Knob.TILE_CGA_M: 27,
    }
    assert all(knob == value for knob, value in values.items())
    assert Knob.OUTPUT_TMA_ENABLE == 45


def test_a_missing_library_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for opener in ("_already_loaded", "_from_wheel", "_from_system"):
        monkeypatch.setattr(backend, opener, lambda: None)
    backend.library.cache_clear()
    with pytest.raises(MissingLibraryError, match="pip install"):
        backend.library()


class FakeLibrary:
    """Counts handles and stream changes; every status has a name."""

    version = 91900

    def __init__(self) -> None:
        self.handles = 0
        self.streams: list[tuple[int, int]] = []

    def create_handle(self, created: Any) -> int:
        self.handles += 1
        created._obj.value = 0x1000 * self.handles
        return 0

    def set_stream(self, handle: int, stream: int) -> int:
        self.streams.append((handle, stream))
        return 0

    def message(self, status: int) -> str:
        return f"CUDNN_STATUS_{status}"


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeLibrary]:
    library = FakeLibrary()
    monkeypatch.setattr(backend, "library", lambda: library)
    monkeypatch.setattr(backend, "_idle", {})
    monkeypatch.setattr(backend, "_thread", backend._Thread())
    yield library
    backend._thread.leases.handles.clear()


def test_a_status_becomes_a_launch_error(fake: FakeLibrary) -> None:
    backend.check(0, "anything")
    with pytest.raises(LaunchError, match="cuDNN 91900: executing a plan failed with CUDNN_STATUS_5000") as caught:
        backend.check(5000, "executing a plan")
    assert caught.value.__cause__ is None


@pytest.mark.parametrize("status", [4003, 4004])
def test_running_out_of_memory_is_recognised_by_status(fake: FakeLibrary, status: int) -> None:
    with pytest.raises(LaunchError) as caught:
        backend.check(status, "finalizing a plan")
    assert isinstance(caught.value.__cause__, MemoryError)


def test_a_handle_belongs_to_one_thread_and_device_and_is_lent_again(fake: FakeLibrary) -> None:
    mine = backend.thread_handle(0)
    assert backend.thread_handle(0) is mine
    assert backend.thread_handle(1) is not mine
    theirs: list[backend.Handle] = []
    for _ in range(2):
        thread = threading.Thread(target=lambda: theirs.append(backend.thread_handle(0)))
        thread.start()
        thread.join()
    assert theirs[0] is theirs[1]
    assert theirs[0] is not mine
    assert fake.handles == 3


def test_a_stream_is_set_only_when_it_changes(fake: FakeLibrary) -> None:
    handle = backend.thread_handle(0)
    for stream in (0, 8, 8, 0):
        handle.use(stream)
    assert [stream for _, stream in fake.streams] == [8, 0]


def test_attributes_have_the_types_of_the_c_interface() -> None:
    assert ctypes.sizeof(backend._CTYPES[backend.Type.INT64]) == 8
    assert backend.Type.KNOB_TYPE not in backend._CTYPES  # enumerators are ints
