"""What two plain sockets reach between two hosts: the part of `hosts.py --check` that runs on the ranks."""

import os
import socket
import threading
import time
from contextlib import suppress

__all__ = ["send_and_count"]


def send_and_count(seconds: float, both_ways: bool) -> float:
    """Rank 0 (and, both ways, rank 1) sends what it can; gives the bits a second that this rank received."""
    is_first, port = os.environ["RANK"] == "0", int(os.environ["MASTER_PORT"])
    if is_first:
        with socket.create_server(("", port)) as server:
            peer = server.accept()[0]
    else:
        peer = _connect(os.environ["MASTER_ADDR"], port)
    peer.settimeout(None)
    sender = threading.Thread(target=_send, args=(peer, seconds if is_first or both_ways else 0.0))
    sender.start()
    received, first = 0, 0.0
    while data := peer.recv(2**20):
        received += len(data)
        first = first or time.perf_counter()
    spent = time.perf_counter() - first
    sender.join()
    return 8 * received / spent if received else 0.0


def _connect(address: str, port: int) -> socket.socket:
    for _ in range(200):
        with suppress(ConnectionRefusedError):
            return socket.create_connection((address, port), timeout=10)
        time.sleep(0.02)
    raise OSError(f"nobody listens at {address}:{port}")


def _send(peer: socket.socket, seconds: float) -> None:
    block, end = bytes(2**18), time.perf_counter() + seconds
    while time.perf_counter() < end:
        peer.sendall(block)
    peer.shutdown(socket.SHUT_WR)
