"""If these break: ranks that generate texts with caches of keys and values take other tokens than without, or
than one process."""

from dataclasses import replace
from typing import Any

import torch
from parity_case import TINY, Case, make_engine
from ranks import run_ranks

from myriad.comm.groups import close_world
from myriad.comm.layout import Layout
from myriad.data.tokenizer import Tokenizer
from myriad.evaluation.full_model import FullModel
from myriad.evaluation.task_files import Generation
from myriad.kernels.rotary_scaling import RotaryScaling
from myriad.model.config import ModelConfig
from myriad.model.gpt import build_full
from myriad.train.task_evaluation import LayoutScorer, WindowBatches

TOKENIZER = Tokenizer.train(["for i in range(10):\n    print(f(i))\n"] * 4, 270)
PROMPTS = [(text, Generation((), 6)) for text in ("for i in", "x", "print(f(i)) and print")]
MODEL: dict[str, Any] = {"vocabulary": 271, "sequence": 32, "initial_deviation": 0.3}
YARN = RotaryScaling(kind="yarn", factor=2.0, original_sequence=16)
BOUNDED = {"window": 5, "window_pattern": (True, False), "attention_sinks": True, "attention_softcap": 2.0}
LATENT = {"kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6}
EXPERTS = {"experts": 4, "experts_per_token": 2, "expert_hidden": 16}
CASES = [
    Case(
        {"tp": 2}, BOUNDED | {"kv_heads": 2, "qk_norm": "all", "rotary_scaling": YARN, "logit_softcap": 4.0}
    ),
    Case({"tp": 2, "ep": 2, "etp": 1}, LATENT | EXPERTS | {"tied": False}),
    Case({"dp": 2, "ep": 2, "zero": 3}, EXPERTS | {"position": "learned", "shared_experts": 1, "bias": True}),
    Case({"pp": 2}, {"position": "none", "block": "parallel", "qk_norm": "head"}),
]


def generated(cases: list[Case], prompts: list[tuple[str, Generation]]) -> list[tuple[list[str], list[str]]]:
    """What one rank generates of each case: with caches, and without."""
    found = []
    for case in cases:
        engine = make_engine(case)
        engine.open_reader()
        each = case.global_batch // engine.layout.dp
        rows = range(each * engine.groups.grid.index("dp"), each * (engine.groups.grid.index("dp") + 1))
        batches = WindowBatches(MODEL["sequence"], case.global_batch, rows, torch.device("cpu"))
        scorer = LayoutScorer([], prompts, TOKENIZER, MODEL["sequence"], batches, 40)
        cached = scorer.results(engine)
        engine.reader = None
        plain = scorer.results(engine)
        assert cached is not None and plain is not None
        found.append((cached[1], plain[1]))
        engine.close()
        close_world()
    return found


def test_ranks_with_and_without_caches_generate_the_texts_of_one_process() -> None:
    assert_texts_of_one_process(2, CASES, PROMPTS)


def test_ranks_that_share_experts_by_halves_generate_the_texts_of_one_process() -> None:
    halves = {"tp": 4, "ep": 2, "etp": 2}
    model = EXPERTS | {"layers": 1, "shared_experts": 1, "bias": True}
    assert_texts_of_one_process(4, [Case(halves, model)], [(PROMPTS[0][0], Generation((), 2))])


def assert_texts_of_one_process(world: int, cases: list[Case], prompts: list[tuple[str, Generation]]) -> None:
    cases = [replace(case, model=MODEL | case.model, global_batch=4) for case in cases]
    found = run_ranks(world, generated, cases, prompts)
    for number, case in enumerate(cases):
        config = ModelConfig(**(TINY | case.model))
        model = FullModel(build_full(config, 3), TOKENIZER, config.sequence)
        expected = model.generate(prompts, 100)
        assert len({*expected}) == len(prompts) and Layout(**case.layout).world == world
        for rank in found:
            assert rank[number] == (expected, expected), case.layout
