"""Mutants of the CPU place: functions of one call that write an output in which something is wrong.

A mutant is a function registered with `mutant` or, where it is right after all, with `control`; its docstring says what
is wrong. `SOLVERS` has a solver of each, and `RIGHT` is the solver that is to answer in their place.
"""

from __future__ import annotations

import importlib
import time
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from miofind.core.epilogue import EpilogueParameters
from miofind.core.problem import ProblemDescription
from miofind.device.device import Device, Place
from miofind.reference.convolution import reference_on_host, round_once
from miofind.reference.epilogue import apply_epilogue
from miofind.solver.steps import RUN_PARAMETERS, Config, ConvSolution, HostStep, Packing, Region, WorkspacePlan
from mutants.base import Declared, Mutant, MutantSolver

Array = NDArray[Any]
Wide = NDArray[np.float64]

_LARGE_FLOPS = 1e8
_KEPT_SUMS = 4


@dataclass(frozen=True, slots=True)
class Call:
    """One run: the tensors with logical shapes, and what this mutant left behind in earlier runs.

    Attributes:
        tensors: "x", "w" and "y", the inputs and the output among them; an epilogue's operands and RUN_PARAMETERS.
        scratch: the workspace that the solver declares, None for none.
        state: kept from run to run, empty when a find begins.
    """

    problem: ProblemDescription
    tensors: Mapping[str, Any]
    scratch: NDArray[np.uint8] | None
    state: dict[str, Any]

    @property
    def out(self) -> Array:
        """The tensor that is written."""
        return self.tensors[self.problem.direction.output]

    @property
    def inputs(self) -> dict[str, Wide]:
        """Copies of the tensors that are read."""
        return {name: self.tensors[name].astype(np.float64) for name in self.problem.direction.inputs}

    def sums(self, **changed: Wide) -> Wide:
        """The right output before it is rounded, of the inputs or of others in their place."""
        if self.problem.flops < _LARGE_FLOPS or changed:
            return reference_on_host(self.problem, **(self.inputs | changed))
        return _kept_sums(self.problem, {name: self.tensors[name] for name in self.problem.direction.inputs})

    @property
    def parameters(self) -> EpilogueParameters:
        """The numbers of the run's epilogue."""
        found = self.tensors[RUN_PARAMETERS]
        assert isinstance(found, EpilogueParameters)
        return found

    def finished(self, sums: Wide, **changed: Array) -> Wide:
        """What the epilogue makes of sums, with its operands or others in their place."""
        return apply_epilogue(self.problem, sums, {**self.tensors, **changed}, self.parameters)

    def write(self, values: Wide) -> None:
        """Write an output, rounded once."""
        self.out[...] = round_once(values, self.problem.output.dtype)

    def write_sums(self, summed: Wide | None = None) -> None:
        """Write the second outputs: sums of y or dy as it is, or of another tensor in its place, for each channel."""
        tensor = self.tensors["y"] if summed is None else summed
        channels = tensor.astype(np.float64).swapaxes(0, 1).reshape(self.problem.k, -1)
        for operand in self.problem.second_outputs:
            values = np.square(channels) if operand.name == "sum_of_squares" else channels
            self.tensors[operand.name][...] = round_once(values.sum(1), operand.tensor.dtype)

    def count(self) -> int:
        """The number of this run, from 1."""
        self.state["runs"] = self.state.get("runs", 0) + 1
        return int(self.state["runs"])


_sums: dict[tuple[ProblemDescription, int], Wide] = {}


def _kept_sums(problem: ProblemDescription, inputs: Mapping[str, Array]) -> Wide:
    """The right output by the contents of the inputs: a large one takes a second, and is wanted in every run."""
    key = (problem, zlib.crc32(b"".join(array.tobytes("A") for array in inputs.values())))
    if key not in _sums:
        while len(_sums) >= _KEPT_SUMS:
            _sums.pop(next(iter(_sums)))
        _sums[key] = reference_on_host(problem, **inputs)
    return _sums[key]


Change = Callable[[Call], None]


@dataclass(frozen=True, slots=True)
class Packed:
    """A mutant's packing: `pack` reads the weights and writes packed bytes, `run` reads these as the call's "w".

    Attributes:
        bytes: of the packed weights, as float64 unless said otherwise.
    """

    pack: Callable[[Call, NDArray[np.uint8]], None]
    run: Callable[[Call, NDArray[np.uint8]], None]
    bytes: Callable[[ProblemDescription], int]


