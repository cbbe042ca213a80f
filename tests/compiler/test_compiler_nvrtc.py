"""The installed toolchain."""

from __future__ import annotations

from pathlib import Path

import pytest

from miofind.compiler import nvrtc


@pytest.mark.parametrize(
    ("text", "version"),
    [
        (b"#define CUDART_VERSION  13050\n", 13050),
        (b"/* \xa9 NVIDIA */\r\n#define CUDART_VERSION 12090\r\n", 12090),
        (b"// no #define CUDART_VERSION 1\n#define CUDART_VERSION 13000\n", 13000),
        (b"#define CUDART_VERSION_OTHER 5\n", 0),
        (b"", 0),
    ],
)
def test_headers_tell_their_version(tmp_path: Path, text: bytes, version: int) -> None:
    (tmp_path / "cuda_runtime_api.h").write_bytes(text)
    assert nvrtc._headers_version(tmp_path) == version


def test_headers_that_are_missing_have_no_version(tmp_path: Path) -> None:
    assert nvrtc._headers_version(tmp_path) == 0
