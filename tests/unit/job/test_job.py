"""If these fail, a job file means something else than it says, or bad input gets no clear single line."""

import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Annotated, Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from myriad.config import read_help
from myriad.data.config import CorpusShare
from myriad.errors import BadInputError
from myriad.job import Job, dump_toml, job_keys, load_job, parse_job
from myriad.job import typed_job as job_module
from myriad.job.phase_values import Phase

F16 = "train.precision=float16"
CLIPS = ["optimizer.name=muon", "optimizer.qk_clip=9"]
GROUPED = ["model.experts=8", "layout.dp=4", "layout.zero=2", "layout.shard_group=2"]
CAPPED = ["model.experts=4", "model.expert_capacity=1.25"]
IN_PAIRS = ["model.experts=4", "layout.dp=2", "layout.ep=2", "overlap.pairs=true"]
IN_A_V = ["layout.pp=2", "layout.virtual_stages=2", "layout.schedule=dualpipe-v"]
EARLY = ["overlap.optimizer_in_backward=true", "optimizer.clip_norm=off"]
GRAPHS = "train.cuda_graphs=true"
ROPELESS = "model.position=none"
SCALING = "model.rotary_scaling"
YARN = [f"{SCALING}.kind=yarn", f"{SCALING}.factor=2", f"{SCALING}.original_sequence=32"]


def configs(config: type[BaseModel]) -> st.SearchStrategy[Any]:
    """Any value of a config type, with the limits that its fields declare."""
    fields = {name: values(field) for name, field in config.model_fields.items()}
    return st.fixed_dictionaries(fields).map(lambda given: config(**given))


def values(field: FieldInfo) -> st.SearchStrategy[Any]:
    annotation = field.annotation
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return configs(annotation)
    if annotation == tuple[CorpusShare, ...]:
        return st.lists(configs(CorpusShare), max_size=3).map(tuple)
    if annotation == tuple[Phase, ...]:
        return st.lists(PHASES, max_size=3).map(tuple)
    patterns = [item.pattern for item in field.metadata if hasattr(item, "pattern")]
    if patterns:
        return st.from_regex(patterns[0], fullmatch=True)
    if type(None) in get_args(annotation):
        kind = next(kind for kind in get_args(annotation) if kind is not type(None))
        return st.none() | limited(kind, field).filter(lambda value: value != "off")
    return limited(annotation, field)


PHASES = st.builds(
    Phase,
    name=st.from_regex("[A-Za-z0-9][A-Za-z0-9._-]{0,9}", fullmatch=True),
    at_step=st.none() | st.integers(1, 99),
    data=st.just({"mixture": [{"path": "a", "weight": 2}]}),
    train=st.fixed_dictionaries({}, optional={"global_batch": st.integers(1, 99)}),
    optimizer=st.fixed_dictionaries({}, optional={"clip_norm": st.none(), "decay": st.just("linear")}),
)
"""Phases with some of the keys, as they are saved: a key that is not set stays as it is."""


def limited(kind: Any, field: FieldInfo) -> st.SearchStrategy[Any]:
    own = [limit for item in getattr(kind, "__metadata__", ()) for limit in getattr(item, "metadata", ())]
    limits = [*own, *field.metadata]  # of `Size | None`, pydantic leaves the type's own inside
    strategy = st.from_type(Annotated[kind, *limits]) if limits else st.from_type(kind)
    return strategy.filter(lambda value: not isinstance(value, float) or abs(value) < float("inf"))


@pytest.mark.slow
@settings(max_examples=50, deadline=None)
@given(configs(Job))
def test_a_saved_job_is_the_job(job: Job) -> None:
    """The job kept with a run is what is resumed and what decides whether a run folder is another job's."""
    assert Job.model_validate(tomllib.loads(dump_toml(job))) == job


def test_what_is_off_stays_off_when_saved(tmp_path: Path) -> None:
    """Clipping is on by default: left out of the saved job, a resumed run would clip."""
    job = load_job("tiny", ["optimizer.clip_norm=off"])
    path = tmp_path / "job.toml"
    path.write_text(dump_toml(job))
    assert load_job(str(path)).optimizer.clip_norm is None
    assert 'clip_norm = "off"' in path.read_text()


