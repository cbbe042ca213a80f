"""What ran the convolutions that PyTorch was asked for while miofind was enabled, and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from miofind.core.problem import ProblemDescription
from miofind.torch.override.calls import DIRECTION_OF
from miofind.torch.override.plans import Part
from miofind.torch.override.settings import CPU_IS_PYTORCHS

_MISALIGNED = "its tensors begin at other addresses"
_WITHOUT_MEMORY = "there was no memory for its workspace"


class CountedPlan(Protocol):
    """What runs calls that look alike: what became of their results, and how many calls there were."""

    @property
    def calls(self) -> int: ...

    @property
    def parts(self) -> tuple[Part, ...]: ...

    def direct_without_memory(self, computed: str) -> int: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class CallCount:
    """Calls that look alike, one result of each.

    Attributes:
        direction: "forward", "backward_data" or "backward_weights" of the convolution, transposed or not.
        problem: what it asks; None where miofind has no such problem.
        solver_id: what ran it, "" for PyTorch's own kernel.
        reason: why PyTorch's own kernel did.
        is_missing: whether no FindDB had an answer to the problem.
        calls: how many.
    """

    direction: str
    problem: ProblemDescription | None
    solver_id: str
    reason: str
    is_missing: bool
    calls: int


@dataclass(frozen=True, slots=True)
class CallReport:
    """Calls since miofind was enabled, the most frequent first.

    Attributes:
        devices: kinds of PyTorch's devices whose calls come to miofind; those on others are not counted.
    """

    counts: tuple[CallCount, ...]
    devices: tuple[str, ...] = ()

    @staticmethod
    def of(plans: Iterable[CountedPlan], devices: Iterable[str] = ()) -> CallReport:
        """The calls on some devices that plans were made for."""
        counts = [count for plan in plans for count in _counts(plan)]
        return CallReport(tuple(sorted(counts, key=lambda count: -count.calls)), tuple(devices))

    @property
    def calls(self) -> int:
        """Results that were asked for."""
        return sum(count.calls for count in self.counts)

    @property
    def own_calls(self) -> int:
        """Those of them that miofind computed."""
        return sum(count.calls for count in self.counts if count.solver_id)

    @property
    def reasons(self) -> dict[str, int]:
        """Why PyTorch's own kernels computed the others, and how many, the most frequent first."""
        reasons: Counter[str] = Counter()
        for count in self.counts:
            if not count.solver_id:
                reasons[count.reason] += count.calls
        return dict(reasons.most_common())

    @property
    def missing(self) -> dict[ProblemDescription, int]:
        """Problems that no FindDB had an answer to, and their calls, the most frequent first."""
        missing: Counter[ProblemDescription] = Counter()
        for count in self.counts:
            if count.is_missing and count.problem is not None:
                missing[count.problem] += count.calls
        return dict(missing.most_common())

    def __str__(self) -> str:
        lines = [f"miofind computed {self.own_calls} of {self.calls} results of convolutions"]
        lines += [f"  {calls} left to PyTorch: {reason}" for reason, calls in self.reasons.items()]
        if not self.counts and self.devices and "cpu" not in self.devices:
            lines.append(f"  {CPU_IS_PYTORCHS}")
        return "\n".join(lines)


def _counts(plan: CountedPlan) -> Iterable[CallCount]:
    for part in plan.parts:
        own = lacking = 0
        if to_solution := plan.calls if part.launch is not None else part.calls_before_failure:
            lacking = part.without_memory + plan.direct_without_memory(part.computed)
            own = max(0, to_solution - part.declined - lacking)  # threads count beside each other
        solver_id = "" if part.solution is None else part.solution.solver_id
        others = plan.calls - own - lacking - part.declined
        told = [
            (own, solver_id, ""),
            (lacking, "", _WITHOUT_MEMORY),
            (part.declined, "", _MISALIGNED),
            (others, "", part.reason),
        ]
        for calls, runs, reason in told:
            if calls:
                yield CallCount(
                    direction=DIRECTION_OF[part.computed].value,
                    problem=part.problem,
                    solver_id=runs,
                    reason=reason,
                    is_missing=part.is_missing,
                    calls=calls,
                )
