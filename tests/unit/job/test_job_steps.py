"""If these fail, a step of a run with phases or a ramp takes other samples, or another rate, than it says."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from myriad.data.sampler import MixtureStart, Sampler
from myriad.errors import BadInputError
from myriad.job import Job, load_job
from myriad.job.job_steps import JobSteps

STEPS = 40
RAMP = ["train.batch_ramp.start=2", "train.batch_ramp.until_samples=64"]
PHASES = st.lists(
    st.fixed_dictionaries(
        {"step": st.integers(1, STEPS - 1), "by_tokens": st.booleans()},
        optional={
            "batch": st.integers(1, 6).map(lambda half: 2 * half),
            "sequence": st.sampled_from([16, 32]),
            "mixture": st.sampled_from([(("a", 1), ("b", 1)), (("b", 3),), (("c", 1), ("a", 2))]),
        },
    ),
    max_size=4,
    unique_by=lambda phase: phase["step"],
)


def job_of(drawn: list[dict[str, Any]], ramp: bool) -> tuple[Job, list[tuple[int, int, tuple[Any, ...]]]]:
    """The job, and the batch, sequence and mixture of each step, found one step after the other."""
    tables, expected = [], []
    begins = {phase["step"]: phase for phase in drawn}
    batch, sequence, mixture, target, samples, tokens = 8, 16, (("a", 1),), 8, 0, 0
    ramps = ramp
    for step in range(STEPS):
        if (phase := begins.get(step)) is not None:
            ramps = ramps and "batch" not in phase
            target, sequence = phase.get("batch", target), phase.get("sequence", sequence)
            mixture = phase.get("mixture", mixture)
            shares = ", ".join(f'{{path = "{path}", weight = {weight}}}' for path, weight in mixture)
            at = f"at_tokens = {tokens}" if phase["by_tokens"] else f"at_step = {step}"
            changes = f"data.mixture = [{shares}], model.sequence = {sequence}"
            size = f", train.global_batch = {target}" if "batch" in phase else ""
            tables.append(f"{{{at}, {changes}{size}}}")
        batch = min(8, 2 + 2 * (samples * 3 // 64)) if ramps else target  # as Megatron-LM counts
        expected.append((batch, sequence, mixture))
        samples, tokens = samples + batch, tokens + batch * sequence
    keys = [f"train.steps={STEPS}", "data.corpus=a", "model.sequence=16", "train.global_batch=8"]
    return load_job("tiny", [*keys, f"phases=[{', '.join(tables)}]", *(RAMP if ramp else [])]), expected


@settings(max_examples=60, deadline=None)
@given(PHASES, st.booleans())
def test_each_step_takes_the_samples_that_follow_and_no_corpus_repeats_or_skips_one(
    drawn: list[dict[str, Any]], ramp: bool
) -> None:
    """Phases by tokens begin with the step before which so many were taken. Within one epoch of a corpus at
    one sequence length, each sample comes once, in the order of a run that reads nothing else."""
    job, expected = job_of(sorted(drawn, key=lambda phase: phase["step"]), ramp)
    steps, samples, tokens = JobSteps(job), 0, 0
    seen: dict[tuple[str, int], list[int]] = {}
    for step, (batch, sequence, mixture) in enumerate(expected):
        now = steps.at(step)
        assert (now.train.global_batch, now.model.sequence) == (batch, sequence), step
        assert (steps.position.samples_before(step), steps.tokens_before(step)) == (samples, tokens), step
        weights = [weight for _, weight in mixture]
        start = steps.mixtures[steps.segment(step).phase]
        sampler = Sampler([1009] * len(weights), weights, 1, start)
        for corpus, position in sampler.samples(samples, samples + batch):
            seen.setdefault((mixture[corpus][0], sequence), []).append(position)
        samples, tokens = samples + batch, tokens + batch * sequence
    orders = [
        [
            sample.position
            for sample in Sampler([1009], [1], 1, MixtureStart(0, (0,), (stream,))).samples(0, 1009)
        ]
        for stream in range(len(seen))
    ]
    for positions in seen.values():
        assert positions in [order[: len(positions)] for order in orders], "one came twice, or was left out"


def test_a_phase_that_sets_a_key_of_the_schedule_begins_one_of_its_own() -> None:
    constant = ["optimizer.decay=constant", "optimizer.learning_rate=1e-3", "optimizer.warmup_steps=2"]
    anneal = '{at_step = 10, optimizer = {decay = "linear", final_learning_rate_ratio = 0}}'
    warm = "{at_step = 15, optimizer = {learning_rate = 4e-3, warmup_steps = 2}}"
    batch = "{at_step = 12, train.global_batch = 4}"
    steps = JobSteps(load_job("tiny", ["train.steps=20", *constant, f"phases=[{anneal}, {batch}, {warm}]"]))
    rates = [round(steps.learning_rate(step) * 1e3, 6) for step in range(20)]
    assert rates[:10] == [0.5, *[1] * 9]
    assert rates[10:15] == [1, 0.75, 0.5, 0.25, 0], "over the steps up to the next schedule"
    assert rates[15:] == [2, 4, pytest.approx(8 / 3), pytest.approx(4 / 3), 0], (
        "from the last rate, not again from 0"
    )


def test_steps_that_get_at_least_twice_the_tokens_are_known() -> None:
    phases = [
        "{at_step = 10, model.sequence = 64, train.global_batch = 8}",
        "{at_step = 20, train.global_batch = 12}",
        "{at_step = 30, train.global_batch = 48}",
    ]
    keys = [
        "model.sequence=16",
        "train.global_batch=16",
        f"train.steps={STEPS}",
        f"phases=[{', '.join(phases)}]",
    ]
    assert JobSteps(load_job("tiny", keys)).longer_steps == (11, 31)


def test_replicas_with_unequal_shares_divide_every_batch_in_about_that_ratio() -> None:
    """The driver moves micro-batches away from slow replicas, for the job's own batch."""
    keys = [
        "layout.dp=2",
        "layout.shares=[6, 2]",
        "train.steps=9",
        "phases=[{at_step = 5, train.global_batch = 5}]",
    ]
    steps = JobSteps(load_job("tiny", [*keys, "train.batch_ramp.start=2", "train.batch_ramp.until_steps=3"]))
    assert [steps.at(step).shares for step in (0, 1, 2, 3, 5)] == [(1, 1), (3, 1), (4, 2), (6, 2), (3, 2)]


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (
            ["phases=[{at_step = 3, train.seed = 3}]"],
            "phases.0.train.seed = 3: not a key that a phase can change: data.",
        ),
        (
            ["phases=[{at_step = 3, layout.tp = 2}]"],
            "phases.0.layout.tp = 2: not a key that a phase can change: data.",
        ),
        (
            ["phases=[{at_step = 3, optimizer.learning_rate = -1}]"],
            "phases.0.optimizer.learning_rate = -1: must be above",
        ),
        (
            ["phases=[{at_step = 3, at_tokens = 4, train.global_batch = 1}]"],
            "exactly one of at_step and at_tokens",
        ),
        (["phases=[{at_tokens = '2X', train.global_batch = 1}]"], "also with k, M, B or T"),
        (["phases=[{at_step = 3}]"], "changes at least one key"),
        (
            ["phases=[{at_step = 20, train.global_batch = 1}]"],
            "at most 19 steps: train.steps = 20 ends the run",
        ),
        (
            ["phases=[{at_step = 5, train.global_batch = 1}, {at_step = 5, train.global_batch = 2}]"],
            "after step 5",
        ),
        (
            ["layout.dp=2", "phases=[{at_step = 5, train.global_batch = 3}]"],
            "must be a multiple of layout.dp",
        ),
        (
            ["layout.tp=2", "phases=[{at_step = 5, model.sequence = 33}]"],
            "phases.0: layout.tp = 2: must divide",
        ),
        (
            ["model.position=learned", "phases=[{at_step = 5, model.sequence = 128}]"],
            "a learned one has a parameter",
        ),
        (
            ["train.memory_budget=400 MiB", "phases=[{at_step = 5, model.sequence = 65536}]"],
            "phases.0: train.memory_budget",
        ),
        (["train.cuda_graphs=true", *RAMP], "graphs are captured once"),
        (["train.batch_ramp.start=8", "train.batch_ramp.until_steps=9"], "below train.global_batch = 8"),
        (["train.batch_ramp.start=2"], "one of train.batch_ramp.until_samples, until_tokens and until_steps"),
        (
            [*RAMP, "train.batch_ramp.increment=4"],
            "must divide train.global_batch - train.batch_ramp.start = 6",
        ),
        (["train.batch_ramp.until_steps=3"], "needs train.batch_ramp.start"),
        (
            ["phases=[{at_step = 9, optimizer.warmup_steps = 12}]"],
            "at most 11, the steps of this learning-rate",
        ),
    ],
)
def test_phases_and_ramps_that_cannot_hold_are_refused(overrides: list[str], says: str) -> None:
    with pytest.raises(BadInputError) as refused:
        load_job("tiny", ["train.steps=20", *overrides])
    assert says in str(refused.value)


def test_a_phase_in_a_file_and_a_key_of_it_on_the_command_line(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text(
        'model = "tiny"\n[data]\nvocabulary = 300\n[[phases]]\nname = "anneal"\nat_tokens = "20k"\n'
        'optimizer.decay = "linear"\n'
    )
    job = load_job(str(path), ["phases.0.train.global_batch=4", "phases.0.at_tokens=30k"])
    assert JobSteps(job).segments[1].first_token >= 30_000
    assert job.phases[0].sections() == {"train": {"global_batch": 4}, "optimizer": {"decay": "linear"}}
