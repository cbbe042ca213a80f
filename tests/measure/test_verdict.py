"""The verdict on a final: who wins, who ties, and how often noise makes it say what is not so."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from miofind.measure.verdict import DIFFERENCE, Finalist, PairedComparison, RaceVerdict, judge

Noise = Callable[[np.random.Generator, int], NDArray[np.float64]]
PAIRS = 400


def final(times_ms: dict[str, list[float]], **fields: dict[str, float]) -> list[Finalist]:
    """Finalists with samples, and other fields by key."""
    return [
        Finalist(key=key, samples_ms=samples, **{name: values.get(key, 0) for name, values in fields.items()})  # type: ignore[arg-type]
        for key, samples in times_ms.items()
    ]


def steady(**times_ms: float) -> dict[str, list[float]]:
    ripple = [1.0, 1.001, 0.999, 1.0005, 0.9995] * 6
    return {key: [time_ms * r for r in ripple] for key, time_ms in times_ms.items()}


def judged(times_ms: dict[str, list[float]], incumbent: str = "", **fields: dict[str, float]) -> RaceVerdict:
    verdict = judge(final(times_ms, **fields), protocol="test-1", incumbent=incumbent)
    assert verdict is not None
    return verdict


def test_the_fastest_wins_and_the_others_are_compared_with_it() -> None:
    verdict = judged(steady(slow=1.5, fast=1.0, near=1.05))
    assert (verdict.winner, verdict.ties) == ("fast", ("fast",))
    assert [comparison.candidate for comparison in verdict.comparisons] == ["near", "slow"]
    near = verdict.comparisons[0]
    assert 1.047 < near.low <= 1.05 <= near.high < 1.053
    assert (verdict.rounds, verdict.protocol) == (30, "test-1")


@pytest.mark.parametrize(
    ("fields", "incumbent", "winner"),
    [
        ({"workspace_bytes": {"a": 10, "b": 5}, "max_error": {"a": 0.0, "b": 1.0, "c": 1.0}}, "a", "c"),
        ({"workspace_bytes": {"a": 10, "b": 5, "c": 5}, "max_error": {"b": 0.1, "c": 0.2}}, "a", "b"),
        ({"workspace_bytes": {"a": 10, "b": 5, "c": 5}}, "c", "c"),
        ({"workspace_bytes": {"a": 10, "b": 5, "c": 5}}, "", "b"),
        ({}, "", "a"),
    ],
    ids=["workspace", "error", "incumbent", "time", "all equal but time"],
)
def test_ties_are_ordered(fields: dict[str, dict[str, float]], incumbent: str, winner: str) -> None:
    verdict = judged(steady(a=1.0, b=1.003, c=1.006, d=1.2), incumbent, **fields)
    assert verdict.winner == winner
    assert verdict.ties[0] == winner
    assert set(verdict.ties) == {"a", "b", "c"}


def test_a_wide_interval_makes_no_tie_of_who_is_clearly_behind() -> None:
    """With five rounds of noise nothing is proved, and the smaller workspace won 10 % of time lost."""
    times = {"fast": [1.0, 1.1, 1.0, 1.2, 1.0], "behind": [1.1, 1.0, 1.15, 1.1, 1.3]}
    verdict = judged(times, workspace_bytes={"fast": 1 << 20})
    assert (verdict.winner, verdict.ties) == ("fast", ("fast",))
    assert not verdict.comparisons[0].is_slower


def test_pairs_cancel_what_hits_both() -> None:
    drift = np.linspace(1.0, 2.0, 40)
    (slower,) = judged({"a": list(drift), "b": list(1.03 * drift)}).comparisons
    assert (slower.low, slower.high) == (pytest.approx(1.03), pytest.approx(1.03))


@pytest.mark.parametrize("seed", range(40))
def test_nobody_wins_whom_another_beats(seed: int) -> None:
    """Where samples have two modes, centred medians put one first that paired ratios do not."""
    random = np.random.default_rng(seed)

    def times(typical: float, slow_share: float, slow: float) -> list[float]:
        samples = typical * np.exp(random.normal(0, 0.02, 15))
        return list(np.where(random.random(15) < slow_share, slow, 1.0) * samples)

    verdict = judged({"a": times(0.195, 0, 1), "b": times(0.14, 0.35, 2.1), "c": times(0.14, 0.5, 4.4)})
    assert [each.candidate for each in verdict.comparisons if each.high < 1 / DIFFERENCE] == []


def test_the_winner_stands_before_ties_of_less_workspace_that_another_beats() -> None:
    noisy = [0.992, 0.946, 1.002, 0.982, 0.987, 0.979, 1.012, 0.997, 1.017, 0.985, 1.033, 1.001]
    small = [1.008, 1.014, 1.013, 1.007, 1.011, 1.01, 1.014, 1.016, 1.007, 1.008, 1.002, 1.012]
    steady_ = [0.999, 1.0, 0.997, 0.994, 0.997, 0.998, 1.0, 0.993, 0.996, 1.001, 0.992, 1.002]
    verdict = judged({"small": small, "noisy": noisy, "steady": steady_}, workspace_bytes={"noisy": 1, "steady": 2})
    assert (verdict.winner, verdict.ties) == ("noisy", ("noisy", "small", "steady"))


def test_where_each_is_beaten_one_wins() -> None:
    ring = [1.0, 1.4, 1.2]  # each beats the next in two rounds of three
    times = {key: (ring[i:] + ring[:i]) * 10 for i, key in enumerate("abc")}
    verdict = judged({key: [t * (1 + 1e-4 * n) for n, t in enumerate(samples)] for key, samples in times.items()})
    assert verdict.winner in verdict.ties


@pytest.mark.parametrize("samples", [[1.0] * 4, []], ids=["four rounds", "none"])
def test_few_rounds_give_no_verdict(samples: list[float]) -> None:
    assert judge(final({"a": samples, "b": samples}), protocol="") is None


def test_one_finalist_gives_no_verdict() -> None:
    assert judge(final(steady(a=1.0)), protocol="") is None
    assert judge([], protocol="") is None


def test_unpaired_samples_are_refused() -> None:
    with pytest.raises(ValueError, match="inhomogeneous"):
        judge(final({"a": [1.0] * 6, "b": [1.0] * 7}), protocol="")


def test_equal_samples_give_equal_verdicts() -> None:
    noise = np.random.default_rng(5)
    times = {key: list(1 + 0.02 * noise.random(45)) for key in "abc"}
    assert judged(times) == judged(times)


def test_a_difference_is_beyond_one_percent() -> None:
    assert PairedComparison(candidate="a", low=1.011, high=1.02).differs
    assert PairedComparison(candidate="a", low=0.97, high=0.985).differs
    assert not PairedComparison(candidate="a", low=0.97, high=0.985).is_slower
    assert not PairedComparison(candidate="a", low=0.995, high=1.2).differs


def normal(noise: np.random.Generator, rounds: int) -> NDArray[np.float64]:
    return 0.01 * noise.standard_normal((2, rounds))


def heavy_tailed(noise: np.random.Generator, rounds: int) -> NDArray[np.float64]:
    """Student's t with two degrees of freedom: no variance, a sample in a hundred is off by 7 %."""
    return 0.007 * noise.standard_t(2, (2, rounds))


