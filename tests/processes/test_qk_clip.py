"""If these break: attention scores grow past optimizer.qk_clip, or layouts clip differently."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from parity_case import Case, batch_of_rank, make_engine, run_case
from ranks import reuse_ranks

from myriad.comm.groups import close_world

GROUPED = {
    "layers": 2,
    "kv_heads": 2,
    "activation": "swiglu",
    "bias": True,
    "attention_bias": "all",
    "window": 6,
}
LATENT = {
    "layers": 2,
    "activation": "swiglu",
    "q_lora_rank": 12,
    "kv_lora_rank": 10,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "prediction_layers": 1,
}


def scores_of_steps(case: Case) -> list[float]:
    """Return the largest score of three steps on one batch, in which the update moves next to nothing."""
    engine, found = make_engine(case), []
    batch = batch_of_rank(case, engine, 0)
    for _ in range(3):
        result = engine.train_step(lambda: batch, 1e-12, case.global_batch * 16)
        assert result.max_attention_score is not None
        found.append(result.max_attention_score)
    engine.close()
    close_world()
    return found


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        (GROUPED, {"tp": 2, "dp": 2, "zero": 3, "micro_batch": 2}),
        (LATENT, {"pp": 2, "tp": 2, "micro_batch": 2, "recompute": "selective"}),
        ({**GROUPED, "bias": False, "attention_bias": "default"}, {"cp": 4, "ulysses": 2, "zero": 1}),
    ],
    ids=["grouped", "latent", "shared sequences"],
)
def test_no_score_stays_above_the_limit_in_any_layout(model: dict[str, Any], layout: dict[str, Any]) -> None:
    free = Case({}, model, {"name": "muon", "qk_clip": 1e9})
    (first, *_), *_ = reuse_ranks(1, scores_of_steps, free)
    limit = 0.5 * first
    one = replace(free, optimizer={"name": "muon", "qk_clip": limit}, steps=3)
    (scores,) = reuse_ranks(1, scores_of_steps, one)
    assert scores[0] == first and limit * 0.5 < scores[1] <= limit * 1.001
    assert scores[2] == pytest.approx(scores[1], rel=1e-3), "nothing is left to clip"
    for rank in reuse_ranks(4, scores_of_steps, many := replace(one, layout=layout)):
        assert rank == pytest.approx(scores, rel=1e-5)
    losses, expected = reuse_ranks(1, run_case, one)[0]
    found, parameters = reuse_ranks(4, run_case, many)[0]
    assert [loss for loss, _ in found] == pytest.approx([loss for loss, _ in losses], rel=1e-5)
    for name, values in expected.items():
        if name.startswith("model."):
            assert np.linalg.norm(parameters[name] - values) <= 1e-5 * np.linalg.norm(values), name
