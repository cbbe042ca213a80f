"""What tunings say of miofind beside PyTorch, in their process and in later ones."""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.processes.forks import in_a_fork

import miofind.torch
from miofind import FindOptions, Handle, Solution, find_solutions
from miofind.core.problem import ProblemDescription
from miofind.find.row_check import RowCheck, Shipping
from miofind.finddb import MEMORY, Store, write_release
from miofind.solver.registry import Registry
from miofind.torch.override import comparisons
from miofind.torch.override.comparisons import Comparison, compared, known, note
from miofind.torch.override.flags import Flags, state

OPTIONS = FindOptions(only="ConvCpuDirect")
FLAGS = Flags.of(state(), on_gpu=False)
LAYER = torch.nn.Conv2d(2, 2, 1, bias=False)
SHAPE = (1, 2, 3, 3)
BARE, BIAS, RELU = (
    ProblemDescription.convolution(x=SHAPE, w=(2, 2, 1, 1), epilogue=epilogue)
    for epilogue in (None, "bias", "bias.relu")
)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A FindDB that answers the three problems."""
    path = tmp_path_factory.mktemp("comparisons") / "finddb.db"
    with Handle("cpu", database=path) as handle:
        for problem in (BARE, BIAS, RELU):
            find_solutions(problem, options=OPTIONS, handle=handle)
    return path


@pytest.fixture
def path(found: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    with Store(found) as source, Store(tmp_path / "finddb.db") as copy:
        copy.merge(source)
    return tmp_path / "finddb.db"


@pytest.fixture
def handle(path: Path) -> Iterator[Handle]:
    with Handle("cpu", database=path) as made:
        yield made


def solution(problem: ProblemDescription, handle: Handle) -> Solution:
    return find_solutions(problem, options=OPTIONS, handle=handle)[0]


def compare(problem: ProblemDescription, handle: Handle, gain: float, flags: Flags = FLAGS) -> None:
    """Have a tuning find that a problem's solution is so many times as fast as PyTorch."""
    note(solution(problem, handle), handle, flags, 2.0, 2.0 * gain)


def asked(problem: ProblemDescription, handle: Handle, flags: Flags = FLAGS) -> Comparison | None:
    return compared(solution(problem, handle), handle, flags, OPTIONS)


def gain(problem: ProblemDescription, handle: Handle, flags: Flags = FLAGS) -> Any:
    found = asked(problem, handle, flags)
    return None if found is None else pytest.approx(found.gain(solution(problem, handle)))


def left_to_pytorch(handle: Handle, **settings: Any) -> list[str]:
    """Why PyTorch's own kernel runs the layer; nothing where miofind does."""
    with miofind.torch.use("fallback", handle=handle, devices="cpu", only=OPTIONS.only, **settings) as override:
        LAYER(torch.ones(SHAPE))
        return list(override.report().reasons)


def test_a_slower_fused_problem_speaks_for_the_bare_one_until_it_is_measured(handle: Handle) -> None:
    assert gain(BARE, handle) is None
    compare(RELU, handle, 0.5)
    assert (gain(RELU, handle), gain(BARE, handle), gain(BIAS, handle)) == (0.5, 0.5, None)
    compare(BIAS, handle, 1.2)
    assert gain(BARE, handle) == 0.5
    compare(BIAS, handle, 0.4)
    assert gain(BARE, handle) == 0.4, "of the two the one that PyTorch is faster at by more"
    compare(BARE, handle, 1.1)
    assert gain(BARE, handle) == 1.1


def test_a_fused_volume_is_answered_as_its_images_are(handle: Handle) -> None:
    bare, relu = (
        ProblemDescription.convolution(x=(1, 2, 1, 3, 3), w=(2, 2, 1, 1, 1), epilogue=each.epilogue)
        for each in (BARE, RELU)
    )
    compare(relu, handle, 0.5)
    assert gain(bare, handle) == 0.5


