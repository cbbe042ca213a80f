"""Reading CUDA sources: includes, what a hash covers and what it leaves out, names that leave the package."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.runs.cuda_package import SCALE, SCALE_HEADER, CudaPackage, make_package

from miofind.compiler import source_hash
from miofind.compiler.sources import normalised, read_source
from miofind.errors import CompileError


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CudaPackage:
    return make_package(tmp_path, monkeypatch)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a // b\nc", "a\nc"),
        ("a /* b\n c */ d", "a d"),
        ("a//b \\\n still comment\nc", "a\nc"),
        ("a\n\n\n  b\t\t c  \r\n", "a\nb c"),
        ('s = "// no comment";', 's = "// no comment";'),
        ('s = "/*"; /* c */ t = "*/";', 's = "/*"; t = "*/";'),
        (r'"\" // in" // out', r'"\" // in"'),
        (r"c = '\''; // out", r"c = '\'';"),
        ("c = '\"'; // \" out", "c = '\"';"),
        ("1'000'000 /* it's */ + 0x1'f // don't", "1'000'000 + 0x1'f"),
        ('R"(// kept\n  /* kept */)" // out', 'R"(// kept\n  /* kept */)"'),
        ('R"a()" // kept)a" // out', 'R"a()" // kept)a"'),
        ('FOOR"(" // out', 'FOOR"("'),
        ("#define A /* over\nlines */ 1\nb", "#define A 1\nb"),
        ("a / b // c\n* d", "a / b\n* d"),
        ("a /**/ b /***/ c", "a b c"),
        ("a // one /* two\nb /* // */ c", "a\nb c"),
        ("a /* never closed", "a /* never closed"),
        ("a /b/ c /* out */d", "a /b/ c d"),
        ("a b  c d// out\n e \tf", "a b c d\ne f"),
        ('s = "a  b" R"x(c  d)x" \'  \'', 's = "a  b" R"x(c  d)x" \'  \''),
        ("", ""),
    ],
)
def test_normalised_drops_comments_and_white_space_alone(text: str, expected: str) -> None:
    assert normalised(text) == expected
    assert normalised(expected) == expected


def test_hash_ignores_comments_and_white_space(package: CudaPackage) -> None:
    before = source_hash(["scale.cu"], package.name)
    package.write(scale_cu=SCALE.replace("// y", "// z").replace("const int i", "const  int i /* index */") + "\n\n")
    assert source_hash(["scale.cu"], package.name) == before


@pytest.mark.parametrize("change", [("i < n", "i <= n"), ("x[i]", "x[0]"), ("\n  if", " if")])
def test_hash_covers_code(package: CudaPackage, change: tuple[str, str]) -> None:
    before = source_hash(["scale.cu"], package.name)
    package.write(scale_cu=SCALE.replace(*change))
    assert source_hash(["scale.cu"], package.name) != before


def test_hash_covers_headers_at_any_depth(package: CudaPackage) -> None:
    package.write(
        common__scale_cuh='#include "common/factor.cuh"\n' + SCALE_HEADER, common__factor_cuh="#define FACTOR 3"
    )
    before = source_hash(["scale.cu"], package.name)
    package.write(common__factor_cuh="#define FACTOR 3 // three")
    assert source_hash(["scale.cu"], package.name) == before
    package.write(common__factor_cuh="#define FACTOR 4")
    assert source_hash(["scale.cu"], package.name) != before


def test_hash_tells_the_files_apart(package: CudaPackage) -> None:
    package.write(a_cu="int a;", b_cu="int b;")
    hashes = {source_hash(names, package.name) for names in (["a.cu"], ["b.cu"], ["a.cu", "b.cu"], ["b.cu", "a.cu"])}
    assert len(hashes) == 4


def test_hash_tells_where_a_header_stands(package: CudaPackage) -> None:
    package.write(a_cu='#include "p.cuh"\n#include "q.cuh"', p_cuh="int a;", q_cuh="int b;")
    before = source_hash(["a.cu"], package.name)
    package.write(p_cuh="int b;", q_cuh="int a;")
    assert source_hash(["a.cu"], package.name) != before


def test_a_hash_outlives_a_move(package: CudaPackage) -> None:
    package.write(common__scale_cuh='#include "common/factor.cuh"\n' + SCALE_HEADER, common__factor_cuh="#define A 3")
    before = source_hash(["scale.cu"], package.name)
    package.write(
        family__scaling_cu=SCALE.replace("common/scale.cuh", "family/scale.cuh"),
        family__scale_cuh='#include "family/factor.cuh"\n' + SCALE_HEADER,
        family__factor_cuh="#define A 3",
    )
    assert source_hash(["family/scaling.cu"], package.name) == before
    package.write(family__factor_cuh="#define A 4")
    assert source_hash(["family/scaling.cu"], package.name) != before


VARIED = """\
int first;
#ifdef EPILOGUE
int fused;
#ifdef VARIANT_PLANES
int both;
#endif
#endif
#ifdef VARIANT_PLANES
int planes;
#else
int rows;
#endif
#ifdef VARIANT_ANOTHER
int another;
#elif defined(OTHER)
int elsewhere;
#else
int usual;
#endif
/*
#define VARIANT_ANOTHER
*/
#ifdef OTHER
int other;
#endif
"""


@pytest.mark.parametrize("fused", [False, True])
def test_a_variant_is_a_source_of_its_own(package: CudaPackage, fused: bool) -> None:
    rest = "#if defined(OTHER)\nint elsewhere;\n#else\nint usual;\n#endif\n#ifdef OTHER\nint other;\n#endif\n"
    package.write(plain_cu=f"int first;\nint rows;\n{rest}")
    plain = source_hash(["plain.cu"], package.name)
    package.write(plain_cu=VARIED, planes_cu='#define VARIANT_PLANES\n#include "plain.cu"\n')
    own, variant = (read_source(name, package.name, fused=fused) for name in ("plain.cu", "planes.cu"))
    words = {"fused": fused, "both": False, "planes": False, "rows": True, "other": True, "another": False}
    assert {word: f"int {word};" in own.text for word in words} == words
    assert "PLANES" not in own.text
    words = {"fused": fused, "both": fused, "planes": True, "rows": True, "other": True, "another": False}
    assert {word: f"int {word};" in variant.headers["plain.cu"] for word in words} == words
    assert (source_hash(["plain.cu"], package.name, fused=fused) == plain) == (not fused)
    assert source_hash(["planes.cu"], package.name, fused=fused) != plain


def test_a_variant_is_defined_by_its_source_alone(package: CudaPackage) -> None:
    package.write(a_cu='#include "b.cuh"\n', b_cuh="#define VARIANT_PLANES\n")
    with pytest.raises(CompileError, match=r"b\.cuh defines VARIANT_PLANES"):
        read_source("a.cu", package.name)


def test_sources_are_read_once(package: CudaPackage) -> None:
    source = read_source("scale.cu", package.name)
    (package.root / "scale.cu").write_text("int other;")
    assert read_source("scale.cu", package.name) is source


def test_headers_that_include_each_other(package: CudaPackage) -> None:
    package.write(
        ring_cu='#include "a.cuh"', a_cuh='#pragma once\n# include "b.cuh"', b_cuh='#pragma once\n#include "a.cuh"'
    )
    assert set(read_source("ring.cu", package.name).headers) == {"a.cuh", "b.cuh"}


def test_toolkit_headers_and_includes_in_comments_are_not_sought(package: CudaPackage) -> None:
    package.write(a_cu='#include <cuda_fp16.h>\n// #include "gone.cuh"\n/*\n#include "gone.cuh"\n*/\nint a;')
    assert read_source("a.cu", package.name).headers == {}


@pytest.mark.parametrize("name", ["../secret.cuh", "common/../../secret.cuh", "/etc/hosts", "./a.cuh", "a\\b.cuh", ""])
def test_names_that_leave_the_package_are_refused(package: CudaPackage, name: str) -> None:
    (package.root.parent / "secret.cuh").write_text("int secret;")
    package.write(bad_cu=f'#include "{name}"\n')
    with pytest.raises(CompileError, match="plain path below the root") as caught:
        read_source("bad.cu", package.name)
    assert package.name in str(caught.value)
    assert "bad.cu" in str(caught.value)
    with pytest.raises(CompileError, match="plain path below the root"):
        read_source(name, package.name)


def test_a_missing_header_names_its_includer(package: CudaPackage) -> None:
    package.write(bad_cu='#include "common/gone.cuh"\n')
    with pytest.raises(CompileError, match=r'#include "common/gone.cuh" in bad.cu cannot be read'):
        read_source("bad.cu", package.name)


def test_a_missing_source_and_a_missing_package(package: CudaPackage) -> None:
    with pytest.raises(CompileError, match=r"'gone.cu'.*cannot be read from package"):
        read_source("gone.cu", package.name)
    with pytest.raises(CompileError, match=r"package 'no_such_package' of CUDA source 'a\.cu' cannot be imported"):
        read_source("a.cu", "no_such_package")


def test_a_binary_file_is_no_source(package: CudaPackage) -> None:
    (package.root / "binary.cu").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(CompileError, match="cannot be read"):
        read_source("binary.cu", package.name)
