"""The gates every candidate passes before it is timed, and the one that it passes again afterwards.

Judges the results of the checks that a harness runs, and words what failed.
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from types import TracebackType
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from miofind.core.problem import ProblemDescription
from miofind.core.values import Values
from miofind.device.device import Device, Place
from miofind.errors import LaunchError, MiofindError, described, raise_if_interrupted
from miofind.process.forks import loading
from miofind.verify.accuracy import direct_error
from miofind.verify.claims import Claims
from miofind.verify.harness import CheckHarness, CheckResult, PackedForm, Poison, Setting
from miofind.verify.ranges import exact_powers, numeric_powers, range_powers
from miofind.verify.sampling import SampleBudget

if TYPE_CHECKING:
    from miofind.compiler import Compiler
    from miofind.launch.invoker import Invoker


_Result = TypeVar("_Result")


class Gate(StrEnum):
    """What a candidate is tried with, always with large and small numbers among the inputs.

    EXACT: inputs from {-1, 0, 1} times powers of two, bit for bit but for inexact activations; with an epilogue again
    with its summands shifted and alpha negative, so that saturating activations hide no error twice. NUMERIC: normal
    inputs, errors within their bound; on a GPU in a CUDA graph, whose kernel before makes the inputs. RANGE: other
    magnitudes, for those that are not exact and for those with an epilogue, whose summands are shifted there.
    NONFINITE: infinities and NaN at a few places of normal inputs reach the results that sum them and no others, where
    that is claimed. PACKED: the packed form, with three sets of weights. REPEAT: NUMERIC after the race, equal to its
    first run bit for bit where that is claimed, then with one input changed and with the other one, too.
    """

    EXACT = "exact"
    NUMERIC = "numeric"
    RANGE = "range"
    NONFINITE = "nonfinite"
    PACKED = "packed"
    REPEAT = "repeat"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """What verification says of one candidate.

    Attributes:
        ok: all gates were passed that test what is claimed.
        message: which gate failed and how, with the seed that repeats it; "" if none did.
        max_error: largest |error| / (|x| * |w|) of the checked elements with normal inputs; None if that was not run.
        bound_ratio: largest share of the arithmetic's bound that an error takes beyond the output's rounding; at most 1
            in a right result, the smaller the wider the margin.
        fingerprint: checksum of the output's bits with normal inputs, for `Verifier.repeat`.
    """

    ok: bool
    message: str = ""
    max_error: float | None = None
    bound_ratio: float | None = None
    fingerprint: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Check:
    """One run of a gate; `factor` is None where results must be exact."""

    gate: Gate
    setting: Setting
    factor: float | None


class Verifier:
    """Inputs and references of one problem, made once and used for every candidate; a context manager.

    Args:
        problem, device: what is computed, and where.
        compiler: builds the checking kernels; not used on the CPU place.
        seed: of inputs and sampled elements; fresh from the operating system by default.
        budget: how much reference work one set of inputs may cost on a GPU; a tenth of a second's by default.

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
        self._harness = _harness(problem, device, compiler, self.seed, budget)

    def verify(self, invoker: Invoker, claims: Claims) -> Verification:
        """The verdict on one candidate, after one run for each check.

        Raises:
            LaunchError: it failed to start or to finish; the cause is chained.
            MemoryError: its workspace does not fit the device (CuPy's OutOfMemoryError is one).
        """
        numeric = None
        for check in self._checks(claims):
            result = self._checked(invoker, check)
            if check.gate is Gate.NUMERIC:
                numeric = result
            message = self._complaint(check, result)
            if message:
                return _verdict(message, numeric)
        message = "" if claims.packed is None else self._packed_complaint(claims.packed, claims)
        return _verdict(message, numeric)

    def repeat(self, invoker: Invoker, claims: Claims, fingerprint: int | None, *, once: bool = False) -> str:
        """What is wrong with more runs of a candidate that was found right; "" if nothing is.

        Each differs from the one before in one input alone, so that whoever keeps results, or transforms of an input,
        by what the other one holds is found out. Beside the last one runs another with other inputs.

        Args:
            fingerprint: of its first verdict; the output's must be equal where the candidate is deterministic.
            once: the first of these runs only, for slow candidates.

        Raises:
            LaunchError, MemoryError: as `verify`.
        """
        # Another poison than at first, so that bits that depend on what the output held differ.
        poison = Poison.NAN if claims.exact else Poison.FINITE
        settings = self._one_by_one(replace(_later(self._normal(claims)), poison=poison))
        for setting in settings[:1] if once else settings:
            check = _Check(gate=Gate.REPEAT, setting=setting, factor=self._factor(claims))
            result = self._checked(invoker, check)
            message = self._complaint(check, result)
            if message:
                return message
            if setting is settings[0] and invoker.deterministic and result.fingerprint != fingerprint:
                return self._change(Gate.REPEAT)
        return ""

    def close(self) -> None:
        """Give all memory back."""
        self._harness.close()

    def __enter__(self) -> Verifier:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _checks(self, claims: Claims) -> Iterator[_Check]:
        """The runs of a candidate: the first on memory of NaN, later ones on numbers and what the first left behind."""
        factor, is_fused = self._factor(claims), self.problem.epilogue.changes_results
        normal = replace(self._normal(claims), is_late=self._harness.has_late_inputs)
        if claims.exact:
            exact = self._exact(claims)
            yield _Check(gate=Gate.EXACT, setting=exact, factor=None)
            if is_fused:
                yield _Check(gate=Gate.EXACT, setting=_later(replace(exact, shifted=True)), factor=None)
            yield _Check(gate=Gate.NUMERIC, setting=_later(normal), factor=factor)
        else:
            yield _Check(gate=Gate.NUMERIC, setting=normal, factor=factor)
        if is_fused or not claims.exact:
            yield _Check(gate=Gate.RANGE, setting=_later(self._ranging(claims)), factor=factor)
        if not claims.spreads_nonfinite:
            nonfinite = replace(_later(self._normal(claims)), nonfinite=True)
            yield _Check(gate=Gate.NONFINITE, setting=nonfinite, factor=factor)

    def _exact(self, claims: Claims) -> Setting:
        powers = exact_powers(self.problem, subnormal=self._harness.takes_subnormals)
        return Setting(values=Values.TERNARY, powers=powers, rounds_twice=claims.rounds_twice)

    def _normal(self, claims: Claims) -> Setting:
        """Normal inputs; of an exact candidate they lie at other addresses than its small integers."""
        return Setting(
            values=Values.NORMAL,
            powers=numeric_powers(self.problem),
            rounds_twice=claims.rounds_twice,
            is_aligned=claims.exact,
        )

    def _ranging(self, claims: Claims) -> Setting:
        return Setting(
            values=Values.NORMAL,
            powers=range_powers(self.problem),
            shifted=self.problem.epilogue.changes_results,
            rounds_twice=claims.rounds_twice,
        )

    def _one_by_one(self, setting: Setting) -> tuple[Setting, ...]:
        """A setting, the same with half the second input, and that with twice the first one, beside another run.

        That has a quarter of the second input: other inputs and other results.
        """
        first, second = setting.powers.pairs
        half, quarter = (
            replace(_later(setting), powers=replace(setting.powers, second=_times(second, power))) for power in (-1, -2)
        )
        twice = replace(half, powers=replace(half.powers, first=_times(first, 1)), beside=quarter)
        return setting, half, twice

    def _change(self, gate: Gate) -> str:
        output = " or ".join(operand.name for operand in self.problem.outputs)
        return (
            f"{gate} gate, seed {self.seed}: {output} differs from that of the first run on equal inputs, and the "
            "solution says that it is deterministic"
        )

    def _factor(self, claims: Claims) -> float:
        return claims.growth * direct_error(self.problem)

    def _packed_complaint(self, packed: PackedForm, claims: Claims) -> str:
        """What is wrong with the packed form.

        Two sets of weights are packed before either is used. Then a third takes the place of the one that ran last, and
        the first must give what it gave.
        """
        factor = self._factor(claims)
        first = _Check(gate=Gate.PACKED, setting=self._normal(claims), factor=factor)
        other = replace(self._exact(claims) if claims.exact else self._ranging(claims), poison=Poison.FINITE)
        second = _Check(gate=Gate.PACKED, setting=other, factor=None if claims.exact else factor)
        nonfinite = replace(first.setting, nonfinite=True, poison=Poison.FINITE)
        third = first if claims.spreads_nonfinite else replace(first, setting=nonfinite)
        seen: dict[Setting, int] = {}

        def steps() -> Iterator[str]:
            yield self._packing_complaint(packed, first, 0)
            yield self._packing_complaint(packed, second, 1)
            yield self._packed_run_complaint(packed, first, 0, seen)
            yield self._packed_run_complaint(packed, second, 1, seen)
            yield self._packing_complaint(packed, third, 1)
            yield self._packed_run_complaint(packed, third, 1, seen)
            yield self._packed_run_complaint(packed, first, 0, seen)

        return next(filter(None, steps()), "")

    def _packing_complaint(self, packed: PackedForm, check: _Check, buffer: int) -> str:
        act = functools.partial(self._harness.pack, packed, check.setting, buffer)
        damaged = self._found(packed.pack, act)
        if not damaged:
            return ""
        return f"{check.gate} gate, seed {self.seed}: overwritten while w was packed: {', '.join(damaged)}"

    def _packed_run_complaint(self, packed: PackedForm, check: _Check, buffer: int, seen: dict[Setting, int]) -> str:
        """What is wrong with a run of the packed form; `seen` are the fingerprints of its runs."""
        run = functools.partial(self._harness.check_packed, packed, check.setting, check.factor, buffer)
        result = self._found(packed.run, run)
        message = self._complaint(check, result)
        before = seen.setdefault(check.setting, result.fingerprint)
        if message or not packed.run.deterministic or result.fingerprint == before:
            return message
        return self._change(check.gate)

    def _checked(self, invoker: Invoker, check: _Check) -> CheckResult:
        return self._found(invoker, functools.partial(self._harness.check, invoker, check.setting, check.factor))

    def _found(self, invoker: Invoker, run: Callable[[], _Result]) -> _Result:
        try:
            with np.errstate(all="ignore"):  # whatever the caller has NumPy do: infinities, too, are to be compared
                return run()
        except (MiofindError, MemoryError):
            raise
        except Exception as error:  # a candidate's own code, NumPy, CuPy: they share no base class below Exception
            raise_if_interrupted(error)
            name = f"{invoker.solver_id} {invoker.config.json}"
            told = f"{type(error).__name__}: {described(error, str)}"
            raise LaunchError(f"{name} failed on {self.problem}: {told}") from error

    def _complaint(self, check: _Check, result: CheckResult) -> str:
        """What is wrong, worst first; "" if nothing is."""
        faults = []
        output = self.problem.direction.output
        if result.unwritten:
            size = self.problem.output.size
            faults.append(
                f"{result.unwritten} of {size} elements of {output} are unwritten or NaN, "
                f"the first at {result.first_unwritten}"
            )
        if result.damaged:
            faults.append(f"overwritten: {', '.join(result.damaged)}")
        if result.worst is not None:
            worst, exponent = result.worst.unscaled, result.worst.exponent
            faults.append(
                f"{result.wrong} of {result.checked} checked elements of {output} are wrong, the worst at "
                f"{worst.index}: got {worst.got!r}, wanted {worst.wanted!r} within {worst.bound:.3g}"
                + (f", all times 2^{exponent}" if exponent else "")
            )
        faults += map(str, result.sums)
        if not faults:
            return ""
        return f"{check.gate} gate{self._circumstances(check.setting)}, seed {self.seed}: {'; '.join(faults)}"

    def _circumstances(self, setting: Setting) -> str:
        """What the inputs of a check were."""
        if setting.beside:  # either run may be wrong, and their inputs differ
            return " (two runs at once)"
        scales = [
            f"{name} * 2^{even}" + ("" if even == odd else f" and 2^{odd}")
            for name, (even, odd) in zip(self.problem.direction.inputs, setting.powers.pairs, strict=True)
            if even or odd
        ]
        if setting.shifted:
            scales.append("the epilogue's operands positive")
        if setting.is_late:
            scales.append("in a graph, its inputs made by the kernel before")
        if setting.nonfinite:
            scales.append(f"infinities, NaN or zeros in {' and '.join(self._harness.injected)}")
        return f" ({', '.join(scales)})" if scales else ""


