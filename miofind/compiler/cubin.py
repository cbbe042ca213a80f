"""What a cubin says of its kernels' parameters.

A cubin is an ELF file. Of the attributes in its section `.nv.info.<kernel>`, 0x17 (EIATTR_KPARAM_INFO) tells of a
parameter its ordinal, its offset and, in the upper 14 bits, its size.
Source: the layout as `cuobjdump -elf` and `readelf -x` show it; NVIDIA documents ELF sections, not these bits.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

_SECTION_HEADER = struct.Struct("<IIQQQQIIQQ")
_INFO = ".nv.info."
_SIZED = 0x04  # an attribute with a 16-bit size and as many bytes; others have 16 bits in all
_PARAMETER = 0x17
_PARAMETER_INFO = struct.Struct("<IHHI")
_SIZE_SHIFT = 18


def parameter_bytes(cubin: bytes, kernel: str) -> tuple[int, ...] | None:
    """Sizes of a kernel's parameters in their order; None where the file does not tell."""
    try:
        info = dict(_sections(cubin)).get(_INFO + kernel)
        found = None if info is None else dict(_parameters(info))
    except (struct.error, IndexError, ValueError):
        return None
    if found is None or sorted(found) != list(range(len(found))):
        return None
    return tuple(found[ordinal] for ordinal in range(len(found)))


def _sections(cubin: bytes) -> Iterator[tuple[str, bytes]]:
    (table,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count, names_at = struct.unpack_from("<HHH", cubin, 0x3A)
    headers = [_SECTION_HEADER.unpack_from(cubin, table + i * size) for i in range(count)]
    names = headers[names_at][4]
    for name, _, _, _, offset, length, *_ in headers:
        start = names + name
        yield cubin[start : cubin.index(b"\0", start)].decode(), cubin[offset : offset + length]


def _parameters(info: bytes) -> Iterator[tuple[int, int]]:
    at = 0
    while at + 4 <= len(info):
        form, attribute, length = struct.unpack_from("<BBH", info, at)
        at += 4
        if form != _SIZED:
            continue
        if attribute == _PARAMETER:
            _, ordinal, _, packed = _PARAMETER_INFO.unpack_from(info, at)
            yield ordinal, packed >> _SIZE_SHIFT
        at += length