def test_a_fused_problem_that_is_faster_after_all_says_nothing_of_the_bare_one(handle: Handle) -> None:
    compare(RELU, handle, 0.5)
    compare(RELU, handle, 1.3)
    assert (gain(RELU, handle), gain(BARE, handle)) == (1.3, None)


def test_a_fused_problem_that_no_solution_answers_says_nothing_of_the_bare_one(handle: Handle) -> None:
    compare(RELU, handle, 0.5)
    (fastest,) = find_solutions(BARE, options=OPTIONS, handle=handle)
    assert compared(fastest, handle, FLAGS, OPTIONS) is not None
    assert compared(fastest, handle, FLAGS, replace(OPTIONS, only=("ConvCpuFft",))) is None


def test_another_solution_gains_as_much_less_as_it_is_slower(handle: Handle) -> None:
    """The comparison's solution took a workspace beyond the override's limit; PyTorch was faster than what ran."""
    compare(BARE, handle, 1.2)
    known, found = asked(BARE, handle), solution(BARE, handle)
    assert known is not None
    assert known.gain(found) == pytest.approx(1.2)
    object.__setattr__(found, "time_ms", found.time_ms * 1.5)
    assert known.gain(found) == pytest.approx(0.8)


def test_the_time_of_a_prediction_is_no_scale(handle: Handle) -> None:
    found = solution(BARE, handle)
    object.__setattr__(found, "samples", 0)
    note(found, handle, FLAGS, 2.0, 3.0)
    known = asked(BARE, handle)
    assert known is not None
    assert known.time_ms == 3.0


def test_a_later_process_leaves_to_pytorch_what_it_was_faster_at(path: Path) -> None:
    with Handle("cpu", database=path) as tuned:
        compare(BARE, tuned, 0.5)
        (told,) = left_to_pytorch(tuned)

    def work() -> None:
        with Handle("cpu", database=path) as later:
            assert gain(BARE, later) == 0.5
            assert left_to_pytorch(later) == [told]
            assert left_to_pytorch(later, min_gain=0.4) == []

    assert told.startswith("PyTorch's own kernel is 2.00 times as fast as ConvCpuDirect, measured 20")
    assert in_a_fork(work) == 0


def test_a_comparison_disturbs_no_find(handle: Handle) -> None:
    before = [(each.id, each.time_ms) for each in find_solutions(BARE, options=OPTIONS, handle=handle)]
    compare(BARE, handle, 0.5)
    handle.forget()
    assert [(each.id, each.time_ms) for each in find_solutions(BARE, options=OPTIONS, handle=handle)] == before
    check, ships = RowCheck(Registry.default()), Shipping(Registry.default())
    assert handle.database.user.check(check) == ()
    rows = [ships(key, row) for key, row in handle.database.user.rows() if row.is_rival]
    assert (rows, ships.findings, ships.void) == ([False], [], 0)


