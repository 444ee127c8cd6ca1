"""The lease on driving a run, and the journal beside it, in a Redis server.

    {RUN}/lease      "TERM OWNER", expires unless renewed, by the server's clock alone
    {RUN}/term       the newest TERM, its owner, whether another may follow (`redis_leadership`)
    {RUN}/standby    a standby waits; expires when it is gone
    {RUN}/plan, {RUN}/entries    the journal (`journal.py`): the plan, the newest decisions

The server runs each script atomically: a line is written by the present owner of the lease, or not at all. An
owner is a `myriad train`: if it restarts a driver that died, the new driver has the lease at once, with the
next term. The server's `appendonly` and `appendfsync` settings determine what survives its crash; the lines
are in RUN/journal.jsonl as well.
"""

import hashlib
import json
import os
import secrets
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from myriad.comm.rendezvous.redis_address import RedisAddress
from myriad.wire.run_secret import run_secret

__all__ = [
    "LeaseAnswer",
    "LeaseLostError",
    "RedisLease",
    "StoreUnavailableError",
    "check_server",
    "lease_seconds",
    "new_owner",
]

_LEASE_SECONDS = 3.0
_ASK_SECONDS = 1.0
"""Seconds without an answer after which the server counts as away."""
_KEEP_SECONDS = 30 * 24 * 3600
_MOST_ENTRIES = 16
"""Most decisions kept in Redis. A driver reads the last; the others help people. The file has all."""

_TAKE = """
local held = redis.call('GET', KEYS[1])
local last, owner, watched = unpack(redis.call('HMGET', KEYS[2], 'number', 'owner', 'watched'))
local is_mine, is_forced = owner == ARGV[1], ARGV[4] == 'force'
if is_mine or (not held and (watched == '1' or is_forced)) then
  local number = math.max(tonumber(last or 0) + 1, tonumber(ARGV[3]))
  local name = string.format('%.0f', number)
  redis.call('HSET', KEYS[2], 'number', name, 'owner', ARGV[1], 'watched', 1, 'asked', 0)
  redis.call('EXPIRE', KEYS[2], ARGV[5])
  redis.call('SET', KEYS[1], name .. ' ' .. ARGV[1], 'PX', ARGV[2])
  return {number, owner or ''}
end
if not is_forced then redis.call('SET', KEYS[3], ARGV[1], 'PX', 2 * ARGV[2]) end
return {0, held and owner or '', tonumber(watched or 0), last and 0 or 1}
"""
_RENEW = """
local held, mine = redis.call('GET', KEYS[1]), ARGV[1] .. ' ' .. ARGV[2]
local last, asked = unpack(redis.call('HMGET', KEYS[2], 'number', 'asked'))
if held ~= mine and (held or (last and last ~= ARGV[1])) then return {0} end
redis.call('SET', KEYS[1], mine, 'PX', ARGV[3])
local stands = redis.call('EXISTS', KEYS[3])
if tonumber(ARGV[6]) > tonumber(asked or 0) then
  redis.call('HSET', KEYS[2], 'number', ARGV[1], 'owner', ARGV[2], 'asked', ARGV[6])
  if stands == 0 or ARGV[4] == '1' then redis.call('HSET', KEYS[2], 'watched', stands) end
  redis.call('EXPIRE', KEYS[2], ARGV[5])
end
return {1, stands, last and 0 or 1}
"""
_APPEND = """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
if ARGV[3] == 'plan' then
  redis.call('SET', KEYS[4], ARGV[2], 'EX', ARGV[4])
  redis.call('DEL', KEYS[5])
else
  if ARGV[6] ~= '' and redis.call('GET', KEYS[4]) ~= ARGV[6] then
    redis.call('SET', KEYS[4], ARGV[6])
    redis.call('DEL', KEYS[5])
  end
  redis.call('RPUSH', KEYS[5], ARGV[2])
  redis.call('LTRIM', KEYS[5], -ARGV[5], -1)
  redis.call('EXPIRE', KEYS[5], ARGV[4])
  redis.call('EXPIRE', KEYS[4], ARGV[4])
end
return 1
"""
_RELEASE = """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
redis.call('HSET', KEYS[2], 'watched', 1)
return redis.call('DEL', KEYS[1])
"""


class StoreUnavailableError(Exception):
    """The server does not answer, or refuses a command."""


class LeaseLostError(Exception):
    """Another driver has the lease: this one can write no entries any more."""


@dataclass(frozen=True)
class LeaseAnswer:
    """The answer to a request for the lease."""

    term: int
    """Term of the lease; 0: another driver has it or may still have it."""
    owner: str
    """The previous owner. If the lease was not granted: its present owner, or empty."""
    is_watched: bool = True
    """Whether the lease can be taken as soon as it is free."""
    is_forgotten: bool = False
    """Whether the server has no data of this run."""


def lease_seconds(patience: float) -> float:
    """Return how long a lease lasts without renewal."""
    return _LEASE_SECONDS * max(1.0, patience)


def new_owner() -> str:
    """Return a name for this process that is unique over time."""
    return f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}"


