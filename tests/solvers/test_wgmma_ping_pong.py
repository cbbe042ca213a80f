"""ConvImplicitGemmPingPong without a GPU: its launches in NumPy, its tiles, its mbarriers, what it refuses."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
from helpers.in_numpy.launches import check_launches
from helpers.in_numpy.wgmma_ping_pong import Launch
from helpers.problems.drawn_configs import spread
from helpers.runs.ping_pong_barriers import Block, Place, Sizes

from miofind.core.problem import Direction, Layout, ProblemDescription
from miofind.device.device import Device
from miofind.solver.occupancy import RESERVED_SHARED_BYTES, SmLimits
from miofind.solver.registry import Registry
from miofind.solver.steps import Box, Config, KernelStep, TensorMap
from miofind.solver.structs import Struct
from miofind.solvers.implicit_gemm.wgmma_ping_pong_tiling import PingPongProduct, PingPongTiling

DEVICE, SOLVER = Device.virtual("90a"), Registry.default().named("ConvImplicitGemmPingPong")
FORWARD, DATA = Direction.FORWARD, Direction.BACKWARD_DATA
SHAPES: dict[str, dict[str, Any]] = {
    "pointwise": {"x": (32, 256, 40, 40), "w": (512, 256, 1, 1)},
    "three_blocks": {"x": (32, 192, 28, 28), "w": (192, 192, 3, 3), "padding": 1},
    "odd": {"x": (3, 40, 13, 29), "w": (200, 40, 3, 4), "padding": ((1, 1), (2, 1)), "dilation": (2, 1)},
    "few_channels": {"x": (8, 16, 40, 40), "w": (24, 16, 5, 5), "padding": 2},
    "large_image": {"x": (1, 64, 512, 512), "w": (64, 64, 3, 3), "padding": 1},
    "small_images": {"x": (300, 512, 3, 3), "w": (512, 512, 3, 3), "padding": 1},
    "1d": {"x": (16, 32, 65536), "w": (32, 32, 11), "padding": 25, "dilation": 5},
    "strided": {"x": (32, 64, 57, 60), "w": (136, 64, 3, 3), "padding": 1, "stride": (2, 3)},
    "halved": {"x": (32, 64, 56, 60), "w": (136, 64, 3, 3), "padding": 1, "stride": 2},
    "apart": {"x": (32, 512, 64, 64), "w": (1024, 512, 2, 2), "stride": 2},
    "channels_first": {"x": (32, 256, 20, 22), "w": (512, 256, 1, 1), "layout": Layout.NCHW},
}
CUT = pytest.mark.parametrize(
    ("shape", "direction"),
    [*((shape, FORWARD) for shape in SHAPES), *((shape, DATA) for shape in SHAPES if shape != "strided")],
)


def problem_of(fields: dict[str, Any], direction: Direction = FORWARD) -> ProblemDescription:
    layout = Layout.of(len(fields["x"]) - 2, channels_last=True)
    return ProblemDescription.convolution(**{"layout": layout, "direction": direction, "dtype": "float16"} | fields)


def tilings(shape: str, direction: Direction) -> Iterator[PingPongTiling]:
    problem = problem_of(SHAPES[shape], direction)
    for config in spread(SOLVER, problem, DEVICE, 12, defaults=4):
        yield PingPongTiling.of(PingPongProduct.of(problem), config, DEVICE)


COMPUTED: dict[str, dict[str, Any]] = {
    "pointwise": {"x": (2, 72, 9, 11), "w": (136, 72, 1, 1)},
    "pointwise_padded": {"x": (2, 32, 6, 7), "w": (32, 32, 1, 1), "padding": (2, 1)},
    "square": {"x": (2, 64, 10, 12), "w": (64, 64, 3, 3), "padding": 1},
    "dilated": {"x": (1, 40, 9, 21), "w": (192, 40, 2, 3), "padding": ((1, 0), (2, 1)), "dilation": (2, 1)},
    "strided": {"x": (3, 72, 15, 9), "w": (200, 72, 3, 2), "padding": ((1, 2), (0, 1)), "stride": (2, 3)},
    "strided_pointwise": {"x": (2, 24, 17, 21), "w": (40, 24, 1, 1), "stride": 2},
    "wide_padding": {"x": (2, 16, 5, 6), "w": (24, 16, 2, 2), "padding": 4},
    "8_channels": {"x": (3, 8, 13, 17), "w": (16, 8, 5, 4), "padding": (2, 3)},
    "24_channels": {"x": (1, 24, 9, 13), "w": (32, 24, 3, 3), "padding": 1},
    "40_channels": {"x": (1, 40, 8, 9), "w": (8, 40, 3, 1)},
    "small_images": {
        "x": (23, 32, 4, 4),
        "w": (40, 32, 3, 3),
        "padding": 1,
        "epilogue": "scale.bias.channel_bias.residual.leaky_relu",
    },
    "one_pixel": {"x": (70, 16, 1, 1), "w": (136, 16, 1, 1), "epilogue": "bias.relu"},
    "long_images": {"x": (3, 16, 2, 24), "w": (136, 16, 1, 1), "epilogue": "channel_bias.relu"},
    "residual_after": {"x": (2, 64, 7, 9), "w": (192, 64, 1, 1), "epilogue": "bias.silu.residual"},
    "1d": {"x": (5, 24, 40), "w": (32, 24, 7), "padding": 9, "dilation": 3},
    "1d_strided": {
        "x": (3, 40, 63),
        "w": (72, 40, 3),
        "padding": 1,
        "stride": 2,
        "epilogue": "channel_bias.residual.relu",
    },
}
GRADIENTS = ("pointwise", "pointwise_padded", "square", "dilated", "8_channels", "24_channels", "40_channels", "1d")
PHASES: dict[str, dict[str, Any]] = {
    "phases": {"x": (3, 72, 14, 10), "w": (40, 72, 3, 3), "padding": 1, "stride": 2},
    "phases_apart": {"x": (2, 136, 6, 14), "w": (24, 136, 2, 2), "stride": 2},
    "phases_moved": {"x": (3, 32, 8, 10), "w": (24, 32, 2, 2), "padding": 1, "stride": 2},
    "phases_without_taps": {"x": (5, 40, 8, 6), "w": (72, 40, 1, 1), "stride": 2},
    "phases_of_rows": {"x": (2, 64, 10, 9), "w": (40, 64, 4, 3), "padding": ((1, 2), (0, 1)), "stride": (2, 1)},
    "phases_of_columns": {"x": (2, 24, 7, 16), "w": (200, 24, 2, 5), "padding": (1, 2), "stride": (1, 2)},
    "phases_dilated": {"x": (2, 40, 12, 18), "w": (72, 40, 3, 2), "padding": (3, 2), "dilation": (3, 2), "stride": 2},
    "phases_of_one_tap_padded": {"x": (2, 16, 8, 8), "w": (24, 16, 1, 1), "padding": 1, "stride": 2},
    "phases_of_one_tap_each_apart": {
        "x": (2, 16, 8, 12),
        "w": (24, 16, 2, 2),
        "padding": ((2, 0), (2, 0)),
        "dilation": 3,
        "stride": 2,
    },
    "phases_1d": {"x": (4, 40, 62), "w": (72, 40, 5), "padding": 2, "stride": 2},
    "phases_of_one_pixel": {"x": (70, 16, 2, 2), "w": (136, 16, 2, 2), "stride": 2},
}
CHANNELS_FIRST: dict[str, dict[str, Any]] = {
    "first": {"x": (3, 72, 10, 12), "w": (136, 72, 1, 1), "layout": Layout.NCHW},
    "first_of_whole_units": {"x": (3, 40, 8, 16), "w": (72, 40, 1, 1), "epilogue": "bias.relu", "layout": Layout.NCHW},
    "first_of_few_channels": {
        "x": (5, 8, 6, 12),
        "w": (24, 8, 1, 1),
        "epilogue": "channel_bias.residual.leaky_relu",
        "layout": Layout.NCHW,
    },
    "first_of_small_images": {
        "x": (11, 32, 2, 4),
        "w": (32, 32, 1, 1),
        "epilogue": "scale.bias.channel_bias.silu",
        "layout": Layout.NCHW,
    },
    "first_of_many_filters": {
        "x": (2, 24, 4, 50),
        "w": (264, 24, 1, 1),
        "epilogue": "bias.residual.relu",
        "layout": Layout.NCHW,
    },
    "first_1d": {"x": (3, 144, 88), "w": (16, 144, 1), "epilogue": "bias.gelu_tanh.residual", "layout": Layout.NCW},
}
Y_FIRST = {"x": Layout.NHWC, "w": Layout.NHWC, "y": Layout.NCHW}
X_FIRST = {"x": Layout.NCHW, "w": Layout.NHWC, "y": Layout.NHWC}
OUTPUT_FIRST: dict[str, dict[str, Any]] = {
    "output_first": {"x": (3, 40, 8, 16), "w": (72, 40, 3, 3), "padding": 1, "layout": Y_FIRST},
    "output_first_strided": {
        "x": (2, 24, 16, 17),
        "w": (136, 24, 2, 3),
        "padding": ((0, 1), (1, 0)),
        "stride": (2, 1),
        "epilogue": "scale.bias.channel_bias.residual.leaky_relu",
        "layout": Y_FIRST,
    },
    "output_first_pointwise": {
        "x": (5, 8, 8, 8),
        "w": (24, 8, 1, 1),
        "epilogue": "bias.silu.residual",
        "layout": Y_FIRST,
    },
    "output_first_dilated": {
        "x": (2, 32, 36, 34),
        "w": (200, 32, 2, 3),
        "dilation": (4, 1),
        "epilogue": "bias.residual.relu",
        "layout": Y_FIRST,
    },
    "output_first_1d": {
        "x": (3, 144, 64),
        "w": (16, 144, 5),
        "padding": 2,
        "epilogue": "bias.gelu_tanh",
        "layout": {"x": Layout.NWC, "w": Layout.NWC, "y": Layout.NCW},
    },
}
INPUT_GRADIENT_FIRST: dict[str, dict[str, Any]] = {
    "dx_first": {"x": (3, 40, 8, 24), "w": (72, 40, 3, 3), "padding": 1, "layout": X_FIRST},
    "dx_first_dilated": {
        "x": (2, 136, 16, 12),
        "w": (24, 136, 2, 3),
        "padding": (1, 3),
        "dilation": (1, 2),
        "epilogue": "residual.drelu",
        "layout": X_FIRST,
    },
    "dx_first_pointwise": {
        "x": (5, 16, 8, 8),
        "w": (40, 16, 1, 1),
        "epilogue": "dsilu",
        "layout": X_FIRST,
    },
}
FUSED_GRADIENTS = {
    "dilated": "residual.drelu",
    "pointwise": "dsilu",
    "small_images": "residual.dhardswish",
    "1d": "residual",
    "phases": "residual.dgelu",
    "phases_apart": "drelu",
    "phases_without_taps": "residual.dsilu",
    "phases_1d": "residual",
    "first": "residual.drelu",
    "first_of_whole_units": "",
    "first_of_few_channels": "dsilu",
    "first_of_small_images": "residual",
    "first_of_many_filters": "residual.dhardswish",
    "first_1d": "",
}
EVERY = COMPUTED | PHASES | CHANNELS_FIRST
CASES = [
    *(pytest.param(fields, FORWARD, id=name) for name, fields in (COMPUTED | CHANNELS_FIRST | OUTPUT_FIRST).items()),
    *(pytest.param(fields, DATA, id=name) for name, fields in INPUT_GRADIENT_FIRST.items()),
    *(pytest.param(EVERY[name], DATA, id=f"data of {name}") for name in (*GRADIENTS, *PHASES)),
    *(
        pytest.param(EVERY[name] | {"epilogue": epilogue}, DATA, id=f"{epilogue} of {name}")
        for name, epilogue in FUSED_GRADIENTS.items()
    ),
]


def run(step: KernelStep, memory: dict[str, Any]) -> None:
    Launch(step, memory).run()


@pytest.mark.parametrize("sm_count", [5, *(pytest.param(count, marks=pytest.mark.full_matrix) for count in (132, 2))])
@pytest.mark.parametrize(("fields", "direction"), CASES)
def test_launches_compute_the_convolution(fields: dict[str, Any], direction: Direction, sm_count: int) -> None:
    """By their maps, numbers and defines, as the kernel counts with them; on few multiprocessors rings wrap around."""
    problem, device = problem_of(fields, direction), replace(DEVICE, sm_count=sm_count)
    configs = list(SOLVER.configs(problem, device))
    chosen = spread(SOLVER, problem, device, 4, defaults=2)
    stays = next((config for config in configs if config["keeps_filters"]), None)
    two_rows = next((config for config in configs if config["rows"] == 2), None)
    check_launches(SOLVER, problem, device, dict.fromkeys(filter(None, (*chosen, stays, two_rows))), run)


@CUT
def test_no_block_is_idle(shape: str, direction: Direction) -> None:
    for tiling in tilings(shape, direction):
        assert 0 < tiling.blocks <= min(tiling.tiles, DEVICE.sm_count), tiling


@CUT
def test_rings_fill_a_block(shape: str, direction: Direction) -> None:
    most = SmLimits.of(DEVICE).shared_bytes - RESERVED_SHARED_BYTES
    for tiling in tilings(shape, direction):
        assert tiling.shared_bytes + tiling.static_bytes <= most, tiling
        more = replace(tiling, stages=tiling.stages + 1)
        assert tiling.stages == 8 or more.shared_bytes + more.static_bytes > most, tiling


@pytest.mark.parametrize(("name", "batch", "in_turn"), [("halved", 32, True), ("halved", 1, False), ("apart", 1, True)])
@pytest.mark.parametrize("rows", [1, 2])
def test_phases_of_other_lengths_are_taken_in_turn_by_blocks_of_many_items(
    name: str, batch: int, rows: int, in_turn: bool
) -> None:
    """Whose k-tiles are then as many; those of few items begin with the longest."""
    fields = SHAPES[name] | {"x": (batch, *SHAPES[name]["x"][1:])}
    problem = problem_of(fields, DATA)
    config = Config({"rows": rows, "tile_n": 64, "out_stages": 1, "keeps_filters": 0})
    tiling = PingPongTiling.of(PingPongProduct.of(problem), config, DEVICE)
    assert tiling.phases_in_turn is in_turn
    (step,) = SOLVER.solution(problem, DEVICE, config).kernels
    launch = Launch(step, {})
    phases = [launch.tile(number).phase for number in range(tiling.tiles)]
    k_tiles = [launch.k_tiles(launch.phases[phase]) for phase in phases]
    if not in_turn:
        assert k_tiles == sorted(k_tiles, reverse=True)
    of_blocks = [sum(k_tiles[block :: tiling.blocks]) for block in range(tiling.blocks)]
    assert max(of_blocks) <= 1.15 * sum(k_tiles) / tiling.blocks + max(k_tiles)


@pytest.mark.parametrize("channels", [64, 192, 512, 1024])
@pytest.mark.parametrize(
    "fields",
    [
        {"x": (32, 0, 16384), "w": (128, 0, 3), "padding": 1, "stride": 2},
        {"x": (32, 0, 64, 128), "w": (64, 0, 3, 3), "padding": 1, "stride": (2, 1)},
        {"x": (32, 0, 64, 64), "w": (64, 0, 3, 3), "padding": 1, "stride": 2},
        {"x": (32, 0, 64, 64), "w": (64, 0, 1, 1), "stride": 2},
    ],
)
def test_no_block_takes_long_phases_alone(fields: dict[str, Any], channels: int) -> None:
    """In turn a block may come to the same phase again and again, by how many there are of blocks and of filters."""
    shape = {name: (size[0], channels, *size[2:]) for name, size in fields.items() if name in "xw"}
    problem = problem_of(fields | shape, DATA)
    for rows, tile_n in ((1, 64), (2, 96), (1, 192)):
        config = Config({"rows": rows, "tile_n": tile_n, "out_stages": 1, "keeps_filters": 0})
        (step,) = SOLVER.solution(problem, DEVICE, config).kernels
        launch, tiling = Launch(step, {}), PingPongTiling.of(PingPongProduct.of(problem), config, DEVICE)
        k_tiles = [launch.k_tiles(launch.phases[launch.tile(number).phase]) for number in range(tiling.tiles)]
        of_blocks = [sum(k_tiles[block :: tiling.blocks]) for block in range(tiling.blocks)]
        assert max(of_blocks) <= 1.15 * sum(k_tiles) / tiling.blocks + max(k_tiles), tiling


@pytest.mark.parametrize("sm_count", [132, 7])
@pytest.mark.parametrize("rows", [1, 2])
def test_filters_stay_where_all_tiles_of_a_block_have_them(rows: int, sm_count: int) -> None:
    problem, device = problem_of({"x": (8, 64, 28, 28), "w": (320, 64, 1, 1)}), replace(DEVICE, sm_count=sm_count)
    config = Config({"rows": rows, "tile_n": 64, "out_stages": 1, "keeps_filters": 1})
    assert SOLVER.is_valid_config(problem, device, config)
    tiling = PingPongTiling.of(PingPongProduct.of(problem), config, device)
    assert tiling.filter_tiles == (5 if rows == 1 else 3)
    for block in range(tiling.blocks):
        of_block = {number % tiling.filter_tiles for number in range(block, tiling.tiles, tiling.blocks)}
        assert len(of_block) == 1, tiling
    assert tiling.blocks > sm_count - tiling.filter_tiles  # no more are idle than have to be


@pytest.mark.parametrize(("filters", "sm_count"), [(192, 2), (8512, 132)])
def test_filters_cannot_stay_where_their_tiles_are_more_than_multiprocessors(filters: int, sm_count: int) -> None:
    """Which once was a division by zero: by the number of blocks."""
    problem, device = problem_of({"x": (8, 64, 7, 7), "w": (filters, 64, 1, 1)}), replace(DEVICE, sm_count=sm_count)
    assert SOLVER.applicability(problem, device)
    values = {"rows": 1, "tile_n": 64, "out_stages": 1}
    assert SOLVER.is_valid_config(problem, device, Config(values | {"keeps_filters": 0}))
    assert not SOLVER.is_valid_config(problem, device, Config(values | {"keeps_filters": 1}))


@CUT
def test_numbers_of_a_launch_fit(shape: str, direction: Direction) -> None:
    problem = problem_of(SHAPES[shape], direction)
    for config in spread(SOLVER, problem, DEVICE, 12, defaults=4):
        (step,) = SOLVER.solution(problem, DEVICE, config).kernels
        (numbers,) = (each for each in step.args if isinstance(each, Struct))
        numbers.in_memory()  # raises what does not fit


def test_k_tiles_of_a_block_are_counted_in_32_bits() -> None:
    """Minutes of work for one small device; a count beyond would be taken for a stage before the first."""
    problem = problem_of({"x": (1, 8, 16000, 16000), "w": (8, 8, 64, 64), "padding": 32})
    assert SOLVER.applicability(problem, DEVICE)
    answer = SOLVER.applicability(problem, replace(DEVICE, sm_count=1))
    assert answer.refused
    assert "k-tiles" in answer.reason


def drawn_sizes(places: int, k_tiles: Sequence[int], generator: random.Random) -> Sizes:
    return Sizes(
        k_tiles=k_tiles,
        stages=generator.randint(3, 8),
        rows=generator.choice((1, 2)),
        places=places,
        keeps_filters=len(set(k_tiles)) == 1 and generator.random() < 0.4,
        writing=generator.choice((1, 2, 4)),
        loads=generator.choice((0, 1, 2, 4)),
    )


@pytest.mark.parametrize("k_tiles", [1, 2, 3, 4, 8, 9, 25])
@pytest.mark.parametrize("places", [1, 2])
def test_mbarriers_keep_the_order(places: int, k_tiles: int) -> None:
    """All ends, and nothing is multiplied, staged or stored but what is there, in whatever order warps go on."""
    for seed in range(5):
        for items in range(1, 10):
            generator = random.Random(f"{places} {k_tiles} {items} {seed}")
            run_block(Block(drawn_sizes(places, [k_tiles] * items, generator), generator))


@pytest.mark.parametrize("taps", [(4, 2, 2, 1), (1, 0, 0, 0), (6, 3, 0, 0), (2, 2)])
@pytest.mark.parametrize("places", [1, 2])
def test_mbarriers_keep_the_order_of_phases(places: int, taps: Sequence[int]) -> None:
    """Whose tiles have other numbers of k-tiles, or none: one after another, and in turn."""
    for seed in range(40):
        generator = random.Random(f"{places} {taps} {seed}")
        counts = [generator.randint(1, 3) * count for count in taps]
        tiles = generator.randint(1, 4)
        one_after_another, in_turn = [each for each in counts for _ in range(tiles)], counts * tiles
        for k_tiles in (one_after_another, in_turn):
            run_block(Block(drawn_sizes(places, k_tiles, generator), generator))


def run_block(block: Block) -> None:
    try:
        block.run()
    except AssertionError as error:
        raise AssertionError(f"{error}: {block.sizes}") from error


class TakesNoTurns(Block):
    """Its second consumer begins at once."""

    def first_parity(self, consumer: int) -> int:
        return 1


class NobodyBegins(Block):
    """Its first consumer waits for a turn that the second would give it."""

    def first_parity(self, consumer: int) -> int:
        return 0


class ReleasesEarly(Block):
    """A stage that is under way."""

    def released(self, number: int) -> int:
        return number


class StagesElsewhere(Block):
    """In the other consumer's place, where there are two."""

    def place_of(self, item: int) -> Place:
        return self.places[(item + 1) % self.sizes.places]


