"""The directions by name: a member of an enum costs a look-up in its class each time, which calls have no time for."""

from __future__ import annotations

from typing import Final

from miofind.core.problem import Direction

FORWARD: Final = Direction.FORWARD
BACKWARD_DATA: Final = Direction.BACKWARD_DATA
BACKWARD_WEIGHTS: Final = Direction.BACKWARD_WEIGHTS
