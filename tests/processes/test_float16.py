"""If these fail, ranks in float16 part: some skip a step that others take, or a killed run resumes with
another loss scale. What one process does in float16 is what every layout does."""

import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from parity_case import Case, batch_of_rank, gather_tensors, make_engine, run_case, train_steps
from ranks import reuse_ranks, run_ranks
from same_run import assert_same_run, train_rank
from test_recovery import events, make_run
from tiny_corpora import make_corpus

from myriad.checkpoint.storage.checkpoint_folder import CheckpointFolder
from myriad.comm.groups import close_world
from myriad.errors import RunFailedError
from myriad.job import load_job
from myriad.parallel.engine import Engine
from myriad.run import Run
from myriad.supervise.exit_causes import cause_of

STEPS, POISONED = 6, 3


def poison_once(engine: Engine) -> None:
    """Put an infinite gradient into this rank's next reduction."""
    chunk = engine.model.chunks[0]
    reduce = chunk.start_reduce

    def reducing() -> None:
        chunk.start_gradients()
        chunk.grad_buffer[3] = torch.inf
        chunk.start_reduce = reduce  # type: ignore[method-assign]
        reduce()

    chunk.start_reduce = reducing  # type: ignore[method-assign]


def values_of(engine: Engine) -> list[torch.Tensor]:
    return [part.values.clone() for part in engine.all_shards()]


def trains(case: Case, culprit: int) -> tuple[list[float], list[float], Any]:
    """Losses, loss scales after each step, and on rank 0 the parameters at the end."""
    engine = make_engine(case)
    assert engine.loss_scaler is not None
    losses, scales = [], []
    for step in range(case.steps):
        before = values_of(engine)
        if step == POISONED and int(os.environ["RANK"]) == culprit:
            poison_once(engine)
        ((loss, norm),) = train_steps(case, engine, step, step + 1)
        stayed = all(torch.equal(*pair) for pair in zip(before, values_of(engine), strict=True))
        assert stayed == (step == POISONED) == (not np.isfinite(norm)), f"step {step}"
        losses.append(loss)
        scales.append(engine.loss_scaler.scale)
    final = gather_tensors(engine)
    engine.close()
    close_world()
    return losses, scales, final


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    """One process, by optimizer."""
    found = {}
    for name in ("adamw", "lamb"):
        case = float16({}, name)
        (found[name],) = reuse_ranks(1, trains, case, 0)
    return found


def float16(layout: dict[str, Any], optimizer: str = "adamw") -> Case:
    scale = {"initial": 2.0**10, "growth_interval": 2}
    return Case(layout, optimizer={"name": optimizer}, steps=STEPS, dtype=torch.float16, loss_scale=scale)


@pytest.mark.parametrize(
    ("optimizer", "layout"),
    [
        ("lamb", {"dp": 2, "zero": 1}),
        ("adamw", {"dp": 2, "zero": 2, "reduce": "each"}),
        ("adamw", {"tp": 2, "dp": 2, "zero": 3, "micro_batch": 2, "recompute": "selective"}),
        ("adamw", {"pp": 2, "virtual_stages": 2, "schedule": "zero-bubble-v", "recompute": "full"}),
        ("lamb", {"dp": 2, "pp": 2, "zero": 0, "schedule": "zero-bubble"}),
    ],
    ids=str,
)
def test_all_ranks_skip_an_overflow_of_one_and_learn_what_one_process_does(
    optimizer: str, layout: dict[str, Any], alone: dict[str, Any]
) -> None:
    """Bounds are of rounding: layouts round sums of float16 products in other places."""
    case = float16(layout, optimizer)
    ranks = reuse_ranks(case.world, trains, case, case.world - 1)
    expected_losses, expected_scales, expected = alone[optimizer]
    losses, scales, parameters = ranks[0]
    assert all((one[0], one[1]) == (losses, scales) for one in ranks)
    assert scales == expected_scales and scales[POISONED] == scales[POISONED - 1] / 2
    np.testing.assert_allclose(losses, expected_losses, rtol=2e-4)
    for name, reference in expected.items():
        if name.startswith("model."):
            difference = np.linalg.norm(parameters[name] - reference) / np.linalg.norm(reference)
            assert difference <= 5e-3, name


@pytest.mark.parametrize(
    ("optimizer", "layout", "comm"),
    [
        ("adamw", {"dp": 2, "zero": 2}, {"compress_gradients": "int8", "compress_parameters": "bfloat16"}),
        ("lamb", {"dp": 2}, {"sync_every": 3, "outer_learning_rate": 0.7, "outer_momentum": 0.9}),
    ],
    ids=str,
)
def test_a_scale_that_grows_changes_no_bit_of_what_is_exact(
    optimizer: str, layout: dict[str, Any], comm: dict[str, Any]
) -> None:
    """In float32 nothing overflows, and scales are powers of two: norms, clipping, moments, what compression
    keeps for the next step and what replicas agree on must be as without a scale."""
    case = Case(layout, optimizer={"name": optimizer, "clip_norm": 0.5}, comm=comm, steps=6)
    scaled = replace(case, loss_scale={"initial": 2.0**12, "growth_interval": 2})
    expected, found = (reuse_ranks(2, run_case, one)[0] for one in (case, scaled))
    assert found[0] == expected[0]
    for name, values in expected[1].items():
        np.testing.assert_array_equal(found[1][name], values, err_msg=name)


