"""What all tests run under. Imports no NumPy, which reads this when it is imported."""

import os
from importlib.util import find_spec

# Workers of pytest share the cores: threads of each one's BLAS would wait for each other while they spin. On two busy
# cores that made tests of small products take 40 s instead of one.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

if find_spec("hypothesis"):  # tests/gpu runs without it
    from hypothesis import HealthCheck, settings

    # A busy machine is no fault of what a test draws or runs: its clock decides nothing.
    settings.register_profile("any-clock", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("any-clock")
