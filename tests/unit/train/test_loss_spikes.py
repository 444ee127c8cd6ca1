"""If these fail, a healthy run is reported to spike, or a step that ruins the weights is learned from."""

import math
import random
from dataclasses import replace
from typing import Any

import pytest

from myriad.errors import BadInputError, RunFailedError
from myriad.job import load_job
from myriad.parallel.optimizer_step import StepResult
from myriad.train.loss_spikes import SpikeDetector, SpikePolicy


def healthy(steps: int, seed: int = 1) -> list[tuple[float, float]]:
    """A loss that falls quickly at first, with the noise of batches; a norm that falls and jitters."""
    draw = random.Random(seed)
    return [
        (
            (3.0 + 7.0 * math.exp(-step / 30)) * draw.gauss(1.0, 0.01),
            (0.5 + 5.0 * math.exp(-step / 20)) * draw.lognormvariate(0.0, 0.12),
        )
        for step in range(steps)
    ]


@pytest.mark.parametrize("seed", range(5))
def test_no_step_of_a_healthy_run_is_a_spike_from_the_first_on(seed: int) -> None:
    spikes, found = SpikeDetector(), []
    for step in healthy(4000, seed):
        found.append(spikes.find(*step))
        spikes.add(*step)
    assert not any(found)


def test_a_warm_up_in_which_the_norm_rises_is_not_one() -> None:
    spikes = SpikeDetector()
    for step in range(500):
        seen = 8.0 - step / 100, 0.3 + step / 100
        assert spikes.find(*seen) is None
        spikes.add(*seen)


def test_a_norm_or_a_loss_far_above_those_before_is_one_whatever_came_before_it() -> None:
    spikes = SpikeDetector()
    assert spikes.find(9.0, 1000.0) is None, "nothing is known yet"
    for step in healthy(300):
        spikes.add(*step)
    for _ in range(40):  # as many as would hide the next ones from a mean
        spikes.add(3.0, 1000.0)
    said = spikes.find(3.0, 50.0)
    assert said is not None and said.startswith("gradient norm 50, the median of 128 steps is 0.5")
    assert (spikes.find(4.5, 0.5) or "").startswith("loss 4.5")
    assert spikes.find(3.1, 0.7) is None


class Ranks:
    """What an engine gives for each step, and what is written."""

    def __init__(self, policy: str) -> None:
        job = load_job("tiny")
        how = job.resilience.model_copy(update={"on_spike": policy})
        self.events: list[dict[str, Any]] = []
        self.watch = SpikePolicy(job.model_copy(update={"resilience": how}), self._tell)
        self.moved: list[int] = []
        self.step, self.times = 0, 0

    def _tell(self, event: str, **fields: Any) -> None:
        self.events.append({"event": event, **fields})

    def train(self, *norms: float) -> StepResult:
        """One step; a norm for each time it is computed."""
        self.step += 1
        given = iter(norms)

        def run() -> StepResult:
            self.times += 1
            result = StepResult(3.0, next(given), 0.0)
            if self.watch.refuses(result.loss, result.grad_norm):
                return replace(result, skipped=True)
            self.moved.append(self.step)
            return result

        return self.watch.review(self.step, run(), run)

    def begin(self) -> "Ranks":
        for step in range(50):
            self.train(1.0 + step % 3 / 100)
        return self


def test_with_report_a_spike_changes_nothing_and_a_lasting_one_is_reported_once() -> None:
    ranks = Ranks("report").begin()
    assert [ranks.train(100.0).skipped for _ in range(5)] == [False] * 5
    assert ranks.times == 55 and ranks.moved == list(range(1, 56))
    assert [(one["step"], one["grad_norm"]) for one in ranks.events] == [(51, 100.0)]
    ranks.train(1.0)
    ranks.train(100.0)
    assert [one["step"] for one in ranks.events] == [51, 57]


def test_gone_when_computed_again_it_was_chance_and_the_second_result_counts() -> None:
    ranks = Ranks("skip").begin()
    assert ranks.train(100.0, 1.01).grad_norm == 1.01
    assert ranks.moved[-1] == 51 and ranks.times == 52
    assert [one["verdict"] for one in ranks.events] == ["transient"]


def test_again_nothing_moves_in_that_step_and_training_continues() -> None:
    ranks = Ranks("skip").begin()
    assert ranks.train(100.0, 100.0).skipped
    ranks.train(1.0)
    assert ranks.moved[-2:] == [50, 52] and [one["verdict"] for one in ranks.events] == ["stays"]


def test_so_many_in_a_row_are_how_things_are_and_training_does_not_stand_still() -> None:
    ranks = Ranks("skip").begin()
    skipped = [ranks.train(5.0, 5.0).skipped for _ in range(40)]
    assert skipped == [True] * 16 + [False] * 24


@pytest.mark.parametrize("policy", ["report", "skip", "rollback"])
def test_an_overflow_of_the_loss_scale_is_no_spike_and_is_compared_with_nothing(policy: str) -> None:
    ranks = Ranks(policy).begin()
    overflow = StepResult(3.0, math.inf, 0.0, skipped=True, overflow=True)
    assert all(ranks.watch.review(step, overflow, lambda: overflow) is overflow for step in range(51, 91))
    assert not ranks.events
    ranks.train(1.0)
    assert ranks.moved[-1] == ranks.step, "the norms before are what they were"


def test_where_it_is_to_be_gone_back_before_all_ranks_end_with_the_reason() -> None:
    ranks = Ranks("rollback").begin()
    with pytest.raises(
        RunFailedError, match="step 51: the spike recurred when the step was recomputed: gradient norm 100"
    ):
        ranks.train(100.0, 100.0)
    assert ranks.moved[-1] == 50


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["resilience.on_spike=rollback"], "checkpoint.every x"),
        (["resilience.on_spike=rollback", "checkpoint.every=60", "checkpoint.keep=2"], "checkpoint.every x"),
        (["resilience.on_spike=skip", "layout.dp=2", "comm.sync_every=10"], "sync_every"),
        (["resilience.on_spike=often"], "on_spike"),
    ],
)
def test_what_cannot_be_done_is_refused_before_anything_starts(overrides: list[str], said: str) -> None:
    with pytest.raises(BadInputError, match=said):
        load_job("tiny", overrides)
    load_job("tiny", ["resilience.on_spike=rollback", "checkpoint.every=60", "checkpoint.keep=3"])
