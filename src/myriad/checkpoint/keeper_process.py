"""``python -m myriad.checkpoint.keeper_process NAME``: the sockets of a node's keeper.

abstract unix socket NAME    ranks of this node and user
TCP, any port                keepers of other nodes, which know the attempt's token
"""

import errno
import hmac
import os
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from typing import Any

from myriad.checkpoint.claiming import claim_folder
from myriad.checkpoint.keeper import AT_WORK, Keeper
from myriad.checkpoint.member import Member
from myriad.checkpoint.wire import Message, Wire
from myriad.strangers import AUTHENTICATION_SECONDS, Strangers

__all__ = ["main"]

_NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.ECONNABORTED)
_MOST_STRANGERS = 256
"""Each has a thread."""
_ALONE_SECONDS = 30.0
"""How long a keeper waits for its first rank."""
_LOST_SECONDS = 1.0
"""After the last rank is gone: others may be on their way out, or in."""
_POLL_SECONDS, _BUSY_SECONDS = 0.05, 1.0
"""How often it looks whether it is needed: while ranks are there one that leaves wakes it."""


_UNIX_BYTES = 2**32
"""The largest payload that a rank may send: heads and tails of its pieces."""


class _Server:
    def __init__(self, name: str) -> None:
        self.keeper = Keeper()
        self._lock = threading.Lock()
        self._ranks, self._patience = 0, _ALONE_SECONDS
        self._said_good_bye = self._joined = self._flushed = self._is_ending = False
        self._last_change = time.monotonic()
        self._left = threading.Event()
        """A rank has gone since this was last looked at."""
        self._tokens: set[str] = set()
        self._strangers = Strangers(_MOST_STRANGERS, _MOST_STRANGERS)
        self._tcp: socket.socket | None = None
        self._unix = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._unix.bind(f"\0{name}")
        self._unix.listen(512)
        threading.Thread(target=self._accept, args=(self._unix, self._serve_rank), daemon=True).start()

    def _accept(self, listener: socket.socket, serve: Callable[[Wire], None]) -> None:
        while True:
            try:
                connection, peer = listener.accept()
            except OSError as error:
                if error.errno in _NO_ROOM:  # for another connection, until one of those that are here ends
                    time.sleep(_POLL_SECONDS)
                    continue
                return  # closed
            if listener.family == socket.AF_UNIX and _user_of(connection) != os.getuid():
                connection.close()
                continue
            if listener.family != socket.AF_UNIX:
                shut = partial(connection.shutdown, socket.SHUT_RDWR)
                self._strangers.admit(connection, peer[0], shut)
            threading.Thread(target=self._guarded, args=(serve, Wire(connection)), daemon=True).start()

    def _guarded(self, serve: Callable[[Wire], None], wire: Wire) -> None:
        """Serve one connection; a message that cannot be obeyed ends that connection, and nothing else."""
        try:
            with suppress(OSError):
                serve(wire)
        except Exception as error:
            sys.stderr.write(f"connection closed: {type(error).__name__}: {error}\n")
        finally:
            wire.close()

    def close(self) -> None:
        """The name is free, even if a thread in a dead file system keeps this process from ending."""
        self._unix.shutdown(socket.SHUT_RDWR)
        self._unix.close()

    # Ranks

    def _serve_rank(self, wire: Wire) -> None:
        message, payload, _ = wire.receive()
        if message["op"] == "ping":
            return self._answer_pings(wire)
        with self._lock:
            if self._is_ending:
                return
            self._ranks, self._patience = self._ranks + 1, 0.0
        member: Member | None = None
        wire.most_bytes = _UNIX_BYTES
        try:
            while message["op"] != "bye":
                member = self._answer_rank(wire, message, payload, member)
                message, payload, _ = wire.receive()
            with self._lock:
                self._said_good_bye |= member is not None and self.keeper.is_present(member)
            wire.send({})
        finally:
            if member is not None:
                with suppress(OSError):  # of an older attempt
                    self.keeper.attempt(member.attempt).leave(member)
            with self._lock:
                self._ranks -= 1
                self._last_change = time.monotonic()
                self._left.set()

    def _answer_pings(self, wire: Wire) -> None:
        """A node agent asks whether this server is alive. It is no rank: the server ends without regard to
        it."""
        while True:
            wire.send({})
            wire.receive()

    def _answer_rank(
        self, wire: Wire, message: Message, payload: memoryview, member: Member | None
    ) -> Member | None:
        keeper, op = self.keeper, message["op"]
        if op == "whole":
            assert member is not None, "a rank joins first"
            keeper.whole(member, message)
        elif op == "skipped":
            assert member is not None, "a rank joins first"
            keeper.attempt(member.attempt).skipped(message["step"])
        elif op == "join":
            try:
                member = keeper.join(message, payload)
            except OSError as error:
                wire.send({"problem": str(error)})
                return None
            with self._lock:
                self._joined, self._said_good_bye, self._flushed = True, False, False
            keeper.held_step = None
            wire.send({"num_bytes": member.memory.num_bytes}, descriptors=[member.descriptor])
        elif op == "configure":
            assert member is not None, "a rank joins first"
            self._tokens.add(message["token"])
            keeper.configure(member.attempt, message, payload)
            wire.send({})
        elif op == "hello":
            wire.send({})
        elif op == "port":
            wire.send({"port": self._port(message["wanted"])})
        elif op == "claim":
            asked = message["url"], message["attempts_before"], message["seconds"], message.get("run")
            claimed = claim_folder(*asked)
            wire.send(asdict(claimed))
        elif op == "snapshots":
            summaries = [known.summary() for known in keeper.snapshots() if known.steps()]
            wire.send({"snapshots": summaries, "held": keeper.held_step})
        elif op == "open":
            self._open(wire, message)
        elif op == "store again":
            assert member is not None, "a rank joins first"
            keeper.attempt(member.attempt).store_again(message["step"])
            wire.send({})
        elif op == "hold":
            assert member is not None, "a rank joins first"
            keeper.attempt(member.attempt)  # of an older one: refused
            keeper.held_step = message["step"]
            wire.send({"pid": os.getpid()})
        elif op == "save":
            self._save(wire, message["url"])
        elif op == "release held":
            wire.send(self._release_held())
        elif op == "wait":
            assert member is not None, "a rank joins first"
            outcome = keeper.attempt(member.attempt).wait_stored(message["step"], message["seconds"])
            wire.send({"outcome": None if outcome is None else asdict(outcome)})
        return member

    def _save(self, wire: Wire, url: str) -> None:
        try:
            saved = self.keeper.save(url)
        except Exception as error:  # whatever a storage does
            wire.send({"problem": str(error) or type(error).__name__})
            return
        wire.send(asdict(saved))

    def _release_held(self) -> Message:
        """Nothing in memory is needed any more, on any node: the servers end."""
        if self.keeper.has_ranks:
            return {"problem": AT_WORK}
        self.keeper.unhold()
        self._end_when_alone()
        return {}

    def _end_when_alone(self) -> None:
        with self._lock:
            self._said_good_bye |= not self.keeper.has_ranks

    def _open(self, wire: Wire, message: Message) -> None:
        member = self.keeper.find(message["attempt"], message["rank"], message["step"], message["copied"])
        opened = None if member is None else member.opened(message["step"])
        if member is None or opened is None:
            wire.send({"problem": "no such snapshot"})
            return
        wire.send(opened[0], opened[1], descriptors=[member.descriptor])

    # Other keepers

    def _port(self, wanted: int) -> int:
        """``wanted``: the port of the server before this one, where others look for it; 0: there was none. If
        several servers are replaced at the same time, none can report a new port to the others."""
        with self._lock:
            if self._tcp is None:
                self._tcp = _listen(wanted)
                arguments = (self._tcp, self._serve_keeper)
                threading.Thread(target=self._accept, args=arguments, daemon=True).start()
        port: int = self._tcp.getsockname()[1]
        return port

    def _serve_keeper(self, wire: Wire) -> None:
        """One that proves in time that it knows the attempt's token."""
        connection = wire.process_socket()
        try:
            message = wire.receive_from_stranger(AUTHENTICATION_SECONDS)
            given = str(message.get("token", "")).encode(errors="replace")
            if message.get("op") != "keeper" or not any(
                hmac.compare_digest(given, token.encode()) for token in list(self._tokens)
            ):
                return
        finally:
            self._strangers.leave(connection)
        while True:
            message, payload, _ = wire.receive()
            try:
                answer = self._answer_keeper(message, payload)
            except (OSError, AssertionError, KeyError) as error:
                answer = {"problem": str(error) or type(error).__name__}
            wire.send(answer)

    def _answer_keeper(self, message: Message, payload: memoryview) -> dict[str, Any]:
        op, attempt = message["op"], self.keeper.attempt(message["attempt"])
        if op == "store":
            files = attempt.store_own(message["step"], message.get("url"))
            return {"files": {name: file.as_json() for name, file in files.items()}}
        if op == "copy":
            return {"has": attempt.copy_own(message["step"])}
        if op == "begin copies":
            self.keeper.copied.begin(message, payload)
        elif op == "copy of":
            self.keeper.copied.take(message, payload)
        elif op == "moved":
            attempt.move(message["node"], message["host"], message["port"])
        elif op == "copied":
            self.keeper.on_copied(attempt.number, message["step"])
        elif op == "release":
            attempt.release_step(message["step"])
        elif op == "unhold":
            self.keeper.held_step = None
            self._end_when_alone()
        elif op == "steps":
            return {"steps": attempt.common_steps()}
        return {}

    # Life

    def stay(self) -> None:
        """Returns when nobody needs the keeper any more."""
        begun = time.monotonic()
        while not self._is_ending:
            self._left.wait(_BUSY_SECONDS if self._ranks else _POLL_SECONDS)
            self._left.clear()
            unused = not self._joined and time.monotonic() - begun > self._patience
            if unused or (self._joined and self._is_over()):
                with self._lock:
                    self._is_ending = self._ranks == 0

    def _is_over(self) -> bool:
        with self._lock:
            away = 0.0 if self._ranks else time.monotonic() - self._last_change
            good_bye = self._said_good_bye
        if not away or not self.keeper.is_idle:
            return False
        if good_bye:
            return True
        if self.keeper.held_step is not None:
            return False
        if away > _LOST_SECONDS and not self._flushed:
            self._flushed = True
            self.keeper.flush()
            return False
        with self._lock:
            return not self._ranks and time.monotonic() - self._last_change > self.keeper.linger_seconds


def _listen(wanted: int) -> socket.socket:
    try:
        return socket.create_server(("", wanted))
    except OSError:  # another process has it by now
        return socket.create_server(("", 0))


def _user_of(connection: socket.socket) -> int:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    user: int = struct.unpack("3i", credentials)[1]
    return user


def main(arguments: list[str]) -> int:
    """Keeps until nobody needs it; at once over when another keeper has the name."""
    try:
        server = _Server(arguments[0])
    except OSError:
        return 0
    server.stay()
    server.close()
    sys.stdout.flush()
    os._exit(0)  # a thread that hangs in a dead file system must not hold up the end


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
