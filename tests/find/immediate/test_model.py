"""A model's file: it comes back as it was written, and whatever is not one is refused."""

from __future__ import annotations

import hashlib
import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.runs.immediate_models import H200, small_model
from hypothesis import given
from hypothesis import strategies as st

import miofind
from miofind import Device, FindOptions
from miofind.core.problem import ProblemDescription
from miofind.errors import ModelError
from miofind.find.immediate.kinds import AXES
from miofind.find.immediate.model import MAGIC, MAX_BYTES, model_bytes, parse_model, read_model, write_model
from miofind.find.immediate.ranker import Estimated, Ranker
from miofind.find.immediate.shipped import model_paths, ranker_of
from miofind.find.immediate.winners import Winners, Won
from miofind.runtime.solution import Source
from miofind.solver.registry import Registry

WINNERS_AXES, WINNERS_BITS = np.ones((AXES, 2), np.float32), np.array([1, 1], np.uint64)
WINNERS = Winners(
    ("ConvA", "ConvB"), {("float16", "forward", "NCHW", "3x3"): Won(WINNERS_AXES, np.array([1, 3], np.uint64))}
)
MODEL = small_model(winners=WINNERS)
TILED = Registry.default()["ConvDirectTiled"]
CONTENT = model_bytes(MODEL)
PROBLEM = ProblemDescription.convolution(x=(4, 64, 28, 28), w=(64, 64, 3, 3), padding=1, dtype="float16")


def sealed(content: bytes) -> bytes:
    """What would be a model's file, by its hash."""
    return MAGIC + hashlib.sha256(content).digest() + content


def changed(**fields: Any) -> bytes:
    """The model's file with other fields of its header or its trees."""
    line, _, body = CONTENT[len(MAGIC) + 32 :].partition(b"\n")
    header = json.loads(line)
    header["trees"] |= {name: value for name, value in fields.items() if name in header["trees"]}
    header |= {name: value for name, value in fields.items() if name not in header["trees"]}
    return sealed(json.dumps(header).encode() + b"\n" + body)


def test_a_file_comes_back_as_it_was_written(tmp_path: Path) -> None:
    write_model(MODEL, tmp_path / "h200.model")
    found = read_model(tmp_path / "h200.model")
    assert model_bytes(found) == CONTENT
    assert found.trees is not None
    assert MODEL.trees is not None
    rows = np.random.default_rng(0).normal(size=(20, len(MODEL.trees.names))).astype(np.float32)
    assert found.trees.winners.solvers == WINNERS.solvers
    assert [(kind, won.axes.tolist(), won.bits.tolist()) for kind, won in found.trees.winners.kinds.items()] == [
        (kind, won.axes.tolist(), won.bits.tolist()) for kind, won in WINNERS.kinds.items()
    ]
    assert found.trees.time.sums(rows).tolist() == MODEL.trees.time.sums(rows).tolist()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"SQLite format 3\0",
        CONTENT[:-1],
        CONTENT + b"\0",
        CONTENT[:200] + b"\xff" + CONTENT[201:],
        sealed(b"[" * 100_000),
        sealed(b"{}\n"),
        sealed(b"null\n"),
        sealed(CONTENT[len(MAGIC) + 32 :] + b"\0"),
        CONTENT + bytes(MAX_BYTES),
        changed(device=3),
        changed(features_version=99),
        changed(solvers={"ConvA": -1}),
        changed(solvers=[]),
        changed(table=[["ConvA", "x" * 1000, 0.5]]),
        changed(table=[["ConvA", 1e9]]),
        changed(table=[["ConvA", float("nan")]]),
        changed(table=[[]]),
        changed(table_calibration=[0, [0, 1], [0.5]]),
        changed(calibration=[0, [], [2]]),
        changed(calibration=[0, [1, 0], [0.1, 0.1, 0.1]]),
        changed(names=["n"]),
        changed(positions=[1 << 30, 7]),
        changed(positions=[-1, 7]),
        changed(positions=[0, 0]),
        changed(positions=[7, 1]),
        changed(forests=[[1, 1 << 30], [1, 3]]),
        changed(forests=[[1, 3]]),
        changed(rank_weight="1"),
        changed(reach=None),
        changed(kinds=[["a"] * 9]),
        changed(winners=["ConvA"]),
        changed(winners=["ConvA"] * 65),
        changed(winners=None),
        changed(won=[]),
        changed(won=[["float16", "forward", "NCHW", "3x3", 3]]),
        changed(won=[["float16", "forward", "NCHW", "3x3", -2]]),
        changed(won=[["float16", "forward", "NCHW", "3x3", 0], ["float32", 2]]),
        changed(won=[[["x"], 2]]),
        model_bytes(small_model(winners=replace(WINNERS, solvers=("ConvA",)))),
        model_bytes(
            small_model(winners=Winners(("ConvA",), {("a",): Won(WINNERS_AXES * np.inf, np.array([1, 1], np.uint64))}))
        ),
    ],
    ids=range(41),
)
def test_what_is_no_model_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "h200.model"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=r"h200\.model is refused"):
        read_model(path)


