"""A run for Prometheus: aggregates of the job and of each node, in base units; never a series for each rank.

    RUN/metrics.jsonl, events.jsonl ──┐
    RUN/counters/node-N.jsonl ────────┼──► RunCollector ──► text
    the account of its time, spans ───┘

Counters count what was done, also what was done again after a fault, so that they never go back. 12,288
ranks on 1,536 nodes are some 48,000 series; what is of single ranks is on the page. Of labels that come from
files there are only so many.
"""

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from myriad.dashboard.gpu_looks import GpuLook, GpuLooks
from myriad.dashboard.node_counters import NodeCounters
from myriad.jsonl import JsonlTail, Record
from myriad.run import Run
from myriad.run_lines import EventLines, Peaks, step_line

__all__ = ["CONTENT_TYPE", "Account", "RunCollector", "RunMetrics", "Spans"]

CONTENT_TYPE = CONTENT_TYPE_LATEST
Account = Callable[[], Mapping[str, Any]]
"""Where the run's time went: ``classes``, ``effective_ratio``."""
_MOST_LABELS = 32
_OF_STEP = {
    "myriad_step_seconds": ("step_seconds", "Seconds of the newest step."),
    "myriad_loss": ("loss", "Of the newest step; NaN: it was not finite."),
    "myriad_gradient_norm": ("grad_norm", "Of the newest step."),
    "myriad_learning_rate": ("learning_rate", "Of the newest step."),
    "myriad_memory_bytes": ("memory_bytes", "The most that the first rank has used."),
    "myriad_data_wait_seconds": ("data_wait_seconds", "Of the newest step, for data."),
    "myriad_exposed_communication_seconds": ("exposed_comm_seconds", "Of the newest step, first rank."),
}
_COUNTED = {
    "fault": ("myriad_faults", "cause", "Faults that were found."),
    "eviction": ("myriad_evictions", "accused", "Nodes that had to leave."),
}
_UNNAMED = {"fault": "storage", "eviction": "lost"}
_OF_LINK = {
    "received_bytes": "receive_bytes",
    "sent_bytes": "transmit_bytes",
    "received_packets": "receive_packets",
    "sent_packets": "transmit_packets",
    "errors": "errors",
    "drops": "drops",
    "carrier_changes": "carrier_changes",
    "retransmissions": "retransmissions",
}


class Spans(Protocol):
    """What a store of spans knows, by node."""

    def num_dropped(self) -> int:
        """Spans that were lost."""

    def node_phase_seconds(self) -> Iterable[tuple[int, str, float, float]]:
        """Node, phase, mean and highest seconds of its ranks in a step."""


