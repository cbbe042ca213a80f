"""Structures of numbers that kernels take by value: declared once, in Python.

A kernel with more than a dozen numbers takes them as one structure. Its solver declares a `StructType`; the fields' C++
declarations reach the source as a define, so that neither side lists them again:

    SHAPE = StructType("Shape", channels="int32", pad=("int32", 3), width=DIVISOR)
    KernelStep(..., defines=(SHAPE.define,), args=(Pointer(buffer="x"), SHAPE(channels=64, pad=(0, 1, 1), width=...)))

    struct Shape { SHAPE_FIELDS };  // in the source: int channels; int pad[3]; Divisor width;
    extern "C" __global__ void kernel(const float* x, const __grid_constant__ Shape shape) { ... }
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Iterator, Sequence
from typing import Any

from miofind.errors import LaunchError

NUMBERS = {
    "int32": ("int", "i"),
    "int64": ("long long", "q"),
    "uint32": ("unsigned", "I"),
    "uint64": ("unsigned long long", "Q"),
    "float32": ("float", "f"),
    "float64": ("double", "d"),
}
"""C++ type and `struct`'s code of each number that a kernel may be given."""

_NUMBER_TYPES = frozenset({int, float})


def number_in_memory(kind: str, value: int | float) -> bytes:
    """A number as a launch reads it; `kind` is a key of `NUMBERS`.

    Raises:
        LaunchError: the type cannot hold it.
    """
    try:
        return packing(NUMBERS[kind][1]).pack(value)
    except (struct.error, OverflowError) as error:
        raise LaunchError(f"{value!r:.80} does not fit into {kind}, which the kernel takes") from error


@functools.lru_cache(maxsize=256)
def packing(layout: str) -> struct.Struct:
    """What packs numbers as a layout has them: codes of `struct` for numbers and for padding, none of it implied."""
    return struct.Struct(f"={layout}")


def alignment_of(layout: str) -> int:
    """Bytes that the memory of a layout begins at a multiple of: those of its largest number."""
    return max((packing(code).size for code in layout if code.isalpha()), default=1)


def padded(layout: str, alignment: int) -> str:
    """A layout with padding behind it, up to a multiple of an alignment."""
    return f"{layout}{-packing(layout).size % alignment}x"


class StructType:
    """A structure's name and fields, in order. Equal declarations are equal.

    Args:
        name: of the C++ type.
        fields: what each is, by name: a key of `NUMBERS` or another structure, or an array as (one of these, length).

    Attributes:
        define: the define that a step passes to its source: the fields' C++ declarations.
        layout: how its numbers lie in memory, as `packing` takes it.

    Raises:
        ValueError: no fields, one of no such type or of no name in C++, or an array of no whole number of elements.
    """

    __slots__ = ("_names", "define", "fields", "layout", "name")

    def __init__(self, name: str, **fields: _Kind | tuple[_Kind, int]) -> None:
        self.name = name
        self._names = frozenset(fields)
        self.fields = tuple(
            (field, *(kind if isinstance(kind, tuple) else (kind, None))) for field, kind in fields.items()
        )
        wrong = [field for field, kind, _ in self.fields if not isinstance(kind, StructType) and kind not in NUMBERS]
        if wrong or not fields:
            said = f"{', '.join(wrong)} has no known type" if wrong else "it has no fields"
            raise ValueError(f"struct {name}: {said}; a field is {', '.join(NUMBERS)} or a StructType")
        if odd := [field for field in (name, *fields) if not (field.isascii() and field.isidentifier())]:
            raise ValueError(f"struct {name}: {', '.join(map(repr, odd))} is no name in C++")
        if empty := [
            f for f, _, length in self.fields if length is not None and (type(length) is not int or length < 1)
        ]:
            raise ValueError(f"struct {name}: {', '.join(empty)} has no elements; an array has a whole number of them")
        declared = (
            f"{kind.name if isinstance(kind, StructType) else NUMBERS[kind][0]} {field}{_brackets(length)};"
            for field, kind, length in self.fields
        )
        self.define = (f"{name.upper()}_FIELDS", " ".join(declared))
        self.layout = _layout(self.fields)

    def __call__(self, **values: _Value | Sequence[_Value]) -> Struct:
        """A value of the structure, every field by name.

        Raises:
            TypeError: a field is missing, of another type or length, or is none of its fields.
        """
        if values.keys() != self._names:
            missing = [field for field, _, _ in self.fields if field not in values]
            unknown = [name for name in values if name not in self._names]
            said = [f"lacks {', '.join(missing)}"] * bool(missing) + [f"has no {', '.join(unknown)}"] * bool(unknown)
            raise TypeError(f"struct {self.name} {' and '.join(said)}")
        given: list[_Value | tuple[_Value, ...]] = []
        for field, kind, length in self.fields:
            value: Any = values[field]
            if isinstance(kind, StructType):
                is_plain = length is None and isinstance(value, Struct) and value.type is kind
            elif length is None:
                is_plain = isinstance(value, (int, float))
            else:
                is_plain = type(value) is tuple and len(value) == length and _NUMBER_TYPES.issuperset(map(type, value))
            given.append(value if is_plain else self._checked(field, value))  # most are, and look-ups make thousands
        return Struct(self, tuple(given))

    def _checked(self, name: str, value: _Value | Sequence[_Value]) -> _Value | tuple[_Value, ...]:
        """A field's value as a structure has it.

        Raises:
            TypeError: it is of another type or length.
        """
        kind, length = next((kind, length) for field, kind, length in self.fields if field == name)
        elements = tuple(value) if isinstance(value, Sequence) else (value,)
        if len(elements) != (length or 1) or isinstance(value, Sequence) is (length is None):
            raise TypeError(f"{name} of struct {self.name} is {value!r:.80}, declared {name}{_brackets(length)}")
        for element in elements:
            if (element.type if isinstance(element, Struct) else kind if isinstance(kind, str) else None) != kind:
                wanted = kind.name if isinstance(kind, StructType) else kind
                raise TypeError(f"{name} of struct {self.name} is {element!r:.80}, not of type {wanted}")
        return elements[0] if length is None else elements

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StructType) and (self.name, self.fields) == (other.name, other.fields)

    def __hash__(self) -> int:
        return hash((self.name, self.fields))

    def __repr__(self) -> str:
        fields = (f"{f}={kind!r}" if length is None else f"{f}=({kind!r}, {length})" for f, kind, length in self.fields)
        return f"StructType({self.name!r}, {', '.join(fields)})"


