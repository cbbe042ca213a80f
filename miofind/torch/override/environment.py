"""MIOFIND_TORCH, by which whoever starts a program says what miofind does in it, whatever its code enables."""

from __future__ import annotations

import os
from enum import StrEnum

from miofind.errors import InvalidOptionError, brief

VARIABLE = "MIOFIND_TORCH"


class Way(StrEnum):
    """What miofind does in a program.

    Attributes:
        OFF: nothing.
        ON: what `enable` is asked for.
        RECORD: it notes all problems and runs none.
        TUNE: what `enable` is asked for, and misses are measured.
    """

    OFF = "0"
    ON = "1"
    RECORD = "record"
    TUNE = "tune"


def way() -> Way:
    """What the environment asks for; ON where it says nothing.

    Raises:
        InvalidOptionError: another value.
    """
    wanted = os.environ.get(VARIABLE) or Way.ON
    try:
        return Way(wanted)
    except ValueError:
        raise InvalidOptionError(f"{VARIABLE}={brief(wanted)} must be one of {', '.join(Way)}") from None
