"""Prove from a run's own record that each planned sample was trained on exactly once.

Each line of ``metrics.jsonl`` has a digest of the samples and tokens that the replicas of that step computed:
hashes of their rows, summed over all of them (`myriad.data.windows.digest_rows`). The certificate reads the
corpora again, in the order that the job prescribes, and compares. The numbers of samples must follow each
other without a gap from the first step to the last, across restarts, other layouts and changes of the job.
Within an epoch the order of samples is a permutation, so that equal digests mean: each once.

A step that an attempt repeated counts as its last execution, which is the one that the weights have seen.
This module does not import torch.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from pydantic import ValidationError

from myriad.config import set_dotted
from myriad.data.bad_blocks import BlockGuard
from myriad.data.corpus import BatchReader, Corpora
from myriad.data.corpus_opening import open_corpora
from myriad.data.streaming.streamed_corpus import StreamPlace
from myriad.data.windows import BatchWords, digest_rows
from myriad.errors import BadInputError, MyriadError
from myriad.job import Job
from myriad.job.job_steps import JobSteps
from myriad.run import Run
from myriad.run.run_lines import EventLines, StepLines
from myriad.train.inputs import bad_blocks_of

__all__ = ["Certificate", "certify"]

Record = Mapping[str, Any]
_MOST_PROBLEMS = 20


@dataclass
class Certificate:
    """What the record of a run shows."""

    steps: int = 0
    """Steps in the record."""
    compared: int = 0
    """Steps whose tokens were read again and are those that the ranks computed."""
    samples: int = 0
    """Samples of all steps."""
    skipped: int = 0
    """Steps whose batch was read, and whose update was skipped."""
    problems: list[str] = field(default_factory=list)
    """What is missing, repeated or different, at most 20."""
    num_problems: int = 0

    def add_problem(self, text: str) -> None:
        """Count a problem, and keep its text if it is among the first 20."""
        self.num_problems += 1
        if len(self.problems) < _MOST_PROBLEMS:
            self.problems.append(text)

    @property
    def is_whole(self) -> bool:
        """Whether every planned sample was trained on once, as far as steps were compared."""
        return self.steps > 0 and not self.num_problems


class _Segment:
    """Steps with one job, and its corpora."""

    def __init__(self, run: Run, job: Job) -> None:
        self.job, self._run = job, run
        self._steps = JobSteps(job)
        self._readers: dict[int, tuple[BatchReader, int]] = {}

    @cached_property
    def _corpora(self) -> list[Corpora]:
        """The corpora of each phase."""
        blocks = bad_blocks_of(self._run, self.job)
        guard = BlockGuard(self.job.data.on_bad_block, self.job.data.max_bad_blocks, blocks)
        place = StreamPlace(self._run.streams_path, self.job.train.seed)
        return [
            open_corpora(phase.data, phase.model.sequence, guard=guard, streams=place)
            for phase in self._steps.phase_jobs
        ]

    @cached_property
    def content(self) -> str:
        """Identifier of the corpora's present content, as `myriad.train.inputs.JobInputs` has it."""
        return "+".join(dict.fromkeys(corpora.content for corpora in self._corpora))

    def batch(self, step: int) -> int:
        """Return the number of samples of a step, which counts from 0."""
        return self._steps.segment(step).global_batch

    def first_sample(self, step: int, tokens: int) -> int:
        """Return the first sample of a step, after which the run has taken ``tokens`` tokens. Without phases
        it follows from the tokens: a resume may have changed the batch."""
        if self._steps.is_constant:
            return tokens // self.job.model.sequence - self.batch(step)
        agrees = tokens == self._steps.tokens_before(step + 1)
        return self._steps.position.samples_before(step) if agrees else -1

    def _reader(self, step: int) -> tuple[BatchReader, int]:
        """Return the reader of a step's batch, and the words of a row."""
        index = self._steps.index(step)
        if index not in self._readers:
            segment = self._steps.segments[index]
            batch, corpora = segment.global_batch, self._corpora[segment.phase]
            window, start = self.job.model.window, self._steps.mixtures[segment.phase]
            reader = BatchReader(corpora, self.job.train.seed, batch, (batch,), 1, window, start)
            self._readers = {index: (reader, corpora.width)}
        return self._readers[index]

    def digest(self, step: int, first: int) -> str:
        """Return the digest of a step's batch, which begins with sample ``first``."""
        batch, documents = self.batch(step), self.job.data.documents
        reader, width = self._reader(step)
        rows = np.empty((batch, width), np.int32)
        reader.read(first, range(batch), rows)
        offsets = range(batch) if documents == "joined" else [BatchWords.read(row).offset for row in rows]
        return f"{digest_rows(rows, [first + offset for offset in offsets], documents):016x}"


