"""One scenario with one control at one level of the model: what came out, as a row of a table.

    flow     rates are max-min fair at once, as a perfect control would have them; no queues, no pauses
    fluid    queues, pauses and the control over time
    packet   each packet is an event

*Throughput*: bytes of all flows / time till the last is done. *Slowdown*: a flow's time / its time alone (as
in Homa, SIGCOMM 2018, and HPCC). *Fairness*: Jain's index of flows' mean rates (Jain, Chiu and Hawe, 1984),
from 1 / N to 1. A flow that is not done at the horizon counts as done there, so that its slowdown is a
lower bound; and how many those are is said.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from myriad.errors import BadInputError
from myriad.network.controls import Control
from myriad.network.fabric import Numbers
from myriad.network.scenarios import Scenario, settings_for

__all__ = ["LEVELS", "Row", "jain", "measure"]

HORIZON = 20.0
"""Times what the flow level takes: then the simulation ends."""
MOST_PACKET_HOSTS = 256


@dataclass(frozen=True)
class Row:
    """What one control did in one scenario."""

    scenario: str
    title: str
    control: str
    level: str
    seconds: float
    """Till the last flow was done."""
    bytes_per_second: float
    throughput_ratio: float
    """Of what fair shares give."""
    queue_median_bytes: float | None
    queue_p99_bytes: float | None
    """Over time till the last flow is done: the deepest queue of a switch (packet level: of the link whose
    queue is the deepest by this measure)."""
    pause_seconds: float | None
    """All links together."""
    slowdown_median: float
    slowdown_p99: float
    """Of the flows that are watched."""
    fairness: float | None
    """Of equal flows; of the victim scenario's incast."""
    num_unfinished: int


def jain(rates: Numbers) -> float:
    """(sum of x)^2 / (N x sum of x^2)."""
    return float(rates.sum() ** 2 / (len(rates) * np.square(rates).sum()))


def measure(case: Scenario, name: str, control: Control, level: str, *, seed: int = 0) -> Row:
    """Runs it. Raises `BadInputError`."""
    if level not in LEVELS:
        raise BadInputError("level", level, "one of " + ", ".join(LEVELS))
    fair = case.fair_seconds()
    horizon = HORIZON * float(fair.max())
    if level == "flow":
        return _row(case, "max-min fair", level, fair, fair, (None, None, None), horizon)
    finish, median, p99, pause = _RUN[level](case, control, horizon, seed)
    return _row(case, name, level, finish, fair, (median, p99, pause), horizon)


_Found = tuple[Numbers, float, float, float]
"""When flows were done; the deepest queue, median and p99 over time; pauses."""


def _fluid(case: Scenario, control: Control, horizon: float, seed: int) -> _Found:
    from myriad.network.fluid.engine import simulate_fluid

    found = simulate_fluid(
        case.fabric, case.flows, case.paths, control, settings_for(control, case.fabric, case.paths),
        horizon_seconds=horizon, start_packets=case.start_packets, seed=seed,
    )  # fmt: skip
    queue = found.queue_bytes
    median, p99 = (float(np.quantile(queue, share)) for share in (0.5, 0.99))
    return found.finish_seconds, median, p99, float(found.pause_seconds.sum())


def _packet(case: Scenario, control: Control, horizon: float, seed: int) -> _Found:
    from myriad.network.packets.engine import simulate_packets

    if case.fabric.num_ports > MOST_PACKET_HOSTS:
        raise BadInputError(
            "hosts", case.fabric.num_ports, f"at most {MOST_PACKET_HOSTS} at the packet level"
        )
    found = simulate_packets(
        case.fabric, case.flows, case.paths, control, settings_for(control, case.fabric, case.paths),
        start_packets=case.start_packets, seed=seed, max_seconds=horizon,
    )  # fmt: skip
    switches = case.fabric.tier[case.fabric.source] > 0
    median, p99 = (float(q[switches].max()) for q in (found.queue_p50_bytes, found.queue_p99_bytes))
    return found.finish_seconds, median, p99, float(found.pause_seconds.sum())


_RUN: dict[str, Callable[[Scenario, Control, float, int], _Found]] = {"fluid": _fluid, "packet": _packet}
LEVELS = ("flow", *_RUN)


def _row(
    case: Scenario,
    name: str,
    level: str,
    finish: Numbers,
    fair: Numbers,
    queue: tuple[float | None, float | None, float | None],
    horizon: float,
) -> Row:
    unfinished = ~np.isfinite(finish)
    done = np.where(unfinished, horizon, finish)
    last = float(done.max())
    slowdown = (done / case.alone_seconds())[case.watched]
    equal = case.watched if case.watched.sum() > 1 else ~case.watched
    return Row(
        scenario=case.name,
        title=case.title,
        control=name,
        level=level,
        seconds=last,
        bytes_per_second=float(case.flows.num_bytes.sum()) / last,
        throughput_ratio=float(fair.max()) / last,
        queue_median_bytes=queue[0],
        queue_p99_bytes=queue[1],
        pause_seconds=queue[2],
        slowdown_median=float(np.median(slowdown)),
        slowdown_p99=float(np.quantile(slowdown, 0.99)),
        fairness=jain((case.flows.num_bytes / done)[equal]),
        num_unfinished=int(unfinished.sum()),
    )