@given(st.data())
def test_no_change_of_a_file_gets_past_the_reader_in_another_way(data: st.DataObject) -> None:
    """Whoever writes the hash anew: what is read is whole, or refused by an error that the reader catches."""
    content = bytearray(CONTENT[len(MAGIC) + 32 :])
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    try:
        model = parse_model(sealed(bytes(content)))
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError, IndexError, AttributeError):
        return
    if model.trees is not None:
        assert np.isfinite(model.trees.time.sums(np.zeros((2, len(model.trees.names)), np.float32))).all()


def test_a_refused_model_is_told_of_once_and_answers_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    database, path = tmp_path / "h200.db", tmp_path / "h200.model"
    with miofind.Handle(H200, database=database) as handle:
        handle.database.record(H200.identity, PROBLEM.network_config)
    monkeypatch.setenv("MIOFIND_SYSTEM_DB", str(database))
    path.write_bytes(CONTENT[:-1])
    assert model_paths() == (path,)
    with caplog.at_level(logging.WARNING), miofind.Handle(H200, database=":memory:") as handle:
        for only in ("ConvDirectTiled", "ConvImplicitGemmMma"):
            options = FindOptions(find_mode="fast", only=only)
            found = miofind.find_solutions(PROBLEM, options=options, handle=handle)
            assert {each.source for each in found} == {Source.PREDICTED}
            assert {each.confidence for each in found} == {None}
    assert [record.message for record in caplog.records if "h200.model" in record.message] == [
        "the model h200.model is refused: it is damaged, its hash differs. Train it anew. "
        "Going on with the solvers' estimates."
    ]


def test_a_kind_without_a_model_has_that_of_the_nearest_of_its_architecture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = replace(MODEL, device="NVIDIA H20|78|9.0|")
    for name, model in (("h200", MODEL), ("h20", small), ("a100", replace(MODEL, device="NVIDIA A100|108|8.0|"))):
        (tmp_path / f"{name}.db").touch()
        write_model(model, tmp_path / f"{name}.model")
    monkeypatch.setenv("MIOFIND_SYSTEM_DB", str(tmp_path))
    assert (ranker_of(H200).model.device, ranker_of(H200).is_of_kind) == (MODEL.device, True)
    for sm_count, device in ((132, MODEL.device), (114, MODEL.device), (80, small.device)):
        ranker = ranker_of(replace(H200, name="NVIDIA H100", sm_count=sm_count))
        assert ranker.model is not None
        assert (ranker.model.device, ranker.is_of_kind) == (device, False)
        assert not ranker.reaches(PROBLEM), "cuDNN is asked beside it"
    assert ranker_of(replace(H200, name="NVIDIA B200", sm=100)).model is None
    assert ranker_of(replace(H200, mig_profile="1g.18gb", sm_count=16)).model is None, "too small a part of one"
    assert ranker_of(Device.cpu()).model is None


def test_nobody_knows_how_sure_a_model_of_another_kind_is() -> None:
    candidates = [Estimated(TILED, config, 1.0) for config in TILED.default_configs(PROBLEM, H200)[:2]]
    own, others = (
        Ranker(MODEL, is_of_kind=of_kind).predictions(PROBLEM, H200, candidates) for of_kind in (True, False)
    )
    assert [each.time_ms for each in own] == [each.time_ms for each in others]
    assert {each.confidence for each in others} == {None}
