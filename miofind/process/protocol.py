"""What this process and a child that serves it tell each other, whatever the service is.

The parent starts a child by a `Service`, whose first message is a `Start`: which function serves, and with what. In the
child that function has a `Parent`. It says `Ready` once it can serve; from then on the two send messages of their own.
The last message is `Finished`, or `Failed` where the function raised. Log records and, if asked for, `Alive` come in
between: the parent's end shows the ones and counts both as signs of life, and hands out neither.

A child ends with its parent, and leaves Ctrl-C to it.
"""

from __future__ import annotations

from dataclasses import dataclass

from miofind.errors import MiofindError


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """What a child is there for; the first message to it.

    Attributes:
        service: a pickled pair of a module's function and its setup; the function is called with the child's parent and
            the setup.
        log_level: of what is logged there and handled here.
        beat_s: seconds from one `Alive` to the next; None for none.
    """

    service: bytes
    log_level: int
    beat_s: float | None


@dataclass(frozen=True, slots=True)
class Ready:
    """The child can serve; what it does from now on is to blame for its end."""


@dataclass(frozen=True, slots=True)
class Alive:
    """A sign of life, so that a child that was stopped or hangs is told from one at work."""


@dataclass(frozen=True, slots=True)
class Finished:
    """The child has done what it was there for, and ends."""


@dataclass(frozen=True, slots=True)
class Failed:
    """The child cannot go on, and ends.

    Attributes:
        message: why.
        error: what it raised, where that is one of miofind's and can be sent: any other child may meet the same.
    """

    message: str
    error: MiofindError | None = None
