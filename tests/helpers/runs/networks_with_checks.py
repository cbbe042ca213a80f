"""Networks that check their input, which pytest does not rewrite: its `assert` asks for more than Python's."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class WidthError(ValueError):
    """An exception that only the network's own code knows."""


def must_be_even(size: Any) -> None:
    if size % 2:
        raise WidthError("a size must be even")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)

    def forward(self, x: Any) -> Any:
        return torch.relu(self.norm(self.conv(x)))


class CheckedBlock(Block):
    """Checks what its convolution gives, as norms do."""

    def forward(self, x: Any) -> Any:
        y = self.conv(x)
        assert y.dim() == 4
        if y.ndim != 4:
            raise ValueError("4 dimensions")
        return torch.relu(self.norm(y))


class Checked(nn.Module):
    """A U-Net's checks: of a size, of two at once, in a function, of values."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = CheckedBlock(), CheckedBlock()

    def forward(self, x: Any) -> Any:
        if x.shape[-1] % 4:
            raise ValueError("the width must be a multiple of 4")
        _, channels, height, _ = x.shape
        assert height % 4 == 0 and channels == 4, f"{height} and {channels}"  # noqa: PT018
        if x.shape[0] > 8 or x.shape[0] == 7:
            raise NotImplementedError
        must_be_even(x.shape[0])
        if x.isnan().any():
            raise RuntimeError("no number")
        return self.second(self.first(x))


class Branches(nn.Module):
    """A network of another graph for other inputs; one way ends in a raise, but later."""

    def __init__(self, block: Any) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Any) -> Any:
        if x.shape[0] > 1:
            x = x + 1
            if x.shape[1] != 4:
                raise ValueError("channels")
        return self.block(x)


class Catches(Branches):
    """Goes on where its check fails."""

    def forward(self, x: Any) -> Any:
        try:
            assert x.shape[0] > 1
        except AssertionError:
            x = 2 * x
        return self.block(x)


class CatchesAll(Branches):
    """Goes on where torch.fx refuses."""

    def forward(self, x: Any) -> Any:
        y = self.block(x)
        try:
            large = bool(x.shape[0] > 1)
        except Exception:
            large = False
        return 3 * y if large else y


class MakesTensors(Branches):
    """Calls what takes no stand-in, which is no check of its own."""

    def forward(self, x: Any) -> Any:
        if x.shape[0] > 1:
            x = x * torch.tensor([x.shape[0]])
        return self.block(x)


class RaisesElsewhere(Branches):
    """Calls a function that raises for any input; another answer had it not called."""

    def forward(self, x: Any) -> Any:
        if x.shape[0] > 1:
            x = self.scaled(x)
        return self.block(x)

    def scaled(self, x: Any) -> Any:
        if isinstance(x, torch.fx.Proxy):
            raise TypeError("no stand-in")
        return 2 * x


class Indexes(Branches):
    """Python's list refuses a stand-in."""

    def forward(self, x: Any) -> Any:
        if x.shape[0] > 1:
            x = x * [1.0, 2.0, 3.0][x.shape[0]]
        return self.block(x)


class Rewords(Branches):
    """Raises where torch.fx refuses another question."""

    def forward(self, x: Any) -> Any:
        if x.shape[0] > 1:
            x = 3 * x
        try:
            assert x.shape[1] < 8
        except Exception:
            raise ValueError("channels") from None
        return self.block(x)


class HasConstants(Branches):
    """Makes a tensor, which torch.fx sets as an attribute of the network."""

    def forward(self, x: Any) -> Any:
        if x.shape[0] > 1:
            x = x * torch.ones(1)
        return self.block(x)


class AsksForEver(Branches):
    """Catches what it is refused, and asks again."""

    def forward(self, x: Any) -> Any:
        while True:
            try:
                if x.shape[0] > 0:
                    return self.block(x)
            except Exception:
                continue


class Residual(nn.Module):
    """Checks between a convolution and the addition that follows it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x: Any) -> Any:
        y = self.conv(x)
        assert x.shape[1] == 4
        if (x.shape[-1] + x.shape[-2]) % 2:
            raise ValueError("an odd sum of sizes")
        return torch.relu(y + x)


class Many(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.count, self.block = count, Block()

    def forward(self, x: Any) -> Any:
        for i in range(self.count):
            assert x.shape[-1] > i
        return self.block(x)


class AsksForADtype(nn.Module):
    """Decides, and then raises by what no stand-in is."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Any) -> Any:
        if x.shape[0] > 1:
            return 1 - self.block(x)
        if x.dtype is not torch.float32:
            raise TypeError("of float32 alone")
        return self.block(x)


class AsksForACount(AsksForADtype):
    """Decides, and then raises for what is no number while it is traced."""

    def forward(self, x: Any) -> Any:
        if x.shape[0] > 1:
            return 1 - self.block(x)
        try:
            count = len(range(x.shape[0]))
        except TypeError:
            raise ValueError("of known sizes alone") from None
        return count * self.block(x)


class Even(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: Any) -> Any:
        if x.shape[0] % 2:
            raise WidthError("a size must be even")
        return self.block(x)


class CatchesItsOwn(nn.Module):
    """Cannot be traced; goes on where a part that is raises an exception of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.part = Even()

    def forward(self, x: Any) -> Any:
        try:
            return self.part(2 * x if x.shape[0] > 1 else x)
        except WidthError as error:
            return x + len(str(error))
