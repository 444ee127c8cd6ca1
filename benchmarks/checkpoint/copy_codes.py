"""What authentication and encryption cost copies of snapshots between nodes.

    python benchmarks/checkpoint/copy_codes.py

First the candidates for the code of a piece of 1 MiB, in one thread. Then whole copies through
`myriad.wire.socket_channel`, as a snapshot server sends them: two processes, loopback, a payload of
``--mib``, the median of ``--times``. "plain" has neither codes nor TLS, as on a unix socket; nothing is sent
so between nodes. CPU time is that of both processes, user and system, for each GB.
"""

import argparse
import hashlib
import hmac
import os
import resource
import socket
import time
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection
from statistics import median

from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.poly1305 import Poly1305

from myriad.wire.socket_channel import SocketChannel
from myriad.wire.tls import tls_identity

SECRET = b"a secret of many letters"
PIECE_BYTES = 2**20
WAYS = ("plain", "codes", "TLS and codes")


def hmac_sha256(key: bytes, piece: bytes) -> bytes:
    code = hmac.new(key, bytes(8), "sha256")
    code.update(piece)
    return code.digest()


def blake2b(key: bytes, piece: bytes) -> bytes:
    code = hashlib.blake2b(bytes(8), key=key, digest_size=16)
    code.update(piece)
    return code.digest()


CODES: dict[str, Callable[[bytes, bytes], bytes]] = {
    "HMAC-SHA256 (hashlib)": hmac_sha256,
    "BLAKE2b, keyed (hashlib)": blake2b,
    "Poly1305 (cryptography)": Poly1305.generate_tag,
    "AES-256-GMAC (cryptography)": lambda key, piece: AESGCM(key).encrypt(bytes(12), b"", piece),
}


def print_codes(times: int) -> None:
    """Speed of each code on one core, by processor time."""
    key, piece = os.urandom(32), os.urandom(PIECE_BYTES)
    print("| code of 1 MiB | GB/s |\n|---|---|")
    for name, code in CODES.items():
        seconds = []
        for _ in range(times):
            began = time.process_time()
            for _ in range(50):
                code(key, piece)
            seconds.append(time.process_time() - began)
        print(f"| {name} | {50 * PIECE_BYTES / median(seconds) / 1e9:.2f} |")


def cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def serve(way: str, times: int, pipe: Connection) -> None:
    """The server that stores the copies."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        pipe.send(server.getsockname()[1])
        connection, _ = server.accept()
        channel = SocketChannel(connection)
        if way != "plain":
            channel.accept("snapshots", [SECRET], tls=tls_identity() if way.startswith("TLS") else None)
        for number in range(times + 1):
            if number == 1:  # the first one warms up
                began = cpu_seconds()
            channel.receive()
            channel.send({})
        pipe.send(cpu_seconds() - began)


def copy(way: str, content: bytes, times: int) -> tuple[float, float]:
    """Bytes per second of a copy, and seconds of processors for each GB."""
    here, there = get_context("spawn").Pipe()
    process = get_context("spawn").Process(target=serve, args=(way, times, there))
    process.start()
    connection = socket.create_connection(("127.0.0.1", here.recv()))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    channel, seconds, used = SocketChannel(connection), [], 0.0
    if way != "plain":
        channel.connect("snapshots", SECRET, encrypts=way.startswith("TLS"))
    for number in range(times + 1):
        began, cpu = time.perf_counter(), cpu_seconds()
        channel.send({"op": "copy of"}, content)
        channel.receive()
        if number:
            seconds.append(time.perf_counter() - began)
            used += cpu_seconds() - cpu
    used += here.recv()
    process.join()
    channel.close()
    return len(content) / median(seconds), used / (times * len(content) / 1e9)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mib", type=int, default=256, help="size of a copy")
    parser.add_argument("--times", type=int, default=9)
    given = parser.parse_args()
    print_codes(given.times)
    content = os.urandom(given.mib * 2**20)
    print("\n| copy | GB/s | CPU seconds per GB |\n|---|---|---|")
    for way in WAYS:
        rate, cpu = copy(way, content, given.times)
        print(f"| {way} | {rate / 1e9:.2f} | {cpu:.2f} |")


if __name__ == "__main__":
    main()