@pytest.mark.parametrize(
    "change",
    [
        {"version": "2.9.1+cpu"},
        {"cudnn": 91900},
        {"deterministic": True},
        {"enabled": False},
        {"depthwise_kernel": "cudnn"},
    ],
    ids=str,
)
def test_a_comparison_with_another_kernel_of_pytorch_s_does_not_count(
    handle: Handle, change: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    compare(BARE, handle, 0.5)
    compare(RELU, handle, 0.5)
    with monkeypatch.context() as patch:
        if version := change.pop("version", None):
            patch.setattr(torch, "__version__", version)
        if cudnn := change.pop("cudnn", None):
            patch.setattr(torch.backends.cudnn, "version", lambda: cudnn)
        flags = replace(FLAGS, **change)
        assert (gain(BARE, handle, flags), gain(RELU, handle, flags)) == (None, None)
        compare(BARE, handle, 1.5, flags)
        assert gain(BARE, handle, flags) == 1.5
    assert gain(BARE, handle) == 0.5, "both are kept"


def test_times_of_another_meaning_do_not_count(handle: Handle, monkeypatch: pytest.MonkeyPatch) -> None:
    compare(BARE, handle, 0.5)
    monkeypatch.setattr(comparisons, "_PROTOCOL", "beside-2")
    assert gain(BARE, handle) is None


def test_the_newest_comparison_counts_whichever_handle_took_it(path: Path) -> None:
    with Handle("cpu", database=path) as first, Handle("cpu", database=path) as second:
        for turn, handle in enumerate((first, second, first), 1):
            compare(BARE, handle, turn / 2)
            assert (gain(BARE, first), gain(BARE, second)) == (turn / 2, turn / 2)
        assert len(first.database.rivals(first.device.identity, BARE.network_config, "~")) == 3, "none is lost"


@pytest.mark.parametrize("name", ["conv2d-forward-n1", f"{BARE.network_config}-e.unheard.of"])
def test_fused_problems_of_other_releases_say_nothing(handle: Handle, name: str) -> None:
    compare(RELU, handle, 0.5)
    user, device = handle.database.user, handle.device.identity
    ((_, row),) = user.rivals(device, RELU.network_config, "~")
    user.clean(device, RELU.network_config)
    user.record(device, name, [replace(row, id="")])
    assert gain(BARE, handle) is None


@pytest.mark.parametrize("time_ms", [5e-324, 1e308])
def test_absurd_times_end_in_a_decision(handle: Handle, time_ms: float) -> None:
    compare(BARE, handle, 0.5)
    with closing(sqlite3.connect(handle.database.user.path or "")) as connection:
        connection.execute("UPDATE measurement SET time_ms = ? WHERE status = 'rival'", (time_ms,))
        connection.commit()
    reasons = left_to_pytorch(handle)
    assert [reason.partition(" times")[0] for reason in reasons] == ["PyTorch's own kernel is inf"][: time_ms < 1]


def test_what_cannot_be_read_is_told_once_and_answers_go_on(handle: Handle, caplog: pytest.LogCaptureFixture) -> None:
    compare(BARE, handle, 0.5)
    with closing(sqlite3.connect(handle.database.user.path or "")) as connection:
        connection.execute("UPDATE measurement SET time_ms = 'soon' WHERE status = 'rival'")
        connection.commit()
    with caplog.at_level(logging.WARNING):
        assert left_to_pytorch(handle) == left_to_pytorch(handle) == []
    (told,) = caplog.messages
    assert "cannot be read" in told


def test_where_nothing_can_be_written_comparisons_are_of_this_process(
    path: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Store(path) as store:
        write_release([store], tmp_path / "release.db")
    with Handle("cpu", database=tmp_path / "release.db") as handle, caplog.at_level(logging.WARNING):
        compare(BARE, handle, 0.5)
        compare(RELU, handle, 0.4)
        assert (gain(BARE, handle), gain(RELU, handle)) == (0.5, 0.4)
        (told,) = caplog.messages
        assert "Going on in memory" in told
    with Handle("cpu", database=tmp_path / "release.db") as later:
        assert gain(BARE, later) is None


def test_what_memory_knows_is_told_in_order() -> None:
    with Handle("cpu", database=MEMORY) as handle:
        device = handle.device

        def told() -> Any:
            return known(handle.database.user, device)

        assert told() == []
        compare(RELU, handle, 0.5)
        compare(BARE, handle, 0.5)
        first = told()
        assert [name for (name, _), _ in first] == [BARE.network_config, RELU.network_config]
        compare(BARE, handle, 0.6)
        assert told() != first
        compare(BARE, handle, 0.5)
        assert told() == first, "the newest counts"


def test_what_no_findb_takes_in_is_warned_of(
    handle: Handle, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch, "__version__", "2" * 30_000)
    with caplog.at_level(logging.WARNING):
        compare(BARE, handle, 0.5)
    (told,) = caplog.messages
    assert "is not recorded" in told
