"""ConvImplicitGemmWgmma and ConvChannelsLast on a GPU: both gates, moving tensors, capture, threads, equal bits."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from helpers.problems.drawn_configs import WGMMA_TILINGS, drawn, drawn_wgmma, lacking_tilings
from helpers.problems.wgmma_forms import KINDS, ONE_FIRST
from helpers.runs.device_buffers import POISON, Buffer, addresses, download, integers, upload
from helpers.runs.gates import check_gates

from miofind.compiler import Compiler
from miofind.core.problem import Direction, Layout, ProblemDescription
from miofind.device.device import Device
from miofind.errors import LaunchError
from miofind.launch.invoker import Invoker, bases_of, make_invoker
from miofind.reference.convolution import reference_on_host, round_once
from miofind.solver.registry import Registry
from miofind.solver.solver import Solver
from miofind.solver.steps import Config
from miofind.solvers.implicit_gemm.channels_last import ConvChannelsLast

cupy = pytest.importorskip("cupy")
pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper")]

WGMMA, CHANNELS_LAST = (Registry.default().named(name) for name in ("ConvImplicitGemmWgmma", "ConvChannelsLast"))
SHAPES: dict[str, dict[str, Any]] = {
    "more_tiles_than_blocks": {"x": (16, 64, 56, 56), "w": (64, 64, 3, 3), "padding": 1},
    "batch_1": {"x": (1, 512, 7, 7), "w": (512, 512, 3, 3), "padding": 1},
    "1x1": {"x": (3, 48, 14, 14), "w": (72, 48, 1, 1)},
    "8_channels": {"x": (2, 8, 13, 14), "w": (8, 8, 3, 3), "padding": 1},
    "24_to_40": {"x": (3, 24, 15, 9), "w": (40, 24, 3, 2), "padding": ((1, 2), (0, 1))},
    "stride": {"x": (2, 24, 17, 16), "w": (32, 24, 3, 3), "padding": 1, "stride": 2},
    "stride_and_dilation": {
        "x": (2, 16, 19, 18),
        "w": (24, 16, 3, 3),
        "stride": (3, 2),
        "dilation": (2, 3),
        "padding": 4,
    },
    "stride_of_columns": {"x": (2, 24, 9, 31), "w": (32, 24, 2, 5), "padding": ((0, 1), (3, 1)), "stride": (1, 2)},
    "stride_of_rows": {"x": (2, 24, 31, 10), "w": (32, 24, 4, 1), "padding": ((1, 3), (0, 0)), "stride": (2, 1)},
    "stride_and_even_dilation": {
        "x": (2, 72, 29, 27),
        "w": (64, 72, 3, 2),
        "padding": 3,
        "stride": 2,
        "dilation": (2, 3),
    },
    "1x1_stride": {"x": (4, 64, 29, 28), "w": (128, 64, 1, 1), "stride": 2},
    "stride_of_groups": {
        "x": (4, 128, 27, 28),
        "w": (96, 64, 3, 3),
        "padding": ((1, 0), (0, 2)),
        "stride": 2,
        "groups": 2,
    },
    "1d_stride": {"x": (3, 24, 101), "w": (40, 24, 9), "padding": 12, "dilation": 3, "stride": 2},
    "dilated": {"x": (1, 16, 33, 33), "w": (16, 16, 3, 3), "padding": 12, "dilation": 12},
    "groups": {"x": (4, 128, 9, 9), "w": (96, 64, 3, 3), "padding": 1, "groups": 2},
    "many_groups": {"x": (2, 256, 8, 9), "w": (512, 32, 3, 3), "padding": ((0, 1), (2, 1)), "groups": 8},
    "padding_beyond_the_filter": {"x": (1, 16, 6, 7), "w": (24, 16, 2, 2), "padding": 5, "stride": 2},
    "patches": {"x": (2, 16, 32, 32), "w": (24, 16, 4, 4), "stride": 4},
    "one_pixel": {"x": (2, 64, 1, 1), "w": (64, 64, 1, 1)},
    "1d": {"x": (3, 24, 100), "w": (40, 24, 9), "padding": 12, "dilation": 3},
    "pointwise_groups": {"x": (3, 72, 9, 11), "w": (120, 24, 1, 1), "groups": 3},
    "few_filters": {"x": (4, 64, 28, 27), "w": (24, 64, 3, 3), "padding": 1},
}
EVERY_TILING: dict[str, dict[str, Any]] = {
    "walked": {"x": (2, 264, 25, 24), "w": (136, 264, 2, 3), "padding": 1},
    "walked_groups": {"x": (2, 160, 25, 24), "w": (256, 80, 3, 3), "padding": ((1, 0), (2, 1)), "groups": 2},
    "strided": {"x": (2, 264, 49, 48), "w": (520, 264, 3, 3), "padding": ((1, 0), (0, 2)), "stride": 2},
    "strided_points": {"x": (2, 264, 49, 48), "w": (1032, 264, 1, 1), "stride": 2},
    "pointwise": {"x": (2, 264, 24, 25), "w": (296, 264, 1, 1)},
    "pointwise_groups": {"x": (2, 528, 24, 25), "w": (576, 264, 1, 1), "groups": 2},
}
"""Problems with every kind of tiling; most tiles, steps and parts end beyond the tensor or the group."""
NCHW_SHAPES: dict[str, dict[str, Any]] = {
    "first": {"x": (6, 264, 16, 17), "w": (328, 264, 1, 1), "layout": "NCHW"},
    "first_whole_blocks": {"x": (4, 64, 56, 56), "w": (256, 64, 1, 1), "layout": "NCHW"},
    "first_groups": {"x": (6, 512, 12, 14), "w": (512, 256, 1, 1), "groups": 2, "layout": "NCHW"},
    "one_first_whole_blocks": {"x": (8, 72, 16, 8), "w": (136, 72, 3, 3), "padding": 1},
    "one_first_odd": {"x": (3, 136, 11, 13), "w": (136, 136, 3, 3), "padding": 1},
    "one_first_even": {"x": (3, 136, 14, 14), "w": (72, 136, 3, 2), "padding": 1, "stride": (2, 1)},
    "one_first_groups": {"x": (3, 256, 9, 11), "w": (384, 128, 2, 3), "padding": 1, "groups": 2},
}
IN_BFLOAT16 = ("24_to_40", "stride", "groups", "batch_1")
TURNED = ("more_tiles_than_blocks", "24_to_40", "1x1", "1x1_stride", "groups", "1d")


def make(shape: str, kind: str, *, channels_last: bool = True, **fields: Any) -> ProblemDescription:
    layout = Layout.of(len(SHAPES[shape]["x"]) - 2, channels_last=channels_last)
    return ProblemDescription.convolution(**SHAPES[shape], **KINDS[kind], layout=layout, **fields)


def asked(solver: Solver, problem: ProblemDescription, device: Device) -> ProblemDescription:
    """What wgmma's solver is asked: the problem, or what the other one makes of it."""
    return solver.form(problem, device) if isinstance(solver, ConvChannelsLast) else problem


