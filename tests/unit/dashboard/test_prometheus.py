"""If these fail, Prometheus gets what it cannot read or too much of it, or an alert that can never fire."""

import json
import math
import re
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from myriad.dashboard.prometheus import RunMetrics
from myriad.run import Run
from myriad.system.jsonl import append_line
from myriad.telemetry.links.network_counters import LINK_FIELDS, RDMA_FIELDS, CounterFile, CounterSample

MONITORING = Path(__file__).parents[3] / "examples" / "monitoring"
PHASES = (
    "data",
    "forward",
    "backward",
    "receive wait",
    "gather",
    "reduce",
    "optimizer",
    "garbage collection",
)


class ManySpans:
    """Like a store of 12,288 ranks on 1,536 nodes."""

    def __init__(self, nodes: int) -> None:
        self._nodes = nodes

    def num_dropped(self) -> int:
        return 5

    def node_phase_seconds(self) -> Iterable[tuple[int, str, float, float]]:
        return ((node, phase, 1.0, 1.5) for node in range(self._nodes) for phase in PHASES)


def series(text: bytes) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """By name and labels."""
    return {
        (one.name, tuple(sorted(one.labels.items()))): one.value
        for family in text_string_to_metric_families(text.decode())
        for one in family.samples
    }


def add_sample(run: Run, node: int, received: int, at: float | None = None) -> None:
    values = tuple((dict.fromkeys(LINK_FIELDS, 2) | {"received_bytes": received}).values())
    port = tuple((dict.fromkeys(RDMA_FIELDS, 3) | {"received_bytes": 2 * received}).values())
    sample = CounterSample(time.time() if at is None else at, {"eth0": values}, (7, 0), {"mlx5_0:1": port})
    CounterFile(run.counters_path / f"node-{node}.jsonl", {"eth0": 1.25e9}).append([sample])


def step(run: Run, number: int, loss: float | None = 2.5, **fields: Any) -> None:
    line = {"time": 1e9 + number, "step": number, "loss": loss, "tokens": 512 * number, "step_seconds": 0.25}
    others = {"grad_norm": 1.0, "learning_rate": 1e-3, "mfu": 0.5, "memory_bytes": 100}
    run.append_metrics(line | others | fields | {"data_wait_seconds": 0.0, "exposed_comm_seconds": 0.01})


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """With something of everything."""
    run = Run(tmp_path / "my-run")
    run.path.mkdir()
    run.append_event("start", world=16, device="cuda", parameters=1000, peak_flops=1e15)
    for number in (1, 2, 3):
        step(run, number)
    run.append_event("fault", cause="hang", rank=3, problem="hung")
    run.append_event("fault", problem="a disk was full")
    run.append_event("restart", epoch=2)
    run.append_event("eviction", node=1, accused="hang")
    step(
        run,
        3,
        noise_scale=4096.0,
        expert_load=1.5,
        router_entropy=0.75,
        dropped_share=0.125,
        user={"mine": 0.5},
        layer_norms={"update": {"blocks.0": 0.5}},
    )
    run.append_event("validation", step=3, loss=2.25, ema_loss=2.125)
    run.append_event("validation_set", step=3, name="books", loss=1.25)
    run.append_event("evaluation", step=3, scores={"choice/acc": 0.75, "text/bits_per_byte": None})
    run.append_event("checkpoint", step=3)
    run.append_event("check", step=3, seconds=0.01, ratio=0.0004, checks=["product"], failed=["product"])
    add_sample(run, 0, 1000)
    add_sample(run, 1, 2000, time.time() - 90)
    hot = {"temperature_celsius": 88, "throttle": ["hardware thermal slowdown"], "utilization_ratio": 1.0}
    gpu = {"device": 0, "name": "H100", "sm_clock_mhz": 990, "max_sm_clock_mhz": 1980, "power_watts": 500.0}
    append_line(
        run.counters_path / "gpus-1.jsonl", {"time": time.time(), "gpus": [gpu | hot, {"retired": 2}]}
    )
    (run.counters_path / "gpus-2.jsonl").write_text('{"time": 1, "gpus": 3}\n')
    return run


def account() -> dict[str, object]:
    return {"effective_ratio": 0.75, "classes": {"training": 75.0, "restarting": 25.0}}


