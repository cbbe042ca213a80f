"""PyTorch's own samples of convolutions, run by miofind in each element type and held to float64's results."""

from __future__ import annotations

import subprocess
import sys

import pytest
from helpers.processes.waiting import LIMIT_S

_SAMPLES = """
import sys, types, unittest
expecttest = types.ModuleType("expecttest")  # of which PyTorch's samples need the name alone
expecttest.TestCase = unittest.TestCase
sys.modules.setdefault("expecttest", expecttest)
import torch
from torch.testing._internal.common_methods_invocations import op_db
from miofind import Handle
from miofind.torch import use

def results(entry, tensors, grad, rest, keywords):
    tensors = [each.detach().requires_grad_() for each in tensors]
    y = entry(*tensors, *rest, **keywords)
    return [y.detach(), *torch.autograd.grad(y, tensors, grad)]

def wide(change, tensors, grad):
    return [change(each.detach().double()) for each in tensors], change(grad.double())

def numbers(value):
    return (value,) * 3 if isinstance(value, int) else value

def stays_pytorchs(keywords):
    pairs = zip(numbers(keywords.get("output_padding", 0)), numbers(keywords.get("stride", 1)))
    return any(padding >= stride for padding, stride in pairs)

def check(entry, dtype, made):
    samples = [*entry.sample_inputs("cpu", dtype, requires_grad=True)]
    for sample in samples:
        given, keywords = [sample.input, *sample.args], sample.kwargs
        tensors = [each for each in given if isinstance(each, torch.Tensor)]  # the first two or three
        rest = given[len(tensors):]
        with torch.no_grad(), use("record", devices="cpu"):
            grad = torch.randn_like(entry(*given, **keywords))
        before = made.report()
        ours = results(entry, tensors, grad, rest, keywords)
        own_calls = made.report().own_calls - before.own_calls
        assert own_calls == (0 if stays_pytorchs(keywords) else 3), (entry.name, sample, own_calls)  # y, dx and dw
        if not own_calls:
            continue
        with use("record", devices="cpu"):
            exact = results(entry, *wide(lambda each: each, tensors, grad), rest, keywords)
            sizes = results(entry, *wide(torch.abs, tensors, grad), rest, keywords)
            terms = results(entry, *wide(torch.ones_like, tensors, grad), rest, keywords)
        sums = torch.float64 if dtype is torch.float64 else torch.float32
        for name, got, wanted, size, count in zip(("y", "dx", "dw", "db"), ours, exact, sizes, terms):
            assert got.dtype is dtype
            bound = (2 * torch.finfo(dtype).eps + count * torch.finfo(sums).eps) * size
            error = (got.double() - wanted).abs()
            assert (error <= bound).all(), (entry.name, dtype, name, sample, float((error / bound).nan_to_num().max()))
    return len(samples)

names = [f"nn.functional.{kind}{n}d" for kind in ("conv", "conv_transpose") for n in (1, 2, 3)]
with Handle("cpu") as handle, use("estimate", handle=handle, devices="cpu") as made:
    for dtype in map(torch.__dict__.get, sys.argv[1:]):
        counts = {entry.name: check(entry, dtype, made) for entry in op_db if entry.name in names}
        print(*(counts[name] for name in names))
"""


@pytest.mark.parametrize(
    "dtypes",
    [("float32",), pytest.param(("float64", "float16", "bfloat16"), marks=pytest.mark.full_matrix)],
    ids=" ".join,
)
def test_pytorchs_own_samples(dtypes: tuple[str, ...]) -> None:
    """In a process of their own: PyTorch's module of them changes its switches for good.

    An error is at most one of the last place of each sum's terms, float32's where results have 16 bits, and two of the
    result's, which a bias is added to once it is rounded. Transposed convolutions whose output padding is as large as
    the stride stay PyTorch's.
    """
    command = [sys.executable, "-c", _SAMPLES, *dtypes]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert ended.returncode == 0, ended.stderr
    lines = [[*map(int, line.split())] for line in ended.stdout.splitlines()]
    assert len(lines) == len(dtypes)
    assert all(len(counts) == 6 and min(counts) >= 10 for counts in lines), "each has all of its samples"
