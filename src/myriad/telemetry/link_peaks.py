"""How near to its limit a link came, from looks at its counters."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from myriad.telemetry.counters import LINK_FIELDS, RDMA_FIELDS, TCP_FIELDS, Sample

__all__ = ["LinkPeak", "peaks", "told_peaks"]

_WINDOW_SECONDS = 0.0095
"""Of one look at 10 ms; looks that come closer together are taken together, as counters of some drivers
move in steps."""
_IDLE_BYTES_PER_SECOND = 1e5


@dataclass(frozen=True)
class LinkPeak:
    """Of one link or port of RDMA over some looks."""

    name: str
    sent_bytes_per_second: float
    received_bytes_per_second: float
    """The most of any window."""
    mean_sent_bytes_per_second: float
    mean_received_bytes_per_second: float
    limit_bytes_per_second: float
    """One way; 0: unknown."""
    lost: Mapping[str, int]
    """Errors, drops and the like, as far as there were any."""

    @property
    def used_ratio(self) -> float:
        """Of the limit, at the peak; 0: the limit is unknown."""
        most = max(self.sent_bytes_per_second, self.received_bytes_per_second)
        return most / self.limit_bytes_per_second if self.limit_bytes_per_second else 0.0


def peaks(samples: Sequence[Sample], speeds: Mapping[str, float]) -> list[LinkPeak]:
    """Of each link, the busiest first."""
    found = [
        _peak(name, [(one.time, row) for one in samples if (row := table(one).get(name))], fields, speeds)
        for table, fields in ((_links, LINK_FIELDS), (_rdma, RDMA_FIELDS))
        for name in table(samples[-1])
    ]
    return sorted(found, key=lambda one: -(one.sent_bytes_per_second + one.received_bytes_per_second))


def _links(sample: Sample) -> dict[str, tuple[int, ...]]:
    return sample.links


def _rdma(sample: Sample) -> dict[str, tuple[int, ...]]:
    return sample.rdma


def _peak(
    name: str,
    rows: Sequence[tuple[float, tuple[int, ...]]],
    fields: Sequence[str],
    speeds: Mapping[str, float],
) -> LinkPeak:
    received, sent = fields.index("received_bytes"), fields.index("sent_bytes")
    (began, first), (ended, last) = rows[0], rows[-1]
    seconds = max(ended - began, 1e-9)
    losses = {
        field: last[at] - first[at]
        for at, field in enumerate(fields)
        if not field.endswith(("bytes", "packets")) and last[at] > first[at]
    }
    return LinkPeak(
        name,
        _most(rows, sent),
        _most(rows, received),
        (last[sent] - first[sent]) / seconds,
        (last[received] - first[received]) / seconds,
        speeds.get(name, 0.0),
        losses,
    )


def _most(rows: Sequence[tuple[float, tuple[int, ...]]], column: int) -> float:
    best, (since, before) = 0.0, rows[0]
    for at, row in rows[1:]:
        if at - since >= _WINDOW_SECONDS:
            best = max(best, (row[column] - before[column]) / (at - since))
            since, before = at, row
    return best


def told_peaks(samples: Sequence[Sample], speeds: Mapping[str, float]) -> list[str]:
    """For a person; links on which nothing went are left out."""
    told = [
        _told(one)
        for one in peaks(samples, speeds)
        if max(one.sent_bytes_per_second, one.received_bytes_per_second) > _IDLE_BYTES_PER_SECOND
    ]
    first, last = samples[0].tcp, samples[-1].tcp
    again = last[TCP_FIELDS.index("retransmitted_segments")] - first[0] if first and last else 0
    told = told or ["nothing went over any link"]
    return [*told, *([f"{again} segments of TCP were sent again"] if again else [])]


def _told(one: LinkPeak) -> str:
    limit = one.limit_bytes_per_second
    share = f", {one.used_ratio:.0%} of its {_rate(limit)}" if limit else "; its limit is unknown"
    text = (
        f"{one.name}: at most {_rate(one.sent_bytes_per_second)} sent"
        f" and {_rate(one.received_bytes_per_second)} received within 10 ms{share};"
        f" {_rate(one.mean_sent_bytes_per_second)} and {_rate(one.mean_received_bytes_per_second)} on average"
    )
    return text + "".join(f"; {count} {what.replace('_', ' ')}" for what, count in one.lost.items())


def _rate(bytes_per_second: float) -> str:
    for unit, scale in (("GB/s", 1e9), ("MB/s", 1e6)):
        if bytes_per_second >= scale:
            return f"{bytes_per_second / scale:.3g} {unit}"
    return f"{bytes_per_second / 1e3:.3g} kB/s"
