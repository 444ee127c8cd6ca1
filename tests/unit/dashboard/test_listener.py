"""If this fails, connections without the token fill the disk with the log of `myriad watch`."""

import os
import resource
import socket

import pytest

from myriad.dashboard.app import listen_at


def test_a_connection_without_a_file_left_for_it_is_closed_and_later_ones_are_served() -> None:
    with listen_at("127.0.0.1", 0) as listener:
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
