"""Python sources of host functions: a module with all that it computes with, hashed without lines of comment.

What a module computes with is what it imports of its own package and of the code that solvers of the CPU place share.
The contract of solvers and the values that they are given are left out: they say what is asked, not how it is computed.
The text is hashed and not the bytecode, which differs between releases of Python.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder

SHARED = ("miofind.solvers", "miofind.reference")
"""Code of this package that host functions may compute with: modules, and packages with all in them."""

# A line of comment or a blank one goes; strings and comments behind code stay, and hide what looks like either.
_TOKEN = re.compile(
    r"""
    (?P<gap>  ^[ \t]*(?:\#[^\n]*)?\n )
  | (?P<kept> (?P<quotes>\"{3}|'{3})(?:\\.|.)*?(?P=quotes)
            | "(?:\\.|[^"\\\n])*"
            | '(?:\\.|[^'\\\n])*'
            | \#[^\n]* )
    """,
    re.VERBOSE | re.DOTALL | re.MULTILINE,
)
_IMPORT = re.compile(
    r"""
    ^[ \t]* (?: from [ \t]+ (?P<base>[\w.]+) [ \t]+ import [ \t]* (?P<names> \([^)]*\) | [^\n]* )
               | import [ \t]+ (?P<modules>[^\n]*) )
    """,
    re.VERBOSE | re.MULTILINE,
)
_NAME = re.compile(r"(?P<name>[\w.]+)(?:[ \t]+as[ \t]+\w+)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Import:
    """What one statement imports: a module by its absolute name, and names out of it, which may be modules, too."""

    module: str
    names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Module:
    """The hash of a module's text without lines of comment, and what it imports."""

    digest: str
    imports: tuple[_Import, ...]


@functools.cache
def host_hash(module: str) -> str:
    """Hash of a module's source with all of its package and of SHARED that it reaches; 64 hexadecimal digits.

    "" where nobody has the source, such as of a module that was typed in. Reads each file once in a process, and
    imports nothing.
    """
    if _read(module) is None:
        return ""
    reached = {module}
    pending = [module]
    while pending:
        for name in _followed(pending.pop(), of=module):
            if name not in reached:
                reached.add(name)
                pending.append(name)
    digests = [(name, found.digest) for name in sorted(reached) if (found := _read(name)) is not None]
    return hashlib.sha256("\n".join(f"{name} {digest}" for name, digest in digests).encode()).hexdigest()


def _followed(name: str, *, of: str) -> Iterator[str]:
    """The modules that one imports and that count for a module."""
    package = of.partition(".")[0]
    roots = SHARED if package == "miofind" else (package, *SHARED)
    found = _read(name)
    for statement in found.imports if found is not None else ():
        for other in (statement.module, *(f"{statement.module}.{part}" for part in statement.names)):
            if any(f"{other}.".startswith(f"{root}.") for root in roots) and _read(other) is not None:
                yield other


@functools.cache
def _read(name: str) -> _Module | None:
    """A module as its text has it; None where there is no such module or nobody has its text."""
    spec = _spec(name)
    text = None if spec is None else _text(spec)
    if spec is None or text is None:
        return None
    package = name if spec.submodule_search_locations is not None else name.rpartition(".")[0]
    text = _TOKEN.sub(lambda token: "" if token["gap"] is not None else token[0], text)
    return _Module(digest=hashlib.sha256(text.encode()).hexdigest(), imports=tuple(_imports(text, package)))


def _spec(name: str) -> ModuleSpec | None:
    """Where a module is; what is not imported yet stays so, which `importlib.util.find_spec` would do to parents."""
    known: ModuleSpec | None = getattr(sys.modules.get(name), "__spec__", None)
    if known is not None:
        return known
    parent = name.rpartition(".")[0]
    try:
        if not parent:
            return importlib.util.find_spec(name)
        found = _spec(parent)
        if found is None or found.submodule_search_locations is None:
            return None
        return PathFinder.find_spec(name, found.submodule_search_locations)
    except (ImportError, ValueError):  # no such package, or one that is being run as a script
        return None


def _text(spec: ModuleSpec) -> str | None:
    """The source, its lines ended alike; what is no Python counts by its bytes."""
    loader = spec.loader
    try:
        if (get_source := getattr(loader, "get_source", None)) is not None:
            text = get_source(spec.name)
            if text is not None:
                return str(text)
        if spec.origin and (get_data := getattr(loader, "get_data", None)) is not None:
            return hashlib.sha256(get_data(spec.origin)).hexdigest()
    except (ImportError, OSError, SyntaxError, UnicodeDecodeError):
        return None
    return None


def _imports(text: str, package: str) -> Iterator[_Import]:
    """The imports of a module; a line of a string that looks like one adds what is not there, or does no harm."""
    for statement in _IMPORT.finditer(text):
        if statement["modules"] is not None:
            yield from (_Import(module=found["name"]) for found in _NAME.finditer(statement["modules"]))
        else:
            names = tuple(found["name"] for found in _NAME.finditer(statement["names"]))
            yield _Import(module=_absolute(statement["base"], package), names=names)


def _absolute(base: str, package: str) -> str:
    """The name of the module that an import is from, whose leading dots climb from the package it stands in."""
    name = base.lstrip(".")
    level = len(base) - len(name)
    if level == 0:
        return base
    parents = package.split(".")
    parent = ".".join(parents[: len(parents) - level + 1])
    return f"{parent}.{name}" if name else parent
