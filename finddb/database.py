"""What a FindDB is kept in: a file or memory of SQLite, or a server. All that differs between them is behind this."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from miofind.finddb.packing import HistoryCodec
from miofind.finddb.values import ProblemKey

if TYPE_CHECKING:
    from sqlalchemy import Connection

T = TypeVar("T")

BATCH = 100
"""Problems that are read or written at a time in work on a whole database, so that others get their turn between."""


class Database(ABC):
    """One database, opened on first use. Threads may share it; a forked child opens its own connections.

    What is done with it raises DatabaseError where it cannot be opened, read or written, and SchemaVersionError where a
    newer release made its tables.

    Attributes:
        where: its name, fit for logs.
        location: what a user is told it is: a whole path, or a server's URL without who asks.
        address: what opens it again. A server's may hold a password: it goes into no message, log or report.
        path: the file, None in memory and on a server.
        read_only: whether it refuses to be written.
    """

    where: str
    location: str
    address: str
    path: Path | None
    read_only: bool

    @property
    @abstractmethod
    def exists(self) -> bool:
        """Whether there is anything to read: a file, memory, or tables on a server, which may be out of reach."""

    @property
    @abstractmethod
    def version(self) -> int:
        """The version of its tables when it was opened."""

    @property
    @abstractmethod
    def packing(self) -> HistoryCodec | None:
        """How the answers of a release are packed, None in any other database; to be asked where it is open."""

    @property
    @abstractmethod
    def is_immutable(self) -> bool:
        """Whether nobody writes to what is open; to be asked where it is."""

    @property
    @abstractmethod
    def files(self) -> int:
        """How many databases were found at the address so far: what was read in one says nothing of the next."""

    @abstractmethod
    def read(self) -> AbstractContextManager[Connection]:
        """A connection to read from, for this thread until the block ends."""

    @abstractmethod
    def one_instant(self) -> AbstractContextManager[None]:
        """What this thread reads from a server in the block is of one instant; of a file only each problem is."""

    @abstractmethod
    def in_batches(
        self, device: str | None, read: Callable[[Connection, Mapping[int, ProblemKey]], list[T]]
    ) -> Iterator[list[T]]:
        """What `read` gives for some problems after the other, by their keys; each batch is of one instant.

        Args:
            device: whose problems; None for all.
        """

    @abstractmethod
    def opened(self) -> AbstractContextManager[None]:
        """It is open for this thread until the block ends, to be asked what it is, for payloads and for rivals."""

    @abstractmethod
    def payload(self, device: str, network_config: str) -> Any:
        """What is stored as the answer to a problem, None where nothing is; to be asked where it is open."""

    @abstractmethod
    def rivals(self, device: str, first: str, end: str) -> Iterable[Sequence[Any]]:
        """The name of the problem and the values of each row of a rival, in the order of ROW_FIELDS, where it is open.

        Args:
            first, end: names of problems from the one up to the other, which is not among them.
        """

    @abstractmethod
    def note(self, key: str) -> str | None:
        """What it says of itself, such as "release", None where it says nothing; to be asked where it is open."""

    @abstractmethod
    def write(self) -> AbstractContextManager[Connection]:
        """A connection in a transaction that is committed when the block ends; nothing is stored where it fails."""

    @abstractmethod
    def transact(self, work: Callable[[Connection], T], *, alone: bool = False) -> T:
        """What `work` returns, in a transaction: it is called again where others got in its way.

        Args:
            alone: nobody else writes meanwhile: what is removed may be what others are about to name.
        """

    @abstractmethod
    def clock(self, connection: Connection, present: str) -> str:
        """The present as all see it that write to it, in the form of `created_at`; `present` is this machine's."""

    @abstractmethod
    def revision(self, connection: Connection) -> str:
        """What is another wherever something else may be stored than before; "" in memory."""

    @abstractmethod
    def prepare_to_write(self) -> None:
        """Open what `write` needs, to learn whether it can be."""

    @abstractmethod
    def shrink(self) -> None:
        """Give room back that removed rows took."""

    @abstractmethod
    def size_bytes(self, connection: Connection) -> int:
        """Room that it takes, 0 in memory."""

    @abstractmethod
    def findings(self, connection: Connection) -> list[str]:
        """What is wrong with it and its tables, one line each."""

    @abstractmethod
    def close(self) -> None:
        """Close for good. Harmless when repeated."""
