"""If these fail, a person reads a file's keys instead of a sentence, or a strange line stops the page."""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import myriad
from myriad.dashboard.api.run_api import _event, grouped, validation_curves
from myriad.run.event_text import SENTENCES, event_text


def _events_written() -> Iterator[str]:
    """Names that stand in a call that adds an event, in a line of one, or in the driver's table of them."""
    for path in Path(myriad.__file__).parent.rglob("*.py"):
        if "dashboard" in path.parts or "cli" in path.parts:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                function = node.func
                called = getattr(function, "attr", getattr(function, "id", ""))
                texts = [one.value for one in node.args if isinstance(one, ast.Constant)]
                if called in ("append_event", "enter_event", "_event") and texts:
                    yield str(texts[0])
            if isinstance(node, ast.Dict):
                pairs = zip(node.keys, node.values, strict=True)
                named = {one.value: value for one, value in pairs if isinstance(one, ast.Constant)}
                if "time" in named and isinstance(name := named.get("event"), ast.Constant):
                    yield str(name.value)


def test_each_event_that_is_written_anywhere_has_a_sentence() -> None:
    written = set(_events_written())
    assert {"fault", "held", "retry", "telemetry", "job_changed", "start_over", "takeover"} <= written
    assert written - SENTENCES.keys() == set()


@pytest.mark.parametrize(
    ("event", "text"),
    [
        (
            {"event": "job_changed", "key": "optimizer.learning_rate", "before": 0.0025, "after": 0.0005},
            "optimizer.learning_rate was 0.0025, is 0.0005",
        ),
        ({"event": "start_over", "steps_done": 120}, "training begins at step 1 again; 120 steps"),
        (
            {
                "event": "held",
                "problem": "No space left on device",
                "servers": [{"node": 0, "host": "gpu-7", "pid": 12}],
            },
            "this step is in memory only on gpu-7 (process 12); No space left on device; `myriad",
        ),
        (
            {"event": "retry", "problem": "No space left on device", "seconds": 20.0},
            "this step is in memory only; storing it is retried for 20.0 s: No space left",
        ),
        (
            {"event": "telemetry", "place": "metrics.jsonl", "problem": "No space left on device"},
            "metrics.jsonl cannot be written: No space left on device; its lines wait in memory",
        ),
        (
            {"event": "telemetry", "place": "metrics.jsonl", "num_late": 1600, "num_dropped": 3},
            "metrics.jsonl is written again: 1,600 lines late, 3 lines lost",
        ),
        (
            {"event": "telemetry", "place": "http://h/api/spans", "node": 3, "problem": "", "num_dropped": 9},
            "spans of node 3 to http://h/api/spans: written again; 9 spans are lost",
        ),
        (
            {"event": "overflow", "loss_scale": 65536.0, "next_loss_scale": 32768.0},
            "gradients overflow float16 at the loss scale 65,536: the step is skipped, and the",
        ),
        ({"event": "health", "what": "link", "problem": "eth0 is down"}, "link: eth0 is down"),
        ({"event": "checkpoint", "seconds": 0.1044724, "bytes": 8848056}, "stored in 0.1 s, 8.4 MiB"),
        (
            {"event": "start", "world": 2, "device": "c", "peak_flops": 52106108498, "peak_source": "tried"},
            "2 ranks on c, peak 52.1 GFLOP/s (tried)",
        ),
        ({"event": "fault", "problem": "a\nb", "failures": 3, "alarm": True}, "ALARM: a (3 in a row)"),
        ({"event": "of a later version", "why": 1e22}, "why 1.00 x 10^22"),
        ({"event": "fault", "problem": "\x1b[31mred \u202eback"}, "[31mred back"),
    ],
)  # fmt: skip
def test_an_event_is_a_sentence(event: dict[str, Any], text: str) -> None:
    assert event_text(event).startswith(text)


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
_KEYS = st.sampled_from(
    ["servers", "seconds", "step", "rank", "node", "differs", "problem", "before", "bytes", "tensors",
     "ranks", "verdict", "epoch", "peak_flops", "set_aside", "shares", "time", "num_dropped", "failures"]
)  # fmt: skip


@given(st.sampled_from([*SENTENCES, "another"]), st.dictionaries(_KEYS, _VALUES))
def test_a_line_with_any_values_has_a_text_of_one_line(name: str, fields: dict[str, Any]) -> None:
    found = _event({**fields, "event": name}, 0)
    assert "\n" not in found["text"] and len(found["text"]) <= 300
    assert all(found[key] is None or found[key] >= 0 for key in ("step", "rank", "node"))


def test_events_that_repeat_are_one_line() -> None:
    def at(time: float, event: str = "diagnosis", rank: int = 1) -> dict[str, Any]:
        return _event({"event": event, "time": time, "rank": rank, "problem": f"slow at {time}"}, 0)

    found = grouped(
        [at(0), at(60, "checkpoint"), at(100), at(150, rank=2), at(300), at(5000), at(5001, "fault")]
    )
    told = [
        (one["event"], one["rank"], one["time"], one.get("times", 1), one.get("seconds")) for one in found
    ]
    assert told == [
        ("checkpoint", 1, 60, 1, None),
        ("diagnosis", 2, 150, 1, None),
        ("diagnosis", 1, 300, 3, 300),
        ("diagnosis", 1, 5000, 1, None),
        ("fault", 1, 5001, 1, None),
    ]


def test_losses_of_validations_are_curves_and_repeated_steps_replace_the_earlier_ones() -> None:
    def at(step: int, **fields: Any) -> dict[str, Any]:
        return {"event": "validation", "step": step} | fields

    events = [
        at(10, loss=3.0, ema_loss=3.1),
        at(20, loss=2.0),
        at(20, event="validation_set", name="code", loss=1.5),
    ]
    events += [at(10, loss=2.9), at(30, loss=None)]
    assert validation_curves(events) == [
        {"name": "validation", "step": [10], "value": [2.9]},
        {"name": "moving average", "step": [10], "value": [3.1]},
        {"name": "code", "step": [20], "value": [1.5]},
    ]
