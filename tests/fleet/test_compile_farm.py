"""Hosts without a GPU compile what waits, and agents have it from the store."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("fsspec")
pytest.importorskip("cuda.bindings.nvrtc")

from helpers.commands.fleet_jobs import problems, submitted
from sqlalchemy import text

from miofind.compiler import BinaryCache, CompilePool, Compiler
from miofind.core.problem import ProblemDescription
from miofind.device.device import Device
from miofind.find.wanted_kernels import kernels_of
from miofind.fleet.binary_store import BinaryStore, SharedCache
from miofind.fleet.campaigns import set_paused, submit
from miofind.fleet.compile_farm import CompileFarm, FarmEnd
from miofind.fleet.database import FleetDatabase
from miofind.fleet.queue import Queue
from miofind.fleet.values import CampaignRequest, Kind
from miofind.options import FindOptions
from miofind.solver.registry import Registry
from miofind.tune.values import TuneOptions

SECRET = b"0123456789abcdef"
KIND = Kind(device="NVIDIA A|108|8.0|", stack="s1")
OPTIONS = TuneOptions(find=FindOptions(only=("ConvDirectNaive",)))
VOLUME = ProblemDescription.convolution(x=(1, 2, 4, 4, 4), w=(2, 2, 1, 1, 1))
REQUEST = CampaignRequest(name="nightly", options=OPTIONS)


@pytest.fixture
def database(postgres_url: str) -> Iterator[FleetDatabase]:
    made = FleetDatabase(postgres_url)
    made.create()
    yield made
    made.close()


def cache(folder: Path, host: str) -> SharedCache:
    (folder / host).mkdir(mode=0o700, exist_ok=True)
    return SharedCache(BinaryStore(str(folder / "store"), SECRET), folder / host)


def test_what_waits_is_compiled_once_and_paused_campaigns_are_not(database: FleetDatabase, tmp_path: Path) -> None:
    submitted(database, 2, REQUEST, KIND)
    submitted(database, 3, replace(REQUEST, name="paused", options=TuneOptions()), KIND)
    set_paused(database, "paused", paused=True)
    submitted(database, 1, replace(REQUEST, name="cpu"), Kind(device="A|2|0.0|", stack="s1"))
    with database.transaction() as connection:
        connection.execute(text("UPDATE campaign SET options = '{\"later\": 1}' WHERE name = 'cpu'"))
    first = cache(tmp_path, "first")
    farm = CompileFarm(database, Compiler(first))
    assert farm.compile_waiting()
    assert farm.end == FarmEnd(problems=2, kernels=1, failed=0)
    assert first.published == 1
    assert not farm.compile_waiting(), "nothing is new"
    second = cache(tmp_path, "second")
    assert CompileFarm(database, Compiler(second)).run(until_idle_s=0.0).kernels == 1
    assert (second.fetched, second.published) == (1, 0)


def test_of_a_volume_the_kernels_of_its_images_are_compiled(database: FleetDatabase, tmp_path: Path) -> None:
    solver, volume = Registry.default()["ConvDirectTiled"], replace(problems(1)[0], problem=VOLUME)
    assert not solver.applicability(VOLUME, Device.virtual("80")), "it serves images alone"
    options = TuneOptions(find=FindOptions(only=(solver.id,)))
    submit(database, replace(REQUEST, options=options), [volume])
    Queue(database).enrol(KIND)
    farm = CompileFarm(database, Compiler(BinaryCache(tmp_path)))
    assert farm.compile_waiting()
    assert farm.end.kernels > 0


def test_a_process_that_compiles_ahead_asks_the_store(tmp_path: Path) -> None:
    """It gets the cache by pickle; what asks on the measuring thread does not wait for the store."""
    solver = Registry.default()["ConvDirectNaive"]
    (step, *_) = kernels_of(solver, problems(1)[0].problem, Device.virtual("80"), search=False)
    made = Compiler(BinaryCache(tmp_path / "made")).build(step, "80")
    host = cache(tmp_path, "host")
    BinaryStore(str(tmp_path / "store"), SECRET).put(replace(made, log="from the store"))
    assert host.local.get(made.key) is None
    with CompilePool(host, workers=1) as pool:
        assert pool.errors([step], "80") == {}
    found = host.local.get(made.key)
    assert found is not None
    assert found.log == "from the store"


def test_a_store_that_does_not_answer_is_not_asked_for_each_kernel(tmp_path: Path) -> None:
    store = BinaryStore("http://127.0.0.1:9/none", SECRET)
    assert store.get("ab" * 32) is None
    began = store._silent_until
    assert began > 0
    assert store.get("cd" * 32) is None
    assert store._silent_until == began
