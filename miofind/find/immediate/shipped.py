"""The models that lie beside the shipped FindDBs, each of which is checked when it is read first."""

from __future__ import annotations

import functools
import logging
import os
from pathlib import Path

from miofind.device.device import Device
from miofind.errors import DatabaseError, ModelError
from miofind.find.immediate.model import Model, read_model
from miofind.find.immediate.ranker import Ranker
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
    """Predictions for a device: by the model of its kind, else estimates; a refused model is told of once."""
    return _ranker(device.identity, os.environ.get("MIOFIND_SYSTEM_DB"))


@functools.lru_cache(maxsize=64)
def _ranker(identity: str, system_db: str | None) -> Ranker:
    try:
        paths = model_paths()
    except DatabaseError:  # opening the FindDBs tells of it
        return Ranker(None)
    return Ranker(next((model for path in paths if (model := _read(path)) and model.device == identity), None))


@functools.cache
def _read(path: Path) -> Model | None:
    try:
        return read_model(path)
    except ModelError as error:
        logger.warning("%s. Going on with the solvers' estimates.", error)
        return None
