"""Job keys as options: every way to write them, and what a slip of the fingers gets."""

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st

from myriad.cli.job_key_options import OverrideCommand, parse_overrides, split_overrides
from myriad.errors import BadInputError
from myriad.job import job_keys, load_job


def test_a_key_takes_its_value_after_a_space_or_an_equals_sign_and_a_switch_needs_none():
    given = ["--layout.tp", "2", "--layout.pp=2", "--model.bias", "--train.steps", "7"]
    assert parse_overrides(given) == ["layout.tp=2", "layout.pp=2", "model.bias=true", "train.steps=7"]


def test_what_is_no_key_is_left_for_the_verb_wherever_it_stands():
    overrides, rest = split_overrides(["--model.bias", "tiny", "--port", "x", "--layout.tp", "2", "--json"])
    assert overrides == ["model.bias=true", "layout.tp=2"]
    assert rest == ["tiny", "--port", "x", "--json"]


def test_a_switch_can_be_turned_off_and_a_value_may_be_negative_or_hold_an_equals_sign():
    assert parse_overrides(["--model.tied", "false"]) == ["model.tied=false"]
    assert parse_overrides(["--train.seed", "-1"]) == ["train.seed=-1"]
    assert parse_overrides(["--train.sample_prompt", "a = b"]) == ["train.sample_prompt=a = b"]


def test_top_level_keys_need_no_dot():
    assert parse_overrides(["--name", "x", "--model", "gpt2-124m"]) == ["name=x", "model=gpt2-124m"]


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["--tp", "2"], "did you mean --layout.tp?"),
        (["--stepss"], "did you mean --train.steps?"),
        (["zzzzzz"], "see --help"),
        (["--layout.tp"], "needs a value: --layout.tp VALUE"),
        (["--layout.tp", "--layout.pp", "2"], "needs a value: --layout.tp VALUE"),
    ],
)
def test_strays_are_refused_with_the_nearest_key(arguments, hint):
    with pytest.raises(BadInputError) as caught:
        parse_overrides(arguments)
    assert hint in str(caught.value) and "\n" not in str(caught.value)


@given(st.sampled_from([key for key, field in job_keys() if field.annotation is int]), st.integers(0, 9))
def test_both_ways_to_write_a_number_mean_the_same(key, value):
    assert parse_overrides([f"--{key}", str(value)]) == parse_overrides([f"--{key}={value}"])


def test_overrides_reach_the_job():
    job = load_job("tiny", parse_overrides(["--layout.tp", "2", "--model.bias", "--name", "other"]))
    assert (job.layout.tp, job.model.bias, job.name) == (2, True, "other")


def test_a_verb_may_be_typed_without_anything_behind_it():
    """As `make train` does."""
    app = typer.Typer()

    @app.command(cls=OverrideCommand)
    def verb(context: typer.Context) -> None:
        assert OverrideCommand.of(context) == []

    app([], standalone_mode=False)
