"""Export a run to Prometheus: aggregates of the job and of each node, in base units, without series per rank.

    RUN/metrics.jsonl, events.jsonl ──┐
    RUN/counters/node-N.jsonl ────────┼──► RunCollector ──► text
    the account of its time, spans ───┘

Counters include work that was repeated after a fault, so they never decrease. 12,288 ranks on 1,536 nodes
give some 48,000 series; data of single ranks is on the page. The number of labels that come from files is
bounded."""

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from myriad.dashboard.node_measurements import GpuSample, GpuSampleReader, NodeCounters
from myriad.run import Run
from myriad.run.run_lines import EventLines, step_line
from myriad.run.run_speed import Peaks
from myriad.system.jsonl import JsonlTail, Record

__all__ = ["CONTENT_TYPE", "Account", "RunCollector", "RunMetrics", "Spans"]

CONTENT_TYPE = CONTENT_TYPE_LATEST
Account = Callable[[], Mapping[str, Any]]
"""Returns the account of the run's time: ``classes``, ``effective_ratio``."""
_MOST_LABELS = 32
_MOST_LAYERS = 512
_OF_STEP = {
    "myriad_step_seconds": ("step_seconds", "Seconds of the newest step."),
    "myriad_loss": ("loss", "Loss of the newest step; NaN if it was not finite."),
    "myriad_gradient_norm": ("grad_norm", "Gradient norm of the newest step."),
    "myriad_learning_rate": ("learning_rate", "Learning rate of the newest step."),
    "myriad_memory_bytes": ("memory_bytes", "Highest memory use of the first rank."),
    "myriad_data_wait_seconds": (
        "data_wait_seconds",
        "Seconds of the newest step in which the first rank waited for data.",
    ),
    "myriad_exposed_communication_seconds": (
        "exposed_comm_seconds",
        "Seconds of exposed communication of the newest step on the first rank.",
    ),
}
_COUNTED = {
    "fault": ("myriad_faults", "cause", "Detected faults."),
    "eviction": ("myriad_evictions", "accused", "Evicted nodes."),
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
    """Data of a span store, by node."""

    def num_dropped(self) -> int:
        """Return the number of lost spans."""

    def node_phase_seconds(self) -> Iterable[tuple[int, str, float, float]]:
        """Yield node, phase, and the mean and highest seconds of its ranks in a step."""


class RunCollector(Collector):
    """Collects the metrics of one run. Each call of `collect` reads the new lines."""

    def __init__(self, run: Run, account: Account | None = None, spans: Spans | None = None) -> None:
        self._run, self._account, self._spans = run, account, spans
        self._metrics, self._events = JsonlTail(run.metrics_path), EventLines(run.events_path)
        self._peaks = Peaks()
        self._nodes, self._gpus = NodeCounters(run.counters_path), GpuSampleReader(run.counters_path)
        self._last: Record = {}
        self._steps, self._tokens, self._tokens_each = 0, 0.0, 0.0
        self._event_counts: dict[str, Counter[str]] = {event: Counter() for event in _COUNTED}
        self._restarts, self._overflows, self._over = 0, 0, False
        self._newest: dict[str, Record] = {}
        self._validation_sets: dict[str, Record] = {}
        self._layer_norms: Record = {}
        """Newest event of each shown kind, by name."""

    def describe(self) -> Iterable[Metric]:
        """Return nothing: the metrics depend on the run."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Read new lines and yield the current metrics."""
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
                self._layer_norms = checked.get("layer_norms") or self._layer_norms
                self._steps += num_steps
                self._tokens += tokens - known if is_next else tokens / step * num_steps
        for event in self._events.poll():
            self._peaks.add(event)
            self._take(str(event.get("event")), event)

    def _take(self, name: str, event: Record) -> None:
        if name in _COUNTED:
            label = str(event.get(_COUNTED[name][1]) or _UNNAMED[name])[:64]
            counts = self._event_counts[name]
            counts[label if label in counts or len(counts) < _MOST_LABELS else "other"] += 1
        self._restarts += name == "restart"
        self._overflows += name == "overflow"
        if name in ("start", "validation", "evaluation", "checkpoint", "check"):
            self._newest[name] = event
        if name == "validation_set" and len(self._validation_sets) < _MOST_LABELS:
            self._validation_sets[str(event.get("name"))[:64]] = event
        if name in ("finish", "interrupted", "start", "restart"):
            self._over = name in ("finish", "interrupted")

    # Export

    def _of_job(self) -> Iterator[Metric]:
        start = self._newest.get("start", {})
        facts = {"name": self._run.path.resolve().name, "device": start.get("device", "")}
        yield InfoMetricFamily(
            "myriad_run", "Name and device of the run.", {key: str(value) for key, value in facts.items()}
        )
        yield _gauge("myriad_ranks", "Number of ranks.", start.get("world"))
        yield _gauge("myriad_parameters", "Number of parameters of the model.", start.get("parameters"))
        peak = self._peaks.flops_per_second
        yield _gauge(
            "myriad_peak_flops_per_second", "Peak FLOP/s of all ranks, the reference of the MFU.", peak
        )
        yield _gauge(
            "myriad_run_over", "1 if the run has finished or was stopped, else 0.", float(self._over)
        )
        yield _counter("myriad_steps", "Steps done, including repeated ones.", self._steps)
        yield _counter("myriad_tokens", "Tokens of the steps done, including repeated ones.", self._tokens)
        if not self._last:
            return
        yield _gauge("myriad_step", "The newest step.", self._last["step"])
        yield _gauge("myriad_step_timestamp_seconds", "End of the newest step.", self._last.get("time"))
        for name, (key, documentation) in _OF_STEP.items():
            yield _gauge(name, documentation, self._last.get(key))
        if "noise_scale" in self._last:
            documentation = "Gradient noise scale, averaged over steps, in tokens."
            yield _gauge("myriad_noise_scale_tokens", documentation, self._last["noise_scale"])
        if "max_attention_logit" in self._last:
            documentation = "Largest attention score of the newest step."
            yield _gauge("myriad_max_attention_logit", documentation, self._last["max_attention_logit"])
        if "expert_load" in self._last:
            documentation = "Tokens of the busiest expert over those of the mean expert of its block."
            yield _gauge("myriad_expert_load_ratio", documentation, self._last["expert_load"])
        if "dropped_share" in self._last:
            documentation = "Share of the pairs of a token and one of its experts that were dropped."
            yield _gauge("myriad_dropped_tokens_ratio", documentation, self._last["dropped_share"])
        if "router_entropy" in self._last:
            documentation = "Mean entropy of routers' scores over that of equal scores."
            yield _gauge("myriad_router_entropy_ratio", documentation, self._last["router_entropy"])
        if norms := self._layer_norms:
            documentation = "Newest L2 norms of each layer: gradient, parameter, update."
            gauge = GaugeMetricFamily("myriad_layer_norm", documentation, labels=["of", "layer"])
            for of, layers in norms.items():
                for layer, norm in list(layers.items())[:_MOST_LAYERS]:
                    gauge.add_metric([of[:64], layer[:64]], _number(norm, math.nan))
            yield gauge
        if own := self._last.get("user"):
            gauge = GaugeMetricFamily(
                "myriad_user", "Values of myriad.log in the newest step.", labels=["name"]
            )
            for name, value in list(own.items())[:_MOST_LABELS]:
                gauge.add_metric([name[:64]], _number(value, math.nan))
            yield gauge
        if "loss_scale" in self._last:
            yield _gauge(
                "myriad_loss_scale", "Loss scale of the newest step, in float16.", self._last["loss_scale"]
            )
            yield _counter(
                "myriad_overflows", "Steps skipped because gradients overflowed float16.", self._overflows
            )
        documentation = "Model FLOP/s of the newest step, as a share of the peak."
        yield _gauge("myriad_mfu_ratio", documentation, self._peaks.mfu(self._last))

    def _of_events(self) -> Iterator[Metric]:
        for event, (name, label, documentation) in _COUNTED.items():
            family = CounterMetricFamily(name, documentation, labels=[label])
            for value, count in sorted(self._event_counts[event].items()):
                family.add_metric([value], count)
            yield family
        yield _counter("myriad_restarts", "Attempts after the first.", self._restarts)
        if (validation := self._newest.get("validation")) is not None:
            yield _gauge("myriad_validation_loss", "Newest validation loss.", validation.get("loss"))
            if "ema_loss" in validation:
                documentation = "Newest validation loss of the moving average of the parameters."
                yield _gauge("myriad_validation_ema_loss", documentation, validation["ema_loss"])
        if self._validation_sets:
            documentation = "Newest loss of each validation set."
            losses = GaugeMetricFamily("myriad_validation_set_loss", documentation, labels=["set"])
            for name, found in sorted(self._validation_sets.items()):
                if isinstance(loss := found.get("loss"), float):
                    losses.add_metric([name], loss)
            yield losses
        if (evaluation := self._newest.get("evaluation")) is not None:
            scores = GaugeMetricFamily("myriad_evaluation_score", "Newest scores on tasks.", labels=["score"])
            for name, value in list(evaluation.get("scores", {}).items())[:_MOST_LABELS]:
                scores.add_metric([name[:64]], _number(value))
            yield scores
        if (check := self._newest.get("check")) is not None:
            text = "Share of this attempt's time spent on checks of ranks."
            yield _gauge("myriad_check_ratio", text, check.get("ratio"))
            failed = check.get("failed")
            num_failed = len(failed) if isinstance(failed, list) else 0
            yield _gauge(
                "myriad_failed_checks", "Kinds of checks that have failed in this attempt.", num_failed
            )
        if (saved := self._newest.get("checkpoint")) is not None:
            yield _gauge("myriad_checkpoint_step", "Step of the newest stored checkpoint.", saved.get("step"))
            documentation = "Time at which the newest checkpoint was complete."
            yield _gauge("myriad_checkpoint_timestamp_seconds", documentation, saved.get("time"))

    def _of_time(self) -> Iterator[Metric]:
        if self._account is None:
            return
        accounted = self._account()
        documentation = "Effective training time, as a share of the run time."
        yield _gauge("myriad_ettr_ratio", documentation, accounted.get("effective_ratio"))
        family = GaugeMetricFamily(
            "myriad_time_seconds", "Seconds of the run by class of the account.", labels=["class"]
        )
        for kind, seconds in accounted.get("classes", {}).items():
            family.add_metric([str(kind)], _number(seconds))
        yield family

    def _of_nodes(self) -> Iterator[Metric]:
        samples, now = self._nodes.newest(), time.time()
        age = GaugeMetricFamily(
            "myriad_node_heartbeat_age_seconds",
            "Seconds since the node agent last wrote its counters.",
            labels=["node"],
        )
        again = CounterMetricFamily(
            "myriad_node_tcp_retransmitted_segments",
            "TCP segments that the node retransmitted.",
            labels=["node"],
        )
        speed = GaugeMetricFamily(
            "myriad_node_network_speed_bytes",
            "Link speed in bytes per second, one way.",
            labels=["node", "device"],
        )
        links = {
            key: CounterMetricFamily(
                f"myriad_node_network_{name}",
                f"{name.replace('_', ' ')} of a link.",
                labels=["node", "device"],
            )
            for key, name in _OF_LINK.items()
        }
        for number, sample in samples.items():
            node = str(number)
            age.add_metric([node], max(0.0, now - sample.time))
            if "retransmitted_segments" in sample.tcp:
                again.add_metric([node], sample.tcp["retransmitted_segments"])
            for device, value in list(sample.speeds.items())[:_MOST_LABELS]:
                speed.add_metric([node, device], value)
            for device, numbers in list(sample.links.items())[:_MOST_LABELS]:
                for key, count in numbers.items():
                    if key in links:
                        links[key].add_metric([node, device], count)
        yield from (age, again, speed, *links.values())


_OF_GPUS: dict[str, tuple[str, Callable[[GpuSample], float | None]]] = {
    "myriad_node_gpus": ("Devices that respond.", lambda sample: sample.count),
    "myriad_node_gpu_highest_celsius": (
        "Temperature of the hottest device.",
        lambda sample: sample.hottest_celsius,
    ),
    "myriad_node_gpu_power_watts": ("Power of all devices.", lambda sample: sample.power_watts),
    "myriad_node_gpu_lowest_clock_ratio": (
        "Clock by its maximum, of the device where it is lowest among those that compute.",
        lambda sample: sample.lowest_clock_ratio,
    ),
    "myriad_node_gpu_narrow_links": (
        "Devices that compute on fewer PCIe lanes than they could.",
        lambda sample: sample.narrow_links,
    ),
    "myriad_node_gpu_retired_pages": (
        "Memory pages retired or rows remapped, of all devices.",
        lambda sample: sample.retired,
    ),
}


def _of_gpus(samples: Mapping[int, GpuSample]) -> Iterator[Metric]:
    if not samples:
        return
    for name, (text, value_of) in _OF_GPUS.items():
        family = GaugeMetricFamily(name, text, labels=["node"])
        for node, sample in samples.items():
            if (value := value_of(sample)) is not None:
                family.add_metric([str(node)], value)
        yield family
    text = "Devices whose clock is lowered, by the reason."
    throttled = GaugeMetricFamily("myriad_node_gpu_throttled", text, labels=["node", "reason"])
    for node, sample in samples.items():
        for reason, count in sample.throttled.items():
            throttled.add_metric([str(node), reason], count)
    yield throttled


def _of_spans(spans: Spans) -> Iterator[Metric]:
    yield _counter("myriad_spans_dropped", "Lost spans.", spans.num_dropped())
    labels = ["node", "phase"]
    mean = GaugeMetricFamily(
        "myriad_node_phase_seconds", "Seconds of a phase per step, mean of the node's ranks.", labels=labels
    )
    most = GaugeMetricFamily(
        "myriad_node_phase_highest_seconds",
        "Seconds of a phase per step on the slowest rank of the node.",
        labels=labels,
    )
    for node, phase, seconds, highest in spans.node_phase_seconds():
        mean.add_metric([str(node), phase], seconds)
        most.add_metric([str(node), phase], highest)
    yield from (mean, most)


def _gauge(name: str, documentation: str, value: Any) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, documentation, value=_number(value, math.nan))


def _counter(name: str, documentation: str, value: float) -> CounterMetricFamily:
    return CounterMetricFamily(name, documentation, value=value)


def _number(value: Any, otherwise: float = 0.0) -> float:
    """Return a value from a file as a number, or ``otherwise`` if it is none."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and abs(value) < 1e300 else otherwise


class RunMetrics:
    """Produces the answer to /metrics for one run."""

    def __init__(self, run: Run, account: Account | None = None, spans: Spans | None = None) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(RunCollector(run, account, spans))

    def text(self) -> bytes:
        """Return the metrics in Prometheus's text format, `CONTENT_TYPE`. It is not thread-safe."""
        return generate_latest(self._registry)
