"""Describe a run's events, one sentence for each kind, for the web page, `myriad top` and alarms.

    {"event": "job_changed", "key": "optimizer.learning_rate", "before": 0.0025, "after": 0.0005, "step": 40}
        -> "optimizer.learning_rate was 0.0025, is 0.0005"

Lines may come from another version of Myriad, or from another program: every value may be missing or of any
type. An event without a sentence here is shown as its keys and values.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from myriad.system.jsonl import Record
from myriad.units import format_bytes, format_count, format_flops, format_number, format_seconds, time_unit

__all__ = ["SENTENCES", "event_text"]

_MOST_LETTERS = 300
_NOT_SHOWN = ("time", "event", "step", "evidence", "rule", "log", "late_seconds")
_LARGEST = 1e24
_CONTROLS = dict.fromkeys([*range(32), *range(127, 160), *range(0x202A, 0x202F), *range(0x2066, 0x206A)], " ")
"""Control characters of terminals, and those that change the direction of text."""


def event_text(event: Record) -> str:
    """Return a one-line description of an event, without its name and step."""
    sentence = SENTENCES.get(str(event.get("event")))
    text = sentence(event) if sentence else _problem(event)
    return _one_line(text or _pairs(event))


def _one_line(text: str) -> str:
    line = " ".join(text.translate(_CONTROLS).split())
    return line if len(line) <= _MOST_LETTERS else f"{line[: _MOST_LETTERS - 1]}…"


def _pairs(event: Record) -> str:
    return ", ".join(f"{key} {_value(value)}" for key, value in event.items() if key not in _NOT_SHOWN)


def _problem(event: Record) -> str:
    """Return the first line of the event's problem, without the path of the log."""
    return str(event.get("problem") or "").partition("\n")[0].partition(" (log:")[0]


def _figure(event: Record, key: str) -> float | None:
    value = event.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if abs(value) < _LARGEST else None


def _shown(event: Record, key: str, show: Callable[[float], str], before: str = "", after: str = "") -> str:
    value = _figure(event, key)
    return "" if value is None else f"{before}{show(value)}{after}"


def _value(value: object) -> str:
    if isinstance(value, float) and abs(value) < _LARGEST:
        return format_number(value)
    if value is None:
        return "none"
    return str(value)


def _joined(*parts: str, by: str = ", ") -> str:
    return by.join(part for part in parts if part)


def _named(event: Record, key: str) -> str:
    """Return the number of a node or rank with its name, such as "node 3"."""
    return _shown(event, key, lambda number: f"{number:.0f}", f"{key} ")


def _sequence(value: object) -> Sequence[Any]:
    return value if isinstance(value, list | tuple) else ()


def _start(event: Record) -> str:
    world, device = _figure(event, "world"), event.get("device")
    ranks = "" if world is None else f"{world:.0f} rank{'' if world == 1 else 's'}"
    where = _joined(ranks, str(device) if device else "", by=" on ")
    precision = str(event.get("precision") or "")
    parameters = _shown(event, "parameters", format_count, after=" parameters")
    resumed = _shown(event, "resumed_from", lambda step: f"resumes from step {step:,.0f}")
    return _joined(where, precision, parameters, _peak(event), resumed)


def _peak(event: Record) -> str:
    source, peak = event.get("peak_source"), _shown(event, "peak_flops", format_flops, "peak ")
    return f"{peak} ({source})" if peak and source else peak


def _resume(event: Record) -> str:
    source = event.get("source")
    return f"state loaded from {source}" + _shown(event, "seconds", format_seconds, " in ") if source else ""


def _job_changed(event: Record) -> str:
    user = event.get("user")
    by = f" (by {user})" if isinstance(user, str) and user else ""
    return f"{event.get('key')} was {_value(event.get('before'))}, is {_value(event.get('after'))}{by}"


def _phase(event: Record) -> str:
    changes = event.get("changes")
    items = changes.items() if isinstance(changes, Mapping) else ()
    texts = [f"{key} = {value if isinstance(value, str) else _changed(value)}" for key, value in items]
    return _joined(str(event.get("name") or ""), _joined(*texts), by=": ")