def _client(address: RedisAddress) -> Any:  # redis-py's type hints do not allow for text answers
    return redis.Redis(
        **address.options(),
        protocol=2,
        decode_responses=True,
        socket_connect_timeout=_ASK_SECONDS,
        socket_timeout=_ASK_SECONDS,
        socket_keepalive=True,
        retry=Retry(NoBackoff(), 0),
    )


def check_server(address: RedisAddress) -> None:
    """Check that the server answers. Raises `StoreUnavailableError`."""
    with _answered():
        _client(address).ping()


class RedisLease:
    """The lease of one owner on one run."""

    def __init__(self, address: RedisAddress, run: Path, owner: str, seconds: float) -> None:
        """``owner``: unique name of the owner. Uses the run's secret to distinguish runs of the same name,
        and sends nothing."""
        self.owner, self.seconds, self.term = owner, seconds, 0
        self.address, self._asked = address, 0
        self._client = _client(address)
        name = run.resolve().name
        mark = hashlib.blake2s(run_secret(run / "secret") + name.encode(), digest_size=8).hexdigest()
        places = ("lease", "term", "standby", "plan", "entries")
        self.keys = {place: f"myriad/{{{name}-{mark}}}/{place}" for place in places}
        texts = {"take": _TAKE, "renew": _RENEW, "append": _APPEND, "release": _RELEASE}
        self._scripts = {name: self._client.register_script(text) for name, text in texts.items()}

    def __str__(self) -> str:
        """Return the address, as error messages name it."""
        return str(self.address)

    @property
    def _mine(self) -> str:
        return f"{self.term} {self.owner}"

    @property
    def _milliseconds(self) -> int:
        return round(1000 * self.seconds)

    def take(self, least_term: int = 1, *, by_force: bool = False) -> LeaseAnswer:
        """Take the lease if it is free and may be taken; otherwise register this owner as standby.
        ``by_force``: take it on request of a person, even if no other owner was allowed to follow the last
        one. Raises `StoreUnavailableError`."""
        how = "force" if by_force else "stand by"
        answer = self._run("take", self.owner, self._milliseconds, least_term, how, _KEEP_SECONDS)
        if answer[0]:
            self.term, self._asked = int(answer[0]), 0
        return LeaseAnswer(int(answer[0]), answer[1], *map(bool, answer[2:]))

    def renew(self, *, knows: bool) -> tuple[bool, bool]:
        """Renew the lease. ``knows``: this driver was notified of a standby. Return whether there is a
        standby, and whether the server had lost all data. Raises `LeaseLostError`,
        `StoreUnavailableError`."""
        self._asked += 1  # a delayed request must not undo a later one
        arguments = (self.term, self.owner, self._milliseconds, int(knows), _KEEP_SECONDS, self._asked)
        held, *more = self._run("renew", *arguments)
        if not held:
            raise LeaseLostError
        return bool(more[0]), bool(more[1])

    def append(self, record: dict[str, Any], plan: dict[str, Any] | None = None) -> bool:
        """Append a journal entry. ``plan``: the plan to which a decision belongs, in case the server has lost
        it; both are written, or neither. Return false if the lease does not hold. Raises
        `StoreUnavailableError`."""
        kind = "plan" if "plan" in record else "decision"
        limits = _KEEP_SECONDS, _MOST_ENTRIES
        before = "" if plan is None else json.dumps(plan)
        return bool(self._run("append", self._mine, json.dumps(record), kind, *limits, before))

    def release(self) -> None:
        """Release the lease, so that a standby need not wait. Raises `StoreUnavailableError`."""
        self._run("release", self._mine)

    def read(self) -> list[dict[str, Any]]:
        """Return the stored plan and decisions, oldest first. Raises `StoreUnavailableError`."""
        with _answered():
            plan = self._client.get(self.keys["plan"])
            entries = self._client.lrange(self.keys["entries"], 0, -1)
            return [json.loads(line) for line in ([plan] if plan else []) + list(entries)]

    def inspect(self) -> tuple[str, bool]:
        """Return the owner (empty: no owner) and whether another may follow it. Raises
        `StoreUnavailableError`."""
        with _answered():
            held = self._client.get(self.keys["lease"]) or ""
            return held.partition(" ")[2], self._client.hget(self.keys["term"], "watched") == "1"

    def promises(self) -> str:
        """Describe how durable the server's writes are. Raises `StoreUnavailableError`."""
        with _answered():
            try:
                settings = self._client.config_get("append*")
            except redis.ResponseError:  # the service does not report its settings
                return "it does not say when it is on disk"
        if settings.get("appendonly") != "yes":
            return "it keeps nothing on disk (appendonly no)"
        return f"on disk as appendfsync {settings.get('appendfsync')} says"

    def _run(self, script: str, *arguments: Any) -> Any:
        with _answered():
            return self._scripts[script](list(self.keys.values()), arguments)


@contextmanager
def _answered() -> Iterator[None]:
    """Convert any error of the server or the connection to `StoreUnavailableError`."""
    try:
        yield
    except (redis.RedisError, OSError) as error:
        raise StoreUnavailableError(str(error)) from None
