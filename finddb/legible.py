"""What is stored, read as what it must be: whoever may have written it, it is text or number, or an error says so."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from miofind.errors import MiofindError


class UnreadableEntryError(Exception):
    """An entry of the database that makes no sense; it leaves `read` and `write` as a DatabaseError."""


@contextmanager
def legible() -> Iterator[None]:
    """Marks a block that makes sense of what is stored."""
    try:
        yield
    except (ValueError, TypeError, RecursionError) as error:
        if isinstance(error, MiofindError):
            raise
        raise UnreadableEntryError(str(error)) from error


def checked_text(value: object) -> str:
    """What a column of texts holds: SQLite keeps values of any kind in it.

    Raises:
        UnreadableEntryError: it is no text.
    """
    if isinstance(value, str):
        return value
    raise UnreadableEntryError(f"{value!r:.60} is no text" if value is not None else "a text is missing")