def _changed(value: object) -> str:
    if isinstance(value, list):  # a mixture
        parts = [one for one in value if isinstance(one, Mapping)]
        return "[" + _joined(*(f"{one.get('path')} {_value(one.get('weight'))}" for one in parts)) + "]"
    return _value(value)


def _overflow(event: Record) -> str:
    scale, after = (_figure(event, key) for key in ("loss_scale", "next_loss_scale"))
    if scale is None or after is None:
        return _problem(event)
    change = f"is lowered to {format_number(after, 4)}" if after < scale else "stays, as it is the smallest"
    at = f"at the loss scale {format_number(scale, 4)}"
    return f"gradients overflow float16 {at}: the step is skipped, and the scale {change}"


def _start_over(event: Record) -> str:
    done = _shown(event, "steps_done", lambda steps: f"; {steps:,.0f} steps were done before")
    return f"training begins at step 1 again{done}"


def _restart_from_scratch(event: Record) -> str:
    if _figure(event, "step") is not None:
        return "checkpoint.restart_from_scratch was not used: a checkpoint was loaded"
    return f"the next start may {'' if event.get('allowed') else 'not '}begin at step 1 again"


def _held(event: Record) -> str:
    servers = [one for one in _sequence(event.get("servers")) if isinstance(one, Mapping)]
    places = [f"{one.get('host')} (process {one.get('pid')})" for one in servers]
    where = f" on {', '.join(places)}" if places else ""
    return _joined(
        f"this step is in memory only{where}",
        _problem(event),
        "`myriad checkpoint save` stores it elsewhere",
        by="; ",
    )


def _retry(event: Record) -> str:
    seconds = _shown(event, "seconds", format_seconds, " for ")
    return _joined(f"this step is in memory only; storing it is retried{seconds}", _problem(event), by=": ")


def _telemetry(event: Record) -> str:
    place, problem, dropped = event.get("place"), _problem(event), _figure(event, "num_dropped")
    if "node" in event:
        what, state = f"spans of {_named(event, 'node') or 'a node'} to {place}", problem or "written again"
        return _joined(f"{what}: {state}", f"{dropped:,.0f} spans are lost" if dropped else "", by="; ")
    if problem:
        return f"{place} cannot be written: {problem}; its lines wait in memory"
    late = _shown(event, "num_late", lambda lines: f"{lines:,.0f} lines late")
    return f"{place} is written again: " + _joined(late, f"{dropped:,.0f} lines lost" if dropped else "")


def _health(event: Record) -> str:
    return _joined(str(event.get("what") or ""), _problem(event), by=": ")


def _fault(event: Record) -> str:
    failures, alarm = _figure(event, "failures"), "ALARM: " if event.get("alarm") else ""
    again = f" ({failures:.0f} in a row)" if failures is not None and failures > 1 else ""
    aside = ", ".join(map(str, _sequence(event.get("set_aside"))))
    text = f"{alarm}{_problem(event)}{again}" if event.get("problem") else ""
    return _joined(text, f"set aside: {aside}" if aside else "", by="; ")


def _checkpoint(event: Record) -> str:
    stored = _shown(event, "seconds", format_seconds, "stored in ")
    return _joined(stored or "stored", _shown(event, "bytes", format_bytes))


def _validation(event: Record) -> str:
    return _joined(
        _shown(event, "loss", lambda loss: f"{loss:.4f}", "loss ") or "loss NaN",
        _shown(event, "bits_per_byte", lambda bits: f"{bits:.3f}", after=" bits per byte"),
        _shown(event, "ema_loss", lambda loss: f"{loss:.4f}", "loss of the moving average "),
        _shown(event, "seconds", format_seconds, "in "),
    )


def _evaluation(event: Record) -> str:
    scores = event.get("scores")
    items = scores.items() if isinstance(scores, Mapping) else ()
    found = [
        _shown({name: value}, name, lambda one: format_number(one, 4), f"{name} ") for name, value in items
    ]
    return _joined(*found, _shown(event, "seconds", format_seconds, "in "))


