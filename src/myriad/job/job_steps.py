"""The values that hold at each step of a run: a pure function of (job, step).

    step     0 ........ 40 ........ 80 ................. 1000 ............ steps
    batch    8 |        16 |        32                   |  64              a ramp, then a phase
    phase    1                                           |  2 "anneal"
    segment  0 |        1  |        2                    |  3

A segment is a range of steps with one batch size, sequence, mixture and set of optimizer keys. Its first
step, samples and tokens follow from the segments before it, so nothing about phases is part of a checkpoint:
any layout, and a run that was killed at any step, finds the same values.

    at_step = N     after N steps: the first step of the phase is number N + 1 in metrics
    at_tokens = N   with the first step before which at least N tokens were taken
    batch ramp      stage k of n begins with the first step before which k / n of the ramp's length was
                    taken (Megatron-LM's --rampup-batch-size). A phase with train.global_batch ends the ramp.
    learning rate   a phase that sets a key of the schedule begins a schedule of its own. Each schedule
                    ends where the next one, or the end of the run, begins. The base's warm-up is not
                    repeated: a phase warms up only if it sets optimizer.warmup_steps, from the last rate.
    mixture         each corpus continues where earlier phases left it. Read at another sequence length it
                    is another list of windows, and begins its own first epoch.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Generic, TypeVar

from myriad.comm.layout import Layout
from myriad.data.sampler import BatchSize, DataPosition, MixtureStart, MixtureUse, mixture_starts
from myriad.errors import BadInputError, need
from myriad.job.job_values import JobValues
from myriad.job.phase_values import SCHEDULE_KEYS, BatchRamp, Phase
from myriad.optim.config import OptimizerConfig
from myriad.optim.schedule import learning_rate

__all__ = ["JobSteps", "StepSegment"]

AnyJob = TypeVar("AnyJob", bound=JobValues)


@dataclass(frozen=True)
class StepSegment:
    """Steps with the same values of all keys."""

    first_step: int
    first_sample: int
    """Samples that the steps before have taken."""
    first_token: int
    """Tokens that the steps before have taken, padding included."""
    phase: int
    """Number of the phase: 0 is the job as it begins."""
    global_batch: int
    sequence: int


@dataclass(frozen=True)
class _RateSchedule:
    """A learning-rate schedule, from a step to the next schedule."""

    first_step: int
    num_steps: int
    config: OptimizerConfig
    start: float
    """Rate of the last step before."""

    def rate(self, step: int) -> float:
        return learning_rate(self.config, step - self.first_step, self.num_steps, self.start)


class JobSteps(Generic[AnyJob]):
    """The values of a job at each of its steps. Raises `BadInputError` for phases that do not begin in order
    within the run."""

    def __init__(self, job: AnyJob) -> None:
        self.job = job
        self._phases = _phase_jobs(job)
        self.segments: tuple[StepSegment, ...] = tuple(_segments(job, self._phases))
        self._jobs: dict[int, AnyJob] = {}
        self._schedules = self._rate_schedules()
        sizes = (BatchSize(one.first_step, one.first_sample, one.global_batch) for one in self.segments)
        self.position = DataPosition(tuple(sizes))
        """The samples of each step."""
        self.mixtures = self._mixture_starts()
        """Where the mixture of each phase begins, in order; phase 0 is the job as it begins."""

    @property
    def is_constant(self) -> bool:
        """Whether no value changes during the run, but the learning rate by its schedule."""
        return len(self.segments) == 1

    def index(self, step: int) -> int:
        """Return the number of the segment of ``step``, which counts from 0."""
        return max(0, bisect_right(self.segments, step, key=lambda one: one.first_step) - 1)

    def segment(self, step: int) -> StepSegment:
        """Return the segment of ``step``, which counts from 0."""
        return self.segments[self.index(step)]

    def at(self, step: int) -> AnyJob:
        """Return the job with the values of ``step``, which counts from 0: without phases, and with the
        micro-batches of its own batch."""
        index = self.index(step)
        if index not in self._jobs:
            segment = self.segments[index]
            self._jobs[index] = _with_batch(self._phases[segment.phase], segment.global_batch)
        return self._jobs[index]

    def phase_at(self, step: int) -> AnyJob:
        """Return the job of the phase of ``step``, whose batch is the one that a ramp leads to. Validation
        uses it, so that a ramp does not change what is validated."""
        return self._phases[self.segment(step).phase]

    def first_step(self, phase: int) -> int:
        """Return the first step of a phase, counted from 0."""
        return next(one.first_step for one in self.segments if one.phase == phase)

    @property
    def phase_jobs(self) -> Sequence[AnyJob]:
        """The job of each phase; number 0 is the job as it begins, with the batch at the end of the ramp."""
        return self._phases

    def past(self, steps: int) -> list[tuple[object, ...]]:
        """Return what decides about the samples of the first ``steps`` steps."""
        return [
            (one.first_step, one.global_batch, *_mixture_use(self._phases[one.phase], one.first_sample))
            for one in self.segments
            if one.first_step < steps
        ]

    @property
    def most_micro_batches(self) -> int:
        """The largest number of micro-batches of any replica in any step."""
        return max(max(self.at(one.first_step).shares) for one in self.segments)

    @property
    def longer_steps(self) -> tuple[int, ...]:
        """The steps, counted from 1 as in metrics, that get at least twice the tokens of the step before."""
        tokens = [(one.first_step, one.global_batch * one.sequence) for one in self.segments]
        return tuple(step + 1 for (_, before), (step, after) in pairwise(tokens) if after >= 2 * before)

    def phase_name(self, phase: int) -> str:
        """Return the name of a phase: its own, or its number in the run, where the job begins with 1."""
        own = self.job.phases[phase - 1].name if phase else ""
        return own or f"phase {phase + 1}"

    def learning_rate(self, step: int) -> float:
        """Return the learning rate of ``step``, which counts from 0."""
        started = bisect_right(self._schedules, step, key=lambda one: one.first_step)
        return self._schedules[max(0, started - 1)].rate(step)

    def tokens_before(self, step: int) -> int:
        """Return the tokens that ``step`` steps have taken, padding included."""
        segment = self.segment(step)
        done = step - segment.first_step
        return segment.first_token + done * segment.global_batch * segment.sequence

    def _rate_schedules(self) -> list[_RateSchedule]:
        begins = {0: self.job.optimizer}
        for number, phase in enumerate(self.job.phases, 1):
            if phase.sets("optimizer", *SCHEDULE_KEYS):
                warmup = phase.optimizer.warmup_steps if phase.sets("optimizer", "warmup_steps") else 0
                own = self._phases[number].optimizer.model_copy(update={"warmup_steps": warmup})
                begins[self.first_step(number)] = own
        ends = [*list(begins)[1:], self.job.train.steps]
        found: list[_RateSchedule] = []
        for (first, config), end in zip(begins.items(), ends, strict=True):
            start = found[-1].rate(first - 1) if found else 0.0
            _check_warmup(
                config, end - first, "optimizer" if not found else f"phases: step {first}: optimizer"
            )
            found.append(_RateSchedule(first, end - first, config, start))
        return found

    def _mixture_starts(self) -> list[MixtureStart]:
        uses: list[MixtureUse] = []
        places = []
        for phase, job in enumerate(self._phases):
            segment = next(one for one in self.segments if one.phase == phase)
            use = _mixture_use(job, segment.first_sample)
            if not uses or uses[-1][1:] != use[1:]:
                uses.append(use)
            places.append(len(uses) - 1)
        starts = mixture_starts(uses)
        return [starts[place] for place in places]


def _check_warmup(config: OptimizerConfig, steps: int, section: str) -> None:
    if config.warmup_steps > steps:
        allowed = f"at most {steps}, the steps of this learning-rate schedule"
        raise BadInputError(f"{section}.warmup_steps", config.warmup_steps, allowed)


def _mixture_use(job: JobValues, first_sample: int) -> MixtureUse:
    data, sequence = job.data, job.model.sequence
    shares = [(one.path, one.weight) for one in data.mixture] or [(data.corpus, 1.0)]
    names = tuple(f"{sequence}:{path}" for path, _ in shares)
    return MixtureUse(first_sample, names, tuple(weight for _, weight in shares))


def _phase_jobs(job: AnyJob) -> list[AnyJob]:
    """Return the job without phases, and with the changes of the first phase, the first two, and so on."""
    if not job.phases and job.train.batch_ramp.start is None:
        return [job]
    train = job.train.model_copy(update={"batch_ramp": BatchRamp()})
    jobs = [job.model_copy(update={"phases": (), "train": train})]
    for phase in job.phases:
        jobs.append(_changed(jobs[-1], phase, job.layout))
    return jobs


def _changed(job: AnyJob, phase: Phase, layout: Layout) -> AnyJob:
    sections = phase.sections()
    data = sections.get("data", {})
    if "corpus" in data and "mixture" not in data:
        data["mixture"] = ()  # a mixture would hide the corpus
    update: dict[str, Any] = {
        section: getattr(job, section).model_copy(update=changes) for section, changes in sections.items()
    }
    made = job.model_copy(update={**update, "layout": layout})
    return _with_batch(made, made.train.global_batch)


def _with_batch(job: AnyJob, global_batch: int) -> AnyJob:
    """Return the job with another batch, which replicas with unequal shares divide in about their ratio."""
    layout = job.layout
    if layout.shares is not None and sum(layout.shares) * layout.micro_batch != global_batch:
        layout = layout.model_copy(update={"shares": _scaled(layout, layout.shares, global_batch)})
    elif job.train.global_batch == global_batch:
        return job
    train = job.train.model_copy(update={"global_batch": global_batch})
    return job.model_copy(update={"layout": layout, "train": train})


def _scaled(layout: Layout, shares: Sequence[int], global_batch: int) -> tuple[int, ...]:
    """Divide the micro-batches of a batch among replicas in the ratio of ``shares``, at least one each: the
    largest remainders are rounded up."""
    total, rest = divmod(global_batch, layout.micro_batch)
    if rest or total < len(shares):
        least = len(shares) * layout.micro_batch
        allowed = f"a multiple of layout.micro_batch = {layout.micro_batch}, and at least {least}"
        raise BadInputError("train.global_batch", global_batch, allowed)
    spare, whole = total - len(shares), sum(shares)
    found = [1 + spare * share // whole for share in shares]
    order = sorted(range(len(shares)), key=lambda one: (-(spare * shares[one] % whole), one))
    for replica in order[: total - sum(found)]:
        found[replica] += 1
    return tuple(found)


def _segments(job: JobValues, phases: Sequence[JobValues]) -> list[StepSegment]:
    """Return the segments of a run, in order."""
    ramp = _Ramp(job)
    found = [StepSegment(0, 0, 0, 0, ramp.batch(0, 0, 0), job.model.sequence)]
    while (after := _next(job, phases, ramp, found[-1])) is not None:
        found.append(after)
    if found[-1].phase < len(job.phases):
        _refuse_late(job, found[-1])
    return found


def _next(job: JobValues, phases: Sequence[JobValues], ramp: "_Ramp", now: StepSegment) -> StepSegment | None:
    """Return the segment after ``now``; ``None`` if it lasts to the end of the run."""
    each = now.global_batch * now.sequence
    phase_step = None
    if now.phase < len(job.phases):
        upcoming = job.phases[now.phase]
        phase_step = upcoming.at_step
        if upcoming.at_tokens is not None:
            phase_step = now.first_step - (now.first_token - upcoming.at_tokens) // each
        if phase_step is not None and phase_step <= now.first_step:
            key, value = _begin_of(upcoming)
            allowed = f"after step {now.first_step}, with which the phase before it begins"
            raise BadInputError(f"phases.{now.phase}.{key}", value, allowed)
    steps = [one for one in (phase_step, ramp.next_step(now)) if one is not None and one < job.train.steps]
    if not steps:
        return None
    step = min(steps)
    samples = now.first_sample + (step - now.first_step) * now.global_batch
    tokens = now.first_token + (step - now.first_step) * each
    phase = now.phase + (step == phase_step)
    batch = ramp.batch(step, samples, tokens) if phase < ramp.end_phase else None
    values = phases[phase]
    return StepSegment(
        step, samples, tokens, phase, batch or values.train.global_batch, values.model.sequence
    )


def _begin_of(phase: Phase) -> tuple[str, int | None]:
    """Return the key that says where a phase begins, and its value."""
    return ("at_step", phase.at_step) if phase.at_tokens is None else ("at_tokens", phase.at_tokens)


def _refuse_late(job: JobValues, last: StepSegment) -> None:
    """Raise `BadInputError` for the first phase that never begins. ``last``: the run's last segment."""
    key, value = _begin_of(job.phases[last.phase])
    steps = job.train.steps - 1
    tokens = last.first_token + (steps - last.first_step) * last.global_batch * last.sequence
    most = f"{steps} steps" if key == "at_step" else f"{tokens} tokens"
    allowed = f"at most {most}: train.steps = {job.train.steps} ends the run before"
    raise BadInputError(f"phases.{last.phase}.{key}", value, allowed)