def named(value: object) -> str:
    """Solvers by their ids."""
    return value.id if isinstance(value, Solver) else str(value)


def inner(config: Config) -> Mapping[str, Any]:
    """Its parameters, of the inner solver where there is one."""
    found: Mapping[str, Any] = config.get("config", config)
    return found


def splits(config: Config) -> int:
    """Parts of a sum that a second pass adds."""
    return int(inner(config)["splits"])


def sampled(solver: Solver, problem: ProblemDescription, device: Device, count: int, each: int) -> list[Config]:
    """The default configurations, `count` more and up to `each` of every kind of tiling, the same in every run."""
    chosen = list(drawn_wgmma(WGMMA, asked(solver, problem, device), device, count, each))
    if solver is not WGMMA:
        chosen = [Config.of(solver=WGMMA.id, config=dict(config)) for config in chosen]
    return list(dict.fromkeys([*solver.default_configs(problem, device), *chosen]))


def one_of_each(solver: Solver, problem: ProblemDescription, device: Device) -> list[Config]:
    """A configuration of every kind of tiling that the problem has; some sums are whole, some are split."""
    form = asked(solver, problem, device)
    found = [config for held in WGMMA_TILINGS.values() for config in drawn(WGMMA, form, device, 1, held)]
    assert {splits(config) > 1 for config in found} == {False, True}
    return found if solver is WGMMA else [Config.of(solver=WGMMA.id, config=dict(config)) for config in found]


class Placed:
    """A problem's tensors and a workspace somewhere on the device, inputs from {-1, 0, 1}."""

    def __init__(self, invoker: Invoker, seed: int, inputs: Mapping[str, np.ndarray] | None = None) -> None:
        self.problem = invoker.problem
        self.inputs = integers(self.problem, seed) if inputs is None else inputs
        self.buffers = upload(self.problem, self.inputs)
        self.workspace = Buffer(invoker.workspace_bytes)

    @property
    def bases(self) -> tuple[int, ...]:
        return bases_of(self.problem, addresses(self.buffers), self.workspace.address)

    def poison(self) -> None:
        """Forget the result and what was left in the workspace."""
        self.buffers[self.problem.direction.output].memory.fill(POISON)
        self.workspace.memory.fill(POISON)
        cupy.cuda.Device().synchronize()

    def bytes(self) -> bytes:
        """The result as it is in memory; guard bands are intact."""
        self.workspace.read(np.dtype(np.uint8))
        return self.buffers[self.problem.direction.output].read(np.dtype(np.uint8)).tobytes()

    def check(self) -> None:
        """The result is exact."""
        self.workspace.read(np.dtype(np.uint8))
        expected = round_once(reference_on_host(self.problem, **self.inputs), self.problem.output.dtype)
        np.testing.assert_array_equal(download(self.problem, self.buffers), expected.astype(np.float64))


