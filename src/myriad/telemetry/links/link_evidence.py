"""Store the link counters around an anomaly: the half minute before it from the ring, and seconds after it.

    RUN/counters/around/node-3-20261123-231507-slow-step.jsonl.gz
        {"version": 1, "node": 3, "why": "slow step", "time": ..., "fields": ["time", "step", "in_step", ...]}
        [1795475677.01, 41, 1, 627, 796431517, ...]           a line each 10 ms

A file appears when it is complete. For each node the newest `MOST_FILES` files are kept, within `MOST_BYTES`
in total."""

import gzip
import json
import os
import re
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from myriad.system.whole_file import write_whole
from myriad.telemetry.links.link_ring import FIRST_COLUMNS, LINK_COLUMNS, Rows, columns_of
from myriad.telemetry.links.network_counters import CounterSample, describe_peaks

__all__ = [
    "EvidenceFile",
    "describe_evidence",
    "list_evidence",
    "read_evidence",
    "samples_of",
    "write_evidence",
]

MOST_FILES, MOST_BYTES = 16, 16 * 2**20
_NAME = re.compile(r"node-(\d{1,6})-(\d{8}-\d{6})-([a-z-]{1,40})\.jsonl\.gz")
_MOST_READ_BYTES, _MOST_LISTED = 2**26, 4096
_STILL_BYTES, _STILL_SECONDS = 2048, 0.5


@dataclass(frozen=True)
class EvidenceFile:
    """One file of link counters around an anomaly."""

    node: int
    why: str
    path: Path


def write_evidence(folder: Path, node: int, why: str, at: float, rows: Rows, epoch_ns: int) -> Path:
    """Write the rows, and delete this node's oldest files beyond the limits.

    ``why`` describes the anomaly in words; ``at`` is in seconds since the epoch; ``epoch_ns`` comes from
    `LinkRing.epoch_ns`. Raises ``OSError``.
    """
    fields = ["time", *columns_of(rows.links)[1:]]
    head = {"version": 1, "node": node, "why": why, "time": at, "fields": fields}
    times = np.round((rows.time_ns + epoch_ns) * 1e-9, 4).tolist()
    lines = [json.dumps(head)]
    lines += [
        json.dumps([moment, *row], separators=(",", ":"))
        for moment, row in zip(times, rows.values[:, 1:].tolist(), strict=True)
    ]
    folder.mkdir(parents=True, exist_ok=True)
    slug = re.sub(r"[^a-z]+", "-", why.lower()).strip("-")[:40] or "asked"
    path = folder / f"node-{node}-{time.strftime('%Y%m%d-%H%M%S', time.localtime(at))}-{slug}.jsonl.gz"
    write_whole(path, gzip.compress("\n".join([*lines, ""]).encode(), 6))
    _prune(folder, node)
    return path


def _prune(folder: Path, node: int) -> None:
    """Delete the node's oldest files. Scan all files, as thousands of nodes may write to one folder."""
    kept, size = 0, 0
    for one in reversed([one for one in _all_evidence(folder) if one.node == node]):
        kept, size = kept + 1, size + one.path.stat().st_size
        if kept > 1 and (kept > MOST_FILES or size > MOST_BYTES):
            one.path.unlink(missing_ok=True)


def list_evidence(folder: Path) -> list[EvidenceFile]:
    """Return the newest `_MOST_LISTED` files, oldest first; links and other names are left out."""
    return _all_evidence(folder)[-_MOST_LISTED:]


def _all_evidence(folder: Path) -> list[EvidenceFile]:
    try:
        with os.scandir(folder) as entries:
            names = [entry.name for entry in entries if entry.is_file(follow_symlinks=False)]
    except OSError:
        return []
    found = [(match[2], name, match) for name in names if (match := _NAME.fullmatch(name))]
    return [
        EvidenceFile(int(match[1]), match[3].replace("-", " "), folder / name)
        for _, name, match in sorted(found, key=lambda one: one[:2])
    ]


