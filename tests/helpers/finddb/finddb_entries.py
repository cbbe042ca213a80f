"""Rows, scopes, verdicts and histories for the tests of the FindDB."""

from __future__ import annotations

import resource
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from miofind.finddb import Answer, Comparison, History, Row, Scope, Store, Verdict, environment_id

DEVICE = "NVIDIA H200|132|9.0|"
PROBLEM = "2d-fwd-n32-c64-h56x56-k64-y3x3-pad1x1"
VERSIONS = {"driver": "13.0", "nvrtc": "13.0.88"}


def row(solver_id: str = "ConvA", config: str = "{}", time_ms: float | None = 1.0, **fields: Any) -> Row:
    """A usable row unless its status says otherwise."""
    values = {"solver_version": 1, "status": "ok"} | fields
    return Row(solver_id=solver_id, config=config, time_ms=time_ms, **values)


def rival(config: str = '{"release":1}', time_ms: float | None = 0.1, **fields: Any) -> Row:
    """Another library's time."""
    return row("Rival", config, time_ms, **{"solver_version": 0, "status": "rival"} | fields)


def scope(*solver_ids: str, **fields: Any) -> Scope:
    """A scope of the solvers, each at version 1."""
    return Scope(solvers=dict.fromkeys(solver_ids or ("ConvA",), 1), **fields)


def lacking(answer: Answer, *solver_ids: str) -> list[str]:
    """Those of the solvers, each at version 1, that no find of an answer considered."""
    return [name for name in solver_ids if not any(scope.solvers.get(name) == 1 for scope in answer.scopes)]


def verdict(winner: str = "ConvA:{}", *ties: str, low: float = 1.02, high: float = 1.05, **fields: Any) -> Verdict:
    """A race that `winner` won, against ConvB, with a tie for each of `ties`."""
    compared = (Comparison(candidate="ConvB:{}", low=low, high=high),)
    values = {"blocks": 30, "protocol": "cuda-1"} | fields
    return Verdict(winner=winner, ties=(winner, *ties), comparisons=compared, **values)


def version_1(path: Path) -> Path:
    """A FindDB that the last release of schema version 1 wrote, in the form of a shipped one."""
    return _restored(path, "finddb_version1.sql")


def older_answers(path: Path) -> Path:
    """A FindDB of this schema by a release that kept the newest eight scopes of an answer, whatever they covered."""
    return _restored(path, "finddb_version2.sql")


def _restored(path: Path, dump: str) -> Path:
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(Path(__file__).with_name(dump).read_text(encoding="utf-8"))
    return path


def unpacked(release: Path, path: Path) -> Path:
    """A release in the form that releases had in schema version 2: that of any FindDB, without a log."""
    with Store(release, read_only=True) as source, Store(path) as target:
        target.merge(source)
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("ATTACH ? AS release", (str(release),))
        connection.execute("INSERT INTO meta SELECT * FROM release.meta WHERE key = 'release'")
        connection.commit()
        connection.execute("DETACH release")
        connection.execute("PRAGMA journal_mode=DELETE")
    return path


@contextmanager
def files_end_at(size_bytes: int) -> Iterator[None]:
    """No file can grow beyond a size meanwhile: writing more fails as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def at(second: int) -> str:
    """A time, later for a greater number."""
    return f"2026-01-01T00:{second // 60:02d}:{second % 60:02d}.000000Z"


def contents(store: Store) -> list[History]:
    """All that a store holds, in a stable order."""
    return list(store.histories())


def answers(store: Store) -> list[Any]:
    """All answers of a store; a problem of which rivals' times alone are known has none."""
    found = (store.answer(key.device, key.network_config) for key in store.problems())
    return [answer for answer in found if answer is not None]


# Few distinct values, so that candidates repeat, times tie and failures displace.
rows = st.builds(
    row,
    solver_id=st.sampled_from(["ConvA", "ConvB", "ConvC"]),
    config=st.sampled_from(['{"tile":1}', '{"tile":2}', '{"tile":3}', '{"tile":4}', '{"tile":5}']),
    time_ms=st.one_of(st.sampled_from([1.0, 1.005, 1.009, 1.012, 2.0]), st.floats(0.001, 100.0)),
    status=st.sampled_from(
        ["ok", "ok", "ok", "cut_off", "crashed", "timed_out", "out_of_memory", "wrong_result", "rival"]
    ),
    workspace_bytes=st.sampled_from([0, 256, 1 << 20]),
    deterministic=st.booleans(),
    max_error=st.one_of(st.none(), st.sampled_from([0.0, 1e-6, 1e-5, 1e-3])),
    samples=st.integers(1, 3),
    environment=st.sampled_from(["", environment_id(VERSIONS)]),
    created_at=st.integers(0, 9).map(at),
    contended=st.sampled_from([False, False, True]),
    dropped_samples=st.integers(0, 2),
)

scopes = st.builds(
    Scope,
    solvers=st.dictionaries(st.sampled_from(["ConvA", "ConvB", "ConvC"]), st.integers(1, 2)),
    filters=st.sampled_from([{}, {"deterministic": True}]),
    workspace_limit_bytes=st.sampled_from([None, 0, 1 << 20]),
    effort=st.sampled_from(["likely", "defaults", "search"]),
    complete=st.booleans(),
    created_at=st.integers(0, 9).map(at),
)

candidates = [f'{solver_id}:{{"tile":{tile}}}' for solver_id in ("ConvA", "ConvB") for tile in (1, 2)]

verdicts = st.builds(
    lambda order, ties, ratios, **fields: Verdict(
        winner=order[0],
        ties=tuple(order[: 1 + ties]),
        comparisons=tuple(
            Comparison(candidate=name, low=low, high=low * 1.5) for name, low in zip(order[1:], ratios, strict=True)
        ),
        protocol="cuda-1",
        **fields,
    ),
    order=st.permutations(candidates),
    ties=st.integers(0, 2),
    ratios=st.tuples(*[st.floats(0.5, 2.0)] * 3),
    blocks=st.integers(0, 40),
    environment=st.sampled_from(["", environment_id(VERSIONS)]),
    created_at=st.integers(0, 9).map(at),
)

histories = st.builds(
    History,
    device=st.sampled_from([DEVICE, "cpu|2||"]),
    network_config=st.sampled_from([PROBLEM, "1d-fwd-n1"]),
    rows=st.lists(rows, max_size=8).map(tuple),
    scopes=st.lists(scopes, max_size=3).map(tuple),
    verdicts=st.lists(verdicts, max_size=3).map(tuple),
    environments=st.just({environment_id(VERSIONS): VERSIONS}),
)