@dataclass(frozen=True, slots=True)
class _Entry:
    mutant: Mutant
    change: Change
    packed: Packed | None


MUTANTS: dict[str, _Entry] = {}
CONTROLS: dict[str, _Entry] = {}
_state: dict[str, dict[str, Any]] = {}


def mutant(problem: ProblemDescription, packed: Packed | None = None, **declared: Any) -> Callable[[Change], Change]:
    """Register a wrong convolution."""
    return _registering(MUTANTS, problem, packed, Declared(**declared))


def control(problem: ProblemDescription, packed: Packed | None = None, **declared: Any) -> Callable[[Change], Change]:
    """Register a right convolution."""
    return _registering(CONTROLS, problem, packed, Declared(**declared))


def _registering(
    kind: dict[str, _Entry], problem: ProblemDescription, packed: Packed | None, declared: Declared
) -> Callable[[Change], Change]:
    def register(change: Change) -> Change:
        name = change.__name__
        assert name not in MUTANTS.keys() | CONTROLS.keys(), name
        assert change.__doc__, f"{name} does not say what is wrong"
        made = Mutant(name=name, fault=change.__doc__, problem=problem, declared=declared)
        kind[name] = _Entry(made, change, packed)
        return change

    return register


def forget() -> None:
    """Begin anew, as in a new process."""
    _state.clear()


def run(problem: ProblemDescription, config: Config, buffers: Mapping[str, Array]) -> None:
    """The host step of every mutant."""
    with np.errstate(all="ignore"):
        _entry(config).change(_call(problem, config, buffers))


def pack(problem: ProblemDescription, config: Config, buffers: Mapping[str, Array]) -> None:
    """The host step of every mutant's packing: reads "w", writes packed bytes to "y"."""
    packed = _entry(config).packed
    assert packed is not None
    packed.pack(_call(problem, config, buffers), buffers["y"])


def run_packed(problem: ProblemDescription, config: Config, buffers: Mapping[str, Array]) -> None:
    """The host step of every mutant's run with packed weights, which are "w"."""
    packed = _entry(config).packed
    assert packed is not None
    packed.run(_call(problem, config, buffers), buffers["w"])


def _entry(config: Config) -> _Entry:
    return (MUTANTS | CONTROLS | {RIGHT.mutant.name: _RIGHT})[config["mutant"]]


def _call(problem: ProblemDescription, config: Config, buffers: Mapping[str, Array]) -> Call:
    return Call(problem, buffers, buffers.get("scratch"), _state.setdefault(config["mutant"], {}))


class HostMutantSolver(MutantSolver):
    """Runs one mutant in NumPy."""

    place = Place.CPU

    def __init__(self, entry: _Entry) -> None:
        super().__init__(entry.mutant)
        self._packed = entry.packed

    def solution(self, problem: ProblemDescription, device: Device, config: Config) -> ConvSolution:
        return self._solution("run", fused=bool(problem.epilogue))

    def packing(self, problem: ProblemDescription, device: Device, config: Config) -> Packing | None:
        if self._packed is None:
            return None
        return Packing(pack=self._solution("pack"), run=self._solution("run_packed"), bytes=self._packed.bytes(problem))

    def _solution(self, function: str, *, fused: bool = False) -> ConvSolution:
        declared = self.mutant.declared
        size = declared.workspace_bytes
        return ConvSolution(
            steps=(HostStep(module=__name__, function=function, fused=fused),),
            workspace=WorkspacePlan((Region(name="scratch", bytes=size),) if size else ()),
            deterministic=declared.deterministic,
        )


def _right(call: Call) -> None:
    """Nothing is wrong; slower than a mutant, which would win."""
    time.sleep(0.002)
    sums = call.sums()
    call.write(call.finished(sums) if call.problem.epilogue.changes_results else sums)
    call.write_sums()


_ANY = ProblemDescription.convolution(x=(1, 1, 1), w=(1, 1, 1))
_RIGHT = _Entry(Mutant(name="right", fault="nothing", problem=_ANY, declared=Declared(estimate_ms=2.0)), _right, None)
RIGHT = HostMutantSolver(_RIGHT)


for _theme in ("places", "memory", "state", "numbers", "nonfinite", "packed", "epilogue", "outputs", "controls"):
    importlib.import_module(f"mutants.host_{_theme}")

SOLVERS = {name: HostMutantSolver(entry) for name, entry in (MUTANTS | CONTROLS).items()}
