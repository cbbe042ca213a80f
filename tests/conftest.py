"""What all tests run under. Imports no NumPy, which reads this when it is imported."""

import os
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

# Workers of pytest share the cores: threads of each one's BLAS would wait for each other while they spin. On two busy
# cores that made tests of small products take 40 s instead of one.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# Hypothesis fails an example that takes 0.2 s, and then takes a minute to find the smallest that does.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")


@pytest.fixture(scope="session", autouse=True)
def patience() -> Iterator[None]:
    """Finds measure all their candidates, however slow the machine is; their budget is finite, as it is for users."""
    from miofind import options

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(options, "DEFAULT_TIME_BUDGET_S", 1e6)
        yield
