"""What all tests run under. Imports no NumPy, which reads this when it is imported."""

import os

# Workers of pytest share the cores: threads of each one's BLAS would wait for each other while they spin. On two busy
# cores that made tests of small products take 40 s instead of one.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
