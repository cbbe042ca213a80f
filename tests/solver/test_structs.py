"""Structures of numbers: declared once, checked by field, laid out in memory as the CUDA compiler lays them out."""

from __future__ import annotations

import ctypes
import math
import pickle
import struct
from pathlib import Path
from typing import Any

import pytest

from miofind.compiler import BinaryCache, Compiler
from miofind.errors import CompileError, LaunchError
from miofind.solver.steps import KernelStep, Pointer, Scalar
from miofind.solver.structs import NUMBERS, Struct, StructType, number_in_memory, packing

INNER = StructType("Inner", by="int32", multiplier="uint32", shift="int64")
OUTER = StructType("Outer", n="int32", scale="float64", pad=("int32", 3), inner=INNER, pairs=(INNER, 2), last="uint64")
SOURCE = """
struct Inner { INNER_FIELDS };
struct Outer { OUTER_FIELDS };
#define AT(field, offset) static_assert(__builtin_offsetof(Outer, field) == offset, #field)
OFFSETS
extern "C" __global__ void kernel(float* y, const __grid_constant__ Outer outer) { *y = outer.n; }
"""


class InnerInC(ctypes.Structure):
    """INNER as ctypes lays it out."""

    _fields_ = (("by", ctypes.c_int32), ("multiplier", ctypes.c_uint32), ("shift", ctypes.c_int64))


class OuterInC(ctypes.Structure):
    """OUTER as ctypes lays it out."""

    _fields_ = (
        ("n", ctypes.c_int32),
        ("scale", ctypes.c_double),
        ("pad", ctypes.c_int32 * 3),
        ("inner", InnerInC),
        ("pairs", InnerInC * 2),
        ("last", ctypes.c_uint64),
    )


def inner(by: int) -> Struct:
    return INNER(by=by, multiplier=by + 1, shift=by + 2)


def outer() -> Struct:
    return OUTER(n=1, scale=0.5, pad=(2, 3, 4), inner=inner(5), pairs=[inner(10), inner(20)], last=2**63)


def test_a_struct_declares_its_fields() -> None:
    assert INNER.define == ("INNER_FIELDS", "int by; unsigned multiplier; long long shift;")
    assert OUTER.define[1].endswith("int pad[3]; Inner inner; Inner pairs[2]; unsigned long long last;")


def test_a_struct_gives_its_numbers_in_order() -> None:
    assert [value for _, value in outer().numbers] == [1, 0.5, 2, 3, 4, 5, 6, 7, 10, 11, 12, 20, 21, 22, 2**63]
    assert dict.fromkeys(kind for kind, _ in outer().numbers) == dict.fromkeys(
        ["int32", "float64", "uint32", "int64", "uint64"]
    )


