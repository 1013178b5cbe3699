"""The decorators that check arguments."""

import sys
import threading

import pytest

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
