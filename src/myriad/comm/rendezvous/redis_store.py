"""A store for `torch.distributed` in a Redis server.

Every value is a stream of one entry, because Redis lets many clients wait for a stream at once. ``XREAD
BLOCK`` returns at once if the entry exists, else when it comes, so no client polls, and one connection per
rank is enough. Operations that read and write (add, append, compare and set) are scripts with a token: a
retry after a lost connection does not apply them twice.

Keys have the name of one attempt of one run as a prefix, and expire a day after their last write. Runs, and
attempts of one run, therefore never conflict in one server, and no cleanup is needed.

A lost connection is retried for `_RETRY_SECONDS`. After a restart of the ranks, the first connection is
retried for `_RESTART_SECONDS`, because a restart of the server must not use up the restarts of the run. A
server that has come back without the run's keys is an error, as no rank would ever write them again.

torch calls a Python store by the names of `torch._C._distributed_c10d`'s C++ trampoline: some of them are in
camel case there (`deleteKey`, `getNumKeys`).
"""

import os
import random
import time
import uuid
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import redis
import torch.distributed as dist
from redis.backoff import NoBackoff
from redis.retry import Retry
from torch._C._distributed_c10d import Store

from myriad.comm.rendezvous.redis_address import RedisAddress
from myriad.errors import RunFailedError

__all__ = ["RedisStore"]

_KEEP_SECONDS = 24 * 3600
_RETRY_SECONDS, _RESTART_SECONDS = 3.0, 30.0
_WAIT_SECONDS = 5.0
"""Seconds of one blocking read. A longer wait is several reads, so that a dead server is noticed."""

_READ = """
local function read(key)
  local entry = redis.call('XREVRANGE', key, '+', '-', 'COUNT', 1)[1]
  return entry and entry[2][2]
end
local function write(key, value)
  redis.call('XADD', key, 'MAXLEN', 1, '*', 'v', value)
  redis.call('EXPIRE', key, ARGV[2])
end
local done = redis.call('GET', KEYS[2])
if done then return done end
local function finish(answer)
  redis.call('SET', KEYS[2], answer, 'EX', 600)
  return answer
end
"""
_ADD = """
local sum = string.format('%.0f', (read(KEYS[1]) or 0) + ARGV[1])
write(KEYS[1], sum)
return finish(sum)
"""
_APPEND = """
local whole = (read(KEYS[1]) or '') .. ARGV[1]
write(KEYS[1], whole)
return finish(string.len(whole))
"""
_COMPARE_SET = """
local now = read(KEYS[1])
if (now == false or now == nil) and ARGV[1] ~= '' then return finish(ARGV[1]) end
if now and now ~= ARGV[1] then return finish(now) end
write(KEYS[1], ARGV[3])
return finish(ARGV[3])
"""
T = TypeVar("T")


