"""If these break, `myriad eval` accepts a layout key that has no effect, or refuses the layout of a run."""

import pytest

from myriad.comm.layout import Layout
from myriad.errors import BadInputError
from myriad.job.scoring_layout import check_scoring, scoring_layout
from myriad.model.config import ModelConfig


def test_typed_keys_change_one_rank_or_the_layout_of_a_run() -> None:
    assert scoring_layout(["layout.tp=2", "layout.pp=3"]) == Layout(tp=2, pp=3)
    own = Layout(dp=4, tp=2, zero=3, shard_group=2, schedule="gpipe")
    assert scoring_layout(["layout.dp=2"], own) == own.model_copy(update={"dp": 2})


def test_a_runs_layout_keeps_nothing_that_only_training_has() -> None:
    own = Layout(
        dp=2, pp=2, zero=2, shard_group=2, reduce="each", shares=(5, 3), micro_batch=4, partition="profile",
        recompute="full", recompute_ratio=0.5, offload_activations=1.0, offload_optimizer=True,
    )  # fmt: skip
    assert scoring_layout([], own) == Layout(dp=2, pp=2, partition="parameters")


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("layout.recompute=full", r"layout\.recompute = \"full\": leave it out: forward passes keep no"),
        ("layout.offload_optimizer=true", "have no optimizer state"),
        ("layout.reduce=each", "have no gradients"),
        ("layout.shares=[5,3]", "equally many windows"),
        ("layout.micro_batch=4", "--batch-tokens"),
        ("layout.zero=2", r"layout\.zero = 2: 0 or 3"),
        ("layout.partition=profile", "a profile times training"),
        ("layout.tpp=2", "unknown key"),
        ("layout.tp=0", "at least 1"),
        ("layout={tp = 2}", r"only keys of the layout, such as --layout\.tp"),
        ("train.seed=2", r"train\.seed = \"2\": only keys of the layout"),
    ],
)
def test_keys_without_effect_on_scores_are_refused(override: str, expected: str) -> None:
    with pytest.raises(BadInputError, match=expected):
        scoring_layout([override])


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        (Layout(tp=3), r"layout\.tp = 3: must divide model\.heads"),
        (Layout(pp=9), "at most 6 stages"),
        (Layout(dp=4, zero=3, shard_group=3), r"must divide layout\.dp = 4"),
        (Layout(cp=3), r"model\.sequence = 64: a multiple of 6"),
        (Layout(pp=2, partition="manual:9"), "manual"),
    ],
    ids=["heads", "stages", "groups", "context", "borders"],
)
def test_a_layout_that_does_not_divide_the_model_is_refused(layout: Layout, expected: str) -> None:
    with pytest.raises(BadInputError, match=expected):
        check_scoring(ModelConfig(layers=4, hidden=64, heads=4, sequence=64, vocabulary=256), layout)