class Struct:
    """A structure's value: an argument of a kernel, inert like all of a step.

    Attributes:
        type: what it is a value of.
        values: of its fields, in their order; a tuple for an array.
    """

    __slots__ = ("type", "values")

    def __init__(self, type: StructType, values: tuple[_Value | tuple[_Value, ...], ...]) -> None:
        self.type = type
        self.values = values

    @property
    def bytes(self) -> int:
        """Size as the compiler lays it out, padding included."""
        return packing(self.type.layout).size

    @property
    def flat(self) -> tuple[int | float, ...]:
        """Its numbers in order, those of inner structures in their place."""
        return tuple(_flat(self.values))

    @property
    def numbers(self) -> Iterator[tuple[str, int | float]]:
        """Type and value of each number in order."""
        return zip(_kinds(self.type.fields), self.flat, strict=True)

    def in_memory(self) -> _Memory:
        """The structure as a launch reads it.

        Raises:
            LaunchError: a field's type cannot hold its number.
        """
        try:
            return packing(self.type.layout).pack(*_flat(self.values))
        except (struct.error, OverflowError):
            for kind, value in self.numbers:
                number_in_memory(kind, value)
            raise

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Struct) and (self.type, self.values) == (other.type, other.values)

    def __hash__(self) -> int:
        return hash((self.type, self.values))

    def __repr__(self) -> str:
        fields = zip(self.type.fields, self.values, strict=True)
        return f"{self.type.name}({', '.join(f'{name}={value!r}' for (name, _, _), value in fields)})"


_Kind = str | StructType
_Memory = bytes  # `Struct.bytes` is something else
_Field = tuple[str, str | StructType, int | None]
_Value = int | float | Struct


def _brackets(length: int | None) -> str:
    return "" if length is None else f"[{length}]"


def _kinds(fields: Sequence[_Field]) -> Iterator[str]:
    """The types of the numbers in fields, in order."""
    for _, kind, length in fields:
        for _ in range(length or 1):
            if isinstance(kind, StructType):
                yield from _kinds(kind.fields)
            else:
                yield kind


def _layout(fields: Sequence[_Field]) -> str:
    """Fields one after another, each at a multiple of its alignment, up to one of the largest alignment, as in C."""
    laid = ""
    for _, kind, length in fields:
        layout = kind.layout if isinstance(kind, StructType) else NUMBERS[kind][1]
        for _ in range(length or 1):
            laid = padded(laid, alignment_of(layout)) + layout
    return padded(laid, alignment_of(laid))


def _flat(values: Sequence[_Value | tuple[_Value, ...]]) -> Iterator[int | float]:
    """The numbers among values, those of inner structures in their place."""
    for value in values:
        if isinstance(value, tuple):
            yield from _flat(value)
        elif isinstance(value, Struct):
            yield from _flat(value.values)
        else:
            yield value
