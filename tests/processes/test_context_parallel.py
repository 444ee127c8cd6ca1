"""If these fail, ranks that share sequences train another model than one process does: they attend to wrong
positions, turn or drop values at wrong ones, or sum what they should not.

`benchmarks/parity/context_layouts.py` has the whole list of layouts, of which these are a sample.
"""

from typing import Any

import pytest
from parity_case import Case
from test_parity import FEW, MODELS, assert_equal, name_of, train

LAYOUTS: list[tuple[str, str, dict[str, Any], bool]] = [
    # model, optimizer, layout, packed documents
    ("gpt2", "adamw", {"cp": 2, "zero": 3}, False),
    ("parallel-window", "adamw", {"cp": 4, "micro_batch": 2}, True),
    ("gemma", "adamw", {"cp": 2, "tp": 2, "micro_batch": 2}, False),
    ("latent", "lamb", {"cp": 2, "ulysses": 2, "dp": 2, "zero": 2, "recompute": "selective"}, False),
    ("predictions", "adamw", {"cp": 2, "pp": 2, "schedule": "zero-bubble", "recompute": "full"}, True),
    ("granite-sinks", "muon", {"cp": 4, "ulysses": 2, "zero": 1}, True),
    ("experts", "adamw", {"cp": 2, "tp": 2, "ep": 4, "etp": 1, "micro_batch": 2}, False),
    ("experts", "muon", {"cp": 2, "pp": 2, "ep": 2, "zero": 2}, False),
    ("few-kv-heads", "adamw", {"cp": 4, "ulysses": 4, "dp": 2, "zero": 1, "shard_group": 4}, False),
]


@pytest.mark.parametrize(("model", "optimizer", "layout", "packed"), LAYOUTS, ids=name_of)
def test_ranks_that_share_sequences_learn_what_one_process_does(
    model: str, optimizer: str, layout: dict[str, Any], packed: bool
) -> None:
    keys = MODELS[model] | {"layers": 2}
    how: dict[str, Any] = {"optimizer": {"name": optimizer}, "steps": FEW, "packed": packed}
    how["global_batch"] = 4 if model != "gemma" else 16  # small weights of its norms show rounding
    case = Case(layout=layout, model=keys, **how, overlap={"tensor_chunks": 2})
    assert_equal(case, train(Case(model=keys, **how)))


def test_the_same_layout_twice_gives_the_same_bits() -> None:
    case = Case({"cp": 4, "ulysses": 2}, {"layers": 2}, {"name": "adamw"}, FEW, global_batch=2, packed=True)
    (losses, parameters), (again, same) = train(case), train(case)
    assert losses == again
    assert all((same[name] == values).all() for name, values in parameters.items())
