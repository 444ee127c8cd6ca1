"""Refused values and unknown keys are explained in plain words, never in those of the library that checks."""

from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import ValidationError

from myriad.config import _MUST_BE, explain
from myriad.errors import BadInputError
from myriad.faults.scenario import FaultScenario
from myriad.forecasts.fleet.fault_mix import Mix
from myriad.job import Job, job_keys, load_job, suggest_key
from myriad.job.typed_job import _SYNONYMS
from myriad.planner.cluster_config import Cluster
from myriad.recipes.cluster import load_cluster

_ERRORS_OF_SCHEMA = {
    "int": ("int_type", "int_parsing", "int_from_float", "int_parsing_size"),
    "float": ("float_type", "float_parsing", "finite_number"),
    "bool": ("bool_type", "bool_parsing"),
    "str": ("string_type", "string_sub_type", "string_unicode"),
    "literal": ("literal_error",),
    "tuple": ("tuple_type", "too_short", "too_long"),
    "list": ("list_type", "too_short", "too_long"),
    "dict": ("dict_type", "too_short", "too_long"),
    "model": ("model_type", "model_attributes_type"),
    "none": ("none_required",),
    "gt": ("greater_than",),
    "ge": ("greater_than_equal",),
    "lt": ("less_than",),
    "le": ("less_than_equal",),
    "multiple_of": ("multiple_of",),
    "pattern": ("string_pattern_mismatch",),
}
_LEAKS = ("should", "unable to", "input", "valid ", "pattern", "instance", "^[")


def _schema_words(schema: Any) -> Iterator[str]:
    if isinstance(schema, dict):
        kind = schema.get("type")
        yield from [kind] if isinstance(kind, str) else []
        yield from (key for key in schema if key in _ERRORS_OF_SCHEMA)
        for value in schema.values():
            yield from _schema_words(value)
    elif isinstance(schema, (list, tuple)):
        for value in schema:
            yield from _schema_words(value)


@pytest.mark.parametrize("config", [Job, Cluster, FaultScenario, Mix])
def test_every_error_that_a_file_can_cause_has_words_of_ours(config: Any) -> None:
    words = set(_schema_words(config.__pydantic_core_schema__))
    needed = {error for word in words for error in _ERRORS_OF_SCHEMA.get(word, ())}
    assert len(needed) > 10 and needed <= {*_MUST_BE}, needed - {*_MUST_BE}


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("layout.tp=two", 'layout.tp = "two": must be a whole number'),
        ("layout.tp=1.5", "layout.tp = 1.5: must be a whole number"),
        ("layout.tp=0", "layout.tp = 0: must be at least 1"),
        ("optimizer.learning_rate=fast", 'optimizer.learning_rate = "fast": must be a number'),
        ("optimizer.learning_rate=inf", "must be a finite number"),
        ("optimizer.beta1=1", "must be below 1"),
        ("model.bias=maybe", "must be true or false"),
        ("model.rotary_scaling.type=yarn", "did you mean model.rotary_scaling.kind?"),
        ("model.mtp=1", "did you mean model.prediction_layers?"),
        ("train.precision=half", 'must be "auto"'),
        ("name=a b", "must be letters, digits, dots, dashes and underscores, a letter or digit first"),
        ("layout.shares=3", "must be a list: [VALUE, ...]"),
        ("layout=3", "is a section with the keys layout.dp"),
        ("optimiser.lr=1", "optimiser.lr = 1: unknown key; did you mean optimizer.learning_rate?"),
    ],
)
def test_the_error_for_a_refused_value_names_what_is_allowed(override: str, told: str) -> None:
    with pytest.raises(BadInputError) as caught:
        load_job("tiny", [override])
    assert told in str(caught.value)
    assert not any(leak in str(caught.value) for leak in _LEAKS)


def test_a_cluster_is_explained_in_the_same_words() -> None:
    with pytest.raises(BadInputError, match=r"nodes = \"many\": must be a whole number"):
        load_cluster("laptop", ["nodes=many"])


def test_a_value_that_is_missing_is_asked_for() -> None:
    with pytest.raises(ValidationError) as caught:
        Cluster.model_validate({})
    assert {explain(error) for error in caught.value.errors()} == {"is needed"}


@pytest.mark.parametrize("key", _SYNONYMS)
def test_words_of_other_frameworks_lead_to_the_key(key: str) -> None:
    assert key in {known for known, _ in job_keys()}
    for word in _SYNONYMS[key].split():
        assert suggest_key(word) == key
        assert suggest_key(word.replace("_", "-").upper()) == key


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("optimiser.lr", "optimizer.learning_rate"),
        ("optimiser.clip_norm", "optimizer.clip_norm"),
        ("train.lr", "optimizer.learning_rate"),
        ("layout.partition", "layout.partition"),
        ("overlap.mesage_bytes", "overlap.message_bytes"),
        ("data.vocab_size", "model.vocabulary"),
        ("tp", "layout.tp"),
        ("qqqqq", None),
    ],
)
def test_a_key_is_suggested(typed: str, meant: str | None) -> None:
    assert suggest_key(typed) == meant
