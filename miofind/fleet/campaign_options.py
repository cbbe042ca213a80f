"""How a campaign's problems are tuned, as JSON on the server: only what is known crosses, checked as a user's words.

Candidates are always measured in a child: what the server says cannot turn the sandbox off.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from miofind.errors import DatabaseError, InvalidOptionError, UnknownSolverError
from miofind.options import FindOptions
from miofind.tune.values import TuneOptions

_FIND = (
    *("only", "exclude", "workspace_limit_bytes", "max_error", "deterministic", "strict_nonfinite"),
    *("tuning", "likely", "trials", "patience", "seed", "retry_failed", "time_budget_s"),
)
_TUNE = ("force", "stored")
_DEFAULTS = {item.name: item.default for item in fields(FindOptions) + fields(TuneOptions) if item.name != "find"}
_INFINITY = "infinity"


def options_json(options: TuneOptions) -> dict[str, object]:
    """What of the options crosses, without what is at its default.

    Raises:
        InvalidOptionError: they ask for a re-check, which goes by one host's notes, or for candidates that are drawn.
    """
    if options.drawn:
        raise InvalidOptionError(
            "agents of other releases know no candidates that are drawn: use `miofind tune --likely --draw` on one host"
        )
    if options.recheck:
        raise InvalidOptionError("recheck goes by the notes of one host's FindDB: use `miofind tune --recheck` there")
    given = {name: getattr(options.find, name) for name in _FIND} | {name: getattr(options, name) for name in _TUNE}
    return {name: _plain(value) for name, value in given.items() if value != _DEFAULTS[name]}


def options_of(values: object) -> TuneOptions:
    """The options that a server holds.

    Raises:
        DatabaseError: they are not of this form: another release's, or altered.
    """
    if not isinstance(values, Mapping):
        raise DatabaseError(f"the options of a campaign are {type(values).__name__}, not a JSON object")
    if unknown := sorted(map(str, values.keys() - {*_FIND, *_TUNE})):
        raise DatabaseError(f"a campaign has options that this release does not know: {', '.join(unknown)[:200]}")
    read = {name: math.inf if value == _INFINITY else value for name, value in values.items()}
    try:
        find = FindOptions(isolate=True, **{name: _read(read[name]) for name in _FIND if name in read})
        flags: dict[str, Any] = {name: read[name] for name in _TUNE if name in read}
        if not all(type(flag) is bool for flag in flags.values()):
            raise InvalidOptionError(f"{flags} must be True or False")
        return TuneOptions(find=find, **flags)
    except (InvalidOptionError, UnknownSolverError, TypeError) as error:
        raise DatabaseError(f"a campaign has options that cannot be used here: {error}") from error


def _plain(value: object) -> object:
    if value == math.inf:
        return _INFINITY
    return list(value) if isinstance(value, tuple) else value


def _read(value: Any) -> Any:
    return tuple(map(str, value)) if isinstance(value, list) else value
