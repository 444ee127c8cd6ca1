"""The nodes of a run as `myriad top --nodes` and the page show them: what each is made of, from
RUN/nodes/node-N.json, what its links carry now, from RUN/counters, and the last event about its health.

Files may be missing, damaged or of another version: what cannot be read is left out.
"""

import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from myriad.dashboard.node_measurements import NodeSample
from myriad.run.event_text import event_text
from myriad.system.jsonl import Record
from myriad.system.whole_file import parse_json
from myriad.telemetry.links.link_evidence import list_evidence

__all__ = ["evidence_rows", "health_of", "node_rows", "read_facts"]

_NAME = re.compile(r"node-(\d{1,6})\.json")
_MOST_BYTES, _MOST_NODES, _MOST_LETTERS, _MOST_FILES = 2**16, 16384, 200, 64
_SAYS = ("fault", "diagnosis", "health", "eviction", "quarantine", "move", "refusal")


def read_facts(folder: Path) -> dict[int, dict[str, Any]]:
    """Return the content of each node's file, by node."""
    try:
        names = sorted(os.listdir(folder))[:_MOST_NODES]
    except OSError:
        return {}
    found: dict[int, dict[str, Any]] = {}
    for name in names:
        if (match := _NAME.fullmatch(name)) is None:
            continue
        try:
            handle = os.open(folder / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                text = os.pread(handle, _MOST_BYTES, 0)
            finally:
                os.close(handle)
            record = parse_json(text)
        except (OSError, ValueError, RecursionError):
            continue
        if isinstance(record, dict):
            found[int(match[1])] = record
    return found


def node_rows(
    facts: Mapping[int, Mapping[str, Any]],
    samples: Mapping[int, NodeSample],
    health: Mapping[int, str],
    now: float,
) -> list[dict[str, Any]]:
    """Return a row for each known node, ascending."""
    return [
        {
            "node": node,
            "heartbeat_seconds_ago": max(0.0, now - samples[node].time) if node in samples else None,
            "health": health.get(node, "no complaint"),
            **_made_of(facts.get(node, {})),
            **_carries(samples.get(node)),
        }
        for node in sorted({*facts, *samples})
    ]


def _made_of(facts: Mapping[str, Any]) -> dict[str, Any]:
    gpus, nics = _objects(facts.get("gpus")), _objects(facts.get("nics"))
    models = Counter(_text(one.get("model")) or "unknown" for one in gpus)
    versions = facts.get("versions")
    return {
        **{key: _text(facts.get(key)) for key in ("host", "address", "pod", "cpu")},
        "gpus": ", ".join(f"{count} x {model}" for model, count in models.items()),
        "gpu_serials": [_text(one.get("serial")) for one in gpus],
        "nics": [_nic(one) for one in nics],
        "versions": {str(name)[:64]: _text(text) for name, text in versions.items()}
        if isinstance(versions, dict)
        else {},
    }


def _nic(nic: Mapping[str, Any]) -> str:
    """Describe a NIC: ``eth0 mlx5_core 24.10, firmware 28.39``."""
    firmware = _text(nic.get("firmware"))
    words = [_text(nic.get("name")), _text(nic.get("driver"))]
    return " ".join(filter(None, words)) + (f", firmware {firmware}" if firmware else "")


def _carries(sample: NodeSample | None) -> dict[str, Any]:
    """Return the bytes per second of all links except the loopback, and the TCP retransmissions."""
    rates = {} if sample is None else sample.rates
    links = [rate for name, rate in rates.items() if name != "lo"]
    return {
        "received_bytes_per_second": sum(rate.get("received_bytes", 0.0) for rate in links),
        "sent_bytes_per_second": sum(rate.get("sent_bytes", 0.0) for rate in links),
        "rdma_bytes_per_second": sum(
            rate.get("received_bytes", 0.0) + rate.get("sent_bytes", 0.0)
            for name, rate in rates.items()
            if ":" in name
        ),
        "sent_again_per_second": rates.get("tcp", {}).get("retransmitted_segments", 0.0)
        + sum(rate.get("retransmissions", 0.0) for rate in links),
    }


def _objects(value: Any) -> list[Mapping[str, Any]]:
    return [one for one in value if isinstance(one, dict)] if isinstance(value, list) else []


def _text(value: Any) -> str:
    return value[:_MOST_LETTERS] if isinstance(value, str) else ""


def health_of(events: Iterable[Record]) -> dict[int, str]:
    """Return the last health event of each node, without nodes that have recovered."""
    found: dict[int, str] = {}
    for event in events:
        node = event.get("node")
        if event.get("event") in _SAYS and type(node) is int:
            found[node] = f"{event['event']}: {event_text(event)}"
            if event.get("level") == "info":  # an alarm has ended
                del found[node]
    return found


def evidence_rows(folder: Path) -> Sequence[dict[str, Any]]:
    """Return the files of link counters around anomalies (RUN/counters/around), newest first."""
    newest = list_evidence(folder)[-_MOST_FILES:]
    return [{"node": one.node, "why": one.why, "name": one.path.name} for one in reversed(newest)]