def _times(pair: tuple[int, int], power: int) -> tuple[int, int]:
    """Powers of two, multiplied by another."""
    return pair[0] + power, pair[1] + power


def _later(setting: Setting) -> Setting:
    """The setting for a run that is not the first."""
    return replace(setting, poison=Poison.FINITE, keeps_workspace=True)


def _verdict(message: str, numeric: CheckResult | None) -> Verification:
    if numeric is None:
        return Verification(ok=not message, message=message)
    return Verification(
        ok=not message,
        message=message,
        max_error=numeric.max_error,
        bound_ratio=numeric.bound_ratio,
        fingerprint=numeric.fingerprint,
    )


def load_harness(place: Place) -> type[CheckHarness]:
    """What checks on a device of a place, and what NumPy imports when it is first used."""
    with loading():
        for name in ("numpy.random", "numpy.ma"):
            importlib.import_module(name)
        if place is Place.CPU:
            from miofind.verify.harness_host import HostHarness

            return HostHarness
        from miofind.verify.harness_cuda import CudaHarness

        return CudaHarness


def _harness(
    problem: ProblemDescription, device: Device, compiler: Compiler, seed: int, budget: SampleBudget | None
) -> CheckHarness:
    harness: Callable[..., CheckHarness] = load_harness(device.place)
    if device.place is Place.CPU:
        return harness(problem, seed)
    return harness(problem, device, compiler, seed, budget)