def test_a_report_covers_the_whole_run(run: Run) -> None:
    found = series(RunMetrics(run, account, ManySpans(2)).text())
    expected = {
        "myriad_ranks": 16.0,
        "myriad_step": 3.0,
        "myriad_step_seconds": 0.25,
        "myriad_loss": 2.5,
        "myriad_mfu_ratio": 0.5,
        "myriad_validation_loss": 2.25,
        "myriad_checkpoint_step": 3.0,
        "myriad_check_ratio": 0.0004,
        "myriad_failed_checks": 1.0,
        "myriad_restarts_total": 1.0,
        "myriad_ettr_ratio": 0.75,
        "myriad_spans_dropped_total": 5.0,
        "myriad_run_over": 0.0,
    }
    assert {name: found[name, ()] for name in expected} == expected
    assert (found["myriad_steps_total", ()], found["myriad_tokens_total", ()]) == (4, 4 * 512), "one again"
    assert found["myriad_validation_set_loss", (("set", "books"),)] == 1.25
    assert found["myriad_validation_ema_loss", ()] == 2.125
    assert found["myriad_noise_scale_tokens", ()] == 4096.0
    assert found["myriad_user", (("name", "mine"),)] == 0.5
    assert found["myriad_expert_load_ratio", ()] == 1.5
    assert found["myriad_router_entropy_ratio", ()] == 0.75
    assert found["myriad_dropped_tokens_ratio", ()] == 0.125
    assert found["myriad_layer_norm", (("layer", "blocks.0"), ("of", "update"))] == 0.5
    assert found["myriad_evaluation_score", (("score", "choice/acc"),)] == 0.75
    assert found["myriad_faults_total", (("cause", "hang"),)] == 1
    assert found["myriad_faults_total", (("cause", "storage"),)] == 1
    assert found["myriad_time_seconds", (("class", "restarting"),)] == 25
    assert found["myriad_run_info", (("device", "cuda"), ("name", "my-run"))] == 1
    assert 89 < found["myriad_node_heartbeat_age_seconds", (("node", "1"),)] < 100
    received = "myriad_node_network_receive_bytes_total"
    assert found[received, (("device", "eth0"), ("node", "1"))] == 2000
    assert found[received, (("device", "mlx5_0:1"), ("node", "0"))] == 2000
    assert found["myriad_node_phase_highest_seconds", (("node", "1"), ("phase", "forward"))] == 1.5
    node = (("node", "1"),)
    assert found["myriad_node_gpu_highest_celsius", node] == 88 and found["myriad_node_gpus", node] == 2
    assert found["myriad_node_gpu_lowest_clock_ratio", node] == 0.5
    assert found["myriad_node_gpu_retired_pages", node] == 2
    assert found["myriad_node_gpu_throttled", (*node, ("reason", "hardware thermal slowdown"))] == 1
    assert ("myriad_node_gpus", (("node", "2"),)) not in found, "its file is damaged"


def test_float16_has_its_loss_scale_and_a_count_of_overflows(run: Run) -> None:
    run.append_event("overflow", step=4, loss_scale=8192.0, next_loss_scale=4096.0)
    run.append_metrics({"step": 4, "loss": 2.0, "loss_scale": 8192.0, "skipped": 1, "overflow": 1})
    found = series(RunMetrics(run, account, ManySpans(2)).text())
    assert (found["myriad_loss_scale", ()], found["myriad_overflows_total", ()]) == (8192, 1)


def test_each_poll_returns_what_arrived_since_the_last(run: Run) -> None:
    metrics = RunMetrics(run)
    assert series(metrics.text())["myriad_steps_total", ()] == 4
    step(run, 4, loss=None)
    run.append_event("finish", step=4)
    add_sample(run, 0, 5000)
    found = series(metrics.text())
    assert (found["myriad_steps_total", ()], found["myriad_run_over", ()]) == (5, 1)
    assert math.isnan(found["myriad_loss", ()])
    assert found["myriad_node_network_receive_bytes_total", (("device", "eth0"), ("node", "0"))] == 5000


def test_files_that_are_wrong_take_nothing_else_with_them(run: Run) -> None:
    """Damaged, foreign, or made to fill Prometheus."""
    metrics = RunMetrics(run)
    metrics.text()
    append_line(run.metrics_path, {"step": "seven", "loss": []})
    append_line(run.metrics_path, {"step": 5, "loss": "high", "tokens": 10**400, "time": True})
    for number in range(1000):
        run.append_event("fault", cause=f'"}} myriad_evil{{a="\n{number}')
    for name, text in {
        "node-0.jsonl": "{}\n",
        "node-1.jsonl": "no json\n",
        "node-7.jsonl": '{"a":1}\n[]\n',
    }.items():
        (run.counters_path / name).write_text(text)
    (run.counters_path / "node-8.jsonl").symlink_to("/dev/zero")
    found = series(metrics.text())
    names = Counter(name for name, _ in found)
    assert names["myriad_faults_total"] <= 33 and not any("evil" in name for name in names)
    assert found["myriad_step", ()] == 5 and math.isnan(found["myriad_loss", ()])
    assert found["myriad_node_network_receive_bytes_total", (("device", "eth0"), ("node", "0"))] == 1000, (
        "as before"
    )
    assert sum(found[key] for key in found if key[0] == "myriad_faults_total") == 1002


def test_there_are_series_for_nodes_and_never_for_ranks(run: Run) -> None:
    nodes = 1536
    for node in range(nodes):
        add_sample(run, node, node)
    found = series(RunMetrics(run, account, ManySpans(nodes)).text())
    assert len(found) < 40 * nodes
    assert {label for _, labels in found for label, _ in labels} <= {
        *(
            "accused",
            "cause",
            "class",
            "device",
            "layer",
            "name",
            "node",
            "of",
            "phase",
            "reason",
            "score",
            "set",
        )
    }


def test_a_run_without_lines_yet_is_described_as_such(tmp_path: Path) -> None:
    found = series(RunMetrics(Run(tmp_path)).text())
    assert found["myriad_steps_total", ()] == 0 and math.isnan(found["myriad_ranks", ()])


def expressions() -> list[str]:
    rules = yaml.safe_load((MONITORING / "alerts.yaml").read_text())["groups"][0]["rules"]
    panels = json.loads((MONITORING / "grafana-dashboard.json").read_text())["panels"]
    return [rule["expr"] for rule in rules] + [
        target["expr"] for panel in panels for target in panel["targets"]
    ]


def test_rules_and_panels_use_what_there_is(run: Run) -> None:
    there = {name for name, _ in series(RunMetrics(run, account, ManySpans(2)).text())}
    used = {name for text in expressions() for name in re.findall(r"myriad_\w+", text)}
    assert used <= there and len(used) > 25
    phases = {name for text in expressions() for name in re.findall(r'phase=~?"([^"]+)"', text)}
    assert {phase for text in phases for phase in text.split("|")} <= set(PHASES)
