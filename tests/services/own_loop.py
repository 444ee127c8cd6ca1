"""Coroutines in a test: in a loop of their own, whatever loop the process has."""

import asyncio
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

__all__ = ["in_a_thread"]

T = TypeVar("T")


def in_a_thread(asked: Coroutine[Any, Any, T]) -> T:
    """A browser's tests, before it in the same process, leave a loop running in this one."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, asked).result()