def test_every_key_has_help() -> None:
    read_help(Job)
    read_help(CorpusShare)
    for key, field in [*job_keys(), *job_keys(CorpusShare, "data.mixture.")]:
        assert field.description, f"{key} has no help"
        if type(None) in get_args(field.annotation):
            assert "off" in field.description.lower(), f"the help of {key} does not say what off means"


def test_reading_a_job_needs_no_torch() -> None:
    code = "import sys, myriad.job; myriad.job.load_job('tiny'); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("layout.tp=2", "layout.tp", 2),
        ("optimizer.clip_norm=off", "optimizer.clip_norm", None),
        ("optimizer.clip_norm=none", "optimizer.clip_norm", None),
        ("model.window=off", "model.window", None),
        ("model.position=none", "model.position", "none"),
        ("layout.recompute=none", "layout.recompute", "none"),
        ("layout.recompute=off", "layout.recompute", "none"),
        ("layout.recompute=full", "layout.recompute", "full"),
        ("train.sample_prompt=import os = 3", "train.sample_prompt", "import os = 3"),
        ("train.sample_prompt=2024-01-01", "train.sample_prompt", "2024-01-01"),
        ("name=123", "name", "123"),
        ("overlap.pipeline=off", "overlap.pipeline", False),
        ("model.rotary_pattern=[true, false]", "model.rotary_pattern", (True, False)),
        ("optimizer.learning_rate=6e-4", "optimizer.learning_rate", 6e-4),
    ],
)
def test_overrides(override: str, key: str, value: object) -> None:
    job: Any = load_job("tiny", [override])
    for part in key.split("."):
        job = getattr(job, part)
    assert job == value


