"""Attributes that are reckoned once."""

from __future__ import annotations

from dataclasses import dataclass, field

from miofind.core.cached import cached_property


@dataclass(frozen=True)
class Square:
    side: int
    asked: list[int] = field(default_factory=list, compare=False)

    @cached_property
    def area(self) -> int:
        """Of the square."""
        self.asked.append(self.side)
        return self.side**2


def test_an_attribute_is_reckoned_once_for_each_instance() -> None:
    first, other = Square(3), Square(4)
    assert (first.area, first.area, other.area) == (9, 9, 16)
    assert (first.asked, other.asked) == ([3], [4])
    assert first == Square(3), "what was reckoned plays no part"


def test_a_class_has_the_attribute_with_what_it_says() -> None:
    assert Square.area.__doc__ == "Of the square."
