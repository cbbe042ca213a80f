"""Text of other people for a terminal: names from files, databases, plugins, the environment and the command line.

What would steer the terminal, hide or turn round what follows, or fill the screen is shown escaped or cut. Everything
that is printed for people passes here once; JSON does not.
"""

from __future__ import annotations

import re

LINE_CHARS = 2000
"""Of a line: as many as the longest that miofind makes itself, such as one that lists all solvers."""

NAME_CHARS = 120
_WORD_CHARS = 500  # network_configs and paths are long
_PATH_CHARS = 4096  # PATH_MAX of Linux (limits.h)
_TOLD_CHARS = 40

# Printable by Unicode's category, and yet nothing is seen of them (DerivedCoreProperties.txt,
# Default_Ignorable_Code_Point).
_UNSEEN = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u3164\ufe00-\ufe0f\uffa0\U0001d173-\U0001d17a\U000e0000-\U000e0fff]"
)
_LONG_WORD = re.compile(rf"\S{{{_WORD_CHARS + 1},}}")


def printable(text: str, limit: int = LINE_CHARS) -> str:
    """The text as one line of at most `limit` characters.

    What is not printable, line breaks included, is escaped as in Python's strings: control characters, marks that turn
    the direction of writing, and what has no width. Of what is longer the middle is left out.
    """
    return _shortened(_escaped(_shortened(text, limit)), limit)


def printable_path(text: str) -> str:
    """A path as one line, cut only where it is too long for any file: it may be used in other commands."""
    return _escaped(_cut(text, _PATH_CHARS))


def printable_lines(text: str) -> str:
    """The text with each of its lines `printable`, for texts that miofind itself breaks into lines."""
    return "\n".join(printable(line.expandtabs()) for line in text.split("\n"))


def printable_name(text: str) -> str:
    """A name, such as a layer's or a device's, in at most NAME_CHARS characters."""
    return printable(text, NAME_CHARS)


def _escaped(text: str) -> str:
    if text.isprintable() and not _UNSEEN.search(text):
        return text
    return "".join(c if c.isprintable() and not _UNSEEN.match(c) else _escape(c) for c in text)


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")


def _shortened(text: str, limit: int) -> str:
    if limit > _WORD_CHARS:
        text = _LONG_WORD.sub(lambda word: _cut(word[0], _WORD_CHARS), text)
    return _cut(text, limit)


def _cut(text: str, limit: int) -> str:
    if len(text) <= limit:
        return text
    kept = limit - _TOLD_CHARS
    tail = kept // 3
    return f"{text[: kept - tail]}...({len(text) - kept} characters more)...{text[-tail:]}"