def test_a_model_by_name_with_keys_on_top(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text('[data]\nvocabulary = 300\n[model]\nrecipe = "tiny"\nhidden = 32\n')
    job = load_job(str(path), ["model.layers=3"])
    assert (job.model.hidden, job.model.layers, job.model.vocabulary) == (32, 3, 512)
    assert load_job("tiny", ["model.layers=2"]).model.hidden == 64


@pytest.mark.parametrize(
    ("overrides", "key", "says"),
    [
        (
            [
                "model.qk_norm=head",
                "model.qk_norm_kind=layer",
                "model.qk_norm_bias=true",
                "model.position=none",
            ],
            "model.qk_norm_bias",
            "unless every layer has rotary positions",
        ),
        (["layout.cp=3"], "model.sequence", "a multiple of 6, for the ranks that share it"),
        (["layout.cp=4", "layout.ulysses=3"], "layout.ulysses", "must divide layout.cp = 4"),
        (["layout.cp=8", "layout.ulysses=8"], "layout.ulysses", "must divide the 4 query heads of a rank"),
        (["layout.cp=2", "train.cuda_graphs=true"], "layout.cp", "needs train.cuda_graphs = false"),
        (["layout.cp=2", "layout.dp=2", "telemetry.noise_scale=true"], "layout.cp", "noise_scale = false"),
        (["layout.ep=2"], "layout.ep", "must divide layout.dp = 1"),
        (["layout.dp=2", "layout.ep=2"], "layout.ep", "needs model.experts"),
        (["model.experts=4", "layout.expert_dispatch=node"], "layout.expert_dispatch", "layout.ep = 1"),
        (["layout.tp=2", "layout.etp=1"], "layout.etp", "needs model.experts"),
        (["layout.expert_load=1.5"], "layout.expert_load", "needs model.experts"),
        (["model.expert_capacity=1.5"], "model.expert_capacity", "only with model.experts, else off"),
        (
            [*CAPPED, "layout.expert_load=1.5"],
            "layout.expert_load",
            "at most 1.25: with model.expert_capacity",
        ),
        (["layout.tp=4", "layout.etp=3", "model.experts=4"], "layout.etp", "must divide layout.tp = 4"),
        (["layout.tp=4", "layout.etp=2", "layout.ep=4"], "layout.ep", "layout.tp / layout.etp = 2"),
        (["layout.dp=2", "layout.ep=2", "model.experts=3"], "layout.ep", "must divide model.experts = 3"),
        (["overlap.pairs=true"], "overlap.pairs", "needs layout.ep above 1"),
        ([*IN_PAIRS, "layout.schedule=gpipe"], "overlap.pairs", "layout.schedule = 1f1b"),
        ([*IN_PAIRS, "layout.pp=2"], "overlap.pairs", "layout.schedule = eager-1f1b"),
        ([*IN_PAIRS, "layout.recompute=full"], "overlap.pairs", "layout.recompute = none"),
        ([*IN_PAIRS, "train.global_batch=2"], "overlap.pairs", "at least 2 micro-batches"),
        ([*IN_PAIRS, *IN_A_V, "train.global_batch=4"], "overlap.pairs", "at least 3 micro-batches"),
        (["model.heads=3"], "model.hidden", "divisible by model.heads = 3"),
        (["model.kv_heads=3"], "model.heads", "divisible by model.kv_heads = 3"),
        (["model.head_dim=17"], "model.head_dim", "even"),
        (["layout.tp=3"], "layout.tp", "one of 1, 2, 4"),
        (["model.kv_heads=2", "layout.tp=8"], "layout.tp", "one of 1, 2, 4"),
        (["model.heads=8", "model.hidden=64", "model.kv_heads=4", "layout.tp=3"], "layout.tp", "1, 2, 4, 8"),
        (["layout.tp=2", "model.ffn_hidden=33"], "layout.tp", "model.ffn_hidden = 33"),
        (["layout.tp=2", "model.sequence=33"], "layout.tp", "model.sequence = 33"),
        (["layout.pp=7"], "layout.pp x layout.virtual_stages", "at most 6"),
        (["layout.virtual_stages=2", "layout.schedule=1f1b"], "layout.virtual_stages", "only 1 with"),
        (["layout.virtual_stages=2", "layout.schedule=zero-bubble"], "layout.virtual_stages", "only 1 with"),
        (["layout.partition=best"], "layout.partition", "uniform, parameters, profile"),
        (["layout.partition=type:"], "layout.partition", "type:REGEX"),
        (["layout.partition=type:("], "layout.partition", "not a regular expression"),
        (["layout.pp=2", "layout.partition=manual:"], "layout.partition", "manual:B1"),
        (["layout.pp=2", "layout.partition=manual:1,2"], "layout.partition", "need 1 number from 1 to 5"),
        (
            ["layout.pp=3", "layout.partition=manual:3,3"],
            "layout.partition",
            "need 2 rising numbers from 1 to 5, the first layer of each later stage, e.g. manual:2,4",
        ),
        (
            ["layout.pp=2", "layout.partition=manual:6"],
            "layout.partition",
            "layer 0 is the Embedding, layer 5 the Head",
        ),
        (
            ["layout.pp=2", "layout.partition=type:Norm"],
            "layout.partition",
            "kinds are Embedding, Block, Head",
        ),
        (["layout.reduce=each"], "layout.reduce", "needs layout.zero = 2 or 3"),
        (["layout.dp=4", "layout.shard_group=2"], "layout.shard_group", "needs layout.zero = 1, 2 or 3"),
        (
            ["layout.dp=4", "layout.zero=3", "checkpoint.holders=2"],
            "checkpoint.holders",
            "at most 1: so many ranks hold the same state",
        ),
        (
            ["layout.dp=2", "comm.sync_every=2", "checkpoint.holders=2"],
            "checkpoint.holders",
            "more than 1 needs comm.sync_every = 1",
        ),
        (
            ["layout.dp=4", "layout.zero=3", "layout.shard_group=3"],
            "layout.shard_group",
            "must divide layout.dp",
        ),
        ([*GROUPED, "layout.ep=4"], "layout.shard_group", "must be a multiple of layout.ep = 4"),
        (
            [*GROUPED, "layout.tp=2", "layout.ep=8", "layout.etp=1"],
            "layout.shard_group",
            "must times layout.tp = 2 be a multiple of layout.ep = 8",
        ),
        (
            ["layout.reduce=each", "layout.zero=1", "layout.dp=2"],
            "layout.reduce",
            "needs layout.zero = 2 or 3",
        ),
        (["layout.dp=2", "layout.shares=[5]"], "layout.shares", "2 numbers of at least 1"),
        (["layout.dp=2", "layout.shares=[8, 0]"], "layout.shares", "2 numbers of at least 1"),
        (["layout.dp=2", "layout.shares=[]"], "layout.shares", "2 numbers of at least 1"),
        (["layout.dp=2", "layout.shares=[5, 4]"], "layout.shares", "must add up to train.global_batch"),
        (["layout.dp=2", "layout.micro_batch=3", "layout.shares=[1, 1]"], "layout.shares", "= 8 / 3"),
        (
            ["layout.dp=2", "layout.shares=[5, 3]", "comm.sync_every=2"],
            "layout.shares",
            "comm.sync_every = 1",
        ),
        (["layout.dp=3"], "train.global_batch", "multiple of layout.dp x layout.micro_batch = 3"),
        (["model.window=65"], "model.window", "at most model.sequence = 64"),
        (["model.window=8", "model.window_pattern=[]"], "model.window_pattern", "at least one"),
        (["model.window=8", "model.window_pattern=[false]"], "model.window_pattern", "model.window = off"),
        (["model.window_pattern=[true, false]"], "model.window_pattern", "with model.window, else [true]"),
        (["model.prediction_weight=0.3"], "model.prediction_weight", "model.prediction_layers, else 0.1"),
        (["model.q_lora_rank=8"], "model.q_lora_rank", "only with model.kv_lora_rank, else off"),
        ([ROPELESS, "model.rotary_base=100"], "model.rotary_base", "with model.position = rotary"),
        ([ROPELESS, "model.rotary_pattern=[false]"], "model.rotary_pattern", "with model.position = rot"),
        ([ROPELESS, f"{SCALING}.kind=linear"], f"{SCALING}.kind", "only with model.position = rotary"),
        (["model.rotary_pattern=[false]"], "model.rotary_pattern", "set model.position = none"),
        ([f"{SCALING}.mscale=2"], f"{SCALING}.mscale", f"only with {SCALING}.kind = yarn, which is none"),
        ([*YARN, f"{SCALING}.mscale=2"], f"{SCALING}.mscale", f"needs {SCALING}.mscale_all_dim"),
        (
            [*YARN, f"{SCALING}.mscale=2", f"{SCALING}.mscale_all_dim=1", f"{SCALING}.attention_factor=1"],
            f"{SCALING}.mscale",
            f"off with {SCALING}.attention_factor",
        ),
        ([*YARN, f"{SCALING}.mscale_all_dim=1"], f"{SCALING}.mscale_all_dim", "only with model.kv_lora_rank"),
        (
            [f"{SCALING}.kind=linear", f"{SCALING}.attention_factor=2"],
            f"{SCALING}.attention_factor",
            "kind = yarn or longrope, which is linear",
        ),
        ([*YARN, f"{SCALING}.low_frequency_factor=2"], f"{SCALING}.low_frequency_factor", "kind = llama3"),
        ([*YARN, f"{SCALING}.long_factors=[2]"], f"{SCALING}.long_factors", "kind = longrope"),
        ([f"{SCALING}.factor=2"], f"{SCALING}.factor", "linear, dynamic, yarn, longrope or llama3"),
        (["data.vocabulary=513"], "data.vocabulary", "at most model.vocabulary = 512"),
        (["optimizer.warmup_steps=21"], "optimizer.warmup_steps", "at most train.steps = 20"),
        (
            ["overlap.optimizer_in_backward=true"],
            "overlap.optimizer_in_backward",
            "needs optimizer.clip_norm = off",
        ),
        (["model.prediction_layers=16", "model.sequence=16"], "model.prediction_layers", "below model.seq"),
        (["model.mup_base_width=64", "optimizer.name=lamb"], "model.mup_base_width", "need adamw"),
        ([*EARLY, "optimizer.name=lamb"], "overlap.optimizer_in_backward", "needs optimizer.name = adamw"),
        ([*EARLY, "optimizer.name=muon"], "overlap.optimizer_in_backward", "needs optimizer.name = adamw"),
        (["model.mup_base_width=64", "optimizer.name=muon"], "model.mup_base_width", "need adamw"),
        (["optimizer.qk_clip=9"], "optimizer.qk_clip", "only with optimizer.name = muon"),
        ([*CLIPS, "model.qk_norm=head"], "optimizer.qk_clip", "needs model.qk_norm = none"),
        (
            ["telemetry.noise_scale=true", "train.global_batch=1"],
            "telemetry.noise_scale",
            "needs layout.dp of at least 2, or two micro-batches a step",
        ),
        (["optimizer.ema_every=4"], "optimizer.ema_every", "only with optimizer.ema_decay"),
        (["train.validate_ema=true"], "train.validate_ema", "needs optimizer.ema_decay"),
        (["optimizer.ema_decay=0.9", "comm.sync_every=2"], "optimizer.ema_decay", "comm.sync_every = 1"),
        (["optimizer.muon_iterations=4"], "optimizer.muon_iterations", "only with optimizer.name = muon"),
        (
            [*EARLY, "resilience.on_spike=skip"],
            "overlap.optimizer_in_backward",
            "needs resilience.on_spike = report",
        ),
        (
            [*EARLY, "overlap.optimizer=false"],
            "overlap.optimizer_in_backward",
            "needs overlap.optimizer = true",
        ),
        (["layout.offload_optimizer=true", "optimizer.name=lamb"], "layout.offload_optimizer", "needs optim"),
        (
            ["layout.offload_optimizer=true", "overlap.optimizer=false"],
            "layout.offload_optimizer",
            "needs overlap.optimizer = true",
        ),
        (["layout.offload_optimizer_ratio=0.5"], "layout.offload_optimizer_ratio", "1.0, unless layout.off"),
        (["train.memory_offload=auto"], "train.memory_offload", "needs train.memory_budget"),
        (
            ["train.memory_offload=auto", "train.memory_budget=9 GiB", "optimizer.name=lamb"],
            "train.memory_offload",
            "needs optimizer.name = adamw or muon",
        ),
        ([GRAPHS, "layout.offload_activations=1"], "train.cuda_graphs", "needs layout.offload_activations"),
        ([*EARLY, F16], "train.precision", "needs overlap.optimizer_in_backward = false"),
        ([F16, "loss_scale.initial=3000"], "loss_scale.initial", "must be a power of two"),
        ([F16, "loss_scale.initial=0.5"], "loss_scale.initial", "at least loss_scale.minimum = 1"),
        ([F16, "loss_scale.growth_interval=0"], "loss_scale.growth_interval", "at least 1"),
        (
            ["train.precision=bfloat16", "loss_scale.minimum=2"],
            "loss_scale.minimum",
            "only with train.precision = float16",
        ),
        (
            [GRAPHS, "layout.tp=2", "overlap.tensor=slices"],
            "train.cuda_graphs",
            "needs overlap.tensor = turns or off: products in slices",
        ),
        ([GRAPHS, "layout.tp=2", "overlap.tensor=auto"], "train.cuda_graphs", "auto may choose them"),
        ([GRAPHS, "train.memory_budget=1 GiB"], "train.cuda_graphs", "needs train.memory_budget = off"),
        (
            ['data.validation_sets=[{name="a", path="b"}, {name="a", path="c"}]'],
            "data.validation_sets",
            "names of their own",
        ),
        ([GRAPHS, "model.experts=4"], "train.cuda_graphs", "needs model.experts = off"),
        (["model.experts=4", "layout.tp=2", "overlap.tensor=slices"], "overlap.tensor", "turns, auto or off"),
        (
            ["model.experts=4", "train.precision=float8"],
            "train.precision",
            "float8-blocks, or without float8",
        ),
        (
            ["model.experts=4", "model.expert_hidden=136", "train.precision=float8-blocks"],
            "model.expert_hidden / layout.etp",
            "a multiple of 16",
        ),
        (
            ["model.activation=swiglu", "model.ffn_hidden=136", "train.precision=float8"],
            "model.ffn_hidden / layout.tp",
            "a multiple of 16",
        ),
        (
            ["model.experts=4", "model.experts_per_token=5"],
            "model.experts_per_token",
            "at most model.experts",
        ),
        (["model.experts=4", "model.experts_per_token=1"], "model.experts_per_token", "2 or more"),
        (["model.experts=4", "model.block=parallel"], "model.block", "serial with model.experts"),
        (
            ["model.experts=4", "model.expert_hidden=64", "model.ffn_hidden=64"],
            "model.ffn_hidden",
            "off with model.expert_hidden",
        ),
        (["model.expert_hidden=64"], "model.expert_hidden", "only with model.experts"),
        (["model.dense_layers=1"], "model.dense_layers", "only with model.experts"),
        (["model.router_logit_bias=true"], "model.router_logit_bias", "only with model.experts"),
        (["model.experts=4", "model.router_group_limit=2"], "model.router_group_limit", "only with"),
        (["model.experts=4", "model.router_groups=3"], "model.router_groups", "a divisor of model.experts"),
        (["model.experts=4", "model.router_groups=4"], "model.router_group_limit", "2 to 4: a group has 1"),
        (
            ["model.experts=4", "model.balance_bias_rate=0.001", *EARLY],
            "model.balance_bias_rate",
            "needs overlap.optimizer_in_backward = false",
        ),
        (
            ["model.experts=4", "model.balance_bias_rate=0.001", "comm.sync_every=2", "layout.dp=2"],
            "model.balance_bias_rate",
            "needs comm.sync_every = 1",
        ),
        (["model.experts=4", "model.dense_layers=4"], "model.dense_layers", "below model.layers = 4"),
        (["model.experts=4", "model.expert_every=5"], "model.expert_every", "at most model.layers = 4"),
        (
            [
                *("model.experts=4", "model.dense_layers=1", "model.expert_hidden=64"),
                *("model.ffn_hidden=9", "layout.tp=2"),
            ],
            "layout.tp",
            "model.ffn_hidden = 9",
        ),
        (["model.experts=4", "model.expert_hidden=9", "layout.tp=2"], "layout.tp", "model.expert_hidden = 9"),
        ([GRAPHS, "data.documents=packed"], "train.cuda_graphs", "needs data.documents = joined"),
        ([GRAPHS, *EARLY], "train.cuda_graphs", "needs overlap.optimizer_in_backward = false"),
        (["layout.zero=4"], "layout.zero", "at most 3"),
        (["train.global_batch=100000000000"], "train.global_batch", "at most 16777216"),
        (
            ["layout.schedule=fifo"],
            "layout.schedule",
            '"zero-bubble", "zero-bubble-v", "eager-zero-bubble" or "dualpipe-v"',
        ),
        (["layout.tp=two"], "layout.tp", "whole number"),
        (["optimizer.learning_rate=inf"], "optimizer.learning_rate", "finite number"),
        (["name=../x"], "name", "letters, digits"),
        (["layout.tpp=2"], "layout.tpp", "did you mean layout.tp?"),
        (["clip_norm=1"], "clip_norm", "did you mean optimizer.clip_norm?"),
        (["optimiser.clip_norm=1"], "optimiser.clip_norm", "did you mean optimizer.clip_norm?"),
        (["qwertyuiop=1"], "qwertyuiop", "top-level keys are name, model"),
        (["layout=2"], "layout", "layout.dp, layout.tp"),
        (["layout=2", "layout.tp=2"], "layout", "is a section"),
        (["layout.tp"], "override", "KEY=VALUE"),
        (["layout..tp=2"], "override", "KEY=VALUE"),
        (["model=tinny"], "model", "did you mean tiny?"),
        (["data.mixture=[{weight = 1}]"], "data.mixture.0.path", "is needed"),
    ],
)
def test_bad_input_is_one_line_with_key_value_and_what_is_allowed(
    overrides: list[str], key: str, says: str
) -> None:
    with pytest.raises(BadInputError) as caught:
        load_job("tiny", overrides)
    assert caught.value.key == key
    assert says in caught.value.allowed
    assert str(caught.value).startswith(f"{key} = ") and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "overrides",
    [
        ["layout.dp=2", "layout.tp=2", "layout.pp=2", "layout.virtual_stages=2", "layout.zero=3"],
        ["layout.zero=3"],
        ["layout.zero=2", "layout.reduce=each"],
        ["layout.dp=4", "layout.zero=1", "layout.shard_group=2"],
        ["layout.pp=6", "layout.schedule=zero-bubble"],
        ["layout.pp=3", "layout.partition=manual:2,4"],
        ["layout.pp=2", "layout.partition=type:Block"],
        ["layout.virtual_stages=3", "layout.schedule=gpipe"],
        ["data.vocabulary=9000", "data.corpus=corpora/text"],
        ["model.window=64"],
        [*EARLY, "layout.dp=2", "layout.zero=1"],
    ],
)
def test_what_is_possible_is_not_refused(overrides: list[str]) -> None:
    load_job("tiny", overrides)


