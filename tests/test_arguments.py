"""The decorators that check arguments."""

import sys
import threading

import pytest
import torch

from pyrohmm._arguments import checked, explained


def make():
    @checked()
    def function(a: int, b: str):
        return a, b

    return function


def test_of_equal_values_the_wrong_one_is_named():
    with pytest.raises(TypeError, match="b must be a str; got int 2"):
        make()(2, 2)


def test_a_missing_argument_has_the_error_of_python():
    @explained()
    def function(a: int, b: int):
        return a + b

    with pytest.raises(TypeError, match="missing 1 required positional argument: 'b'") as caught:
        function(1)
    assert "fit together" not in str(caught.value)


def test_what_is_not_implemented_stays_so():
    @explained()
    def function(a: int):
        raise NotImplementedError("in a subclass")

    with pytest.raises(NotImplementedError, match="in a subclass"):
        function(1)


def failing(error):
    @explained()
    def function(table: torch.Tensor, count: int):
        raise error

    return function


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("the file is not there any more"),
        torch.linalg.LinAlgError("the input is not positive-definite"),
        KeyboardInterrupt(),
        KeyError("rate"),
    ],
    ids=repr,
)
def test_what_is_not_about_shapes_passes(error):
    """Of the same kind, with its text, and what the arguments were as a note."""
    with pytest.raises(type(error)) as caught:
        failing(error)(torch.zeros(2, 3), 4)
    assert caught.value is error
    if isinstance(error, Exception):
        (note,) = error.__notes__
        assert "table of shape (2, 3) and torch.float64, count: int 4" in note


def test_what_is_about_shapes_has_the_shapes_after_its_own_words():
    @explained()
    def product(one: torch.Tensor, other: torch.Tensor):
        return one @ other

    with pytest.raises(ValueError, match=(
        r"fit together.*shapes cannot be multiplied \(2x3 and 2x3\); got one of shape \(2, 3\)"
    )) as caught:  # fmt: skip
        product(torch.zeros(2, 3), torch.zeros(2, 3))
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_threads_may_make_the_first_call_together():
    interval, failed = sys.getswitchinterval(), []
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(50):
            function, barrier = make(), threading.Barrier(4)

            def call(function=function, barrier=barrier):
                barrier.wait()
                try:
                    function(1, "x")
                except TypeError as error:
                    failed.append(error)

            threads = [threading.Thread(target=call) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert function(1, "x") == (1, "x")
    finally:
        sys.setswitchinterval(interval)
    assert not failed