@pytest.mark.parametrize(
    ("solver", "problem"),
    [(solver, problem) for solver in (WGMMA, CHANNELS_LAST) for problem in solver.examples()],
    ids=named,
)
def test_examples_pass_both_gates(
    solver: Solver, problem: ProblemDescription, device: Device, compiler: Compiler
) -> None:
    assert solver.applicability(problem, device)
    check_gates(solver, problem, device, compiler, sampled(solver, problem, device, 3, 1))


@pytest.mark.parametrize(
    ("kind", "direction"),
    [
        *(("float16", direction) for direction in Direction),
        ("tf32", Direction.FORWARD),
        ("tf32", Direction.BACKWARD_DATA),
    ],
)
@pytest.mark.parametrize("shape", EVERY_TILING)
def test_every_kind_of_tiling_passes_both_gates(
    shape: str, kind: str, direction: Direction, device: Device, compiler: Compiler
) -> None:
    problem = ProblemDescription.convolution(**EVERY_TILING[shape], **KINDS[kind], layout="NHWC", direction=direction)
    answer = WGMMA.applicability(problem, device)
    assert answer, answer.reason
    found = {name: drawn(WGMMA, problem, device, 2, held) for name, held in WGMMA_TILINGS.items()}
    assert {name for name, configs in found.items() if not configs} == lacking_tilings(problem)
    check_gates(WGMMA, problem, device, compiler, [config for configs in found.values() for config in configs])


def test_blocks_without_columns_get_all_signals_of_their_cluster(device: Device, compiler: Compiler) -> None:
    """Such a block ends right after its neighbour's last signal to it, which once found its barrier gone."""
    problem = ProblemDescription.convolution(
        x=(1, 16, 256, 128), w=(32, 16, 5, 5), padding=2, dtype="float16", layout="NHWC", direction="backward_weights"
    )
    tile = {"consumers": 1, "rows": 1, "tile_n": 64, "depth_bytes": 128, "stages": 5, "swapped": 0}
    config = Config({**tile, "cluster": "1x2x1", "splits": 32, "blocks": 2})
    for _ in range(5):
        check_gates(WGMMA, problem, device, compiler, [config])


@pytest.mark.parametrize("direction", list(Direction))
@pytest.mark.parametrize(
    ("shape", "kind"),
    [(shape, kind) for shape in SHAPES for kind in KINDS if kind != "bfloat16" or shape in IN_BFLOAT16],
)
def test_wgmma_passes_both_gates(
    shape: str, kind: str, direction: Direction, device: Device, compiler: Compiler
) -> None:
    problem = make(shape, kind, direction=direction)
    answer = WGMMA.applicability(problem, device)
    if not answer:
        pytest.skip(answer.reason)
    check_gates(WGMMA, problem, device, compiler, sampled(WGMMA, problem, device, 3, 1 if kind == "float16" else 0))


@pytest.mark.parametrize("direction", list(Direction))
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", NCHW_SHAPES)
def test_channels_first_passes_both_gates(
    shape: str, kind: str, direction: Direction, device: Device, compiler: Compiler
) -> None:
    fields = {"layout": ONE_FIRST[direction], **NCHW_SHAPES[shape]}
    problem = ProblemDescription.convolution(**fields, **KINDS[kind], direction=direction)
    answer = WGMMA.applicability(problem, device)
    if not answer:
        pytest.skip(answer.reason)
    drawn_each = drawn_wgmma(WGMMA, problem, device, 3, 1 if kind == "float16" else 0)
    check_gates(
        WGMMA, problem, device, compiler, list(dict.fromkeys([*WGMMA.default_configs(problem, device), *drawn_each]))
    )


@pytest.mark.parametrize("direction", list(Direction))
@pytest.mark.parametrize("kind", ["float16", "tf32"])
@pytest.mark.parametrize("shape", TURNED)
def test_channels_last_passes_both_gates(
    shape: str, kind: str, direction: Direction, device: Device, compiler: Compiler
) -> None:
    problem = make(shape, kind, channels_last=False, direction=direction)
    answer = CHANNELS_LAST.applicability(problem, device)
    if not answer:
        pytest.skip(answer.reason)
    check_gates(CHANNELS_LAST, problem, device, compiler, sampled(CHANNELS_LAST, problem, device, 4, 0))


