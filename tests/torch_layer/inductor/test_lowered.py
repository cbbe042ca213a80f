"""How Inductor calls the operators: by their form, with packed tensors."""

from __future__ import annotations

import re
import shutil
from typing import Any

import pytest
import torch
from helpers.runs.fused_answers import answers_of
from torch import nn
from torch.nn import functional

import miofind.torch
from miofind import Handle
from miofind.torch import formats

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor compiles for the CPU with g++"),
]


class Split(nn.Module):
    """Convolutions of halves of channels, the last one of what they give together."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.second, self.third = (nn.Conv2d(4, 4, 3, padding=1) for _ in range(2))

    def forward(self, x: Any) -> Any:
        left, right = self.first(x).chunk(2, 1)
        return torch.cat([left, torch.relu(self.second(right)), functional.silu(self.third(right))], 1)


@pytest.mark.parametrize("order", [torch.contiguous_format, torch.channels_last])
def test_operators_are_called_by_form_and_copy_no_parts(
    order: Any, cpu_handle: Handle, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._inductor.utils import run_and_get_code

    torch.manual_seed(0)
    network, x = Split().eval().to(memory_format=order), torch.randn(2, 3, 6, 5).to(memory_format=order)
    copied = []

    def dense(tensor: Any, layout: Any) -> Any:
        copied.append(tuple(tensor.shape))
        return packed(tensor, layout)

    packed = formats.dense
    monkeypatch.setattr(formats, "dense", dense)
    torch._dynamo.reset()
    with answers_of(cpu_handle) as ran, torch.no_grad():
        options = {**miofind.torch.inductor_options(), "fx_graph_cache": False}
        given, (code,) = run_and_get_code(torch.compile(miofind.torch.fuse(network), options=options), x)
        torch.testing.assert_close(given, network(x), rtol=1e-4, atol=1e-4)
    assert copied == []
    assert len(ran) == 3
    called = re.findall(r"= torch.ops.miofind.(convolution\w*).default", code)
    assert called == ["convolution_by_form"] * 3


def test_sizes_that_depend_on_inputs_are_given_one_by_one(cpu_handle: Handle) -> None:
    from torch._inductor.utils import run_and_get_code

    x, w = torch.randn(2, 3, 6, 5), torch.randn(4, 3, 3, 3)

    def call(x: Any, size: int) -> Any:
        return miofind.torch.convolution(x, w, padding=size)

    torch._dynamo.reset()
    with answers_of(cpu_handle), torch.no_grad():
        options = {**miofind.torch.inductor_options(), "fx_graph_cache": False}
        given, (code,) = run_and_get_code(torch.compile(call, options=options, dynamic=True), x, 2)
        torch.testing.assert_close(given, call(x, 2), rtol=1e-4, atol=1e-4)
    assert "miofind.convolution.default" in code
