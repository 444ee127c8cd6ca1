"""If these break: a plan or a memory budget leaves out the memory of texts that training generates."""

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from myriad.comm.layout import Layout
from myriad.data.tokenizer import Tokenizer
from myriad.evaluation.greedy_texts import GreedyTexts
from myriad.evaluation.task_files import Generation
from myriad.job import load_job
from myriad.job.job_values import work_of
from myriad.model.config import ModelConfig
from myriad.model.generate import Session, WholeReader
from myriad.model.generation_limits import cached_values
from myriad.model.gpt import build_full
from myriad.planner.memory.closed_form_memory import worst_stage_memory
from myriad.planner.memory.generation_memory import generation_bytes
from myriad.planner.memory.micro_batch_shard import MicroBatchShard
from myriad.planner.memory.rank_memory import memory_of_ranks
from myriad.planner.workload import FrameworkProfile, Workload

ROWS, SEQUENCE = 4, 64
MODEL = ModelConfig(layers=4, hidden=64, heads=8, vocabulary=271, sequence=SEQUENCE, initial_deviation=0.3)
LATENT = {"kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
GPT = ModelConfig(layers=8, hidden=512, heads=8, kv_heads=2, sequence=4096, vocabulary=4096)


def load_live_bytes() -> Any:
    path = Path(__file__).parents[3] / "benchmarks" / "memory" / "live_bytes.py"
    spec = importlib.util.spec_from_file_location("live_bytes", path)
    assert spec is not None and spec.loader is not None
    module = sys.modules["live_bytes"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.LiveBytes()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "keys",
    [{}, {"kv_heads": 2, "attention_softcap": 5.0}, {"ffn_hidden": 512, "kv_heads": 1}, LATENT],
    ids=str,
)
def test_generated_texts_take_the_memory_of_the_formula(keys: dict[str, Any], dtype: torch.dtype) -> None:
    """The caches to the byte; with what is temporary, at most so much, and not much less."""
    model, live = ModelConfig(**(MODEL.model_dump() | keys)), load_live_bytes()
    tokenizer = Tokenizer.train(["for i in range(10):\n    print(f(i))\n"] * 4, 270)
    prompts = [("print(f(i))\n" * 30, Generation((), SEQUENCE // 4))] * (2 * ROWS + 1)
    with live:
        layers = build_full(model, 3).to(dtype)
        parameters = {one.data_ptr(): one.numel() * dtype.itemsize for one in layers.parameters()}
        live.start_peak()
        GreedyTexts(WholeReader(layers), tokenizer, SEQUENCE, ROWS * SEQUENCE).generate(prompts)
    planned = generation_bytes(model, FrameworkProfile(), MicroBatchShard(1.0, ROWS, dtype.itemsize, True))
    assert 0.6 < (live.peak - sum(parameters.values())) / planned.total(model.layers) <= 1

    session = Session(WholeReader(layers), SEQUENCE)
    session.add([list(range(SEQUENCE))] * ROWS)
    held = [cache.num_bytes for cache in session.caches]
    each = cached_values(model, 1) * dtype.itemsize
    assert held == [ROWS * SEQUENCE * each] * model.layers
    assert planned.of_block == (ROWS + 1) * SEQUENCE * each


def peaks(layout: dict[str, Any], *, generates: bool) -> tuple[float, float]:
    """The fullest rank's bytes, from its program and in closed form."""
    shape = Layout(**layout)
    work = Workload(GPT, shape, 4 * shape.dp * shape.micro_batch, generates=generates)
    rank_model = work.rank_model
    closed = worst_stage_memory(
        rank_model,
        work.profile,
        dp=shape.num_holders,
        tp=shape.tp,
        pp=shape.pp,
        virtual_stages=1,
        micro_batch=shape.micro_batch,
        num_micro_batches=4,
        zero=shape.zero,
        reduce_each=0,
        recompute=["none", "selective", "full"].index(shape.recompute),
        eager=0,
        zero_bubble=0,
        value_bytes=2,
        context=(shape.ring, shape.ulysses),
        generates=generates,
    )
    return max(float(one.total) for one in memory_of_ranks(work)), float(closed.total)


@pytest.mark.parametrize(
    ("layout", "counts"),
    [
        ({}, False),
        ({"cp": 8, "recompute": "full"}, True),
        ({"cp": 4, "dp": 2, "zero": 3, "recompute": "full"}, True),
        ({"cp": 4, "pp": 2, "recompute": "full"}, True),
    ],
    ids=str,
)
def test_a_plan_counts_generated_texts_where_they_are_the_peak(layout: dict[str, Any], counts: bool) -> None:
    """Ranks that share sequences have a part of each in training, and whole texts here."""
    without, with_texts = (peaks(layout, generates=generates) for generates in (False, True))
    assert (with_texts[0] > without[0]) == counts
    assert with_texts[1] == pytest.approx(with_texts[0], rel=0.08)


def test_a_job_with_tasks_counts_them() -> None:
    job = load_job("tiny", ["eval.tasks=tasks.jsonl"])
    assert work_of(job).generates and not work_of(load_job("tiny")).generates
