"""What a user asks of the override: which calls it takes, and what becomes of those that no FindDB knows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from miofind.core.tensor import DataType, Direction, data_type, enum_value
from miofind.errors import InvalidOptionError, InvalidProblemError, brief
from miofind.options import FindMode, FindOptions, member
from miofind.runtime.handle import Handle
from miofind.torch.override.calls import Unserved
from miofind.torch.override.flags import Flags

DEFAULT_WORKSPACE_LIMIT_BYTES = 2 << 30
"""What turns images of large batches and volumes to channels last and back needs, as PyTorch's own kernels do."""
CPU_IS_PYTORCHS = 'calls on CPU tensors are PyTorch\'s own, unless miofind.torch.enable(devices="cpu") asks for them'


class MissPolicy(StrEnum):
    """What becomes of a call whose problem no FindDB has an answer to.

    In all PyTorch's own kernel runs it and the problem is noted, unless: AUTO measures it first where
    `torch.backends.cudnn.benchmark` is True, FIND always, ESTIMATE runs what estimates say is fastest, ERROR raises.
    RECORD notes all problems and has PyTorch run them.
    """

    AUTO = "auto"
    FIND = "find"
    ESTIMATE = "estimate"
    FALLBACK = "fallback"
    RECORD = "record"
    ERROR = "error"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Arguments of `miofind.torch.enable`, which tells of them.

    Attributes:
        takes_cpu: CPU tensors are miofind's, too: what `enable` was not asked for does not come this far, but fused
            operators do, with nothing enabled.

    Raises:
        InvalidOptionError: the message names the argument and the value.
        UnknownSolverError: a name in `only` or `exclude` is no solver, algorithm or library.
    """

    on_miss: MissPolicy = MissPolicy.AUTO
    min_gain: float = 1.0
    workspace_limit_bytes: int | None = DEFAULT_WORKSPACE_LIMIT_BYTES
    only: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    dtypes: frozenset[DataType] | None = None
    directions: frozenset[Direction] | None = None
    time_budget_s: float | None = None
    background: bool = True
    handle: Handle | None = None
    takes_cpu: bool = True

    def __post_init__(self) -> None:
        set_field = object.__setattr__
        set_field(self, "on_miss", member(MissPolicy, self.on_miss, "on_miss"))
        gain: object = self.min_gain
        if isinstance(gain, bool) or not isinstance(gain, int | float) or not 0 < gain < math.inf:
            raise InvalidOptionError(f"min_gain={brief(gain)} must be a positive number, such as 1.05")
        if not isinstance(self.background, bool):
            raise InvalidOptionError(f"background={brief(self.background)} must be True or False")
        if self.handle is not None and not isinstance(self.handle, Handle):
            raise InvalidOptionError(f"handle={brief(self.handle)} must be a Handle, such as miofind.Handle(0)")
        set_field(self, "dtypes", _members(data_type, self.dtypes, "dtypes"))
        set_field(self, "directions", _members(_direction, self.directions, "directions"))
        checked = self.options(deterministic=False)
        for name in ("workspace_limit_bytes", "only", "exclude"):
            set_field(self, name, getattr(checked, name))

    def options(self, *, deterministic: bool) -> FindOptions:
        """What is asked of a find."""
        return FindOptions(
            workspace_limit_bytes=self.workspace_limit_bytes,
            deterministic=deterministic,
            find_mode=FindMode.HYBRID,
            time_budget_s=self.time_budget_s,
            only=self.only,
            exclude=self.exclude,
        )

    def measures(self, flags: Flags) -> bool:
        """Whether a miss is measured."""
        return self.on_miss is MissPolicy.FIND or (self.on_miss is MissPolicy.AUTO and flags.benchmark)

    def waits(self, flags: Flags) -> bool:
        """Whether a call waits for its kernels to be compiled: PyTorch's, run meanwhile, may give other bits."""
        return not self.background or flags.deterministic

    def refuse(self, flags: Flags, *, dtype: DataType, direction: Direction, is_depthwise: bool) -> None:
        """Do nothing where PyTorch's switches leave a result of a call to miofind, and miofind was asked for it.

        Args:
            direction: of the call; see `calls.DIRECTION_OF`.

        Raises:
            Unserved: PyTorch's own kernel is to compute it.
        """
        if not flags.enabled:
            raise Unserved("torch.backends.cudnn.enabled is False")
        if flags.depthwise_kernel != "auto" and is_depthwise:
            raise Unserved(f"torch.backends.cudnn.depthwise_kernel is {flags.depthwise_kernel!r}")
        if self.dtypes is not None and dtype not in self.dtypes:
            raise Unserved(f"{dtype} is not among the dtypes asked for")
        if self.directions is not None and direction not in self.directions:
            raise Unserved(f"{direction} is not among the directions asked for")


def _direction(value: object, name: str) -> Direction:
    return enum_value(Direction, value, name)


def _members(read: Callable[[object, str], Any], given: Any, name: str) -> Any:
    """What each of some values means, or a single one; None for all there are.

    Args:
        read: gives what a value of an argument of that name means.

    Raises:
        InvalidOptionError: a value means nothing.
    """
    if given is None:
        return None
    if isinstance(given, str) or not isinstance(given, Iterable):
        given = (given,)
    try:
        return frozenset(read(each, name) for each in given)
    except InvalidProblemError as error:
        raise InvalidOptionError(str(error)) from None