@pytest.mark.parametrize(
    ("recipe", "off", "typed"),
    [
        ("gemma3-1b", "model.window=off", "model.window_pattern=[true, false]"),
        ("llama3.1-8b", "model.position=none", "model.rotary_base=100"),
        ("llama3.1-8b", f"{SCALING}.kind=none", f"{SCALING}.factor=4"),
        ("stablelm2-12b", "model.qk_norm=none", "model.qk_norm_kind=layer"),
    ],
)
def test_a_part_of_a_model_is_turned_off_by_one_key(recipe: str, off: str, typed: str) -> None:
    """Its settings in the recipe's file are not what the user typed."""
    load_job(recipe, [off])
    with pytest.raises(BadInputError, match="|".join(("only with", "rms with"))):
        load_job(recipe, [typed, off])


@pytest.mark.parametrize(
    ("content", "says"),
    [(b"name = ", "not valid TOML"), (b"\xff\xfe", "not valid TOML"), (None, "no such file")],
)
def test_an_unreadable_file_is_one_line(tmp_path: Path, content: bytes | None, says: str) -> None:
    path = tmp_path / "job.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(BadInputError, match=says) as caught:
        load_job(str(path))
    assert "\n" not in str(caught.value)


def test_a_folder_is_not_a_job(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match="cannot be read"):
        load_job(f"{tmp_path}/")


