"""Sources of a report: files of any of the kinds that miofind writes, told apart by what is in them."""

from __future__ import annotations

from pathlib import Path

from miofind.errors import InvalidOptionError
from miofind.finddb import is_database
from miofind.report.finddb_source import read_finddb
from miofind.report.json_source import read_json
from miofind.report.results import SourceContent


def read_source(name: str) -> SourceContent:
    """What a file holds: a FindDB, or the JSON of a benchmark or a tuning.

    Raises:
        InvalidOptionError: it is not there, is none of these, or holds no problem. DatabaseError: a FindDB that cannot
            be read.
    """
    path = Path(name)
    try:
        is_finddb = is_database(path)
    except (OSError, ValueError) as error:
        raise InvalidOptionError(f"{name}: it cannot be read: {error}") from error
    return checked_content(read_finddb(path) if is_finddb else read_json(path, name))


def checked_content(content: SourceContent) -> SourceContent:
    """The content, which has something to show.

    Raises:
        InvalidOptionError: it has nothing.
    """
    if not content.results:
        raise InvalidOptionError("; ".join((f"{content.name}: it holds no problem to show", *content.notes)))
    return content
