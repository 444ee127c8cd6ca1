"""Loads of experts that a run measured, for `myriad plan` and `simulate` (``--expert-load-from RUN``).

``expert_loads`` in ``RUN/metrics.jsonl`` has the tokens of each expert over those of the mean expert of its
block, of some steps. Of ep ranks each holds E / ep consecutive experts, and all wait for the busiest:

    load of a rank in a block = mean of its experts'        E = 4, ep = 2      2.0 0.4 | 0.8 0.8
                                                                              1.2      | 0.8
    load of a step            = mean over blocks of the largest of a block

So each number of ranks has a distribution over steps. A plan counts its mean, which gives the mean time of a
step as long as seconds grow in proportion to tokens, and says what the 95th percentile would cost.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from myriad.comm.layout import Layout
from myriad.errors import BadInputError
from myriad.planner import LayoutCandidate
from myriad.units import format_number

if TYPE_CHECKING:
    from myriad.job import Job

__all__ = ["MeasuredLoads"]

_KEY = "--expert-load-from"
_HIGH = 95
"""Percentile of steps that is shown beside the mean."""


@dataclass(frozen=True, eq=False)
class MeasuredLoads:
    """The loads of all experts in some steps of a run."""

    run: str
    loads: npt.NDArray[np.float64]
    """Tokens of each expert over those of the mean expert, shape (steps, blocks, experts)."""
    most: float
    """Largest load that the model of the plan allows: experts may have a capacity."""

    @classmethod
    def read(cls, name: str, job: "Job", overrides: Sequence[str] = ()) -> "MeasuredLoads":
        """Read the loads of a run, given it or its name under runs/, for plans of ``job``. ``overrides``:
        keys of the command line, ``KEY=VALUE``. Raises `BadInputError`."""
        from myriad.run.run_folder import Run, existing_run

        model = job.model
        if model.experts is None:
            raise BadInputError(_KEY, name, "needs a job with model.experts")
        if any(one.startswith("layout.expert_load=") for one in overrides):
            raise BadInputError(_KEY, name, "without --layout.expert_load: both give the same value")
        run = Run(existing_run(name))
        try:
            lines = [line["expert_loads"] for line in run.read_metrics() if line.get("expert_loads")]
        except OSError as error:
            raise BadInputError(_KEY, name, f"metrics.jsonl cannot be read: {error.strerror}") from None
        if not lines:
            allowed = "a run with expert_loads in metrics.jsonl: telemetry.expert_loads_every above 0"
            raise BadInputError(_KEY, name, allowed)
        return cls(name, _table(name, lines, model.experts), max(1.0, model.largest_expert_load))

    def of_layout(self, layout: Layout) -> Layout:
        """Return the layout with the mean load of its ranks."""
        return layout.model_copy(update={"expert_load": self.mean(layout.ep)})

    def of_job(self, job: "Job") -> "Job":
        """Return a job whose ranks share experts, with the mean load. Raises `BadInputError`."""
        if job.layout.ep == 1:
            raise BadInputError(_KEY, self.run, "needs layout.ep above 1: each rank has all experts")
        return job.model_copy(update={"layout": self.of_layout(job.layout)})

    def of_candidate(self, candidate: LayoutCandidate) -> LayoutCandidate:
        """Return a layout of a plan with the mean load of its ranks."""
        return replace(candidate, layout=self.of_layout(candidate.layout))

    def of_steps(self, ep: int) -> npt.NDArray[np.float64]:
        """Return the load of the busiest of ``ep`` ranks that share experts, by step."""
        num_steps, num_blocks, _ = self.loads.shape
        ranks = self.loads.reshape(num_steps, num_blocks, ep, -1).mean(3)
        found: npt.NDArray[np.float64] = np.clip(ranks.max(2).mean(1), 1.0, min(float(ep), self.most))
        return found

    def mean(self, ep: int) -> float:
        """Return the mean over steps."""
        return float(self.of_steps(ep).mean())

    def high(self, ep: int) -> float:
        """Return the load that 95 % of the steps do not exceed."""
        return float(np.percentile(self.of_steps(ep), _HIGH))

    @property
    def by_ranks(self) -> dict[int, float]:
        """Mean load by every number of ranks that can share the experts."""
        experts = self.loads.shape[2]
        return {ep: self.mean(ep) for ep in range(1, experts + 1) if experts % ep == 0}

    def note(self, ep: int, seconds: float, fit_probability: float) -> str:
        """Return a sentence about the loads of ``ep`` ranks. ``seconds``, ``fit_probability``: those of an
        iteration with the high load."""
        what = f"{_KEY} {self.run}: the busiest of {ep} ranks has {self.mean(ep):.2f} times the mean tokens"
        steps = f"{len(self.loads)} step{'s' * (len(self.loads) > 1)}"
        high = f"{_HIGH}% of {steps} at most {self.high(ep):.2f}"
        return f"{what}, {high}: then {format_number(seconds, 4)} s, and fits with {fit_probability:.0%}"

    def as_json(self, ep: int, seconds: float, fit_probability: float) -> dict[str, Any]:
        """Return plain values for ``--json``; the arguments are those of `note`."""
        return {
            "run": self.run,
            "steps": len(self.loads),
            "ep": ep,
            "mean": self.mean(ep),
            "p95": self.high(ep),
            "p95_seconds": seconds,
            "p95_fits_probability": fit_probability,
        }


def _table(name: str, lines: list[Mapping[str, list[float]]], experts: int) -> npt.NDArray[np.float64]:
    """Return the loads of all steps as one array. Raises `BadInputError` where a file has other ones."""
    blocks = {frozenset(line) for line in lines}
    sizes = {len(own) for line in lines for own in line.values()}
    if len(blocks) > 1:
        raise BadInputError(_KEY, name, "equal blocks in all steps of metrics.jsonl")
    if sizes != {experts}:
        found = ", ".join(map(str, sorted(sizes)))
        raise BadInputError(
            _KEY, name, f"a run with {experts} experts in each block, as the job; not {found}"
        )
    try:
        table = np.array([[line[block] for block in line] for line in lines], dtype=np.float64)
    except (TypeError, ValueError):
        table = np.full((1, 1, 1), np.nan)
    if not (np.isfinite(table).all() and (table >= 0).all()):
        raise BadInputError(_KEY, name, "finite expert_loads of at least 0 in metrics.jsonl")
    return table