class MakesReadyTooMuch(Block):
    """Of two places the one whose results have not left."""

    def following(self, item: int) -> int:
        return item + 1


class MakesReadyForTheSame(Block):
    """One place for the consumer whose results have left, though the other one's are next."""

    def following(self, item: int) -> int:
        return item + 2


@pytest.mark.parametrize(
    ("wrong", "places"),
    [
        (TakesNoTurns, 2),
        (NobodyBegins, 2),
        (ReleasesEarly, 2),
        (StagesElsewhere, 2),
        (MakesReadyTooMuch, 2),
        (MakesReadyForTheSame, 1),
    ],
)
def test_a_wrong_order_is_seen(wrong: Callable[[Sizes, random.Random], Block], places: int) -> None:
    """In some order that mbarriers allow, or in all: what lets a kernel hang, or compute nonsense, now and then."""

    def in_some_orders() -> None:
        for seed in range(50):
            generator = random.Random(seed)
            wrong(drawn_sizes(places, [generator.randint(4, 9)] * 9, generator), generator).run()

    with pytest.raises(AssertionError):
        in_some_orders()


def test_a_ring_as_short_as_what_is_under_way_hangs() -> None:
    """Which the kernel asserts that it is not, and tilings keep a stage away from."""
    sizes = Sizes(k_tiles=[5], stages=2, rows=1, places=1, keeps_filters=False, writing=4, loads=0)
    with pytest.raises(AssertionError, match="deadlock"):
        Block(sizes, random.Random(1)).run()


