"""The two gates every candidate passes before it is timed: exact sums of small integers, and bounded errors.

Judges what a rig finds in a trial and words the verdict. Knows nothing of timing or databases.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from enum import StrEnum
from types import TracebackType
from typing import TYPE_CHECKING

import numpy as np

from miofind.device import Device, Place
from miofind.errors import LaunchError, MiofindError, described
from miofind.interrupts import raise_if_interrupted
from miofind.problem import ProblemDescription
from miofind.values import Values
from miofind.verify.accuracy import direct_error
from miofind.verify.rig import Findings, Rig
from miofind.verify.sampling import SampleBudget

if TYPE_CHECKING:
    from miofind.compiler import Compiler
    from miofind.invoker import Invoker


class Gate(StrEnum):
    """EXACT: inputs from {-1, 0, 1}, bit for bit. NUMERIC: normal inputs, errors within their bound."""

    EXACT = "exact"
    NUMERIC = "numeric"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What verification says of one candidate.

    Attributes:
        ok: both gates were passed (the numeric one alone where exactness is not claimed).
        message: which gate failed and how, with the seed that repeats it; "" if none did.
        max_error: largest |error| / (|x| * |w|) of the checked elements with normal inputs; None if that was not run.
        bound_ratio: largest share of the arithmetic's bound that an error takes beyond the output's rounding; at most 1
            in a right result, the smaller the wider the margin.
    """

    ok: bool
    message: str = ""
    max_error: float | None = None
    bound_ratio: float | None = None


class Verifier:
    """Inputs and references of one problem, made once and used for every candidate; a context manager.

    Args:
        problem, device: what is computed, and where.
        compiler: builds the checking kernels; not used on the CPU place.
        seed: of inputs and sampled elements; fresh from the operating system by default.
        budget: how much reference work one set of inputs may cost on a GPU.

    Raises:
        MemoryError: the problem's tensors do not fit the device.
        CompileError, MissingLibraryError: the checking kernels cannot be built.
    """

    def __init__(
        self,
        problem: ProblemDescription,
        device: Device,
        compiler: Compiler,
        *,
        seed: int | None = None,
        budget: SampleBudget | None = None,
    ) -> None:
        self.problem = problem
        self.seed = int.from_bytes(os.urandom(6), "little") if seed is None else seed
        self._rig = _rig(problem, device, compiler, self.seed, budget or SampleBudget())

    def verify(self, invoker: Invoker, *, growth: float, exact: bool) -> Verdict:
        """The verdict on one candidate, after one run a gate.

        Args:
            invoker: the candidate.
            growth: how much wider its error bound is than direct summation's.
            exact: whether it claims exact results for small integers.

        Raises:
            LaunchError: it failed to start or to finish; the cause is chained.
            MemoryError: its workspace does not fit the device (CuPy's OutOfMemoryError is one).
        """
        if exact:
            message = self._complaint(Gate.EXACT, self._trial(invoker, Values.TERNARY, None))
            if message:
                return Verdict(ok=False, message=message)
        findings = self._trial(invoker, Values.NORMAL, growth * direct_error(self.problem))
        message = self._complaint(Gate.NUMERIC, findings)
        return Verdict(ok=not message, message=message, max_error=findings.max_error, bound_ratio=findings.bound_ratio)

    def close(self) -> None:
        """Give all memory back."""
        self._rig.close()

    def __enter__(self) -> Verifier:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _trial(self, invoker: Invoker, values: Values, factor: float | None) -> Findings:
        try:
            with np.errstate(all="ignore"):  # whatever the caller has NumPy do: an infinity, too, is to be compared
                return self._rig.trial(invoker, values, factor)
        except (MiofindError, MemoryError):
            raise
        except Exception as error:  # a candidate's own code, NumPy, CuPy: they share no base class below Exception
            raise_if_interrupted(error)
            name = f"{invoker.solver_id} {invoker.config.json}"
            told = f"{type(error).__name__}: {described(error, str)}"
            raise LaunchError(f"{name} failed on {self.problem}: {told}") from error

    def _complaint(self, gate: Gate, findings: Findings) -> str:
        """What is wrong, worst first; "" if nothing is."""
        faults = []
        output = self.problem.direction.output
        if findings.unwritten:
            size = self.problem.output.size
            faults.append(
                f"{findings.unwritten} of {size} elements of {output} are unwritten or NaN, "
                f"the first at {findings.first_unwritten}"
            )
        if findings.damaged:
            faults.append(f"overwritten: {', '.join(findings.damaged)}")
        if findings.worst is not None:
            worst = findings.worst
            faults.append(
                f"{findings.wrong} of {findings.checked} checked elements of {output} are wrong, the worst at "
                f"{worst.index}: got {worst.got!r}, wanted {worst.wanted!r} within {worst.bound:.3g}"
            )
        if not faults:
            return ""
        return f"{gate} gate, seed {self.seed}: {'; '.join(faults)}"


def _rig(problem: ProblemDescription, device: Device, compiler: Compiler, seed: int, budget: SampleBudget) -> Rig:
    if device.place is Place.CPU:
        from miofind.verify.rig_host import HostRig

        return HostRig(problem, seed)
    from miofind.verify.rig_cuda import CudaRig

    return CudaRig(problem, device, compiler, seed, budget)