def drifting(noise: np.random.Generator, rounds: int) -> NDArray[np.float64]:
    """Clocks that wander by far more than what is looked for, while both are sampled in turn."""
    walk = np.cumsum(0.02 * noise.standard_normal(2 * rounds)) + np.linspace(0, 0.5, 2 * rounds)
    return walk.reshape(rounds, 2).T + 0.005 * noise.standard_normal((2, rounds))


def jumping(noise: np.random.Generator, rounds: int) -> NDArray[np.float64]:
    """One-sided outliers: a sample in ten meets an interrupt and takes up to half as long again."""
    hit = noise.random((2, rounds)) < 0.1
    return 0.005 * noise.standard_normal((2, rounds)) + hit * noise.uniform(0, 0.4, (2, rounds))


def share_called(noise: Noise, slowdown: float, rounds: int) -> float:
    """Share of pairs called different; of slowed ones, those whose slower side is known."""
    generator = np.random.default_rng(17)
    called = 0
    for _ in range(PAIRS):
        first, second = np.exp(noise(generator, rounds))
        comparison = judged({"a": list(first), "b": list(second * slowdown)}).comparisons[0]
        called += comparison.differs if slowdown == 1 else comparison.is_slower and comparison.candidate == "b"
    return called / PAIRS


@pytest.mark.parametrize("rounds", [30, 45])
@pytest.mark.parametrize("noise", [normal, heavy_tailed, drifting, jumping], ids=lambda noise: noise.__name__)
def test_equal_kernels_are_hardly_ever_called_different(noise: Noise, rounds: int) -> None:
    assert share_called(noise, 1.0, rounds) <= 0.05


@pytest.mark.parametrize("rounds", [30, 45])
@pytest.mark.parametrize("noise", [normal, heavy_tailed, jumping], ids=lambda noise: noise.__name__)
def test_three_percent_are_nearly_always_found(noise: Noise, rounds: int) -> None:
    assert share_called(noise, 1.03, rounds) >= 0.8


def test_three_percent_are_found_while_clocks_drift() -> None:
    """By 2 % from sample to sample: more than the difference, so fewer rounds than a tuning's would not do."""
    assert share_called(drifting, 1.03, 45) >= 0.8