class RunCollector(Collector):
    """Of one run. Each call of `collect` reads what has come since the last."""

    def __init__(self, run: Run, account: Account | None = None, spans: Spans | None = None) -> None:
        self._run, self._account, self._spans = run, account, spans
        self._metrics, self._events = JsonlTail(run.metrics_path), EventLines(run.events_path)
        self._peaks = Peaks()
        self._nodes, self._gpus = NodeCounters(run.counters_path), GpuLooks(run.counters_path)
        self._last: Record = {}
        self._steps, self._tokens, self._tokens_each = 0, 0.0, 0.0
        self._told: dict[str, Counter[str]] = {event: Counter() for event in _COUNTED}
        self._restarts, self._overflows, self._over = 0, 0, False
        self._newest: dict[str, Record] = {}
        """Event to the last of its kind, of those that are shown."""

    def describe(self) -> Iterable[Metric]:
        """None: what there is depends on the run."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """As the files say now."""
        self._poll()
        yield from self._of_job()
        yield from self._of_events()
        yield from self._of_time()
        yield from self._of_nodes()
        yield from _of_gpus(self._gpus.newest())
        if self._spans is not None:
            yield from _of_spans(self._spans)

    # Reading

    def _poll(self) -> None:
        for line in self._metrics.poll():
            if (checked := step_line(line)) is not None and (step := checked["step"]) > 0:
                num_steps = max(1, step - self._last.get("step", 0))  # of some there may be no line
                tokens, known = _number(checked.get("tokens")), _number(self._last.get("tokens"))
                is_next = step > self._last.get("step", 0) and tokens > known  # else: an attempt went back
                self._last = checked
                self._steps += num_steps
                self._tokens += tokens - known if is_next else tokens / step * num_steps
        for event in self._events.poll():
            self._peaks.add(event)
            self._take(str(event.get("event")), event)

    def _take(self, name: str, event: Record) -> None:
        if name in _COUNTED:
            label = str(event.get(_COUNTED[name][1]) or _UNNAMED[name])[:64]
            counts = self._told[name]
            counts[label if label in counts or len(counts) < _MOST_LABELS else "other"] += 1
        self._restarts += name == "restart"
        self._overflows += name == "overflow"
        if name in ("start", "validation", "checkpoint", "check"):
            self._newest[name] = event
        if name in ("finish", "interrupted", "start", "restart"):
            self._over = name in ("finish", "interrupted")

    # Telling

    def _of_job(self) -> Iterator[Metric]:
        start = self._newest.get("start", {})
        facts = {"name": self._run.path.resolve().name, "device": start.get("device", "")}
        yield InfoMetricFamily("myriad_run", "What it is.", {key: str(value) for key, value in facts.items()})
        yield _gauge("myriad_ranks", "That train.", start.get("world"))
        yield _gauge("myriad_parameters", "Of the model.", start.get("parameters"))
        peak = self._peaks.flops_per_second
        yield _gauge("myriad_peak_flops_per_second", "Of all ranks together, that MFU is of.", peak)
        yield _gauge("myriad_run_over", "1 when it has finished or was stopped.", float(self._over))
        yield _counter("myriad_steps", "Steps done, also those done again.", self._steps)
        yield _counter("myriad_tokens", "Tokens of these steps.", self._tokens)
        if not self._last:
            return
        yield _gauge("myriad_step", "The newest step.", self._last["step"])
        yield _gauge("myriad_step_timestamp_seconds", "When it ended.", self._last.get("time"))
        for name, (key, told) in _OF_STEP.items():
            yield _gauge(name, told, self._last.get(key))
        if "loss_scale" in self._last:
            yield _gauge("myriad_loss_scale", "Of the newest step, in float16.", self._last["loss_scale"])
            yield _counter("myriad_overflows", "Steps skipped as float16 overflowed.", self._overflows)
        told = "Model FLOP/s of the newest step by the peak of all ranks."
        yield _gauge("myriad_mfu_ratio", told, self._peaks.mfu(self._last))

    def _of_events(self) -> Iterator[Metric]:
        for event, (name, label, told) in _COUNTED.items():
            family = CounterMetricFamily(name, told, labels=[label])
            for value, count in sorted(self._told[event].items()):
                family.add_metric([value], count)
            yield family
        yield _counter("myriad_restarts", "Attempts after the first.", self._restarts)
        if (validation := self._newest.get("validation")) is not None:
            yield _gauge("myriad_validation_loss", "The newest.", validation.get("loss"))
        if (check := self._newest.get("check")) is not None:
            text = "Share of this attempt's time spent on checks of ranks."
            yield _gauge("myriad_check_ratio", text, check.get("ratio"))
            failed = check.get("failed")
            num_failed = len(failed) if isinstance(failed, list) else 0
            yield _gauge(
                "myriad_failed_checks", "Kinds of checks that have failed in this attempt.", num_failed
            )
        if (saved := self._newest.get("checkpoint")) is not None:
            yield _gauge("myriad_checkpoint_step", "Of the newest one that is stored.", saved.get("step"))
            told = "When it was complete."
            yield _gauge("myriad_checkpoint_timestamp_seconds", told, saved.get("time"))

    def _of_time(self) -> Iterator[Metric]:
        if self._account is None:
            return
        accounted = self._account()
        told = "Effective training time: steps that count by all the time."
        yield _gauge("myriad_ettr_ratio", told, accounted.get("effective_ratio"))
        family = GaugeMetricFamily(
            "myriad_time_seconds", "Of the run, by what became of it.", labels=["class"]
        )
        for kind, seconds in accounted.get("classes", {}).items():
            family.add_metric([str(kind)], _number(seconds))
        yield family

    def _of_nodes(self) -> Iterator[Metric]:
        looks, now = self._nodes.newest(), time.time()
        age = GaugeMetricFamily(
            "myriad_node_heartbeat_age_seconds", "Since its executor wrote.", labels=["node"]
        )
        again = CounterMetricFamily(
            "myriad_node_tcp_retransmitted_segments", "Sent again by TCP.", labels=["node"]
        )
        speed = GaugeMetricFamily(
            "myriad_node_network_speed_bytes", "That a link carries in a second.", labels=["node", "device"]
        )
        links = {
            key: CounterMetricFamily(
                f"myriad_node_network_{name}",
                f"{name.replace('_', ' ')} of a link.",
                labels=["node", "device"],
            )
            for key, name in _OF_LINK.items()
        }
        for number, look in looks.items():
            node = str(number)
            age.add_metric([node], max(0.0, now - look.time))
            if "retransmitted_segments" in look.tcp:
                again.add_metric([node], look.tcp["retransmitted_segments"])
            for device, value in list(look.speeds.items())[:_MOST_LABELS]:
                speed.add_metric([node, device], value)
            for device, numbers in list(look.links.items())[:_MOST_LABELS]:
                for key, count in numbers.items():
                    if key in links:
                        links[key].add_metric([node, device], count)
        yield from (age, again, speed, *links.values())


_OF_GPUS: dict[str, tuple[str, Callable[[GpuLook], float | None]]] = {
    "myriad_node_gpus": ("Devices that answer.", lambda look: look.count),
    "myriad_node_gpu_highest_celsius": ("Temperature of the hottest.", lambda look: look.hottest_celsius),
    "myriad_node_gpu_power_watts": ("Power of all together.", lambda look: look.power_watts),
    "myriad_node_gpu_lowest_clock_ratio": (
        "Clock by its maximum, of the device where it is lowest among those that compute.",
        lambda look: look.lowest_clock_ratio,
    ),
    "myriad_node_gpu_narrow_links": (
        "Devices that compute on fewer PCIe lanes than they could.",
        lambda look: look.narrow_links,
    ),
    "myriad_node_gpu_retired_pages": (
        "Memory pages retired or rows remapped, of all devices.",
        lambda look: look.retired,
    ),
}


def _of_gpus(looks: Mapping[int, GpuLook]) -> Iterator[Metric]:
    if not looks:
        return
    for name, (text, value_of) in _OF_GPUS.items():
        family = GaugeMetricFamily(name, text, labels=["node"])
        for node, look in looks.items():
            if (value := value_of(look)) is not None:
                family.add_metric([str(node)], value)
        yield family
    text = "Devices whose clock is lowered, by the reason."
    throttled = GaugeMetricFamily("myriad_node_gpu_throttled", text, labels=["node", "reason"])
    for node, look in looks.items():
        for reason, count in look.throttled.items():
            throttled.add_metric([str(node), reason], count)
    yield throttled


def _of_spans(spans: Spans) -> Iterator[Metric]:
    yield _counter("myriad_spans_dropped", "Spans that were lost on their way.", spans.num_dropped())
    labels = ["node", "phase"]
    mean = GaugeMetricFamily(
        "myriad_node_phase_seconds", "Of a step, mean of the node's ranks.", labels=labels
    )
    most = GaugeMetricFamily("myriad_node_phase_highest_seconds", "The slowest of its ranks.", labels=labels)
    for node, phase, seconds, highest in spans.node_phase_seconds():
        mean.add_metric([str(node), phase], seconds)
        most.add_metric([str(node), phase], highest)
    yield from (mean, most)


def _gauge(name: str, told: str, value: Any) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, told, value=_number(value, math.nan))


def _counter(name: str, told: str, value: float) -> CounterMetricFamily:
    return CounterMetricFamily(name, told, value=value)


def _number(value: Any, otherwise: float = 0.0) -> float:
    """Whatever a file says."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and abs(value) < 1e300 else otherwise


class RunMetrics:
    """What answers /metrics of one run."""

    def __init__(self, run: Run, account: Account | None = None, spans: Spans | None = None) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(RunCollector(run, account, spans))

    def text(self) -> bytes:
        """In Prometheus's text format, `CONTENT_TYPE`. Not for two threads at once."""
        return generate_latest(self._registry)
