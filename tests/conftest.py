"""What all tests run under. Imports no NumPy, which reads this when it is imported."""

import gc
import os
import zlib
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from helpers.finddb.postgres_server import _finddb_of_worker, finddb_url, postgres_server, postgres_url
from helpers.processes.nursery import forked_children, nursery
from hypothesis import HealthCheck, settings

__all__ = ["_finddb_of_worker", "finddb_url", "forked_children", "nursery", "postgres_server", "postgres_url"]

# Workers of pytest share the cores: threads of each one's BLAS would wait for each other while they spin. On two busy
# cores that made tests of small products take 40 s instead of one. PyTorch's threads made those of compiled graphs a
# tenth slower.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Inductor's code for CPUs without vectors: g++ is not asked first what it can, which took each worker ten seconds, and
# compiles less. Vectors are PyTorch's affair; graphs and their results are what tests look at.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "0")

# Hypothesis fails an example that takes 0.2 s, and then takes a minute to find the smallest that does.
settings.register_profile("any machine", deadline=None, max_examples=30, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")


def pytest_configure(config: pytest.Config) -> None:
    """Keep the direct path into PyTorch that this user has built out of the tests without a GPU."""
    if "not gpu" in config.option.markexpr:
        os.environ.setdefault("MIOFIND_TORCH_DIRECT", "0")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Look for no garbage among modules and tests, which live to the end: that took a fifth of collecting them.

    Afterwards it is looked for less often than Python does by itself.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(20_000, 20, 20)  # by default one of ten seconds of compiled graphs' tests went into that
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave most cases of tests that are marked `sampled(n)` to `full_matrix`: all but the first and one in n.

    Which ones depends on their names, so that a sample of a product has some of each parameter's values: a list of
    cases that differ in kind is not to be marked. Who names tests by -k, as those of one solver, has all of their
    cases.
    """
    if config.option.keyword:
        return
    seen: set[str] = set()
    for item in items:
        mark = item.get_closest_marker("sampled")
        if mark is None:
            continue
        test = item.nodeid.partition("[")[0]
        if test in seen and zlib.crc32(item.nodeid.encode()) % mark.args[0]:
            item.add_marker(pytest.mark.full_matrix)
        seen.add(test)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave tests/gpu unread where marks leave all of its tests out: each worker would import it for nothing."""
    is_asked_for = any("gpu" in argument for argument in config.args)
    without = "not gpu" in config.option.markexpr and collection_path == Path(__file__).parent / "gpu"
    return True if without and not is_asked_for else None


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say of which solvers the contract tests computed nothing, so that nobody takes their pass for more."""
    passed = terminalreporter.stats.get("passed", [])
    unchecked = {value for report in passed for name, value in report.user_properties if name == "values unchecked"}
    if unchecked:
        named = ", ".join(sorted(map(str, unchecked))) if len(unchecked) <= 3 else f"{len(unchecked)} solvers"
        terminalreporter.write_line(
            f"Contract: the values of {named} on a GPU were not checked; `make gpu-test` checks them on one."
        )


@pytest.fixture(scope="session", autouse=True)
def patience() -> Iterator[None]:
    """Finds measure all their candidates, however slow the machine is; their budget is finite, as it is for users.

    On the CPU place a sample is of few runs: those that a user's find takes, so that it does not measure the steps of
    the clock, were half of the time of tests that find.
    """
    from miofind import options
    from miofind.measure import backend_host

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(options, "DEFAULT_TIME_BUDGET_S", 1e6)
        patch.setattr(backend_host, "_SAMPLE_MS", 0.1)
        yield
