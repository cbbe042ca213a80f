"""What a cubin says of its kernels' parameters and blocks, and whether its ELF tables are what a compiler writes.

A cubin is an ELF file. Of the attributes in its section `.nv.info.<kernel>`, 0x17 (EIATTR_KPARAM_INFO) tells of a
parameter its ordinal, its offset and, in the upper 14 bits, its size; 0x05 (EIATTR_MAX_THREADS) has what
`__launch_bounds__` says, as three sizes of a block.
Source: elf(5); the layout as `cuobjdump -elf` and `readelf -x` show it: NVIDIA documents ELF sections, not these bits.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass

_IDENT = b"\x7fELF\x02\x01"  # 64 bits, little endian
_EM_CUDA = 190
_FILE_HEADER = struct.Struct("<16xHHIQQQIHHHHHH")
_SECTION_HEADER = struct.Struct("<IIQQQQIIQQ")
_SEGMENT_HEADER = struct.Struct("<IIQQQQQQ")
_NOTHING_STORED = frozenset({0, 8})  # SHT_NULL, SHT_NOBITS
_MAX_UNSTORED_BYTES = 16 << 20
"""Of sections that take memory and none of the file; shared memory, of which a kernel has at most 228 KiB."""

_UNREADABLE = (struct.error, ValueError, OverflowError)  # places beyond any file do not fit a size of C

_INFO = ".nv.info."
_MODULE_WIDE = frozenset({".nv.constant3", ".nv.constant4", ".nv.global", ".nv.global.init", ".nv.shared.reserved.0"})
_SIZED = 0x04  # an attribute with a 16-bit size and as many bytes; others have 16 bits in all
_MAX_THREADS = 0x05
_BLOCK = struct.Struct("<III")
_PARAMETER = 0x17
_PARAMETER_INFO = struct.Struct("<IHHI")
_SIZE_SHIFT = 18


@dataclass(frozen=True, slots=True)
class _Section:
    """One section; `name_at` is where its name begins in the file, `registers` those of a kernel's instructions."""

    name_at: int
    kind: int
    at: int
    size_bytes: int
    registers: int = 0


@dataclass(frozen=True, slots=True)
class _Header:
    """Of the file: where its tables are, how many entries they have, and which section has the sections' names."""

    segments_at: int
    segments: int
    sections_at: int
    sections: int
    names: int


def complaint(cubin: bytes) -> str:
    """What is wrong with a cubin's tables, "" for nothing: who follows them takes little more memory than the file."""
    try:
        header = _header(cubin)
        sections = _sections(cubin, header)
        sizes = [section.size_bytes for section in sections]
        outside = any(s.kind not in _NOTHING_STORED and s.at + s.size_bytes > len(cubin) for s in sections)
        segments = _segment_sizes(cubin, header)
    except _UNREADABLE as error:
        return f"its ELF tables cannot be read ({error})"
    if outside:
        return "a section of it lies outside of the file"
    limit = 2 * len(cubin) + _MAX_UNSTORED_BYTES  # segments repeat what sections have, and may overlap
    if max(sum(sizes), sum(segments)) > limit:
        return f"it has {len(cubin)} bytes and asks for {max(sum(sizes), sum(segments))} bytes of memory"
    return ""


def machine_code(cubin: bytes, kernel: str) -> str:
    """Hash of what a GPU executes for a kernel, and of what the driver sets up for it: instructions, constants,
    parameters, registers and shared memory. Names are left out, and so are other kernels of the file.

    Of the sections, those that end in the kernel's name are its own; those of module-wide memory count, too.

    Raises:
        ValueError: it is no cubin, or has no such kernel.
    """
    try:
        sections = _sections(cubin, _header(cubin))
        named = [(_name(cubin, section), section) for section in sections]
    except _UNREADABLE as error:
        raise ValueError(f"its ELF tables cannot be read ({error})") from error
    own = {name.removesuffix(f".{kernel}"): section for name, section in named if name.endswith(f".{kernel}")}
    if ".text" not in own:
        raise ValueError(f"it has no kernel {kernel}")
    shared = {name: section for name, section in named if name in _MODULE_WIDE}
    digest = hashlib.sha256()
    for name, section in sorted((own | shared).items()):
        is_stored = section.kind not in _NOTHING_STORED
        content = cubin[section.at : section.at + section.size_bytes] if is_stored else b""
        digest.update(f"{name} {section.kind} {section.size_bytes} {section.registers} {len(content)}:".encode())
        digest.update(content)
    return digest.hexdigest()


