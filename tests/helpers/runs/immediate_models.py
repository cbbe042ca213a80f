"""Small models of candidates' times, and FindDBs whose law is known, for tests."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from miofind.core.problem import ProblemDescription
from miofind.device.device import Device
from miofind.find.immediate.forest import Forest
from miofind.find.immediate.kinds import Kind, position
from miofind.find.immediate.model import Calibration, Model, Trees
from miofind.find.immediate.table import Table
from miofind.find.immediate.winners import Winners
from miofind.solver.registry import Registry

H200 = replace(Device.virtual("90a"), name="NVIDIA H200", clock_hz=1.98e9, bandwidth_bytes_per_s=4.9e12)
NAMES = ("parameter stages", "solver ConvDirectTiled", "table_over_best")
NEAR = ProblemDescription.convolution(x=(4, 64, 28, 28), w=(64, 64, 3, 3), padding=1, dtype="float16")


def stump(feature: int, threshold: float, low: float, high: float) -> Forest:
    """One tree of one split."""
    return Forest.of(
        {
            "roots": np.array([0], np.int16),
            "features": np.array([feature, 0, 0], np.int16),
            "thresholds": np.array([threshold, 0, 0], np.float32),
            "left": np.array([1, 1, 2], np.int16),
            "right": np.array([2, 1, 2], np.int16),
            "values": np.array([0, low, high], np.float32),
        },
        len(NAMES),
    )


def small_model(winners: Winners | None = None, **fields: object) -> Model:
    """A model that knows problems like NEAR, and takes ConvDirectTiled for 64 times faster than the table has it."""
    solvers = {solver.id: solver.version for solver in Registry.default().values()}
    kind = Kind.of(NEAR)
    trees = Trees(
        names=NAMES,
        time=stump(1, 0.5, 0.0, -6.0),
        rank=stump(1, 0.5, 0.0, 1.0),
        rank_weight=0.2,
        calibration=Calibration(0.0, (0.0,), (0.9, 0.2)),
        positions=np.array([position(NEAR)], np.float32),
        kinds=frozenset({kind.levels[0]}),
        reach=1.0,
        winners=winners or Winners(),
    )
    model = Model(
        device=H200.identity,
        solvers=solvers,
        table=Table({("ConvImplicitGemmMma",): 1.0, ("ConvDirectTiled", *kind.levels[2]): 0.5}),
        table_calibration=Calibration(0.0, (), (0.5,)),
        estimate_calibration=Calibration(0.0, (), (0.3,)),
        trees=trees,
        report={"trees regret": 0.02, "problems": 1.0},
    )
    return replace(model, **fields)  # type: ignore[arg-type]
