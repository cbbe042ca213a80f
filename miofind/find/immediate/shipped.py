"""The models that lie beside the shipped FindDBs, each of which is checked when it is read first.

A kind of device that has none takes that of the nearest kind of its architecture, which runs the same kernels: of 80
convolutions whose fastest solver was measured on an H100 the first guess was right for 69 by the H200's model, and for
53 by plain estimates.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Sequence
from pathlib import Path

from miofind.device.device import Device, Place
from miofind.errors import DatabaseError, ModelError
from miofind.find.immediate.model import Model, read_model
from miofind.find.immediate.ranker import Ranker
from miofind.find.row_check import device_of
from miofind.finddb import shipped_paths

logger = logging.getLogger(__name__)

SUFFIX = ".model"


def model_paths() -> tuple[Path, ...]:
    """The models in force: each has the name of a shipped FindDB.

    Raises:
        DatabaseError: MIOFIND_SYSTEM_DB names nothing that exists.
    """
    return tuple(path for path in (each.with_suffix(SUFFIX) for each in shipped_paths()) if path.is_file())


def ranker_of(device: Device) -> Ranker:
    """Predictions for a device: by the model of its kind or of the nearest, else estimates.

    A refused model is told of once.
    """
    return _ranker(device, os.environ.get("MIOFIND_SYSTEM_DB"))


@functools.lru_cache(maxsize=64)
def _ranker(device: Device, system_db: str | None) -> Ranker:
    try:
        paths = model_paths()
    except DatabaseError:  # opening the FindDBs tells of it
        return Ranker(None)
    models = [model for path in paths if (model := _read(path)) is not None]
    own = next((model for model in models if model.device == device.identity), None)
    return Ranker(own) if own is not None else Ranker(_nearest(models, device), is_of_kind=False)


_NEAR = 2.0
"""How many times as many multiprocessors as another a GPU may have to be like it."""


def _nearest(models: Sequence[Model], device: Device) -> Model | None:
    """The model of a GPU of the same architecture, of whose multiprocessors there are the most nearly as many."""
    akin: list[tuple[float, Model]] = []
    for model in models:
        other = device_of(model.device)
        if other is None or other.place is not Place.CUDA or device.place is not Place.CUDA or other.sm != device.sm:
            continue
        ratio = max(other.sm_count, device.sm_count) / min(other.sm_count, device.sm_count)
        if ratio <= _NEAR:
            akin.append((ratio, model))
    return min(akin, key=lambda each: each[0])[1] if akin else None


@functools.cache
def _read(path: Path) -> Model | None:
    try:
        return read_model(path)
    except ModelError as error:
        logger.warning("%s. Going on with the solvers' estimates.", error)
        return None
