"""Tensor maps: values that solutions hold, and what the driver is asked to encode. The driver itself is replaced."""

from __future__ import annotations

import ctypes
import pickle
from collections.abc import Iterator
from dataclasses import FrozenInstanceError, dataclass, field, replace
from typing import Any

import pytest

from miofind.errors import LaunchError
from miofind.launch import tensor_maps
from miofind.solver.steps import Box, ConvSolution, Im2col, KernelStep, Pointer, TensorMap

driver = pytest.importorskip("cuda.bindings.driver")

WALK = Im2col(lower=(-1, -2), upper=(-3, 4), strides=(2, 5), channels=64, pixels=128)
PIXELS = TensorMap(
    pointer=Pointer(buffer="x"),
    element="float16",
    sizes=(64, 15, 14, 2),
    strides_bytes=(128, 1920, 26880),
    copy=WALK,
    swizzle_bytes=128,
)
FILTERS = TensorMap(
    pointer=Pointer(buffer="w", offset_bytes=32),
    element="tfloat32",
    sizes=(24, 9, 40),
    strides_bytes=(96, 864),
    copy=Box(sizes=(8, 1, 32)),
    swizzle_bytes=32,
)


@dataclass
class Made:
    """An encoded map of the stub driver: one byte, repeated."""

    filler: int
    memory: Any = field(init=False)

    def __post_init__(self) -> None:
        self.memory = ctypes.create_string_buffer(bytes([self.filler]) * tensor_maps.BYTES, tensor_maps.BYTES)

    def getPtr(self) -> int:  # noqa: N802, the binding's name
        return ctypes.addressof(self.memory)


@dataclass
class StubDriver:
    """Stands for both ways to encode: keeps what it was asked, and answers with `status`."""

    status: Any
    asked: list[tuple[str, list[Any]]] = field(default_factory=list)

    def tiled(self, *given: Any) -> tuple[Any, Made | None]:
        return self._answer("tiled", given)

    def im2col(self, *given: Any) -> tuple[Any, Made | None]:
        return self._answer("im2col", given)

    def _answer(self, kind: str, given: tuple[Any, ...]) -> tuple[Any, Made | None]:
        self.asked.append((kind, [plain(value) for value in given]))
        is_made = self.status == driver.CUresult.CUDA_SUCCESS
        return self.status, Made(len(self.asked)) if is_made else None


def plain(value: Any) -> Any:
    """Numbers and names, whatever types the driver wants them in."""
    if isinstance(value, list):
        return [plain(each) for each in value]
    if isinstance(value, (driver.cuuint32_t, driver.cuuint64_t)):
        return int(value)
    return getattr(value, "name", value)


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> Iterator[StubDriver]:
    made = StubDriver(driver.CUresult.CUDA_SUCCESS)
    monkeypatch.setattr(driver, "cuTensorMapEncodeTiled", made.tiled)
    monkeypatch.setattr(driver, "cuTensorMapEncodeIm2col", made.im2col)
    tensor_maps.encoded.cache_clear()
    yield made
    tensor_maps.encoded.cache_clear()


def step(*maps: TensorMap) -> KernelStep:
    return KernelStep(source="a.cu", entry="a", grid=(1, 1, 1), block=(32, 1, 1), args=maps)


@pytest.mark.parametrize("tensor_map", [PIXELS, FILTERS], ids=["im2col", "box"])
def test_maps_are_values(tensor_map: TensorMap) -> None:
    copy = pickle.loads(pickle.dumps(tensor_map))
    assert copy == tensor_map
    assert hash(copy) == hash(tensor_map)
    with pytest.raises(FrozenInstanceError):
        copy.swizzle_bytes = 64


