"""Rows, scopes and histories for the tests of the FindDB."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from miofind.finddb import History, Row, Scope, Store, environment_id

DEVICE = "NVIDIA H200|132|9.0|"
PROBLEM = "2d-fwd-n32-c64-h56x56-k64-y3x3-pad1x1"
VERSIONS = {"driver": "13.0", "nvrtc": "13.0.88"}


def row(solver_id: str = "ConvA", config: str = "{}", time_ms: float | None = 1.0, **fields: Any) -> Row:
    """A usable row unless its status says otherwise."""
    values = {"solver_version": 1, "status": "ok"} | fields
    return Row(solver_id=solver_id, config=config, time_ms=time_ms, **values)


def scope(*solver_ids: str, **fields: Any) -> Scope:
    """A scope of the solvers, each at version 1."""
    return Scope(solvers=dict.fromkeys(solver_ids or ("ConvA",), 1), **fields)


def at(second: int) -> str:
    """A time, later for a greater number."""
    return f"2026-01-01T00:{second // 60:02d}:{second % 60:02d}.000000Z"


def contents(store: Store) -> list[History]:
    """All that a store holds, in a stable order."""
    return list(store.histories())


def answers(store: Store) -> list[Any]:
    """All answers of a store."""
    return [store.answer(key.device, key.network_config) for key in store.problems()]


# Few distinct values, so that candidates repeat, times tie and failures displace.
rows = st.builds(
    row,
    solver_id=st.sampled_from(["ConvA", "ConvB", "ConvC"]),
    config=st.sampled_from(['{"tile":1}', '{"tile":2}', '{"tile":3}', '{"tile":4}', '{"tile":5}']),
    time_ms=st.one_of(st.sampled_from([1.0, 1.005, 1.009, 1.012, 2.0]), st.floats(0.001, 100.0)),
    status=st.sampled_from(["ok", "ok", "ok", "cut_off", "crashed", "timed_out", "out_of_memory", "wrong_result"]),
    workspace_bytes=st.sampled_from([0, 256, 1 << 20]),
    deterministic=st.booleans(),
    max_error=st.one_of(st.none(), st.sampled_from([0.0, 1e-6, 1e-5, 1e-3])),
    samples=st.integers(1, 3),
    environment=st.sampled_from(["", environment_id(VERSIONS)]),
    created_at=st.integers(0, 9).map(at),
)

scopes = st.builds(
    Scope,
    solvers=st.dictionaries(st.sampled_from(["ConvA", "ConvB", "ConvC"]), st.integers(1, 2)),
    filters=st.sampled_from([{}, {"deterministic": True}]),
    workspace_limit_bytes=st.sampled_from([None, 0, 1 << 20]),
    effort=st.sampled_from(["defaults", "search"]),
    complete=st.booleans(),
    created_at=st.integers(0, 9).map(at),
)

histories = st.builds(
    History,
    device=st.sampled_from([DEVICE, "cpu|2||"]),
    network_config=st.sampled_from([PROBLEM, "1d-fwd-n1"]),
    rows=st.lists(rows, max_size=8).map(tuple),
    scopes=st.lists(scopes, max_size=3).map(tuple),
    environments=st.just({environment_id(VERSIONS): VERSIONS}),
)
