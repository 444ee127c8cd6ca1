"""The store of an attempt. If these fail, ranks do not find each other, or wait for ever."""

import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from myriad.comm.rendezvous import attempt_store
from myriad.comm.rendezvous.attempt_store import AttemptStore
from myriad.comm.rendezvous.store_server import StoreServer
from myriad.errors import RunFailedError

SECRET = b"the secret of this attempt, long enough"
SECONDS = timedelta(seconds=20)


@pytest.fixture
def server() -> Iterator[StoreServer]:
    server = StoreServer(socket.create_server(("127.0.0.1", 0)), SECRET)
    yield server
    server.close()


def rank(server: StoreServer, number: int = 0, timeout: timedelta = SECONDS) -> AttemptStore:
    return AttemptStore(server.address, SECRET, number, timeout)


def test_what_one_rank_writes_another_reads(server: StoreServer) -> None:
    first, second = rank(server), rank(server, 1)
    first.set("text", "value")
    first.multi_set(["a", "b"], [b"\0\xff", ""])
    assert second.get("text") == b"value"
    assert second.multi_get(["b", "a"]) == [b"", b"\0\xff"]
    assert [first.add("sum", 3), second.add("sum", -5)] == [3, -2]
    second.append("text", b" and more")
    assert first.get("text") == b"value and more"
    assert first.check(["a", "b"]) and not first.check(["a", "missing"])
    assert first.num_keys() == 4 and second.list_keys() == ["a", "b", "sum", "text"]
    assert second.delete_key("a") and not second.delete_key("a")


def test_compare_and_set_is_that_of_torch(server: StoreServer) -> None:
    torch_store = dist.HashStore()
    for store in (rank(server), torch_store):
        steps = [("k", "", "1"), ("k", "2", "3"), ("k", "1", "2"), ("other", "x", "y")]
        found = [store.compare_set(*step) for step in steps]
        assert found == [b"1", b"1", b"2", b"x"]
        assert not store.check(["other"])


def test_a_rank_waits_for_what_is_written_later(server: StoreServer) -> None:
    waiting, other = rank(server), rank(server, 1)
    with ThreadPoolExecutor() as threads:
        found = threads.submit(waiting.multi_get, ["late", "later"])
        both = threads.submit(waiting.wait, ["later", "latest"])
        waiting.set("meanwhile", "a thread that waits delays no other")
        other.set("late", "1")
        assert not found.done()
        other.add("later", 2)
        assert found.result(20) == [b"1", b"2"]
        other.append("latest", "3")
        both.result(20)


def test_a_wait_ends_and_the_store_continues(server: StoreServer) -> None:
    store = rank(server)
    with pytest.raises(dist.DistStoreError, match=r"timed out after waiting 0.05 s for a, b"):
        store.wait(["a", "b"], timedelta(seconds=0.05))
    store.set("a", "1")
    store.set_timeout(timedelta(seconds=0.05))
    with pytest.raises(dist.DistStoreError, match=r"the store of rank 0 at 127.0.0.1:\d+: timed out"):
        store.get("b")
    assert store.get("a") == b"1"


def test_wrong_requests_are_errors_and_the_connection_stays(server: StoreServer) -> None:
    store = rank(server)
    store.set("text", "no number")
    with pytest.raises(dist.DistStoreError, match="refuses ADD"):
        store.add("text", 1)
    assert store.get("text") == b"no number"


def test_torch_takes_it_as_a_store(server: StoreServer) -> None:
    """Through torch's C++ half, which calls the methods by names of its own."""
    inner = rank(server)
    prefixed = dist.PrefixStore("p", inner)
    prefixed.set("k", "1")
    assert inner.get("p/k") == b"1" == prefixed.get("k")
    assert prefixed.add("n", 2) == 2 and prefixed.check(["n"])
    prefixed.wait(["n"], timedelta(seconds=5))
    assert prefixed.num_keys() == 2
    assert prefixed.delete_key("k") and not inner.check(["p/k"])


def test_ranks_that_do_not_come_are_named(server: StoreServer) -> None:
    stores = [rank(server, number) for number in (0, 2)]
    assert server.wait_for_ranks(4, 0.05) == [1, 3]
    with ThreadPoolExecutor() as threads:
        waited = threads.submit(server.wait_for_ranks, 4, 20)
        stores += [rank(server, number) for number in (1, 3)]
        assert waited.result(20) == []


def test_a_server_that_ends_is_an_error_at_once(server: StoreServer) -> None:
    store = rank(server, 3)
    threading.Timer(0.1, server.close).start()
    began = time.monotonic()
    with pytest.raises(
        dist.DistNetworkError, match=r"connection was closed .* while rank 3 waited for never"
    ):
        store.get("never")
    assert time.monotonic() - began < 5


def test_another_secret_is_named_after_a_while(server: StoreServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempt_store, "_FOREIGN_SECONDS", 0.1)
    with pytest.raises(RunFailedError, match=r"rank 1: .*: another process serves this port, or this rank"):
        AttemptStore(server.address, b"another secret of the same length", 1, SECONDS)


def test_a_store_that_is_gone_leaves_its_port(server: StoreServer) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    address = listener.getsockname()
    own = StoreServer(listener, SECRET)
    store = AttemptStore(address, SECRET, 0, SECONDS, own)
    store.set("k", "1")
    del store
    socket.create_server(address).close()