class _Ramp:
    """The batch sizes of ``train.batch_ramp``. Raises `BadInputError` for one that does not lead to
    ``train.global_batch``."""

    def __init__(self, job: JobValues) -> None:
        ramp, self._target = job.train.batch_ramp, job.train.global_batch
        lengths = {"samples": ramp.until_samples, "tokens": ramp.until_tokens, "steps": ramp.until_steps}
        given = {unit: length for unit, length in lengths.items() if length is not None}
        self._unit, self._length = next(iter(given.items()), ("steps", 1))
        key = "train.batch_ramp"
        if ramp.start is None:
            others = {
                "increment": ramp.increment,
                **{f"until_{unit}": value for unit, value in given.items()},
            }
            for name, value in others.items():
                need(value is None, f"{key}.{name}", value, f"needs {key}.start")
        else:
            allowed = f"below train.global_batch = {self._target}"
            need(ramp.start < self._target, f"{key}.start", ramp.start, allowed)
            allowed = f"with one of {key}.until_samples, until_tokens and until_steps"
            need(len(given) == 1, f"{key}.start", ramp.start, allowed)
        self._start = self._target if ramp.start is None else ramp.start
        self._increment = ramp.increment or self._start
        self._num, rest = divmod(self._target - self._start, self._increment)
        allowed = f"must divide train.global_batch - {key}.start = {self._target - self._start}"
        need(rest == 0, f"{key}.increment", self._increment, allowed)
        sets_batch = [number for number, one in enumerate(job.phases, 1) if one.sets("train", "global_batch")]
        self.end_phase = min(sets_batch, default=len(job.phases) + 1)
        """The first phase with a batch of its own, which ends the ramp."""

    def batch(self, step: int, samples: int, tokens: int) -> int:
        """Return the batch of a step before ``end_phase``, by what was done before it."""
        done = {"samples": samples, "tokens": tokens, "steps": step}[self._unit]
        return self._start + self._increment * min(self._num, done * self._num // self._length)

    def next_step(self, now: StepSegment) -> int | None:
        """Return the first step of the stage after that of a segment; ``None`` if there is none."""
        if now.phase >= self.end_phase or now.global_batch == self._target:
            return None
        stage = (now.global_batch - self._start) // self._increment + 1
        threshold = -(-stage * self._length // self._num)
        each, done = {
            "samples": (now.global_batch, now.first_sample),
            "tokens": (now.global_batch * now.sequence, now.first_token),
            "steps": (1, now.first_step),
        }[self._unit]
        return now.first_step - (done - threshold) // each
