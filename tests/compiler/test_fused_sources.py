"""Lines of a source for kernels that apply an epilogue: no part of a bare convolution's source, text or hash."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from miofind.compiler.sources import read_source

BARE = """#include "part.cuh"
void kernel(int a) {
#if WIDE
  wide();
#else
  narrow();
#endif
  store(a);
}
"""
FUSED = """#include "part.cuh"
#ifdef EPILOGUE
#include "finish.cuh"
#if WIDE
using T = double;
#endif
void kernel(int a, Epilogue e) {
#else
void kernel(int a) {
#endif
#if WIDE
  wide();
#else
  narrow();
#endif
  #  ifdef EPILOGUE  // rounds once
  a = finish(a, e);
  #endif
  store(a);
}
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    folder = tmp_path / "fused_kernels"
    folder.mkdir()
    (folder / "__init__.py").touch()
    for name, text in {"bare.cu": BARE, "fused.cu": FUSED, "part.cuh": "int part;\n", "finish.cuh": "int f;\n"}.items():
        (folder / name).write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, folder.name, raising=False)
    return folder.name


def test_a_bare_source_is_what_it_was_before_its_kernel_learnt_to_fuse(package: str) -> None:
    before, after = read_source("bare.cu", package), read_source("fused.cu", package)
    assert after.digest == before.digest
    assert list(after.headers) == ["part.cuh"]
    assert [line for line in after.text.split("\n") if line] == [line for line in before.text.split("\n") if line]
    assert after.text.count("\n") == FUSED.count("\n"), "lines keep their numbers"


def test_a_fused_source_is_the_whole(package: str) -> None:
    whole = read_source("fused.cu", package, fused=True)
    assert whole.text == FUSED
    assert set(whole.headers) == {"part.cuh", "finish.cuh"}
    assert whole.digest != read_source("fused.cu", package).digest
    assert read_source("bare.cu", package, fused=True).digest == read_source("bare.cu", package).digest
