"""Whether an exception is a signal's doing, and what is told of exceptions that resist."""

from __future__ import annotations

import functools
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest

from miofind.errors import MAX_TOLD, causes, described, raise_if_interrupted


class _Stop(BaseException):
    pass


class _Handler:
    """A program's own handlers of a signal."""

    def method(self, number: int, frame: FrameType | None) -> None:
        raise _Stop

    def __call__(self, *given: object) -> None:
        self._further()

    def _further(self) -> None:
        raise _Stop

    def with_word(self, word: str, number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_IGN)
        raise _Stop


HANDLERS: dict[str, Callable[..., Any]] = {
    "method": _Handler().method,
    "object": _Handler(),
    "partial": functools.partial(_Handler().with_word, "word"),
}


@pytest.fixture
def usr1() -> Iterator[Callable[[Any], None]]:
    before = signal.getsignal(signal.SIGUSR1)
    yield lambda handler: signal.signal(signal.SIGUSR1, handler)
    signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("handler", HANDLERS.values(), ids=HANDLERS.keys())
def test_what_a_handler_raises_is_raised_again(usr1: Callable[[Any], None], handler: Callable[..., Any]) -> None:
    usr1(handler)

    def code() -> None:
        try:
            signal.raise_signal(signal.SIGUSR1)
        except BaseException as error:
            raise_if_interrupted(error)
            pytest.fail("it was held against the code")

    with pytest.raises(_Stop):
        code()


def _call(function: Callable[..., object], *arguments: object) -> object:
    return function(*arguments)


@pytest.mark.parametrize("kind", [SystemExit, GeneratorExit, _Stop, ValueError])
def test_what_code_raises_by_itself_is_its_own(kind: type[BaseException]) -> None:
    def code(number: int, frame: object) -> None:
        raise kind

    try:
        _call(_call, code, 1, None)
    except BaseException as error:
        raise_if_interrupted(error)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), BaseExceptionGroup("", [ValueError(), KeyboardInterrupt()])])
def test_ctrl_c_is_the_users_in_the_main_thread_alone(error: BaseException) -> None:
    with pytest.raises(type(error)):
        raise_if_interrupted(error)
    raised: list[BaseException] = []

    def elsewhere() -> None:
        try:
            raise_if_interrupted(error)
        except BaseException as again:
            raised.append(again)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert raised == []


class _Resists(Exception):
    def __init__(self, answer: Callable[[], Any]) -> None:
        super().__init__()
        self._answer = answer

    def __str__(self) -> str:
        return self._answer()  # type: ignore[no-any-return]

    __repr__ = __str__


def _exit() -> str:
    raise SystemExit(0)


@pytest.mark.parametrize("form", [str, repr])
def test_any_exception_is_described(form: Callable[[object], str]) -> None:
    assert described(ValueError("why"), form) == form(ValueError("why"))
    assert described(_Resists(lambda: "x" * 10_000_000), form) == "x" * MAX_TOLD
    assert "_Resists" in described(_Resists(lambda: 7), form)
    assert "SystemExit" in described(_Resists(_exit), form)


def test_a_circle_of_causes_has_an_end() -> None:
    first, second, third = ValueError(1), ValueError(2), ValueError(3)
    first.__cause__, second.__cause__, third.__cause__ = second, third, second
    assert list(causes(first)) == [first, second, third]
    first.__cause__ = first
    assert list(causes(first)) == [first]
