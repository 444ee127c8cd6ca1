"""One scenario with one control at one level of the model: what came out, as a row of a table.

    flow     rates are max-min fair at once, as a perfect control would have them; no queues, no pauses
    fluid    queues, pauses and the control over time
    packet   each packet is an event

*Throughput*: bytes of all flows / time till the last is done. *Slowdown*: a flow's time / its time alone (as
in Homa, SIGCOMM 2018, and HPCC). *Fairness*: Jain's index of flows' mean rates (Jain, Chiu and Hawe, 1984),
from 1 / N to 1. A flow that is not done at the horizon counts as done there, so that its slowdown is a
lower bound; and how many those are is said.
"""

from dataclasses import dataclass

import numpy as np

from myriad.errors import BadInputError
from myriad.network.controls import Control
from myriad.network.fabric import Numbers
from myriad.network.fluid import simulate_fluid
from myriad.network.scenarios import Scenario, settings_for

__all__ = ["LEVELS", "Row", "jain", "measure"]

HORIZON = 20.0
"""Times what the flow level takes: then the simulation ends."""


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
    """Of samples in equal steps till the last flow is done: the deepest queue of a switch."""
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
        return _row(case, name, level, fair, fair, np.empty(0), None, horizon)
    settings = settings_for(control, case.fabric, case.paths)
    found = simulate_fluid(
        case.fabric, case.flows, case.paths, control, settings,
        horizon_seconds=horizon, start_packets=case.start_packets, seed=seed,
    )  # fmt: skip
    pause = float(found.pause_seconds.sum())
    return _row(case, name, level, found.finish_seconds, fair, found.queue_bytes, pause, horizon)


def _row(
    case: Scenario,
    name: str,
    level: str,
    finish: Numbers,
    fair: Numbers,
    queue: Numbers,
    pause: float | None,
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
        queue_median_bytes=float(np.median(queue)) if len(queue) else None,
        queue_p99_bytes=float(np.quantile(queue, 0.99)) if len(queue) else None,
        pause_seconds=pause,
        slowdown_median=float(np.median(slowdown)),
        slowdown_p99=float(np.quantile(slowdown, 0.99)),
        fairness=jain((case.flows.num_bytes / done)[equal]),
        num_unfinished=int(unfinished.sum()),
    )


LEVELS = ("flow", "fluid")
