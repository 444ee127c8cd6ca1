"""If these fail, connections that prove nothing fill the disk with a driver's log or the page's."""

import os
import resource
import socket
from functools import partial

import pytest

from myriad.wire.listener import Listener
from myriad.wire.pending_connections import PendingConnections


def test_a_connection_without_a_file_left_for_it_is_closed_and_later_ones_are_served() -> None:
    with Listener() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        listener.setblocking(False)
        place = listener.getsockname()
        before = resource.getrlimit(resource.RLIMIT_NOFILE)
        with socket.create_connection(place) as known, socket.create_connection(place) as flood:
            with listener.accept()[0] as served:
                free = os.dup(0)
                os.close(free)
                resource.setrlimit(resource.RLIMIT_NOFILE, (free, before[1]))
                try:
                    with pytest.raises(BlockingIOError):
                        listener.accept()
                    flood.settimeout(5.0)
                    assert flood.recv(1) == b""
                    with pytest.raises(BlockingIOError):
                        listener.accept()
                finally:
                    resource.setrlimit(resource.RLIMIT_NOFILE, before)
                served.sendall(b"x")
                assert known.recv(1) == b"x"
            with socket.create_connection(place), listener.accept()[0] as later:
                assert later.fileno() >= 0


def test_peers_that_prove_nothing_take_no_more_than_a_part_of_the_files(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (64, 64))
    pending, closed = PendingConnections(), list[int]()
    for number in range(40):
        pending.admit(number, f"10.0.0.{number % 4}", partial(closed.append, number))
    assert closed == list(range(24))
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY,) * 2)
    pending = PendingConnections()
    for number in range(2048):
        pending.admit(number, "10.0.0.1", partial(closed.append, -1))
    assert -1 not in closed