def test_the_error_for_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(BadInputError, match=r"did you mean tiny\? a .toml file or one of .*tiny"):
        load_job("tinny")


def test_shares_that_no_equal_division_gives() -> None:
    job = load_job("tiny", ["layout.dp=3", "layout.shares=[3, 3, 2]"])
    assert (job.shares, job.num_micro_batches) == ((3, 3, 2), 3)
    assert load_job("tiny", ["layout.dp=2"]).shares == (4, 4)


@pytest.mark.parametrize(
    "override",
    [
        "model.layers=1000000000",
        "model.hidden=1000000000000",
        "model.heads=1000000000",
        "model.ffn_hidden=1000000000000",
        "model.vocabulary=1000000000000",
        "model.sequence=1000000000000",
        "train.global_batch=1000000000",
        "layout.dp=1000000000",
        "layout.virtual_stages=1000000000",
        "layout.micro_batch=1000000000",
    ],
)
def test_absurd_sizes_are_refused_by_their_types(override: str) -> None:
    """Every verb that reads a job hung or ran out of memory on them."""
    with pytest.raises(BadInputError, match=override.partition("=")[0]):
        load_job("tiny", [override])


def test_a_world_that_no_table_can_hold_is_refused() -> None:
    with pytest.raises(BadInputError, match="at most 1,048,576 ranks"):
        load_job("tiny", ["layout.dp=100000", "layout.tp=100000"])