def test_a_struct_is_laid_out_as_the_compiler_has_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    laid = OuterInC(1, 0.5, (2, 3, 4), (5, 6, 7), ((10, 11, 12), (20, 21, 22)), 2**63)
    assert outer().in_memory() == bytes(laid)
    offsets = {name: getattr(OuterInC, name).offset for name, _, _ in OUTER.fields}
    (tmp_path / "struct_sources").mkdir()
    (tmp_path / "struct_sources" / "__init__.py").touch()
    asserted = " ".join(f"AT({name}, {offset});" for name, offset in offsets.items())
    (tmp_path / "struct_sources" / "kernel.cu").write_text(SOURCE.replace("OFFSETS", asserted), encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    compiler = Compiler(BinaryCache(tmp_path / "cache"))

    def build(*args: Pointer | Scalar | Struct) -> None:
        step = KernelStep(
            source="kernel.cu",
            entry="kernel",
            grid=(1, 1, 1),
            block=(1, 1, 1),
            args=args,
            defines=(INNER.define, OUTER.define),
            package="struct_sources",
        )
        compiler.build(step, "90a")

    build(Pointer(buffer="y"), outer())
    assert outer().bytes == ctypes.sizeof(laid) == 88
    with pytest.raises(CompileError, match="88"):
        build(Pointer(buffer="y"), inner(1))


def test_structs_are_values() -> None:
    assert outer() == outer()
    assert hash(outer()) == hash(outer())
    assert outer() != OUTER(n=2, scale=0.5, pad=(2, 3, 4), inner=inner(5), pairs=(inner(10), inner(20)), last=2**63)
    assert pickle.loads(pickle.dumps(outer())) == outer()
    assert StructType("Inner", by="int32", multiplier="uint32", shift="int64") == INNER != OUTER
    assert repr(inner(5)) == "Inner(by=5, multiplier=6, shift=7)"


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"by": 1, "multiplier": 2}, "struct Inner lacks shift"),
        ({"by": 1, "multiplier": 2, "shift": 3, "sum": 4}, "struct Inner has no sum"),
        ({"by": inner(1), "multiplier": 2, "shift": 3}, "by of struct Inner is Inner.*not of type int32"),
        ({"by": (1, 2), "multiplier": 2, "shift": 3}, r"by of struct Inner is \(1, 2\), declared by$"),
    ],
)
def test_a_wrong_field_is_named(values: dict[str, int], said: str) -> None:
    with pytest.raises(TypeError, match=said):
        INNER(**values)


def test_an_array_has_its_length() -> None:
    pads = StructType("Pads", pad=("int32", 3))
    assert [value for _, value in pads(pad=[1, 2, 3]).numbers] == [1, 2, 3]
    for wrong in (1, (1, 2)):
        with pytest.raises(TypeError, match=r"declared pad\[3\]"):
            pads(pad=wrong)


def test_a_field_of_no_type_is_refused() -> None:
    with pytest.raises(ValueError, match="width has no known type; a field is int32, "):
        StructType("Shape", height="int32", width="int")
    with pytest.raises(ValueError, match="it has no fields"):
        StructType("Shape")
    with pytest.raises(ValueError, match="pad has no elements"):
        StructType("Shape", pad=("int32", 0))
    with pytest.raises(ValueError, match="pad has no elements"):
        StructType("Shape", pad=("int32", 2.5))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="'a b' is no name in C"):
        StructType("Shape", **{"a b": "int32"})


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        *(("int32", value) for value in (2**31, -(2**31) - 1, 1.5, None)),
        *(("uint32", value) for value in (2**32, -1)),
        *(("int64", 2**63), ("uint64", -1), ("float32", 1e39), ("float64", 10**400), ("float32", None)),
    ],
)
def test_a_number_that_does_not_fit_is_refused(kind: str, value: Any) -> None:
    with pytest.raises(LaunchError, match=f"{kind}, which the kernel takes"):
        number_in_memory(kind, value)
    with pytest.raises(LaunchError, match=f"{kind}, which the kernel takes"):
        StructType("One", size=kind)(size=value).in_memory()


@pytest.mark.parametrize(
    ("kind", "value"),
    [("int32", -(2**31)), ("uint32", 2**32 - 1), ("uint64", 2**64 - 1), ("float32", 0.1), ("float32", math.inf)],
)
def test_a_number_that_fits_is_kept(kind: str, value: float) -> None:
    (kept,) = packing(NUMBERS[kind][1]).unpack(number_in_memory(kind, value))
    assert kept == pytest.approx(value)
    assert StructType("One", size=kind)(size=value).in_memory() == number_in_memory(kind, value)


def test_a_struct_ends_where_an_array_of_it_has_the_next_one() -> None:
    pair = StructType("Pair", wide="int64", narrow="int32")
    assert pair(wide=1, narrow=2).bytes == 16
    two = StructType("Two", first="int32", pairs=(pair, 2), last="float32")
    given = two(first=1, pairs=(pair(wide=2, narrow=3), pair(wide=4, narrow=5)), last=6.0)
    assert given.in_memory() == struct.pack("=i4xqi4xqi4xf4x", 1, 2, 3, 4, 5, 6.0)
