"""Ranks that meet in Redis: a value lost, counted twice or read from another attempt would hang or corrupt a
start; a server that dies must end it."""

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from ranks import free_port, run_ranks

from myriad.comm.config import CommConfig
from myriad.comm.groups import close_world, open_world
from myriad.comm.layout import Layout
from myriad.comm.rendezvous.redis_address import redis_address
from myriad.errors import RunFailedError

redis_store = pytest.importorskip("myriad.comm.rendezvous.redis_store", reason="needs the package redis")


def open_store(url: str, attempt: str = "a", seconds: float = 60.0):
    address = redis_address(url)
    assert address is not None
    return redis_store.RedisStore(address, attempt, timedelta(seconds=seconds))


@pytest.fixture
def store(server):
    return open_store(server.url)


def test_all_that_torch_asks_of_a_store_is_there(store):
    """Through PrefixStore: by the way on which groups call it."""
    asked = dist.PrefixStore("group", store)
    asked.set("value", b"\0\xff")
    assert asked.get("value") == b"\0\xff"
    assert (asked.add("count", 3), asked.add("count", -1), asked.get("count")) == (3, 2, b"2")
    assert asked.check(["value", "count"]) and not asked.check(["value", "other"])
    assert asked.compare_set("c", "", "one") == b"one"
    assert asked.compare_set("c", "other", "two") == b"one" and asked.compare_set("c", "one", "two") == b"two"
    assert asked.compare_set("nothing", "x", "y") == b"x" and not asked.check(["nothing"])
    asked.append("text", "ab")
    asked.append("text", "cd")
    asked.multi_set(["m", "n"], ["1", "2"])
    assert asked.multi_get(["n", "text", "n"]) == [b"2", b"abcd", b"2"]
    asked.wait(["m", "n"], timedelta(seconds=1))
    assert asked.num_keys() == 6 and asked.delete_key("m") and not asked.delete_key("m")
    assert asked.num_keys() == 5 and asked.has_extended_api()
    assert asked.clone().get("value") == b"\0\xff"
    asked.barrier("met", 1, timedelta(seconds=1))


def test_a_waiting_client_continues_when_the_value_arrives(store):
    found: list[list[bytes]] = []
    waiting = threading.Thread(target=lambda: found.append(store.multi_get(["a", "b", "c"])))
    store.set("b", "2")
    waiting.start()
    for key, value in (("c", "3"), ("a", "1")):
        time.sleep(0.05)
        assert found == []
        store.set(key, value)
    waiting.join(30)
    assert found == [[b"1", b"2", b"3"]]


def test_a_timeout_names_the_keys_that_were_missing(store):
    store.set_timeout(timedelta(seconds=0.1))
    for wait in (lambda: store.get("x"), lambda: store.wait(["x", "y"], timedelta(seconds=0.1))):
        with pytest.raises(dist.DistStoreError, match=r"timed out after waiting 0\.1 s for x"):
            wait()


def test_attempts_do_not_meet_and_their_keys_expire(server):
    first, second = open_store(server.url, "run.1"), open_store(server.url, "run.1*")
    first.set("key", "1")
    second.add("key", 5)
    assert (first.get("key"), second.get("key")) == (b"1", b"5")
    assert first.list_keys() == second.list_keys() == ["key"]
    assert all(0 < server.client.ttl(name) <= 24 * 3600 for name in server.client.keys("*"))


@pytest.mark.parametrize("ask", ["get", "add", "set"])
def test_a_lost_connection_is_made_again(server, store, ask):
    store.set("key", "1")
    server.client.client_kill_filter(_type="normal", skipme=True)
    asked = {
        "get": lambda: store.get("key"),
        "add": lambda: store.add("n", 2),
        "set": lambda: store.set("n", 2),
    }
    asked[ask]()
    assert store.get("key") == b"1" and store.add("n", 0) == (0 if ask == "get" else 2)


def test_a_sum_whose_answer_was_lost_is_not_taken_twice(store, monkeypatch):
    script, answers = store._scripts["add"], []

    def answer_lost_once(keys, arguments):
        answers.append(script(keys, arguments))
        if len(answers) == 1:
            raise redis_store.redis.ConnectionError("the answer was lost")
        return answers[-1]

    monkeypatch.setitem(store._scripts, "add", answer_lost_once)
    assert store.add("n", 5) == 5 and store.add("n", 1) == 6 and len(answers) == 3