@pytest.mark.parametrize("direction", list(Direction))
def test_maps_follow_their_tensors(direction: Direction, device: Device, compiler: Compiler) -> None:
    """One invoker, there and back between two places with inputs of their own."""
    problem = make("24_to_40", "float16", direction=direction)
    stream = cupy.cuda.get_current_stream().ptr
    for config in one_of_each(WGMMA, problem, device):
        invoker = make_invoker(problem, device, WGMMA, config, compiler)
        places = [Placed(invoker, seed) for seed in (1, 2)]
        for place in (places[0], places[1], places[0]):
            place.poison()
            invoker.run(place.bases, stream)
            place.check()


@pytest.mark.parametrize("solver", [WGMMA, CHANNELS_LAST], ids=named)
def test_captured_runs_keep_their_addresses(solver: Solver, device: Device, compiler: Compiler) -> None:
    """A graph runs where it was captured, though the invoker has moved on."""
    problem = make("24_to_40", "float16", channels_last=solver is WGMMA)
    for config in one_of_each(solver, problem, device):
        invoker = make_invoker(problem, device, solver, config, compiler)
        captured, other = (Placed(invoker, seed) for seed in (3, 4))
        stream = cupy.cuda.Stream(non_blocking=True)
        cupy.cuda.Device().synchronize()
        with stream:
            stream.begin_capture()
            invoker.run(captured.bases, stream.ptr)
            graph = stream.end_capture()
        invoker.run(other.bases, stream.ptr)
        for _ in range(2):
            stream.synchronize()
            captured.poison()
            graph.launch(stream)
            stream.synchronize()
            captured.check()
        other.check()


@pytest.mark.parametrize("is_split", [False, True], ids=["whole", "split"])
@pytest.mark.parametrize(
    ("solver", "direction"),
    [*((WGMMA, direction) for direction in Direction), (CHANNELS_LAST, Direction.FORWARD)],
    ids=named,
)
def test_equal_inputs_give_equal_bits(
    solver: Solver, direction: Direction, is_split: bool, device: Device, compiler: Compiler
) -> None:
    """Sums of normal numbers, which depend on their order."""
    problem = make("more_tiles_than_blocks", "float16", channels_last=solver is WGMMA, direction=direction)
    generator = np.random.default_rng(6)
    inputs = {name: generator.standard_normal(problem.tensor(name).shape) for name in direction.inputs}
    every = [config for config in sampled(solver, problem, device, 20, 2) if (splits(config) > 1) is is_split]
    assert every
    chosen = {(inner(config)["cluster"], inner(config)["swapped"]): config for config in every}
    for config in dict.fromkeys([*every[:3], *chosen.values()]):
        invoker = make_invoker(problem, device, solver, config, compiler)
        assert invoker.deterministic
        place, results = Placed(invoker, 0, inputs), set()
        for _ in range(5):
            place.poison()
            invoker.run(place.bases, cupy.cuda.get_current_stream().ptr)
            results.add(place.bytes())
        assert len(results) == 1, config.json


@pytest.mark.parametrize("is_shared", [False, True], ids=["streams", "one_stream"])
@pytest.mark.parametrize("solver", [WGMMA, CHANNELS_LAST], ids=named)
def test_an_invoker_serves_several_threads(solver: Solver, is_shared: bool, device: Device, compiler: Compiler) -> None:
    """Each thread has maps and launches of its own; in one stream, other threads' kernels come between its steps."""
    problem = make("stride", "float16", channels_last=solver is WGMMA)
    config = next(config for config in one_of_each(solver, problem, device) if splits(config) > 1)
    invoker = make_invoker(problem, device, solver, config, compiler)
    shared = cupy.cuda.Stream(non_blocking=True)
    places = [Placed(invoker, seed) for seed in range(8)]
    failures: list[BaseException] = []

    def work(mine: list[Placed]) -> None:
        try:
            own = shared if is_shared else cupy.cuda.Stream(non_blocking=True)
            with cupy.cuda.Device(device.index), own as stream:
                for _ in range(25):
                    for place in mine:
                        invoker.run(place.bases, stream.ptr)
                stream.synchronize()
        except BaseException as error:
            failures.append(error)

    cupy.cuda.Device().synchronize()
    threads = [threading.Thread(target=work, args=(places[i::4],)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    for place in places:
        place.check()


def test_the_driver_refuses_maps_of_misplaced_tensors(device: Device, compiler: Compiler) -> None:
    problem = make("1x1", "float16")
    invoker = make_invoker(problem, device, WGMMA, WGMMA.default_configs(problem, device)[0], compiler)
    place, stream = Placed(invoker, 9), cupy.cuda.get_current_stream().ptr
    x, *others = place.bases
    with pytest.raises(LaunchError, match="refuses a tensor map"):
        invoker.run((x + 8, *others), stream)
    invoker.run((x, *others), stream)
    place.check()
