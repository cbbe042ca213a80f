"""What all tests run under. Imports no NumPy, which reads this when it is imported."""

import os
from collections.abc import Iterator

import pytest

# Workers of pytest share the cores: threads of each one's BLAS would wait for each other while they spin. On two busy
# cores that made tests of small products take 40 s instead of one.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


@pytest.fixture(scope="session", autouse=True)
def patience() -> Iterator[None]:
    """Finds measure all their candidates, however slow the machine is; their budget is finite, as it is for users."""
    from miofind import options

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(options, "DEFAULT_TIME_BUDGET_S", 1e6)
        yield
