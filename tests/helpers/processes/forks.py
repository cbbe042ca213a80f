"""Work in a forked child of a test."""

from __future__ import annotations

import os
import signal
import traceback
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from helpers.processes.waiting import LIMIT_S


def in_a_fork(work: Callable[[], object]) -> int:
    """Exit status of a forked child: 0 once it has worked, 1 if that raised, negative the signal that killed it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of forks where there are threads
        child = os.fork()
    if child == 0:
        status = 1
        try:
            signal.alarm(int(LIMIT_S))
            work()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def forked_by_a_thread(work: Callable[[], object]) -> int:
    """As `in_a_fork`; another thread forks, so that the child owns none of the locks that this one holds."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(in_a_fork, work).result()