def _name(cubin: bytes, section: _Section) -> str:
    return cubin[section.name_at : cubin.index(b"\0", section.name_at)].decode()


def parameter_bytes(cubin: bytes, kernel: str) -> tuple[int, ...] | None:
    """Sizes of a kernel's parameters in their order; None where the file does not tell."""
    try:
        found = _parameters(_info(cubin, kernel))
    except _UNREADABLE:
        return None
    if sorted(found) != list(range(len(found))):
        return None
    return tuple(found[ordinal] for ordinal in range(len(found)))


def max_threads(cubin: bytes, kernel: str) -> int | None:
    """Threads that a block of a kernel may have by its `__launch_bounds__`; None where the file does not tell."""
    try:
        blocks = [
            _BLOCK.unpack_from(value) for kind, value in _attributes(_info(cubin, kernel)) if kind == _MAX_THREADS
        ]
    except _UNREADABLE:
        return None
    return math.prod(blocks[0]) if blocks else None


def _info(cubin: bytes, kernel: str) -> bytes:
    """The section that tells of a kernel.

    Raises:
        ValueError, struct.error: it is no cubin, or has no such section.
    """
    name = f"{_INFO}{kernel}\0".encode()
    named = (section for section in _sections(cubin, _header(cubin)) if cubin.startswith(name, section.name_at))
    section = next(named, None)
    if section is None:
        raise ValueError(f"it has no section {_INFO}{kernel}")
    return cubin[section.at : section.at + section.size_bytes]


def _header(cubin: bytes) -> _Header:
    """The file's header.

    Raises:
        ValueError, struct.error: it is none of a cubin.
    """
    values = _FILE_HEADER.unpack_from(cubin)
    _, machine, _, _, segments_at, sections_at, _, _, segment_bytes, segments, section_bytes, sections, names = values
    if not cubin.startswith(_IDENT) or machine != _EM_CUDA:
        raise ValueError("it is no 64-bit ELF file for CUDA")
    if section_bytes != _SECTION_HEADER.size or (segments and segment_bytes != _SEGMENT_HEADER.size):
        raise ValueError(f"its tables have entries of {section_bytes} and {segment_bytes} bytes")
    return _Header(segments_at, segments, sections_at, sections, names)


def _sections(cubin: bytes, header: _Header) -> list[_Section]:
    """The sections, none of them read: their headers may name the whole file again and again.

    Raises:
        ValueError, struct.error: the table does not lie in the file, or names none of its sections.
    """
    at, size = header.sections_at, _SECTION_HEADER.size
    entries = [_SECTION_HEADER.unpack_from(cubin, at + number * size) for number in range(header.sections)]
    if header.names >= len(entries):
        raise ValueError(f"it has {len(entries)} sections, their names are in section {header.names}")
    names_at = entries[header.names][4]
    return [_Section(names_at + entry[0], entry[1], entry[4], entry[5], entry[7] >> 24) for entry in entries]


def _segment_sizes(cubin: bytes, header: _Header) -> list[int]:
    """Bytes of memory that each segment takes."""
    at, size = header.segments_at, _SEGMENT_HEADER.size
    return [_SEGMENT_HEADER.unpack_from(cubin, at + number * size)[6] for number in range(header.segments)]


def _parameters(info: bytes) -> dict[int, int]:
    """Bytes of each parameter by ordinal."""
    found: dict[int, int] = {}
    for kind, value in _attributes(info):
        if kind == _PARAMETER:
            _, ordinal, _, packed = _PARAMETER_INFO.unpack_from(value)
            found[ordinal] = packed >> _SIZE_SHIFT
    return found


def _attributes(info: bytes) -> Iterator[tuple[int, bytes]]:
    """Attributes that have a size, by their number, with what they hold."""
    at = 0
    while at + 4 <= len(info):
        form, attribute, length = struct.unpack_from("<BBH", info, at)
        at += 4
        if form == _SIZED:
            yield attribute, info[at : at + length]
            at += length
