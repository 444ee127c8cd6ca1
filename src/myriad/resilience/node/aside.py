"""Work that may hang (a disk, another program), in a thread that nobody waits for when the process ends."""

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

__all__ = ["aside"]

T = TypeVar("T")


async def aside(work: Callable[[], T]) -> T:
    """What it gives, or raises. Whoever does not wait any longer leaves it to itself."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def tell(result: T | None, error: Exception | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        result, problem = None, None
        try:
            result = work()
        except Exception as error:
            problem = error
        with suppress(RuntimeError):  # the loop is over
            loop.call_soon_threadsafe(tell, result, problem)

    threading.Thread(target=run, name="aside", daemon=True).start()
    return await future