def read_evidence(path: Path) -> tuple[dict[str, Any], Rows]:
    """Return the head and the rows of a file. Raises ``OSError``, and ``ValueError`` for an invalid file or
    one that unpacks to more than 64 MiB."""
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    with os.fdopen(handle, "rb") as file:
        try:
            unpacked = zlib.decompressobj(31)
            data = unpacked.decompress(file.read(_MOST_READ_BYTES), _MOST_READ_BYTES)
        except zlib.error as error:
            raise ValueError(f"{path} is not of gzip: {error}") from None
    if unpacked.unconsumed_tail or not unpacked.eof:
        raise ValueError(f"{path} is truncated, or larger than {_MOST_READ_BYTES} bytes")
    lines = data.decode().splitlines()
    try:
        head, rows = json.loads(lines[0]), [json.loads(line) for line in lines[1:]]
        fields = list(map(str, head["fields"]))
        values = np.array([[row[0] * 1e9, *row[1:]] for row in rows], np.float64).reshape(-1, len(fields))
    except (IndexError, KeyError, TypeError, RecursionError, OverflowError) as error:
        raise ValueError(f"{path} is not of this format: {error}") from None
    if not (np.abs(values) < 2**62).all():  # false for NaN as well
        raise ValueError(f"{path} is not of this format: it has a value beyond 2**62")
    return head, Rows(tuple(_links(fields)), values.astype(np.int64))


def _links(fields: list[str]) -> Iterator[str]:
    """Yield LINK of the columns LINK.received_bytes, ... Raises ``ValueError`` if a link lacks columns."""
    names = fields[4:]
    if fields[:4] != ["time", *FIRST_COLUMNS[1:]]:
        raise ValueError(f"unknown columns {fields[:4]}")
    for at in range(0, len(names), len(LINK_COLUMNS)):
        own = names[at : at + len(LINK_COLUMNS)]
        link = own[0].rpartition(".")[0]
        if own != [f"{link}.{field}" for field in LINK_COLUMNS]:
            raise ValueError(f"unknown columns {own}")
        yield link


def describe_evidence(path: Path) -> list[str]:
    """Describe each link of a file in words: the busiest 10 ms, losses, and the longest time without traffic.
    Raises ``OSError`` and ``ValueError``."""
    head, rows = read_evidence(path)
    if len(rows.values) < 2:
        return ["no row"]
    seconds = (rows.time_ns[-1] - rows.time_ns[0]) * 1e-9
    steps = rows.step[rows.step >= 0]
    over = f"steps {steps.min()} to {steps.max()}, " if len(steps) else ""
    lines = [f"node {head.get('node')}, around a {head.get('why')}: {over}{seconds:.1f} s"]
    lines += describe_peaks(samples_of(rows, 0), {})
    for link in rows.links:
        moved = np.diff(rows.column(link, "received_bytes") + rows.column(link, "sent_bytes"))
        ends = np.concatenate([[True], (moved > _STILL_BYTES) | ~rows.in_step[1:], [True]])
        still = int(np.diff(np.flatnonzero(ends)).max()) * seconds / len(moved)
        if still > _STILL_SECONDS:
            lines.append(f"{link}: at most {still:.1f} s of a step without traffic")
    return lines


def samples_of(rows: Rows, epoch_ns: int) -> list[CounterSample]:
    """Return the rows as `CounterSample`\\ s, from which `describe_peaks` computes peaks."""
    links = [link for link in rows.links if ":" not in link]
    ports = [link for link in rows.links if ":" in link]
    tables = {link: np.stack([rows.column(link, field) for field in LINK_COLUMNS], 1) for link in rows.links}
    found = []
    for place, time_ns in enumerate(rows.time_ns.tolist()):
        of_links, of_ports = dict[str, tuple[int, ...]](), dict[str, tuple[int, ...]]()
        for link in links:
            received, sent, errors, drops, _, _ = tables[link][place].tolist()
            of_links[link] = (received, sent, 0, 0, errors, drops, 0)
        for port in ports:
            of_ports[port] = tuple(tables[port][place].tolist()[:5])
        tcp = (int(rows.tcp_sent_again[place]), 0)
        found.append(CounterSample((time_ns + epoch_ns) * 1e-9, of_links, tcp, of_ports))
    return found
