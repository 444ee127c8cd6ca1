"""A launcher that runs in a thread of its own, because the manager that it asks may never answer.

    supervised run ──start, poll, replace──► queue ──► thread ──► Ray's launcher ──► Ray

The run reads its driver, handles SIGTERM and ends within bounded time whatever the manager does. Requests
are executed in order; a poll is skipped while the last one has not returned.
"""

import logging
import threading
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue

from myriad.launchers.launcher import Launcher

__all__ = ["BackgroundLauncher"]

_LOG = logging.getLogger(__name__)
_CLOSE_SECONDS = 10.0
"""How long the manager may take to end all agents. The kernel ends those whose manager sees that this process
has ended."""


class BackgroundLauncher:
    """Passes each request on to another launcher, in a thread."""

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher
        self._requests: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._is_polled = threading.Event()
        self._is_polled.set()
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._work, name="launcher", daemon=True)

    def _work(self) -> None:
        while (request := self._requests.get()) is not None:
            try:
                request()
            except Exception as error:
                self._error = self._error or error

    def start(self) -> None:
        """Start the thread, and launch all nodes in it."""
        self._thread.start()
        self._requests.put(self._launcher.start)

    def poll(self) -> None:
        """Restart agents that died, in the thread. Raises the first exception of the thread."""
        if self._error is not None:
            raise self._error
        if self._is_polled.is_set():
            self._is_polled.clear()
            self._requests.put(self._poll)

    def _poll(self) -> None:
        try:
            self._launcher.poll()
        finally:
            self._is_polled.set()

    def replace(self, node: int) -> None:
        """Replace a node that the driver has given up, in the thread."""
        self._requests.put(partial(self._launcher.replace, node))

    def ask_to_stop(self) -> None:
        """Ask the ranks to save and stop, in the thread."""
        self._requests.put(self._launcher.ask_to_stop)

    def wait(self, seconds: float) -> None:
        """Wait up to ``seconds`` for the agents to end by themselves."""
        self._do(partial(self._launcher.wait, seconds), seconds)

    def close(self) -> None:
        """End all agents, and the thread."""
        if self._thread.is_alive() and not self._do(self._launcher.close, _CLOSE_SECONDS):
            _LOG.warning(
                "the cluster manager does not answer; it ends the agents once it sees the end of this"
            )
        self._requests.put(None)

    def _do(self, request: Callable[[], None], seconds: float) -> bool:
        """Execute a request in the thread. Return whether that took less than ``seconds``."""
        done = threading.Event()

        def execute() -> None:
            try:
                request()
            finally:
                done.set()

        self._requests.put(execute)
        return done.wait(seconds)
