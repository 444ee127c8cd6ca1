"""If these fail, the biases that balance experts, or the loads of their balance loss, do not follow the whole
batch, or depend on the layout or on an interruption."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from parity_case import Case, batch_of_rank, make_engine
from ranks import run_ranks
from same_run import train_rank
from tiny_corpora import make_corpus

from myriad.checkpoint.checkpoint_files import load, load_model, save
from myriad.checkpoint.storage.checkpoint_folder import CheckpointFolder
from myriad.comm.groups import close_world
from myriad.job import load_job
from myriad.model.boundary import Boundary
from myriad.model.config import ModelConfig
from myriad.model.experts import Router
from myriad.run import Run

RATE = 0.0625
MODEL: dict[str, Any] = {
    "experts": 4,
    "expert_hidden": 16,
    "layers": 3,
    "dense_layers": 1,
    "prediction_layers": 1,
    "balance_bias_rate": RATE,
    "balance_loss": 0.1,
    "balance_scope": "batch",
}
VECTORS = ("router.bias", "router.batch_loads")
Step = tuple[tuple[str, int, float], dict[str, np.ndarray]]


def vectors_of(path: Path) -> dict[str, np.ndarray]:
    found = {name: tensor.numpy() for name, tensor in load_model(path, "").items()}
    return {name: values for name, values in found.items() if name.endswith(VECTORS)}


def steps(case: Case, folder: Path) -> list[Step]:
    """The busiest expert and, on rank 0, all stored biases and loads with their moments, after each step."""
    engine, found = make_engine(case), list[Step]()
    for step in range(3):
        batch = batch_of_rank(case, engine, step)
        result = engine.train_step(lambda batch=batch: batch, 1e-3, case.global_batch * 16)
        assert result.expert_load is not None
        path = save(CheckpointFolder(folder), step + 1, list(engine.shards()), {})
        found.append((tuple(result.expert_load), vectors_of(path) if os.environ["RANK"] == "0" else {}))
        engine.evaluate(lambda batch=batch: batch)
    engine.close()
    close_world()
    return found


def test_they_are_moved_against_the_load_of_all_ranks_alike(tmp_path: Path) -> None:
    alone = run_ranks(1, steps, Case({}, MODEL), tmp_path / "alone")[0]
    (layer, expert, _), first = alone[0]
    places = ["blocks.1", "blocks.2", "head.predictions.0.block"]
    names = {f"model.{place}.mlp.{vector}" for place in places for vector in VECTORS}
    assert names == {name for name in first if name.startswith("model.")}
    assert first[f"model.{layer}.mlp.router.bias"][expert] == -RATE
    loads = first[f"model.{layer}.mlp.router.batch_loads"]
    assert loads.argmax() == expert and loads[expert] == pytest.approx(alone[0][0][2]) and loads.sum() == 4
    for name, values in alone[-1][1].items():
        if name.startswith("model.") and name.endswith("batch_loads"):
            assert values.sum() == pytest.approx(4) and not np.array_equal(values, first[name])
        elif name.startswith("model."):
            assert np.array_equal(values % RATE, np.zeros(4)) and abs(values).max() <= 3 * RATE
            assert values.min() < 0 < values.max()
        else:
            assert not values.any(), "an optimizer moved them"
    for layout in (
        {"tp": 2, "pp": 2, "dp": 2, "micro_batch": 2, "recompute": "full", "zero": 3},
        {"pp": 2, "zero": 1, "schedule": "gpipe", "recompute": "full", "micro_batch": 2},
        {"dp": 4, "zero": 0, "ep": 2, "recompute": "full", "recompute_ratio": 0.5, "micro_batch": 2},
    ):
        case = Case(layout, MODEL, {"ema_decay": 0.5})
        ranks = run_ranks(case.world, steps, case, tmp_path / f"zero-{layout['zero']}")
        for (most, found), (largest, expected) in zip(ranks[0], alone, strict=True):
            assert most[:2] == largest[:2] and most[2] == pytest.approx(largest[2])
            for name, values in expected.items():
                assert np.array_equal(found[name], values), name


def choices_after_changes(case: Case, folder: Path) -> None:
    """Every router of the rank chooses by the float32 values of what was trained, averaged or loaded."""
    engine, names = make_engine(case), list[str]()

    def check(path: Path, prefix: str) -> None:
        batch = batch_of_rank(case, engine, 0)
        engine.evaluate(lambda: batch)
        stored = vectors_of(path)
        for stage in engine.model.stages.values():
            for index, layer in stage.layers.items():
                for name, router in layer.named_modules(prefix=engine._definition.names[index]):
                    if isinstance(router, Router):
                        assert router.bias is not None and router.exact_bias is not None
                        values = torch.from_numpy(stored[f"{prefix}{name}.bias"])
                        assert torch.equal(router.exact_bias, values)
                        loads = torch.from_numpy(stored[f"{prefix}{name}.batch_loads"])
                        assert router.exact_loads is not None and torch.equal(router.exact_loads, loads)
                        names.append(name)

    paths = []
    for step in range(3):
        batch = batch_of_rank(case, engine, step)
        engine.train_step(lambda batch=batch: batch, 1e-3, case.global_batch * 16)
        paths.append(save(CheckpointFolder(folder), step + 1, list(engine.shards()), {}))
    check(paths[2], "model.")
    with engine.averaged():
        check(paths[2], "optimizer.ema.")
    check(paths[2], "model.")
    load(paths[0], list(engine.all_shards()))
    engine.loaded()
    check(paths[0], "model.")
    assert names
    engine.close()
    close_world()


def test_half_precision_chooses_by_their_float32_values(tmp_path: Path) -> None:
    layout, optimizer = {"dp": 2, "zero": 3}, {"ema_decay": 0.5}
    model = MODEL | {"balance_bias_rate": 0.003}
    run_ranks(2, choices_after_changes, Case(layout, model, optimizer, dtype=torch.bfloat16), tmp_path)
    router = Router(ModelConfig(experts=4, balance_bias_rate=0.0, hidden=8), Boundary())
    assert router.bias is not None
    torch.nn.init.zeros_(router.bias)
    router.exact_bias = torch.tensor([0.0, 0.0, 9.0, 8.0])
    assert router.choose(torch.zeros(1, 4))[1].tolist() == [[2, 3]]


def test_a_resumed_run_goes_on_with_their_bits_in_half_precision(tmp_path: Path) -> None:
    corpus = make_corpus(tmp_path, count=100)

    def run_to(name: str, last: int) -> dict[str, torch.Tensor]:
        run = Run(tmp_path / name)
        keys = ["layout.dp=2", "layout.zero=2", "train.precision=bfloat16", f"train.steps={last}"]
        keys += ["model.layers=2", "model.hidden=32", "model.sequence=32", "train.threads=1"]
        keys += [f"data.corpus={corpus}", "model.balance_bias_rate=0.003", "train.global_batch=4"]
        keys += ["model.balance_scope=batch", "model.balance_loss=0.1"]
        keys += ["optimizer.final_learning_rate_ratio=1", "optimizer.warmup_steps=0"]
        job = load_job("tiny-moe", keys)
        run.create_or_resume(job)
        assert run_ranks(2, train_rank, [str(run.path)]) == [0, 0]
        return load_model(CheckpointFolder(run.checkpoints_path).of_step(last), "")

    run_to("killed", 2)
    resumed, whole = run_to("killed", 4), run_to("whole", 4)
    bias = whole["model.blocks.1.mlp.router.bias"]
    assert bias.dtype == torch.float32 and not torch.equal(bias, bias.bfloat16().float())
    assert all(torch.equal(resumed[name], values) for name, values in whole.items())