class _Segments:
    """The job of each step: the present one without the changes that came later."""

    def __init__(self, run: Run) -> None:
        self._run = run
        events = EventLines(run.events_path).poll()
        # "content of data.corpus" is no key of the job
        self._changes = [
            event for event in events if event["event"] == "job_changed" and " " not in event.get("key", " ")
        ]
        self._contents = [event for event in events if event["event"] == "corpus"]
        self._made: dict[int, _Segment] = {}

    def of(self, line: Record) -> _Segment:
        """Return the segment of a step's line. Raises `BadInputError` if the record makes no job."""
        later = [event for event in self._changes if event.get("time", 0.0) > _time_of(line)]
        if len(later) not in self._made:
            tree = self._run.job().model_dump(mode="json")
            for event in reversed(later):
                set_dotted(tree, event["key"], event.get("before"))
            try:
                job = Job.model_validate(tree)
            except ValidationError as error:
                allowed = f"changes of the job that make one: {error.errors()[0]['msg']}"
                raise BadInputError("events", str(self._run.events_path), allowed) from None
            self._made[len(later)] = _Segment(self._run, job)
        return self._made[len(later)]

    def content(self, line: Record) -> str | None:
        """Return the content of the corpora that the step read; ``None`` if it is not recorded."""
        before = [event for event in self._contents if event.get("time", 0.0) <= _time_of(line)]
        return before[-1].get("content") if before else None


def _time_of(line: Record) -> float:
    """Return the end of a step; a line without a valid time counts as new."""
    time = line.get("time")
    return math.inf if time is None else float(time)


def certify(
    run: Run, every: int = 1, progress: Callable[[int, int], None] = lambda done, total: None
) -> Certificate:
    """Check the record of a run, and compare each ``every``-th step and the last one with the corpora.

    ``progress`` gets the steps done and all steps. Raises `BadInputError` if the run has no steps, or its
    record makes no job."""
    record = StepLines(run.metrics_path)
    record.poll()
    lines = [line for line in record.lines if line["step"] > 0]
    if not lines:
        raise BadInputError("run", str(run.path), "a run with steps in metrics.jsonl")
    found, segments, step = Certificate(steps=len(lines)), _Segments(run), 0
    for number, line in enumerate(lines):
        progress(number, len(lines))
        segment = segments.of(line)
        batch = segment.batch(line["step"] - 1)
        first = segment.first_sample(line["step"] - 1, int(line.get("tokens") or 0))
        if line["step"] != step + 1:
            found.add_problem(f"steps {step + 1} to {line['step'] - 1}: no lines in metrics.jsonl")
        elif first != found.samples:
            found.add_problem(f"step {step + 1}: begins at sample {first:,}, after {found.samples:,} samples")
        step, found.samples = line["step"], first + batch
        found.skipped += line.get("skipped") == 1
        if number % every == 0 or number + 1 == len(lines):
            _compare(line, segment, segments.content(line), first, found)
    return found


def _compare(line: Record, segment: _Segment, content: str | None, first: int, found: Certificate) -> None:
    step = line["step"]
    if not isinstance(digest := line.get("data_digest"), str):
        found.add_problem(f"step {step}: no digest; an earlier version trained it")
        return
    try:
        if content not in (None, segment.content):
            found.add_problem(f"step {step}: the corpus was replaced since")
        elif segment.digest(step - 1, first) != digest:
            found.add_problem(f"step {step}: the ranks computed other tokens than the job prescribes")
        else:
            found.compared += 1
    except MyriadError as error:
        found.add_problem(f"step {step}: {error}")
