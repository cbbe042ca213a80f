"""Named lists of convolution problems: the shipped tables, the user's own, and files of MIOpenDriver lines."""

from miofind.suites.classes import PROBLEM_CLASSES, problem_class
from miofind.suites.suite import (
    Suite,
    SuiteProblem,
    load,
    load_csv,
    load_lines,
    load_suite,
    save_csv,
    save_lines,
    suite_names,
)
from miofind.suites.table import SuiteRow

__all__ = [
    "PROBLEM_CLASSES",
    "Suite",
    "SuiteProblem",
    "SuiteRow",
    "load",
    "load_csv",
    "load_lines",
    "load_suite",
    "problem_class",
    "save_csv",
    "save_lines",
    "suite_names",
]
