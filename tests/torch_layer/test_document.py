"""docs/pytorch.md runs as pasted, here on the CPU place."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest

import miofind.torch
from miofind import Handle
from miofind.suites import load
from miofind.torch.tuning import tuning

DOCUMENT = Path(__file__).parents[2] / "docs" / "pytorch.md"


def test_the_document_has_each_public_name_once() -> None:
    """Some stood nowhere in it."""
    section = DOCUMENT.read_text(encoding="utf-8").partition("## Public names\n")[2].partition("\n## ")[0]
    assert sorted(re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)) == sorted(miofind.torch.__all__)


@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor compiles for the CPU with g++")
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_the_document_s_python_runs_as_pasted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    with Handle("cpu", database=tmp_path / "finddb.db") as handle:
        monkeypatch.setattr(tuning, "default_handle", lambda: handle)
        try:
            for block in re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL):
                exec(compile(block, str(DOCUMENT), "exec"), names)
        finally:
            miofind.torch.disable()
    assert names["report"].is_complete
    assert len(names["report"].rows) == 5
    assert "PyTorch's own" in capsys.readouterr().out
    assert len(load("step.csv").problems()) == len(load("net.csv").problems()) == 5
