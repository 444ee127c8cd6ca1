"""Replicas that train alone: what they agree on, and that a resumed run continues identically."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from parity_case import OPTIMIZER, Case, batch_of_replica, make_engine, run_case, train_steps
from ranks import reuse_ranks

from myriad.checkpoint.checkpoint_files import load, load_model, save
from myriad.checkpoint.storage.checkpoint_folder import CheckpointFolder
from myriad.comm.groups import close_world
from myriad.comm.layout import Layout
from myriad.optim.config import OptimizerConfig
from myriad.optim.schedule import learning_rate
from myriad.parallel.engine import Engine

EVERY = 3


def case(**comm: float) -> Case:
    keys = {"sync_every": EVERY, "outer_learning_rate": 1.0, "outer_momentum": 0.0} | comm
    return Case(layout={"dp": 2}, comm=keys, steps=2 * EVERY)


def parameters(engine: Engine) -> dict[str, np.ndarray]:
    return {
        f"{part.name} {part.offsets}": part.values.clone().numpy()
        for part in engine.all_shards()
        if part.name.startswith("model.")
    }


def train_replicas(asked: Case) -> list[dict[str, np.ndarray]]:
    """This replica's parameters after each step of the first round, and after the second round."""
    engine = make_engine(asked)
    found = []
    for step in range(EVERY):
        train_steps(asked, engine, step, step + 1)
        found.append(parameters(engine))
    train_steps(asked, engine, EVERY, 2 * EVERY)
    found.append(parameters(engine))
    engine.close()
    close_world()
    return found


def train_half(asked: Case, replica: int) -> dict[str, np.ndarray]:
    """One process on one replica's half of each batch, for one round."""
    alone = Case(layout={}, steps=asked.steps, global_batch=asked.global_batch // 2)
    engine = make_engine(alone)
    for step in range(EVERY):
        batch = batch_of_replica(asked, replica, 2, step)
        rate = learning_rate(OptimizerConfig(**OPTIMIZER), step, asked.steps)
        engine.train_step(lambda batch=batch: batch, rate, batch.targets.numel())
    return parameters(engine)


def test_replicas_agree_on_the_mean_of_what_each_learned_alone() -> None:
    first, second = reuse_ranks(2, train_replicas, case())
    halves = [reuse_ranks(1, train_half, case(), replica)[0] for replica in range(2)]
    for name, agreed in first[EVERY - 1].items():
        np.testing.assert_array_equal(agreed, second[EVERY - 1][name], err_msg=name)
        mean = (halves[0][name] + halves[1][name]) / 2
        assert np.linalg.norm(agreed - mean) <= 1e-5 * np.linalg.norm(mean), name


def test_replicas_differ_in_between() -> None:
    first, second = reuse_ranks(2, train_replicas, case())
    assert any((first[0][name] != second[0][name]).any() for name in first[0])


def train_and_save(asked: Case, folder: Path, first: int, last: int) -> None:
    engine, checkpoints = make_engine(asked), CheckpointFolder(folder)
    if first:
        progress = load(checkpoints.of_step(first), list(engine.all_shards()))
        engine.optimizer.steps_done = progress["optimizer_steps"]
        engine.loaded()
    train_steps(asked, engine, first, last)
    save(checkpoints, last, list(engine.shards()), {"optimizer_steps": last})
    engine.close()
    close_world()


@pytest.mark.parametrize("cp", [1, 2])
def test_a_run_that_stopped_where_replicas_agreed_continues_with_the_same_bits(
    tmp_path: Path, cp: int
) -> None:
    asked = replace(case(outer_learning_rate=0.7, outer_momentum=0.9), layout={"dp": 2, "cp": cp})
    reuse_ranks(2 * cp, train_and_save, asked, tmp_path / "a", 0, asked.steps)
    reuse_ranks(2 * cp, train_and_save, asked, tmp_path / "b", 0, EVERY)
    reuse_ranks(2 * cp, train_and_save, asked, tmp_path / "b", EVERY, asked.steps)
    undisturbed, resumed = (
        load_model(CheckpointFolder(tmp_path / name).of_step(asked.steps), "") for name in "ab"
    )
    assert undisturbed.keys() == resumed.keys()
    assert any(name.startswith("replica.1.optimizer.") for name in resumed)
    for name, values in undisturbed.items():
        np.testing.assert_array_equal(values, resumed[name], err_msg=name)


@pytest.mark.parametrize("layout", [{"dp": 2, "pp": 2}, {"dp": 2, "tp": 2, "micro_batch": 2}], ids=str)
def test_it_works_in_layouts_with_more_than_data_parallelism(layout: dict[str, int]) -> None:
    asked = Case(layout=layout, comm={"sync_every": 2}, steps=4)
    losses = reuse_ranks(4, losses_of, asked)
    assert all(own == losses[0] for own in losses)
    assert losses[0][-1] < losses[0][0]


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("layout", [{"tp": 4, "ep": 2, "etp": 2}, {"cp": 2}, {"cp": 2, "pp": 2}], ids=str)
def test_ranks_of_a_replica_may_share_experts_and_sequences(optimizer: str, layout: dict[str, int]) -> None:
    comm = {"sync_every": 2, "outer_momentum": 0.5}
    model = {"layers": 2, "experts": 4, "expert_hidden": 16}
    one = Case({"dp": 2}, model, {"name": optimizer, "clip_norm": 0.1}, 4, comm=comm)
    losses, tensors = reuse_ranks(2, run_case, one)[0]
    shared = replace(one, layout={"dp": 2} | layout)
    found, whole = reuse_ranks(Layout(**shared.layout).world, run_case, shared)[0]
    assert [one for pair in found for one in pair] == pytest.approx(
        [one for pair in losses for one in pair], rel=1e-5
    )
    assert whole.keys() == tensors.keys()
    for name in (name for name in tensors if name.startswith("model.")):
        assert np.linalg.norm(whole[name] - tensors[name]) <= 1e-5 * np.linalg.norm(tensors[name]), name


def losses_of(asked: Case) -> list[float]:
    engine = make_engine(asked)
    found = [loss for loss, _ in train_steps(asked, engine, 0, asked.steps)]
    engine.close()
    close_world()
    return found