CHANGES: dict[str, dict[str, Any]] = {
    "buffer": {"pointer": Pointer(buffer="y")},
    "offset": {"pointer": Pointer(buffer="x", offset_bytes=16)},
    "element": {"element": "bfloat16"},
    "sizes": {"sizes": (64, 15, 14, 3)},
    "strides": {"strides_bytes": (128, 1920, 26896)},
    "swizzle": {"swizzle_bytes": 64},
    "lower corner": {"copy": replace(WALK, lower=(-2, -1))},
    "upper corner": {"copy": replace(WALK, upper=(4, -3))},
    "steps": {"copy": replace(WALK, strides=(5, 2))},
    "channels": {"copy": replace(WALK, channels=32)},
    "pixels": {"copy": replace(WALK, pixels=64)},
    "kind": {"copy": Box(sizes=(64, 1, 1, 128))},
    "kind and box steps": {"copy": Box(sizes=(64, 1, 1, 128), steps=(1, 1, 1, 2))},
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_solutions_differ_where_their_maps_do(change: dict[str, Any]) -> None:
    same, other = ConvSolution(steps=(step(PIXELS),)), ConvSolution(steps=(step(replace(PIXELS, **change)),))
    assert ConvSolution(steps=(step(replace(PIXELS)),)) == same
    assert other != same
    assert len({same, other, pickle.loads(pickle.dumps(other))}) == 2


def test_boxes_are_asked_for_in_the_drivers_order(stub: StubDriver) -> None:
    encoded = tensor_maps.encoded(FILTERS, 0x7000)
    assert stub.asked == [
        (
            "tiled",
            [
                "CU_TENSOR_MAP_DATA_TYPE_TFLOAT32",
                3,
                0x7000,
                [24, 9, 40],
                [96, 864],
                [8, 1, 32],
                [1, 1, 1],
                "CU_TENSOR_MAP_INTERLEAVE_NONE",
                "CU_TENSOR_MAP_SWIZZLE_32B",
                "CU_TENSOR_MAP_L2_PROMOTION_L2_128B",
                "CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE",
            ],
        )
    ]
    assert encoded == bytes([1]) * 128


def test_boxes_with_steps_span_what_they_step_over(stub: StubDriver) -> None:
    tensor_maps.encoded(replace(FILTERS, copy=Box(sizes=(8, 3, 32), steps=(1, 3, 2))), 0x7000)
    [(_, asked)] = stub.asked
    assert asked[5:7] == [[8, 9, 64], [1, 3, 2]]


def test_walks_are_asked_for_in_the_drivers_order(stub: StubDriver) -> None:
    """Corners as numbers, then channels and pixels, then a stride for every dimension, channels and images included."""
    encoded = tensor_maps.encoded(PIXELS, 0x7000)
    assert stub.asked == [
        (
            "im2col",
            [
                "CU_TENSOR_MAP_DATA_TYPE_FLOAT16",
                4,
                0x7000,
                [64, 15, 14, 2],
                [128, 1920, 26880],
                [-1, -2],
                [-3, 4],
                64,
                128,
                [1, 2, 5, 1],
                "CU_TENSOR_MAP_INTERLEAVE_NONE",
                "CU_TENSOR_MAP_SWIZZLE_128B",
                "CU_TENSOR_MAP_L2_PROMOTION_L2_128B",
                "CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE",
            ],
        )
    ]
    assert encoded == bytes([1]) * 128


@pytest.mark.parametrize("element", ["float16", "bfloat16", "float32", "tfloat32"])
@pytest.mark.parametrize(("span", "name"), [(0, "NONE"), (32, "32B"), (64, "64B"), (128, "128B")])
def test_the_binding_knows_every_element_and_swizzle(stub: StubDriver, element: str, span: int, name: str) -> None:
    tensor_maps.encoded(replace(FILTERS, element=element, swizzle_bytes=span), 0x7000)
    [(_, asked)] = stub.asked
    assert asked[0] == f"CU_TENSOR_MAP_DATA_TYPE_{element.upper()}"
    assert asked[8] == f"CU_TENSOR_MAP_SWIZZLE_{name}"


def test_maps_are_kept_by_address(stub: StubDriver) -> None:
    here, there = tensor_maps.encoded(PIXELS, 0x7000), tensor_maps.encoded(PIXELS, 0x8000)
    other = tensor_maps.encoded(FILTERS, 0x7000)
    assert len({here, there, other}) == 3
    assert [asked[2] for _, asked in stub.asked] == [0x7000, 0x8000, 0x7000]
    assert tensor_maps.encoded(pickle.loads(pickle.dumps(PIXELS)), 0x7000) == here
    assert tensor_maps.encoded(PIXELS, 0x8000) == there
    assert len(stub.asked) == 3


@pytest.mark.parametrize("tensor_map", [PIXELS, FILTERS], ids=["im2col", "box"])
def test_a_refusal_names_the_status_and_is_not_kept(stub: StubDriver, tensor_map: TensorMap) -> None:
    stub.status = driver.CUresult.CUDA_ERROR_INVALID_VALUE
    with pytest.raises(LaunchError, match=r"with CUDA_ERROR_INVALID_VALUE: TensorMap\(.* at 0x7001"):
        tensor_maps.encoded(tensor_map, 0x7001)
    stub.status = driver.CUresult.CUDA_SUCCESS
    assert len(tensor_maps.encoded(tensor_map, 0x7001)) == tensor_maps.BYTES
    assert len(stub.asked) == 2
