"""The hardware of each node, kept in RUN/nodes/node-N.json; a change behind a host name is an event.

A machine is identified by its host name. Another machine under the same node number is reported as such, not
as a change of hardware. The files outlive drivers and starts of the run, so a machine that comes back with
another GPU is noticed.

    driver ──enter──► one thread: read the known facts, compare, write what differs ──take──► driver

All nodes of a job report within a second of its start. A thread of the inventory reads and writes the files,
so neither a hung disk nor 1,536 files delay the driver or its journal.
"""

import json
import logging
import threading
from contextlib import suppress
from pathlib import Path

from myriad.supervise.agent.node_facts import changes_of
from myriad.supervise.background import AsyncWriter
from myriad.supervise.observations import NodeFacts
from myriad.supervise.policy.policy_actions import Notice
from myriad.system.whole_file import write_whole
from myriad.wire.message_codec import plain, read

__all__ = ["NodeInventory", "read_nodes"]

_LOG = logging.getLogger(__name__)
_MOST_BYTES, _MOST_NODES, _MOST_LISTED = 2**16, 16384, 6


class NodeInventory:
    """Stores the hardware of each node of a run."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known: dict[int, NodeFacts] = {}
        self._disk_writer, self._lock = AsyncWriter(), threading.Lock()
        self._waiting: dict[int, NodeFacts] = {}
        self._unwritten = set[int]()
        """Nodes with facts that could not be written to disk."""
        self._notices: list[Notice] = []

    def enter(self, facts: NodeFacts) -> None:
        """Compare and store the facts of a node, in another thread. `take` returns what changed."""
        with self._lock:
            is_idle = not self._waiting
            self._waiting[facts.node] = facts
        if is_idle:
            self._disk_writer.enter("what nodes are made of", self._work)

    def take(self) -> list[Notice]:
        """Return the changes that were found since the last call."""
        with self._lock:
            found, self._notices = self._notices, []
        return found

    def wait_written(self) -> bool:
        """Wait half a second at most until all facts are written; return whether they are."""
        return self._disk_writer.wait_written()

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    return
                facts = next(iter(self._waiting.values()))
            try:
                self._enter_one(facts)
            finally:
                with self._lock:
                    if self._waiting.get(facts.node) is facts:
                        del self._waiting[facts.node]

    def _enter_one(self, facts: NodeFacts) -> None:
        before = self._before(facts.node)
        notice = self.record(facts)
        if notice is not None:
            with self._lock:
                self._notices.append(notice)
        if facts == before and facts.node not in self._unwritten:
            return  # 1,536 nodes report again to each new driver
        try:
            self.write(facts)
            self._unwritten.discard(facts.node)
        except OSError as error:
            self._unwritten.add(facts.node)
            _LOG.warning("what node %d is made of was not written: %s", facts.node, error.strerror)

    def _before(self, node: int) -> NodeFacts | None:
        return self._known.get(node) or _read(self._path(node))

    def record(self, facts: NodeFacts) -> Notice | None:
        """Compare facts with the known ones; return the change, or ``None``. `write` stores the facts."""
        before = self._before(facts.node)
        self._known[facts.node] = facts
        if before is None or before == facts:
            return None
        number, host = facts.node, facts.host
        if before.host != host:
            evidence: dict[str, object] = {"before": before.host, "now": host}
            text = f"node {number} is another machine: {before.host} -> {host}"
            return Notice(
                rule="a node has another name",
                evidence=evidence,
                what="hardware",
                node=number,
                problem=text,
                level="info",
            )
        changes = changes_of(before, facts)
        if not changes:
            return None
        more = f"; and {len(changes) - _MOST_LISTED} more" if len(changes) > _MOST_LISTED else ""
        text = (
            f"the hardware of node {number} ({host}) has changed: {'; '.join(changes[:_MOST_LISTED])}{more}"
        )
        return Notice(
            rule="the hardware behind a name has changed",
            evidence={"host": host, "changes": changes[:64]},
            what="hardware",
            node=number,
            problem=text,
            level="warning",
        )

    def write(self, facts: NodeFacts) -> None:
        """Write the facts of a node to its file. Raises ``OSError``."""
        self._folder.mkdir(parents=True, exist_ok=True)
        write_whole(self._path(facts.node), json.dumps(plain(facts)))

    def _path(self, node: int) -> Path:
        return self._folder / f"node-{node}.json"


def _read(path: Path) -> NodeFacts | None:
    with suppress(OSError, ValueError, RecursionError):
        if path.stat().st_size <= _MOST_BYTES:
            found: NodeFacts = read(NodeFacts, json.loads(path.read_text()))
            return found
    return None


def read_nodes(folder: Path) -> dict[int, NodeFacts]:
    """Return the facts of all nodes of a run, by number. Damaged files and those of another version are
    ignored."""
    found = (_read(path) for path in sorted(folder.glob("node-*.json"))[:_MOST_NODES])
    return {one.node: one for one in sorted(filter(None, found), key=lambda one: one.node)}
