"""What tunings of this process say of miofind beside PyTorch."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from miofind import Device
from miofind.core.problem import ProblemDescription
from miofind.torch.override import comparisons

CPU = Device.cpu()
BARE, BIAS, RELU = (
    ProblemDescription.convolution(x=(1, 2, 3, 3), w=(2, 2, 1, 1), epilogue=epilogue)
    for epilogue in (None, "bias", "bias.relu")
)


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    comparisons.forget()
    yield
    comparisons.forget()


def test_a_slower_fused_problem_speaks_for_the_bare_one_until_it_is_measured() -> None:
    assert comparisons.gain(BARE, CPU) is None
    comparisons.note(RELU, CPU, 0.5)
    assert (comparisons.gain(RELU, CPU), comparisons.gain(BARE, CPU)) == (0.5, 0.5)
    comparisons.note(BIAS, CPU, 1.2)
    assert comparisons.gain(BARE, CPU) == 0.5
    comparisons.note(BARE, CPU, 1.1)
    assert comparisons.gain(BARE, CPU) == 1.1


def test_another_solution_gains_as_much_less_as_it_is_slower() -> None:
    """The comparison's solution took a workspace beyond the override's limit; PyTorch was faster than what ran."""
    comparisons.note(BARE, CPU, 1.2, 2.0)
    assert comparisons.gain(BARE, CPU) == comparisons.gain(BARE, CPU, 2.0) == 1.2
    assert comparisons.gain(BARE, CPU, 3.0) == pytest.approx(0.8)
    comparisons.note(BARE, CPU, 1.5)
    assert comparisons.gain(BARE, CPU, 3.0) == 1.5, "of no known time"


def test_a_fused_problem_that_is_faster_after_all_says_nothing_of_the_bare_one() -> None:
    comparisons.note(RELU, CPU, 0.5)
    comparisons.note(RELU, CPU, 1.3)
    assert (comparisons.gain(RELU, CPU), comparisons.gain(BARE, CPU)) == (1.3, None)