def test_pixels_in_order_are_copied_as_boxes_wherever_results_lie() -> None:
    for layout in (Layout.NHWC, Y_FIRST):
        problem = problem_of({"x": (4, 64, 16, 16), "w": (64, 64, 1, 1), "layout": layout})
        (step,) = SOLVER.solution(problem, DEVICE, SOLVER.default_configs(problem, DEVICE)[0]).kernels
        pixels = next(arg for arg in step.args if isinstance(arg, TensorMap))
        assert isinstance(pixels.copy, Box)


RUNS = {"rows": 1, "tile_n": 192, "out_stages": 2, "keeps_filters": 0}


@pytest.mark.parametrize(
    ("fields", "valid", "values"),
    [
        ({"x": (4, 64, 40, 40)}, {}, {"keeps_filters": 1}),
        ({"w": (64, 64, 3, 3)}, {}, {"rows": 2}),
        ({}, {"rows": 2, "out_stages": 1}, {"tile_n": 208}),
        ({"epilogue": "bias.silu"}, {"rows": 2, "out_stages": 1, "tile_n": 176}, {"tile_n": 192}),
        ({"epilogue": "channel_bias"}, {"rows": 2, "out_stages": 1, "tile_n": 144}, {"tile_n": 160}),
        ({"w": (128, 64, 1, 1), "padding": 0, "layout": Layout.NCHW}, {}, {"tile_n": 176}),
        ({"layout": Y_FIRST}, {}, {"tile_n": 176}),
        ({"x": (32, 256, 40, 40), "w": (64, 256, 3, 3)}, {}, {"keeps_filters": 1}),
        (
            {"x": (32, 128, 40, 40), "w": (64, 128, 3, 3), "direction": DATA, "epilogue": "residual.drelu"},
            {"rows": 2, "out_stages": 1},
            {"out_stages": 2},
        ),
    ],
    ids=[
        "filters stay for one tile",
        "there is one block of filters",
        "more accumulators than registers",
        "more accumulators than an activation leaves registers for",
        "more accumulators than terms of images leave registers for",
        "a tile is no whole units of pixels",
        "a tile is no whole units of results",
        "filters that stay leave no room for stages",
        "a second place leaves no room for stages",
    ],
)
def test_what_cannot_run_is_refused(fields: dict[str, Any], valid: dict[str, int], values: dict[str, int]) -> None:
    """Each for one reason: without it they run."""
    problem = problem_of({"x": (32, 64, 40, 40), "w": (128, 64, 3, 3), "padding": 1} | fields)
    runs, refused = (Config(RUNS | valid | changed) for changed in ({}, values))
    assert SOLVER.is_valid_config(problem, DEVICE, runs)
    assert not SOLVER.is_valid_config(problem, DEVICE, refused)
    tiling = PingPongTiling.of(PingPongProduct.of(problem), refused, DEVICE)
    reasons = (
        tiling.stages < 3,
        tiling.rows > tiling.product.filter_blocks,
        tiling.rows * tiling.tile_n // 2 > tiling.product.most_accumulators,
        tiling.kept_tiles > 0 and tiling.items == 1,
        tiling.product.has_nchw_output and tiling.tile_n % 64 > 0,
    )
    assert sum(reasons) == 1, tiling


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"w": (64, 32, 3, 3), "groups": 2}, "one group, not 2"),
        ({"stride": (1, 3), "direction": DATA}, "backward data needs strides of at most 2, not (1, 3)"),
        ({"x": (4, 64, 30, 31), "stride": 2, "direction": DATA}, "multiples of its strides: (30, 31)"),
        ({"x": (4, 60, 30, 30), "w": (64, 60, 3, 3)}, "60 channels"),
        ({"w": (68, 64, 3, 3)}, "68 filters"),
        ({"padding": 128}, "padding or filter is too large"),
        ({"x": (4, 64, 300, 9), "dilation": (70, 1)}, "padding or filter is too large"),
        ({"stride": 9}, "stride (9, 9) is more than 8"),
        ({"x": (4, 64, 30, 31), "epilogue": "channel_bias"}, "930 are no multiple"),
        ({"layout": Layout.NCHW}, "or one tap with channels first, not x NCHW, w NCHW, y NCHW"),
        ({"layout": Layout.NCHW, "w": (64, 64, 1, 1)}, "one tap, stride 1 and no padding"),
        ({"layout": Layout.NCHW, "w": (64, 64, 1, 1), "padding": 0, "stride": 2}, "one tap, stride 1 and no padding"),
        ({"layout": Layout.NCHW, "w": (64, 64, 1, 1), "padding": 0}, "900 pixels of an image"),
        ({"layout": Y_FIRST}, "900 of an image are no multiple"),
        ({"layout": X_FIRST, "x": (4, 64, 32, 32), "stride": 2, "direction": DATA}, "backward data of stride 1"),
        ({"layout": X_FIRST, "x": (4, 64, 32, 32), "w": (64, 64, 1, 1), "padding": 0}, "alone with channels first"),
        ({"layout": Y_FIRST | {"w": Layout.NCHW}, "x": (4, 64, 32, 32)}, "not x NHWC, w NCHW, y NCHW"),
        ({"layout": Y_FIRST, "x": (4, 64, 32, 33)}, "1056 of an image are no multiple"),
        ({"layout": Y_FIRST, "x": (4, 64, 34, 34), "padding": 128}, "padding or filter is too large"),
        ({"dtype": {"x": "float16", "w": "bfloat16", "y": "float16"}}, "needs one dtype"),
    ],
    ids=[
        "groups",
        "stride of data",
        "sizes of data",
        "channels",
        "filters",
        "padding",
        "dilation",
        "stride",
        "images",
        "taps of channels first",
        "padding of channels first",
        "stride of channels first",
        "images of channels first",
        "images of an output with channels first",
        "stride of a gradient with channels first",
        "input alone with channels first",
        "filters with channels first",
        "half a unit of an output with channels first",
        "padding of an output with channels first",
        "dtypes",
    ],
)
def test_problems_that_it_does_not_serve(fields: dict[str, Any], reason: str) -> None:
    shape = {"x": (4, 64, 30, 30), "w": (64, 64, 3, 3), "padding": 1}
    answer = SOLVER.applicability(problem_of(shape | fields), DEVICE)
    assert answer.refused
    assert reason in answer.reason
    assert SOLVER.applicability(problem_of(shape), DEVICE)