def test_a_wait_outlives_a_lost_connection(server, store):
    found: list[bytes] = []
    waiting = threading.Thread(target=lambda: found.append(store.get("late")))
    waiting.start()
    while not server.client.info("clients")["blocked_clients"]:
        time.sleep(0.01)
    server.client.client_kill_filter(_type="normal", skipme=True)
    time.sleep(0.1)
    open_store(server.url).set("late", "1")
    waiting.join(30)
    assert found == [b"1"]


def test_a_server_that_comes_back_empty_is_an_error_not_a_hang(server, store):
    store.set("key", "1")
    server.kill()
    server.start()
    with pytest.raises(RunFailedError, match=r"has restarted and lost the keys of this run$"):
        store.get("key")


def error_of(ask: Callable[[], object]) -> str:
    with pytest.raises(RunFailedError) as error:
        ask()
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_server_that_is_not_there_is_named_with_what_was_waited_for(server, store):
    server.kill()
    message = error_of(lambda: store.get("dp//cpu//3"))
    assert message.startswith(f"Redis at 127.0.0.1:{server.port} does not answer (waited for dp//cpu//3; ")
    nowhere = f"redis://127.0.0.1:{free_port()}"
    assert "(waited for a first answer; " in error_of(lambda: open_store(nowhere))


def test_ranks_that_start_again_wait_for_a_server_that_is_being_restarted(
    server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a server that is away for a quarter of a minute uses up the restarts of the run."""
    monkeypatch.setattr(redis_store, "_RETRY_SECONDS", 0.2)
    server.kill()
    error_of(lambda: open_store(server.url))
    monkeypatch.setenv("MYRIAD_EPOCH", "2")
    with ThreadPoolExecutor(1) as rank:
        store = rank.submit(open_store, server.url)
        time.sleep(1.0)
        server.start()  # here: the server ends with the thread that has started it
        store.result(60).set("key", "value")


def test_a_server_that_takes_no_more_clients_reports_it(server):
    server.client.config_set("maxclients", 1)
    assert "max number of clients reached" in error_of(lambda: [open_store(server.url) for _ in range(3)])


def test_a_server_out_of_memory_reports_it(server, store):
    server.client.config_set("maxmemory", 1)
    assert "maxmemory" in error_of(lambda: store.set("key", "x"))


def sums(layout: Layout, url: str, attempt: str) -> list[float]:
    os.environ["MYRIAD_ATTEMPT_ID"] = attempt
    groups = open_world(layout, torch.device("cpu"), comm=CommConfig(store=url))
    found = []
    for axis in ("dp", "pp", "tp"):
        x = torch.ones(1)
        dist.all_reduce(x, group=groups.along(axis))
        found.append(x.item())
    dist.barrier()
    close_world()
    return found


def test_ranks_meet_in_redis_attempt_after_attempt(server):
    layout = Layout(dp=2, pp=2, tp=2)
    for attempt in ("run.1", "run.2"):
        assert run_ranks(8, sums, layout, server.url, attempt, timeout=120) == [[2.0, 2.0, 2.0]] * 8


def start_and_lose_redis(url: str, pid: int) -> str:
    os.environ["MYRIAD_ATTEMPT_ID"] = "lost"
    groups = open_world(Layout(dp=3), torch.device("cpu"), comm=CommConfig(store=url))
    rank = groups.grid.rank
    if rank == 2:
        store = open_store(url, "lost")
        while store.num_keys() < 5:  # the world's three addresses and those of the two that wait
            time.sleep(0.01)
        os.kill(pid, 9)
        return ""
    return error_of(lambda: groups.along("dp"))


def test_ranks_that_lose_redis_in_the_middle_of_a_start_all_end_with_one_line(server):
    found = run_ranks(3, start_and_lose_redis, server.url, server.process.pid, timeout=120)
    assert all(f"Redis at 127.0.0.1:{server.port} does not answer (waited for group:" in m for m in found[:2])
