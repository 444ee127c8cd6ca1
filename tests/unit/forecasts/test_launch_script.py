"""If these fail, a plan for another framework is started there with another model or another layout."""

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from myriad.errors import BadInputError
from myriad.forecasts.launch_script import check_launch, launch_text
from myriad.job import Job, load_job
from myriad.job.translation.megatron_arguments import read_command_line, translate_arguments
from myriad.recipes import recipe_names
from myriad.recipes.cluster import load_cluster, scale_cluster
from myriad.recipes.framework import load_framework

HEAD = "# A plan\n"


def script(job: Job, framework: str) -> str:
    cluster = scale_cluster(load_cluster("eos-3072xh100"), job.layout.world)
    return launch_text(job, load_framework(framework), cluster, HEAD)


def started(text: str, folder: Path, *more: str, **environment: str) -> list[str]:
    """Run a script with a torchrun that prints its arguments, one on each line."""
    (folder / "plan.sh").write_text(text)
    fake = folder / "torchrun"
    fake.write_text('#!/usr/bin/env bash\nprintf "%s\\n" "$@"\n')
    fake.chmod(0o755)
    path = f"{folder}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", str(folder / "plan.sh"), *more],
        env={"PATH": path, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.splitlines()


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        ("llama3.1-8b", ("layout.dp=8", "layout.zero=1")),
        ("qwen3-0.6b", ("layout.dp=4", "layout.zero=3", "layout.recompute=selective")),
        ("gpt2-355m", ("layout.tp=2", "layout.pp=2", "layout.recompute=full")),
        ("phi3-mini", ("layout.pp=2", "layout.virtual_stages=2", "overlap.pipeline=false")),
        ("qwen3-8b", ("layout.cp=4", "layout.ulysses=4", "layout.tp=2", "layout.zero=1")),
        ("stablelm2-1.6b", ("layout.cp=2", "layout.dp=4", "layout.zero=2")),
        ("smollm3-3b", ("layout.tp=4", "layout.micro_batch=2", "train.precision=float8-blocks")),
    ],
)
def test_megatrons_arguments_read_back_are_the_plan(model: str, layout: tuple[str, ...]) -> None:
    job = load_job(model, layout)
    made = translate_arguments(read_command_line(script(job, "megatron-core")))
    assert made.unknown == {}
    wanted = job.layout.model_dump(mode="json", exclude={"dp", "reduce"})  # the number of ranks decides dp
    defaults = type(job.layout)().model_dump(mode="json")
    assert {key: made.keys.get(f"layout.{key}", defaults[key]) for key in wanted} == wanted
    assert made.keys["train.global_batch"] == job.train.global_batch
    assert made.keys["train.steps"] == job.train.steps
    assert made.keys["optimizer.learning_rate"] == pytest.approx(job.optimizer.learning_rate)
    assert made.keys["model.layers"] == job.model.layers
    assert made.keys["model.vocabulary"] == job.model.vocabulary
    if job.train.precision.startswith("float8"):
        assert made.keys["train.precision"] == job.train.precision


def test_a_model_is_given_as_it_is_or_refused() -> None:
    """The check inside reads every script's model back; experts, which it does not read, are looked at."""
    framework = load_framework("megatron-core")
    taken = []
    for name in recipe_names("models"):
        try:
            check_launch(load_job(name), framework)
            taken.append(name)
        except BadInputError as error:
            assert error.value.startswith("model."), name
    assert {"llama3-8b", "qwen3-30b-a3b", "deepseek-v3", "mixtral-8x7b", "megascale-175b"} <= set(taken)
    assert not {"gemma2-2b", "gpt-oss-20b", "falcon-7b", "olmo2-7b"} & set(taken)
    text = script(load_job("deepseek-v3", ["layout.ep=8", "layout.dp=8"]), "megatron-core")
    given = read_command_line(text)
    assert (given["num_experts"], given["moe_router_topk"], given["expert_model_parallel_size"]) == (
        256,
        8,
        8,
    )
    assert given["moe_layer_freq"] == f"[{','.join('0' * 3 + '1' * 58)}]"
    assert (given["moe_router_num_groups"], given["moe_router_group_topk"]) == (8, 4)


def test_a_shell_hands_all_of_it_to_torchrun(tmp_path: Path) -> None:
    job = load_job("deepseek-v3", ["layout.ep=8", "layout.dp=16", "layout.tp=2"])
    words = started(script(job, "megatron-core"), tmp_path, "--data-path", "my data", NODE_RANK="3")
    assert words[:4] == ["--nproc-per-node", "8", "--nnodes", "4"]
    assert words[words.index("--node-rank") + 1] == "3"
    assert words[-2:] == ["--data-path", "my data"]
    assert words[words.index("--moe-layer-freq") + 1].startswith("[0,0,0,1")


