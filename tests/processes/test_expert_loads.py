"""If these fail, the load of experts, the entropy of routers or the share of dropped tokens that a run shows
depends on its layout."""

from typing import Any

import pytest
from parity_case import Case, batch_of_rank, make_engine
from ranks import run_ranks

from myriad.comm.groups import close_world

MODEL: dict[str, Any] = {"experts": 4, "expert_hidden": 16, "layers": 3, "expert_capacity": 1.0}


def loads(case: Case) -> list[tuple[str, int, float, float, float]]:
    engine = make_engine(case)
    found = []
    for step in range(2):
        batch = batch_of_rank(case, engine, step)
        result = engine.train_step(lambda batch=batch: batch, 1e-3, case.global_batch * 16)
        assert result.expert_load is not None
        layer, expert, ratio = result.expert_load
        assert result.router_entropy is not None and result.dropped_share is not None
        found.append((layer, expert, ratio, result.router_entropy, result.dropped_share))
        if step == 0:
            assert result.expert_loads is not None and result.expert_loads[layer][expert] == ratio
            assert all(sum(own) == pytest.approx(4) for own in result.expert_loads.values())
        else:
            assert result.expert_loads is None, "they are of the first step, and of each 50th"
        engine.evaluate(lambda batch=batch: batch)
    engine.close()
    close_world()
    return found


def test_the_busiest_expert_is_that_of_all_ranks_and_micro_batches() -> None:
    (alone,) = run_ranks(1, loads, Case({}, MODEL))
    for layer, expert, ratio, entropy, dropped in alone:
        assert 0.9 < entropy < 1, "new routers have nearly equal scores"
        assert layer.startswith("blocks.") and 0 <= expert < 4
        assert 0 < dropped < 0.5, "an expert has room for half of the tokens"
        assert 1 < ratio <= 2, "of two experts a token, one can have at most all tokens"
    cut = {"tp": 4, "dp": 2, "ep": 4, "etp": 2, "micro_batch": 2, "recompute": "full"}
    for rank in run_ranks(8, loads, Case(cut, MODEL)):
        assert [one[:2] for one in rank] == [one[:2] for one in alone]
        assert [one[2] for one in rank] == pytest.approx([one[2] for one in alone])
        assert [one[3] for one in rank] == pytest.approx([one[3] for one in alone], rel=1e-6)
        assert [one[4] for one in rank] == [one[4] for one in alone], "whole numbers of pairs"
