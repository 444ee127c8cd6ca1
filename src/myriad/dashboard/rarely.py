"""What is worked out again now and then, however often it is asked for: a folder of many files costs time."""

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

__all__ = ["Rarely"]

_T = TypeVar("_T")
_REST_TIMES = 20.0


class Rarely(Generic[_T]):
    """The last answer, until some time has passed: at least so much, and twenty times what that one took."""

    def __init__(self, find: Callable[[], _T], rest_seconds: float) -> None:
        self._find, self._rest_seconds = find, rest_seconds
        self._lock, self._due = threading.Lock(), 0.0

    def __call__(self) -> _T:
        """Asked by any number of threads."""
        with self._lock:
            if (began := time.monotonic()) >= self._due:
                self._value = self._find()
                done = time.monotonic()
                self._due = done + max(self._rest_seconds, _REST_TIMES * (done - began))
            return self._value
