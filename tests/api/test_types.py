"""What type checkers see of the calls: one run of mypy over the documents' Python and over right and wrong calls."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.processes.waiting import LIMIT_S

import miofind
from miofind.errors import InvalidProblemError

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = ("README.md", "docs/python.md", "docs/pytorch.md")

RIGHT = """
import miofind
import miofind.torch
import numpy as np
from numpy.typing import NDArray

x: NDArray[np.float32] = np.zeros((1, 2, 5, 5), np.float32)
w: NDArray[np.float32] = np.zeros((3, 2, 3, 3), np.float32)
options = miofind.FindOptions(deterministic=True)
y: NDArray[np.float32] = miofind.convolution(x, w, padding="same", bias=x[0, 0, 0], options=options)
y = miofind.convolution(x, w, padding=((1, 0), (0, 1)), stride=(1, 2), math="tf32", out=y)
statistics: miofind.OutputStatistics[NDArray[np.float32]] = miofind.convolution(x, w, statistics=True)
dx: NDArray[np.float32] = miofind.convolution_backward_data(y, w, x.shape, residual=x, padding=1)
dw: NDArray[np.float32] = miofind.convolution_backward_weights(y, x, w.shape, padding=[1, 1])
both = miofind.convolution_backward_weights(y, x, w.shape, bias_gradient=True)
dw = both.bias_gradient
every: miofind.Gradients[NDArray[np.float32]] = miofind.convolution_gradients(y, x, w, padding=1)
some: miofind.Gradients[NDArray[np.float32] | None] = miofind.convolution_gradients(y, x, w, ("x", "w"), padding=1)
conv = miofind.Convolution.of(x, w, padding=1, activation="relu")
y = conv.prepare()(x, alpha=2.0, out=y)
dx = conv.gradients.data(y)
y = miofind.convolution_transpose(x, w, output_padding=1, stride=2)
folded, shift = miofind.fold_batch_norm(w, None, x[0, 0, 0], x[0, 0, 0])
y = folded
problem = miofind.ProblemDescription.from_arrays(x=x, w=w, padding="valid", bias=y)
with miofind.torch.use("find", min_gain=1.05, directions=["forward"]) as override:
    print(override.report().reasons)
"""

WRONG = """
miofind.convolution(x, w, pading=1)
miofind.convolution(x, w, padding="sam")
miofind.convolution(x, w, derivative="relu")
miofind.convolution_backward_data(y, w, x.shape, activation="relu")
miofind.convolution_backward_weights(y, x, w.shape, strides=1)
miofind.convolution_gradients(y, x, w, wanted="y")
miofind.convolution_gradients(y, x, w, determinstic=True)
miofind.convolution_transpose(x, w, outputpadding=1)
miofind.Convolution.of(x, w, pading=1)
conv(x, workspce=None)
miofind.ProblemDescription.from_arrays(x=x, w=w, pading=1)
text: str = miofind.convolution(x, w)
miofind.torch.use("find", min_gian=1.05)
miofind.torch.enable(on_mis="find")
"""


X, W = np.zeros((1, 2, 5, 5), np.float32), np.zeros((3, 2, 3, 3), np.float32)
CALLS: dict[Any, tuple[Any, ...]] = {
    miofind.convolution: (X, W),
    miofind.convolution_backward_data: (X, W, X.shape),
    miofind.convolution_backward_weights: (X, X, W.shape),
    miofind.convolution_gradients: (X, X, W),
    miofind.convolution_transpose: (X, W),
    miofind.convolution_transpose_gradients: (X, X, W),
}


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
def test_help_shows_the_keywords_that_a_call_takes(call: Any) -> None:
    parameters = inspect.signature(call).parameters.values()
    shown = {each.name for each in parameters if each.kind is not each.POSITIONAL_OR_KEYWORD}
    with pytest.raises(InvalidProblemError, match="unknown arguments") as caught:
        call(*CALLS[call], frobnicate=1)
    known = set(str(caught.value).partition("Known are ")[2].split(", "))
    assert known - {"wanted"} == shown
    assert inspect.signature(call).parameters["padding"].default == 0


def test_mypy_takes_the_examples_and_refuses_what_is_misspelt(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    files = {"calls.py": RIGHT + WRONG}
    for document in DOCUMENTS:
        blocks = re.findall(r"```python\n(.*?)```", (ROOT / document).read_text(encoding="utf-8"), re.DOTALL)
        files[f"{Path(document).stem.lower()}_examples.py"] = "\n".join(blocks)
    for name, text in files.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    config = ("--strict", "--config-file", str(ROOT / "pyproject.toml"), "--cache-dir", str(ROOT / ".mypy_cache"))
    told = subprocess.run(
        [sys.executable, "-m", "mypy", *config, "--no-error-summary", "--hide-error-context", *sorted(files)],
        cwd=tmp_path,
        env={"MYPYPATH": str(ROOT), "PATH": "", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    errors = re.findall(r"^(\w+\.py):(\d+): error: (.*)$", told.stdout, re.MULTILINE)
    assert [error for error in errors if error[0] != "calls.py"] == [], told.stderr
    first = len(RIGHT.splitlines()) + 1
    wrong = {first + i: line for i, line in enumerate(WRONG.splitlines()[1:], start=1) if line}
    refused = {int(line) for _, line, _ in errors}
    assert sorted(set(wrong) - refused) == [], told.stdout
    assert sorted(refused - set(wrong)) == [], told.stdout
