"""One way to refuse: Applicability, and functions named refuse_... that give one."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from miofind.core.problem import ProblemDescription
from miofind.solver.solver import APPLICABLE, Applicability, first_refusal
from miofind.solvers.common.limits import MAX_PADDING, refuse_tensors

PACKAGE = Path(__file__).resolve().parents[2] / "miofind"


def refusing_functions() -> Iterator[tuple[str, str]]:
    """Where each function named refuse_... is, and what it is declared to return."""
    for folder in ("solver", "solvers", "find", "runtime"):
        for path in sorted((PACKAGE / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.FunctionDef) and node.name.removeprefix("_").startswith("refuse_"):
                    yield f"{path}:{node.lineno} {node.name}", ast.unparse(node.returns) if node.returns else ""


def test_functions_that_refuse_give_an_applicability() -> None:
    found = dict(refusing_functions())
    assert len(found) > 30
    others = {where: returned for where, returned in found.items() if returned not in ("Applicability", "None")}
    assert others == {}


def test_an_applicability_is_true_or_has_a_reason() -> None:
    refusal = Applicability("needs 16 bits")
    assert APPLICABLE
    assert not APPLICABLE.refused
    assert not refusal
    assert refusal.refused
    assert Applicability("") == APPLICABLE


def test_the_first_refusal_is_given() -> None:
    first, second = Applicability("first"), Applicability("second")
    assert first_refusal(APPLICABLE, first, second) is first
    assert first_refusal(APPLICABLE, APPLICABLE) is APPLICABLE
    assert first_refusal() is APPLICABLE


def test_tensors_are_refused_for_what_they_are() -> None:
    def problem(**fields: object) -> ProblemDescription:
        given = {"x": (2, 8, 9, 9), "w": (8, 8, 3, 3)} | fields
        return ProblemDescription.convolution(**given)  # type: ignore[arg-type]

    assert refuse_tensors(problem()) is APPLICABLE
    assert "one dtype" in refuse_tensors(problem(dtype={"x": "float16", "w": "float16", "y": "float32"})).reason
    assert "more than 1000" in refuse_tensors(problem(), 1000).reason
    padded = problem(padding=MAX_PADDING + 1, stride=2**18)
    assert f"padding is more than {MAX_PADDING}" in refuse_tensors(padded).reason