def agrees(case: Case, overflows: bool) -> list[np.ndarray]:
    """Parameters after the step in which replicas agree, in which one of them overflowed, or all skipped."""
    engine = make_engine(case)
    train_steps(case, engine, 0, 2)
    if overflows and os.environ["RANK"] == "1":
        poison_once(engine)
    if overflows:
        train_steps(case, engine, 2, 3)
    else:
        engine.train_step(lambda: batch_of_rank(case, engine, 2), 0.0, 128, skip=True)
    assert engine.optimizer.steps_done == 2
    values = [chunk.master.clone().numpy() for chunk in engine.model.chunks]
    close_world()
    return values


@pytest.mark.parametrize("overflows", [True, False])
def test_replicas_that_train_alone_agree_in_their_step_though_it_was_skipped(overflows: bool) -> None:
    """Other ranks and the trainer count steps, whether anything moved in them or not."""
    case = replace(float16({"dp": 2}), comm={"sync_every": 3})
    first, second = reuse_ranks(2, agrees, case, overflows)
    assert all(np.array_equal(*pair) for pair in zip(first, second, strict=True))


def fails(poison: str) -> tuple[int, str]:
    """Number of steps that were skipped first, and what was raised."""
    engine = make_engine(replace(float16({}), loss_scale={"initial": 2.0, "max_skips": 1}))
    train_steps(float16({}), engine, 0, 1)
    for step in range(1, 6):
        if poison == "loss":
            engine.model.chunks[0].master[-1] = torch.nan
            engine.model.chunks[0].mark_stale()
        else:
            poison_once(engine)
        try:
            train_steps(float16({}), engine, step, step + 1)
        except RunFailedError as error:
            return step - 1, str(error)
    return 5, "nothing"


def test_an_overflow_that_persists_and_a_loss_that_is_not_finite_are_faults() -> None:
    """The first from the smallest scale on, the second at once: no scale causes it."""
    ((skipped, said),) = run_ranks(1, fails, "gradient")
    assert skipped == 2 and "overflow at the smallest loss scale (1), 2 steps in a row; first bad" in said
    assert said.startswith("step 2: loss is 4.") and said.endswith(", on rank 0")
    assert cause_of(1, said, memory_killed=False) == "nan"
    ((skipped, said),) = run_ranks(1, fails, "loss")
    assert skipped == 0 and said.startswith("step 2: loss is nan; first bad tensor is the parameter")


FLOAT16 = [
    "train.precision=float16",
    "loss_scale.initial=268435456",
    "loss_scale.growth_interval=3",
    "layout.dp=2",
    "layout.zero=2",
    "train.steps=24",
    "checkpoint.every=8",
    "checkpoint.keep=4",
    "checkpoint.memory_seconds=0",
]
"""It overflows in the first steps, and again now and then."""


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_corpus(tmp_path_factory.mktemp("corpus"), count=300)


def of_steps(run: Run, key: str) -> list[Any]:
    return [line.get(key) for line in run.read_metrics()]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Run:
    """Nothing happens to it; its snapshots end with it."""
    made = make_run(tmp_path_factory.mktemp("run") / "run", corpus, *FLOAT16, "checkpoint.linger_seconds=0")
    assert run_ranks(2, train_rank, [str(made.path)]) == [0, 0]
    return made


def test_a_resumed_run_continues_with_the_scale_and_its_counter_in_other_layouts_too(
    tmp_path: Path, run: Run
) -> None:
    skipped = [step for step, overflow in enumerate(of_steps(run, "overflow"), 1) if overflow]
    assert skipped[0] == 1 and any(8 < step <= 16 for step in skipped), "it overflows before and after step 8"
    told = [(one["step"], one["loss_scale"] / one["next_loss_scale"]) for one in events(run, "overflow")]
    assert told == [(step, 2.0) for step in skipped] and not events(run, "skip") and not events(run, "fault")
    same, other = Run(tmp_path / "same"), Run(tmp_path / "other")
    for copy in (same, other):
        shutil.copytree(run.path, copy.path)
        folder = CheckpointFolder(copy.checkpoints_path)
        for step in (16, 24):
            damage(folder.of_step(step) / "__0_0.distcp")
    assert run_ranks(2, train_rank, [str(same.path)]) == [0, 0]
    assert_same_run(same, run)
    assert of_steps(same, "loss_scale") == of_steps(run, "loss_scale")
    other.create_or_resume(load_job(str(other.job_path), ["layout.dp=1", "layout.pp=2", "layout.zero=0"]))
    assert run_ranks(2, train_rank, [str(other.path)]) == [0, 0]
    assert [one["step"] for one in events(other, "resume")] == [8]
    scales = [of_steps(each, "loss_scale") for each in (run, other)]
    assert scales[0][:9] == scales[1][:9], "the first step after it has the scale that was stored"
    np.testing.assert_allclose(of_steps(other, "loss")[8:], of_steps(run, "loss")[8:], rtol=5e-3)


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)