class RedisStore(Store):
    """Keys of one attempt of one run in one Redis server."""

    timeout: timedelta
    """The attribute of torch's store, which its type hints lack."""

    def __init__(self, address: RedisAddress, attempt: str, timeout: timedelta) -> None:
        super().__init__()
        self.set_timeout(timeout)
        self._address, self._attempt, self._mark = address, attempt, ""
        greet: Any = self._check_connection  # redis-py's type hints lack the connection argument
        self._client = redis.Redis(
            **address.options(),
            protocol=2,
            socket_connect_timeout=_RETRY_SECONDS,
            socket_timeout=2 * _WAIT_SECONDS,
            socket_keepalive=True,
            retry=Retry(NoBackoff(), 0),
            redis_connect_func=greet,
        )
        scripts = {"add": _ADD, "append": _APPEND, "compare_set": _COMPARE_SET}
        self._scripts = {name: self._client.register_script(_READ + body) for name, body in scripts.items()}
        mark = f"myriad/{attempt}\0mark/{uuid.uuid4().hex}"
        is_restart = int(os.environ.get("MYRIAD_EPOCH", "1")) > 1
        self._retry_seconds = _RESTART_SECONDS if is_restart else _RETRY_SECONDS
        self._call("a first answer", lambda: self._client.set(mark, 1, ex=_KEEP_SECONDS))
        self._retry_seconds = _RETRY_SECONDS
        self._mark = mark

    def __str__(self) -> str:
        """Return the name of the store for errors."""
        return str(self._address)

    def _name(self, key: str) -> str:
        return f"myriad/{self._attempt}/{key}"

    def _check_connection(self, connection: Any) -> None:
        """Check on every connection that the server still has the keys that this rank has written."""
        connection.on_connect()
        if self._mark:
            connection.send_command("EXISTS", self._mark)
            if not connection.read_response():
                raise RunFailedError(f"{self} has restarted and lost the keys of this run")

    def _call(self, what: str, ask: Callable[[], T]) -> T:
        """Call ``ask``, and retry after a lost connection. Raises `RunFailedError`."""
        started, delay = time.monotonic(), 0.05
        while True:
            try:
                return ask()
            except redis.AuthenticationError as error:
                raise RunFailedError(f"{self} refuses the password: {error}") from None
            except (redis.ConnectionError, redis.TimeoutError, redis.BusyLoadingError) as error:
                if time.monotonic() - started > self._retry_seconds:
                    tried = f"(waited for {what}; tried for {self._retry_seconds:g} s)"
                    raise RunFailedError(f"{self} does not answer {tried}: {error}") from None
                time.sleep(delay * (0.5 + random.random()))
                delay = min(2 * delay, 1.0)
            except redis.RedisError as error:
                raise RunFailedError(f"{self} refuses (waited for {what}): {error}") from None

    def set(self, key: str, value: str | bytes) -> None:
        """Write a value, and wake the ranks that wait for it."""
        self.multi_set([key], [value])

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Write several values in one request."""

        def write() -> None:
            with self._client.pipeline(transaction=False) as pipeline:
                for key, value in zip(keys, values, strict=True):
                    pipeline.xadd(self._name(key), {"v": value}, maxlen=1, approximate=False)
                    pipeline.expire(self._name(key), _KEEP_SECONDS)
                pipeline.execute()

        self._call(f"writing {keys[0]}", write)

    def get(self, key: str) -> bytes:
        """Wait for a value, and return it."""
        return self._read([key], self.timeout)[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Wait for all values, and return them."""
        return self._read(keys, self.timeout)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Block until all keys exist. Raises `torch.distributed.DistStoreError` after the timeout."""
        self._read(keys, timeout or self.timeout)

    def _read(self, keys: Sequence[str], timeout: timedelta) -> list[bytes]:
        missing = {self._name(key): key for key in keys}
        found: dict[str, bytes] = {}
        deadline = time.monotonic() + timeout.total_seconds()
        while missing:
            left = deadline - time.monotonic()
            if left <= 0:
                waited = f"{timeout.total_seconds():g} s for {', '.join(sorted(missing.values()))}"
                raise dist.DistStoreError(f"{self}: timed out after waiting {waited}")
            for name, entries in self._read_some(list(missing), min(left, _WAIT_SECONDS)):
                found[missing.pop(name.decode())] = entries[-1][1][b"v"]
        return [found[key] for key in keys]

    def _read_some(self, names: list[str], seconds: float) -> Any:
        """Return the values that exist; if none does, wait for the first one."""
        streams: Any = dict.fromkeys(names, "0")
        block = max(1, int(seconds * 1000))
        what = names[0].split("/", 2)[2]
        return self._call(what, lambda: self._client.xread(streams, block=block)) or []

    def add(self, key: str, value: int) -> int:
        """Add to a number (0 if the key is missing), and return the sum."""
        return int(self._run("add", key, value, _KEEP_SECONDS))

    def append(self, key: str, value: str | bytes) -> None:
        """Append bytes to a value."""
        self._run("append", key, value, _KEEP_SECONDS)

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Write ``desired`` if the value is ``expected``, or if ``expected`` is empty and the key is missing.

        Returns the value afterwards, or ``expected`` if the key is missing.
        """
        return self._run("compare_set", key, expected, _KEEP_SECONDS, desired)

    def _run(self, script: str, key: str, *arguments: Any) -> Any:
        keys = [self._name(key), f"myriad/{self._attempt}\0once/{uuid.uuid4().hex}"]
        return self._call(f"{script} {key}", lambda: self._scripts[script](keys, arguments))

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all keys exist."""
        names = {self._name(key) for key in keys}
        return self._call(f"looking for {keys[0]}", lambda: self._client.exists(*names)) == len(names)

    def delete_key(self, key: str) -> bool:
        """Delete a key, and return whether it existed."""
        return self._call(f"deleting {key}", lambda: self._client.delete(self._name(key))) == 1

    def list_keys(self) -> list[str]:
        """Return all keys of this attempt."""
        start = self._name("")
        pattern = "".join(f"[{letter}]" if letter in "*?[\\" else letter for letter in start) + "*"
        found = self._call("listing keys", lambda: list(self._client.scan_iter(match=pattern, count=1000)))
        return sorted(name.decode().removeprefix(start) for name in set(found))

    def num_keys(self) -> int:
        """Return the number of keys of this attempt."""
        return len(self.list_keys())

    deleteKey, getNumKeys = delete_key, num_keys  # the C++ trampoline's names

    def has_extended_api(self) -> bool:
        """Return True: append, multi_get and multi_set are available."""
        return True

    def clone(self) -> "RedisStore":
        """Return this store itself, which is thread-safe; torch would keep only the C++ half of a new one."""
        return self