def _check(event: Record) -> str:
    failed = event.get("failed")
    found = "wrong values in " + ", ".join(map(str, failed)) if isinstance(failed, list) else "right"
    cost = _shown(event, "ratio", lambda ratio: f"{ratio:.3%} of the time")
    return _joined(f"active checks: {found}", _shown(event, "seconds", _short_time, "in "), cost)


def _short_time(seconds: float) -> str:
    """Return a time that may be less than a second: ``4.9 ms``."""
    if seconds >= 1:
        return format_seconds(seconds)
    unit, size = time_unit(seconds)
    return f"{format_number(seconds / size)} {unit}"


def _diagnosis(event: Record) -> str:
    verdict, cause, problem = event.get("verdict"), event.get("cause"), _problem(event)
    if verdict is not None:
        whose = _joined(_named(event, "rank"), _named(event, "node"), by=" on ") or "the fault"
        return _joined(f"{whose} is {verdict}", problem or str(cause or ""), by=": ")
    if not problem and (ranks := _sequence(event.get("ranks"))):
        return f"stacks of ranks {', '.join(map(str, ranks))} are kept in their logs"
    return problem


def _layout(event: Record) -> str:
    shares, cut = _sequence(event.get("shares")), _sequence(event.get("partition"))
    return _joined(
        _shown(event, "dp", lambda dp: f"{dp:.0f} replica{'' if dp == 1 else 's'}"),
        f"shares {', '.join(map(str, shares))}" if shares else "",
        f"layers cut at {', '.join(map(str, cut))}" if cut else "",
    )


def _restart(event: Record) -> str:
    attempt = _shown(event, "epoch", lambda epoch: f"attempt {epoch:.0f} begins") or "another attempt begins"
    return _joined(attempt, _layout(event), by=" with ")


def _move(event: Record) -> str:
    node = _named(event, "node")
    return _joined(f"{node} gives way to another" if node else "", _layout(event)) or "ranks start again"


def _eviction(event: Record) -> str:
    machine, accused = event.get("machine"), event.get("accused")
    node = f"{_named(event, 'node') or 'a node'}{f' ({machine})' if machine else ''}"
    return f"{node} leaves the run" + (f": {accused}" if accused else "")


def _machine(event: Record) -> str:
    return _joined(str(event.get("machine") or ""), _problem(event), by=": ")


def _spares(event: Record) -> str:
    return _shown(event, "nodes", lambda nodes: f"{nodes:.0f} spare node{'' if nodes == 1 else 's'}")


def _takeover(event: Record) -> str:
    before = event.get("before")
    return f"{event.get('driver')} drives the run" + (f"; before it did {before}" if before else "")


def _taken_over(event: Record) -> str:
    whose = f"{event.get('url')} was of the run {event.get('run')}, which cannot be found from here"
    return f"{whose}; this run stores there from now on"


def _older_state(event: Record) -> str:
    newer = _shown(event, "newer_step", lambda step: f"; step {step:,.0f} is in {event.get('url')}")
    return f"an older state was loaded{newer} (--checkpoint.url)"


def _prediction_layers(number: float) -> str:
    return f"{number:,.0f} prediction layer{'' if number == 1 else 's'}"


def _weights(event: Record) -> str:
    differs = event.get("differs")
    items = differs.items() if isinstance(differs, Mapping) else ()
    pairs = [(key, pair) for key, pair in items if len(_sequence(pair)) == 2]
    changes = [f"{key} was {_value(pair[0])}, is {_value(pair[1])}" for key, pair in pairs]
    counts = (
        _shown(event, "drawn_prediction_layers", _prediction_layers, after=" drawn by train.seed"),
        _shown(event, "unused_prediction_layers", _prediction_layers, after=" left out"),
    )
    return _joined(f"weights from {event.get('source')}", *counts, *changes, by="; ")


def _import(event: Record) -> str:
    return _shown(event, "tensors", lambda number: f"{number:,.0f} tensors") + f" from {event.get('source')}"


