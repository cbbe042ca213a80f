"""How a release keeps a problem: its whole history in one text, which is its answer, too.

The text is the answer's, of all rows and scopes, then an empty line and the verdicts. Ids are left out, since they
follow from the content. A text is stored in blocks of deflate that are not compressed: git stores the next release as
its difference from this one (0.02 to 0.33 MiB, where a compressed file takes 1.7), and a wheel compresses the whole
file better than its texts one by one. Compressed texts of earlier releases are read, too. Whoever may have written a
text, it is read within bounds, and a checksum over the problem's key and the text tells damage. Nothing here knows SQL.
"""

from __future__ import annotations

import json
import zlib
from dataclasses import replace
from typing import TypeVar

from miofind.finddb import answers, ranking
from miofind.finddb.validation import RefusedEntryError
from miofind.finddb.values import (
    VERDICT_FIELDS,
    History,
    ProblemKey,
    Row,
    Scope,
    Verdict,
    canonical_json,
    content_id,
    without_defaults,
)

Named = TypeVar("Named", Row, Scope, Verdict)

MAX_TEXT_CHARS = 1 << 22
"""Of one problem, whose text takes a thousandth of that."""

_MAX_DICTIONARY_CHARS = 1 << 15  # what deflate can look back on
_RAW = -15  # no header: each is of one form
_CHECK_BYTES = 4
_BREAK = "\n\n"


class HistoryCodec:
    """How the histories of one file are packed.

    Args:
        dictionary: the preset dictionary of compressed texts; empty where texts are stored plain.

    Raises:
        TypeError, ValueError: it can be no dictionary.
    """

    def __init__(self, dictionary: str | None) -> None:
        if not isinstance(dictionary, str):
            raise TypeError("the dictionary of its answers is missing")
        if len(dictionary) > _MAX_DICTIONARY_CHARS:
            raise ValueError(f"the dictionary of its answers is longer than {_MAX_DICTIONARY_CHARS} characters")
        self._dictionary = dictionary.encode("ascii")

    def unpack(self, device: str, network_config: str, payload: bytes) -> str:
        """The text of a problem that was packed.

        Raises:
            TypeError, ValueError: none was.
        """
        unpacker = zlib.decompressobj(wbits=_RAW, zdict=self._dictionary)
        try:
            text = unpacker.decompress(payload[_CHECK_BYTES:], MAX_TEXT_CHARS + 1)
        except zlib.error as error:
            raise ValueError(f"an answer is damaged, {error}") from error
        if not unpacker.eof or unpacker.unused_data:
            raise ValueError("an answer is cut off, or longer than any")
        if _checksum(device, network_config, text) != payload[:_CHECK_BYTES]:
            raise ValueError("an answer or its problem is damaged, their checksum differs")
        return text.decode("ascii")

    def answer_text(self, device: str, network_config: str, payload: bytes) -> str:
        """The part of a packed text that `answers.decode` takes.

        Raises:
            TypeError, ValueError: there is none.
        """
        return self.unpack(device, network_config, payload).partition(_BREAK)[0]

    def history(self, key: ProblemKey, payload: bytes) -> History:
        """The packed history of a problem, in the order of a store's, without environments.

        Raises:
            TypeError, ValueError, RecursionError, DatabaseError: it is none.
        """
        found = self.history_without_ids(key, payload)
        rows = [_named(key, row) for row in found.rows]
        scopes = [_named(key, scope) for scope in found.scopes]
        verdicts = [_named(key, verdict) for verdict in found.verdicts]
        return replace(
            found,
            rows=tuple(sorted(rows, key=lambda row: (row.solver_id, row.config, row.created_at, row.id))),
            scopes=tuple(sorted(scopes, key=_by_time)),
            verdicts=tuple(sorted(verdicts, key=_by_time)),
        )

    def history_without_ids(self, key: ProblemKey, payload: bytes) -> History:
        """As `history`, in the order as packed, and in a fifth of the time.

        Raises:
            TypeError, ValueError, RecursionError, DatabaseError: as for `history`.
        """
        answer_text, _, verdicts_text = self.unpack(key.device, key.network_config, payload).partition(_BREAK)
        answer = answers.decode(key.device, key.network_config, answer_text)
        return History(
            device=key.device,
            network_config=key.network_config,
            rows=tuple(answer.rows),
            scopes=answer.scopes,
            verdicts=tuple(answers.verdict_of(values) for values in json.loads(verdicts_text)),
        )


def _checksum(device: str, network_config: str, text: bytes) -> bytes:
    key = f"{device}\n{network_config}\n".encode()
    return zlib.crc32(text, zlib.crc32(key)).to_bytes(_CHECK_BYTES, "little")


def text_of(history: History) -> str:
    """A history of usable rows as the text to be packed.

    Raises:
        RefusedEntryError: it is too long.
    """
    rows = (replace(row, id="") for row in ranking.rank(history.rows, history.verdicts))
    scopes = (replace(scope, id="") for scope in sorted(history.scopes, key=_by_time, reverse=True))
    plain = (without_defaults(verdict, "id") for verdict in history.verdicts)
    verdicts = [[values.get(name, "") for name in VERDICT_FIELDS] for values in plain]
    text = answers.text_of(rows, scopes) + _BREAK + canonical_json(verdicts)
    if len(text) > MAX_TEXT_CHARS:
        told = f"{len(text)} characters: a release has room for {MAX_TEXT_CHARS}"
        raise RefusedEntryError(f"{history.network_config} takes {told}")
    return text


def pack(device: str, network_config: str, text: str) -> bytes:
    """A checksum and the text of a problem, which `HistoryCodec("")` unpacks."""
    plain = text.encode("ascii")
    writer = zlib.compressobj(level=0, wbits=_RAW)
    return _checksum(device, network_config, plain) + writer.compress(plain) + writer.flush()


def _named(key: ProblemKey, entry: Named) -> Named:
    """The entry with the id that was left out."""
    return replace(entry, id=entry.id or content_id(key.device, key.network_config, entry))


def _by_time(entry: Scope | Verdict) -> tuple[str, str]:
    return entry.created_at, entry.id