@pytest.mark.parametrize(
    ("layout", "wanted"),
    [
        (("dp=16", "tp=2", "zero=3"), {"data_parallel_shard_degree": 16, "local_batch_size": 1}),
        (
            ("dp=8", "zero=3", "shard_group=4", "recompute=full", "recompute_ratio=0.25"),
            {"data_parallel_replicate_degree": 2, "data_parallel_shard_degree": 4, "selective_ac_option": 4},
        ),
        (
            ("dp=4", "pp=2", "virtual_stages=2", "micro_batch=2"),
            {
                "pipeline_parallel_schedule": "Interleaved1F1B",
                "pipeline_parallel_microbatch_size": 2,
                "pipeline_parallel_layers_per_stage": 8,
                "local_batch_size": 128,
            },
        ),
    ],
)
def test_torchtitans_degrees_are_the_layouts(
    layout: tuple[str, ...], wanted: dict[str, Any], tmp_path: Path
) -> None:
    job = load_job("llama3-8b", [f"layout.{one}" for one in layout])
    words = started(script(job, "torchtitan"), tmp_path, MODULE="llama3", CONFIG="llama3_8b")
    given = {words[i][2:].rpartition(".")[2]: words[i + 1] for i in range(len(words) - 1) if "." in words[i]}
    ranks = 1
    for name in ("data_parallel_replicate", "data_parallel_shard", "tensor_parallel", "pipeline_parallel"):
        ranks *= int(given[f"{name}_degree"])
    assert ranks == job.layout.world
    assert {name: given[name] for name in wanted} == {name: str(value) for name, value in wanted.items()}


def test_megatron_bridges_overrides_name_the_layout() -> None:
    job = load_job("qwen3-30b-a3b", ["layout.dp=8", "layout.ep=4", "layout.zero=1", "layout.tp=2"])
    text = script(job, "megatron-bridge")
    for line in (
        "model.tensor_model_parallel_size=2",
        "model.expert_model_parallel_size=4",
        "model.sequence_parallel=true",
        "ddp.use_distributed_optimizer=true",
        "mixed_precision=bf16_mixed",
        f"train.global_batch_size={job.train.global_batch}",
    ):
        assert f"    {line}\n" in text


@pytest.mark.parametrize(
    ("framework", "keys", "says"),
    [
        ("nanotron", (), "names a launcher"),
        ("megatron-core", ("optimizer.name=lamb",), "optimizer.name = lamb"),
        ("megatron-bridge", ("train.precision=float32",), "train.precision = float32"),
        ("torchtitan", ("train.precision=float8",), "train.precision = float8"),
    ],
)
def test_what_cannot_be_started_is_refused(framework: str, keys: tuple[str, ...], says: str) -> None:
    with pytest.raises(BadInputError, match=says):
        check_launch(load_job("llama3-8b", keys), load_framework(framework))


@pytest.mark.parametrize(
    ("framework", "keys", "says"),
    [
        ("megatron-core", ("offload_activations=0.5",), "offload_activations"),
        ("megatron-core", ("offload_optimizer=true",), "offload_optimizer"),
        ("megatron-core", ("pp=2", "schedule=gpipe"), "schedule = gpipe"),
        ("torchtitan", ("pp=2", "schedule=zero-bubble"), "schedule = zero-bubble"),
        ("megatron-core", ("pp=5",), "a divisor of the 32 layers, or of 34"),
        ("torchtitan", ("pp=12",), "a number that 32 layers fill"),
    ],
)
def test_layouts_that_the_framework_does_not_have_are_refused(
    framework: str, keys: tuple[str, ...], says: str
) -> None:
    with pytest.raises(BadInputError, match=says):
        script(load_job("llama3-8b", [f"layout.{key}" for key in keys]), framework)


def test_the_width_of_experts_is_written_where_the_framework_has_it() -> None:
    job = load_job("qwen3-30b-a3b", ["layout.tp=4", "layout.etp=2", "layout.dp=4", "layout.ep=8"])
    given = read_command_line(script(job, "megatron-core"))
    assert (given["expert_tensor_parallel_size"], given["expert_model_parallel_size"]) == (2, 8)
    with pytest.raises(BadInputError, match=r"layout.etp = 2.*1 or layout.tp = 4"):
        script(job, "torchtitan")


def test_groups_that_share_state_and_stages_with_embedding_and_head_are_written() -> None:
    grouped_job = load_job("llama3-8b", ["layout.dp=8", "layout.zero=1", "layout.shard_group=4"])
    grouped = read_command_line(script(grouped_job, "megatron-core"))
    assert grouped["num_distributed_optimizer_instances"] == 2
    assert "account_for_loss_in_pipeline_split" not in grouped
    uneven_job = load_job("llama3-405b", ["layout.pp=16", "layout.tp=8"])
    uneven = read_command_line(script(uneven_job, "megatron-core"))
    assert uneven["account_for_embedding_in_pipeline_split"] and uneven["account_for_loss_in_pipeline_split"]