def _corpus(event: Record) -> str:
    tokens = _shown(event, "tokens", format_count, after=" tokens")
    windows = _shown(event, "windows", format_count, after=" packed windows")
    padding = _shown(event, "padding", format_count, after=" positions of padding")
    split = _shown(event, "split_documents", format_count, after=" documents split")
    files = _shown(event, "files", format_count, after=" files streamed")
    size = _shown(event, "bytes", format_bytes)
    return _joined(tokens, files, size, windows, padding, split, f"fingerprint {event.get('fingerprint')}")


def _sample(event: Record) -> str:
    return f"{event.get('prompt')} … {event.get('text')}"


def _tensor_overlap(event: Record) -> str:
    seconds = event.get("seconds")
    items = seconds.items() if isinstance(seconds, Mapping) else ()
    timed = [_shown({key: own}, key, lambda one: f"{1e3 * one:.1f} ms", f"{key} ") for key, own in items]
    chosen = f"overlap.tensor = auto: {event.get('tensor')}"
    return _joined(chosen, _joined(*timed), _problem(event), by="; ")


def _trace(event: Record) -> str:
    ranks, what = event.get("ranks"), event.get("what")
    files = _shown(event, "num_files", lambda number: f"{number:.0f} files")
    return _joined(f"{what} of ranks {ranks}", files, _problem(event))


def _drain(event: Record) -> str:
    return _problem(event) or f"{event.get('host')} is drained: no other job gets it"


def _requeue(event: Record) -> str:
    return _problem(event) or f"job {event.get('job')} is queued again, as {event.get('host')} was lost"


def _replace(event: Record) -> str:
    cordoned = "; its machine takes no other pod" if event.get("cordoned") else ""
    return f"pod {event.get('pod')} is replaced{cordoned}"


def _bad_block(event: Record) -> str:
    ending = "; samples in it are replaced" if event.get("action") == "skip" else ""
    return f"{_problem(event)}{ending}"


def _log_match(event: Record) -> str:
    count = _figure(event, "count")
    times = f" ({count:.0f} times)" if count is not None and count > 1 else ""
    ranks = _sequence(event.get("ranks"))
    where = f"ranks {', '.join(map(str, ranks))}" if ranks else _named(event, "rank")
    return f"{event.get('what')} in the log of {where or _named(event, 'node')}: {_problem(event)}{times}"


def _alert(event: Record) -> str:
    return _problem(event) or f"alarms to {event.get('sink')} are sent again"


SENTENCES: dict[str, Callable[[Record], str]] = {
    "alert": _alert,
    "bad_block": _bad_block,
    "bad_record": _problem,
    "check": _check,
    "checkpoint": _checkpoint,
    "corpus": _corpus,
    "diagnosis": _diagnosis,
    "drain": _drain,
    "evaluation": _evaluation,
    "eviction": _eviction,
    "failed": _problem,
    "fault": _fault,
    "finish": lambda event: "all steps are done",
    "health": _health,
    "held": _held,
    "import": _import,
    "interrupted": lambda event: "stopped by a person",
    "job_changed": _job_changed,
    "journal": _problem,
    "log_match": _log_match,
    "logger": _problem,
    "move": _move,
    "older_state": _older_state,
    "overflow": _overflow,
    "peak": _peak,
    "phase": _phase,
    "quarantine": _machine,
    "refusal": _machine,
    "replace": _replace,
    "requeue": _requeue,
    "reread": _problem,
    "restart": _restart,
    "restart_from_scratch": _restart_from_scratch,
    "resume": _resume,
    "retry": _retry,
    "sample": _sample,
    "skip": _problem,
    "spares": _spares,
    "spike": _problem,
    "start": _start,
    "start_over": _start_over,
    "superseded": _problem,
    "taken_over": _taken_over,
    "takeover": _takeover,
    "telemetry": _telemetry,
    "tensor_overlap": _tensor_overlap,
    "trace": _trace,
    "unsupervised": _problem,
    "validation": _validation,
    "validation_set": lambda event: _joined(str(event.get("name")), _validation(event)),
    "weights": _weights,
}
"""Functions that describe an event, by its name. If the text is empty, keys and values are shown."""