def test_a_batch_that_cannot_be_divided_is_refused_with_the_nearest_that_can() -> None:
    with pytest.raises(BadInputError, match="such as 6 or 9"):
        load_job("tiny", ["layout.dp=3", "train.global_batch=8"])


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("overlap.partition=2 MiB", "overlap.message_bytes=2 MiB"),
        ("overlap.credit=32 MiB", "overlap.max_in_flight_bytes=32 MiB"),
        ("resilience.patience=2.5", "resilience.timeout_scale=2.5"),
        ("resilience.on_slow=tell", "resilience.on_slow=report"),
        ("resilience.on_spike=tell", "resilience.on_spike=report"),
        ("loss_scale.most_skips=5", "loss_scale.max_skips=5"),
    ],
)
def test_a_job_with_a_former_name_means_the_same(
    old: str, new: str, caplog: pytest.LogCaptureFixture
) -> None:
    job_module._warn_renamed.cache_clear()
    base = ["train.precision=float16"]
    expected = load_job("tiny", [*base, new])
    assert load_job("tiny", [*base, old]) == expected
    key, _, value = old.partition("=")
    section, _, name = key.partition(".")
    text = f'[train]\nprecision = "float16"\n[{section}]\n{name} = "{value}"\n'
    in_file = parse_job(text, "job.toml")
    assert getattr(in_file, section) == getattr(expected, section)
    current = new.partition("=")[0]
    assert [current in record.message for record in caplog.records] == [True], "one line a process"


def test_an_override_by_its_former_name_wins_over_the_file_s_current_one() -> None:
    text = "[resilience]\ntimeout_scale = 3\n"
    assert parse_job(text, "job.toml", ["resilience.patience=2"]).resilience.timeout_scale == 2


def test_a_key_under_both_of_its_names_is_refused() -> None:
    text = "[resilience]\ntimeout_scale = 3\npatience = 2\n"
    with pytest.raises(BadInputError, match=r"resilience\.patience = 2: is the former name of"):
        parse_job(text, "job.toml")
