"""CUDA sources of a package: read, their #includes gathered, hashed without comments.

`#include "common/tile.cuh"` names a file from the package's root, whichever file it stands in; `#include <...>` belongs
to the CUDA toolkit. The text that is hashed is the text that is compiled: both come from one `KernelSource`. The hash
leaves out files' names: what was measured outlives a move.

A bare convolution's source has no lines between `#ifdef EPILOGUE` and its `#else` or `#endif`, nor these lines: a
kernel may learn to fuse, and what was measured of it without stays what it was. So it is with the lines of `#ifdef
VARIANT_...`, but for a source that defines it itself and includes the other's: a variant is a source of its own.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.resources
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources.abc import Traversable
from types import MappingProxyType
from typing import NamedTuple

from miofind.errors import CompileError

DEFAULT_PACKAGE = "miofind.kernels_src"

VARIANT = "VARIANT_"
"""What the macros begin with that sources of variants define."""

_MOST_TEXTS = 256
"""Of which what was found is kept: sources have most of their headers in common."""

_INCLUDE = re.compile(r'\s*#\s*include\s*"([^"\n]*)"')
_CONDITIONAL = re.compile(r"\s*#\s*(if|ifdef|ifndef|elif|elifdef|elifndef|else|endif)\b")
_OPTIONAL = re.compile(rf"#\s*ifdef\s+(EPILOGUE|{VARIANT}\w+)\b")
_IF_OPTIONAL = re.compile(rf"\s*{_OPTIONAL.pattern}")
_ELSE_IF = re.compile(r"(\s*#\s*)el(?=if)")
_VARIANT = re.compile(rf"^\s*#\s*define\s+({VARIANT}\w+)", re.MULTILINE)

# Words come first among the short tokens, so that the apostrophe of 1'000 opens no literal and `FOOR"(` no raw string.
# What is kept is matched in long runs, single spaces between words included: a call a token would take most of a hash.
# No possessive quantifier: before Python 3.11.5 (Debian 12 has 3.11.2) one around groups matches to the end.
_TOKEN = re.compile(
    r"""
    (?P<gap>   (?: \s | //(?:\\\r?\n|[^\n])* | /\*.*?\*/ )+ )
  | (?P<kept>(?: (?:u8|[uUL])?R"(?P<mark>[^()\\\s]{0,16})\(.*?\)(?P=mark)"
               | "(?:\\.|[^"\\\n])*"
               | \d(?:'?[\w.])*
               | \w+
               | '(?:\\.|[^'\\\n])*'
               | [ ](?![\s/])
               | [^\s/]
               | /(?!/|\*.*?\*/) )+)
    """,
    re.VERBOSE | re.DOTALL,
)
_COMMENT = re.compile(r"//(?:\\\r?\n|[^\n])*|/\*.*?\*/", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelSource:
    """One source file with all it includes.

    Attributes:
        name: file name relative to the package, with "/" between folders.
        text: the file as it is.
        headers: texts of the package's files it includes, directly or not, by the name they are included under.
        digest: hash of all of it but for files' names; comments and white space left out.
    """

    name: str
    text: str
    headers: Mapping[str, str]
    digest: str


@functools.cache
def read_source(name: str, package: str = DEFAULT_PACKAGE, *, fused: bool = False) -> KernelSource:
    """A source file with all it includes; read once in a process.

    Args:
        fused: with the lines for kernels that apply an epilogue.

    Raises:
        CompileError: the package or a file is missing or unreadable, a name leaves the package, or what is included
            defines a variant.
    """
    text = _read(name, package, f"source {name!r} of a kernel")
    parts = frozenset(_variants(text)) | ({"EPILOGUE"} if fused else set())
    text = _with_parts(text, parts)
    headers: dict[str, str] = {}
    pending = [(name, text)]
    while pending:
        includer, body = pending.pop()
        for included in _included(body):
            if included in headers or included == name:
                continue
            header = _read(included, package, f'#include "{included}" in {includer}')
            if variants := _variants(header):
                raise _refused(name, f"{included} defines {variants[0]}: that must stand in the variant's own source")
            headers[included] = _with_parts(header, parts)
            pending.append((included, headers[included]))
    digest = _digest(name, {name: text, **headers}, ())
    return KernelSource(name=name, text=text, headers=MappingProxyType(headers), digest=digest)


def _digest(name: str, texts: Mapping[str, str], includers: tuple[str, ...]) -> str:
    """Hash of a file, where the hash of what it includes stands for each line that does."""
    if name in includers:  # included once: its text is above
        return str(includers.index(name))
    digest = hashlib.sha256()
    for piece in _pieces(texts[name]):
        if isinstance(piece, bytes):
            digest.update(piece)
        else:
            digest.update(_hashed(f"include {_digest(piece.name, texts, (*includers, name))}"))
    return digest.hexdigest()


class _Include(NamedTuple):
    """A line that includes a file of the package."""

    name: str


@functools.lru_cache(maxsize=_MOST_TEXTS)
def _pieces(text: str) -> tuple[bytes | _Include, ...]:
    """What is hashed of a text, in order: the lines between two includes are one piece."""
    pieces: list[bytes | _Include] = []
    lines: list[bytes] = []
    for line in normalised(text).split("\n"):
        included = _INCLUDE.match(line) if "#" in line else None
        if included is None:
            lines.append(_hashed(f"text {line}"))
            continue
        pieces += [b"".join(lines), _Include(included[1])]
        lines = []
    return (*pieces, b"".join(lines))


def _included(text: str) -> list[str]:
    """The files of the package that a text includes."""
    return [piece.name for piece in _pieces(text) if isinstance(piece, _Include)]


def _hashed(part: str) -> bytes:
    """A part as it is hashed: no two lists of parts are the same bytes."""
    encoded = part.encode()
    return b"%d:%b" % (len(encoded), encoded)


def _variants(text: str) -> list[str]:
    """The variants that a text defines."""
    return _VARIANT.findall(normalised(text)) if VARIANT in text else []


def source_hash(sources: Sequence[str], package: str = DEFAULT_PACKAGE, *, fused: bool = False) -> str:
    """Hash of source files with all they include, comments and white space left out; 64 hexadecimal digits.

    Args:
        fused: with the lines for kernels that apply an epilogue.

    Raises:
        CompileError: a file is missing or unreadable, or a name leaves the package.
    """
    digests = [read_source(name, package, fused=fused).digest for name in sources]
    return hashlib.sha256(" ".join(digests).encode()).hexdigest()


@functools.lru_cache(maxsize=_MOST_TEXTS)
def _with_parts(text: str, parts: frozenset[str]) -> str:
    """A text as the preprocessor reads it where of what is optional these macros alone are defined.

    `#ifdef` of the others is left out itself, too. Lines are left empty, so that those of a compiler's messages keep
    their numbers.
    """
    if parts.issuperset(_OPTIONAL.findall(text)):
        return text
    kept: list[str] = []
    open_ones: list[bool | None] = []  # for an #ifdef that is left out whether its lines are, None for all others
    for line in text.split("\n"):
        directive = _CONDITIONAL.match(line) if "#" in line else None
        kind, is_own = directive[1] if directive else "", False
        if kind.startswith("if"):
            optional = _IF_OPTIONAL.match(line)
            is_own = optional is not None and optional[1] not in parts
            open_ones.append(True if is_own else None)
        elif kind.startswith("elif") and open_ones and open_ones[-1]:  # what is left out was the first branch
            line, open_ones[-1] = _ELSE_IF.sub(r"\1", line), None
        elif kind and open_ones and open_ones[-1] is not None:
            is_own, open_ones[-1] = True, False
        if kind == "endif" and open_ones:
            open_ones.pop()
        kept.append("" if is_own or any(open_ones) else line)
    return "\n".join(kept)


@functools.lru_cache(maxsize=_MOST_TEXTS)
def normalised(text: str) -> str:
    """C++ text without comments, blank lines and runs of white space; literals are kept as they are."""
    return _TOKEN.sub(_shortened, text).strip()


def _shortened(token: re.Match[str]) -> str:
    if token["gap"] is None:
        return token[0]
    gap = token[0]
    if "/" in gap:  # a block comment counts as one space, wherever its lines end, so a directive goes on behind it
        gap = _COMMENT.sub(" ", gap)
    return "\n" if "\n" in gap else " "


def _read(name: str, package: str, what: str) -> str:
    """Text of a file of a package; `what` says who asks, for messages."""
    parts = name.split("/")
    if "\\" in name or any(part in ("", ".", "..") for part in parts):
        raise _refused(name, f"{what} is refused: write a plain path below the root of package {package}")
    file = _root(name, package)
    for part in parts:
        file = file / part
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise _refused(name, f"{what} cannot be read from package {package}: {error}") from error


def _root(name: str, package: str) -> Traversable:
    try:
        return importlib.resources.files(package)
    except (ImportError, TypeError) as error:
        raise _refused(name, f"package {package!r} of CUDA source {name!r} cannot be imported: {error}") from error


def _refused(name: str, message: str) -> CompileError:
    return CompileError(message, source=name, options=(), log="")
