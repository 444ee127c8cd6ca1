"""If these fail, a plan for another framework is started there with another model or another layout."""

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from myriad.errors import BadInputError
from myriad.forecasts.launch.launch_script import check_launch, launch_text
from myriad.job import Job, load_job
from myriad.job.translation.megatron_arguments import read_command_line, translate_arguments
from myriad.planner import scale_cluster
from myriad.recipes import recipe_names
from myriad.recipes.cluster import load_cluster
from myriad.recipes.framework import load_framework

HEAD = "# A plan\n"


def script(job: Job, framework: str) -> str:
    cluster = scale_cluster(load_cluster("eos-3072xh100"), job.layout.world)
    return launch_text(job, load_framework(framework), cluster, HEAD)


def started(text: str, folder: Path, *more: str, **environment: str) -> list[str]:
    """Run a script with starters that print their arguments, one on each line."""
    (folder / "plan.sh").write_text(text)
    for name in ("torchrun", "deepspeed", "python3"):
        (folder / name).write_text('#!/usr/bin/env bash\nprintf "%s\\n" "$@"\n')
        (folder / name).chmod(0o755)
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
            assert str(error.value).startswith("model."), name
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
        (
            ("dp=16", "tp=2", "zero=3"),
            {"data_parallel_shard_degree": 16, "num_tokens_per_microbatch_per_dp_rank": 8192},
        ),
        (
            ("dp=8", "zero=3", "shard_group=4", "micro_batch=2"),
            {
                "data_parallel_replicate_degree": 2,
                "data_parallel_shard_degree": 4,
                "num_tokens_per_microbatch_per_dp_rank": 16384,
            },
        ),
        (
            ("dp=4", "pp=2", "virtual_stages=2", "micro_batch=2"),
            {
                "pipeline_parallel_schedule": "Interleaved1F1B",
                "pipeline_parallel_layers_per_stage": 8,
                "num_pp_microbatches": 64,
                "num_tokens_per_microbatch_per_dp_rank": 16384,
                "num_tokens_per_train_step": 512 * 8192,
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
    assert ("--training.disable_cuda_graphs" in words) == (job.layout.pp > 1)
    assert words[-1] == f"activation-checkpoint:{job.layout.recompute}"


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
        ("primus", (), "names a launcher"),
        ("megatron-core", ("optimizer.name=lamb",), "optimizer.name = lamb"),
        ("megatron-bridge", ("train.precision=float32",), "train.precision = float32"),
        ("torchtitan", ("train.precision=float8",), "train.precision = float8"),
        ("nanotron", ("model.qk_norm=head",), "model.qk_norm = head"),
        ("nanotron", ("model.experts=8",), r"model.experts = 8\": only off"),
        ("maxtext", ("optimizer.decay=linear",), "optimizer.decay = linear"),
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
        ("torchtitan", ("pp=4", "virtual_stages=5"), "a number that 32 layers fill"),
        ("torchtitan", ("recompute=full", "recompute_ratio=0.25"), "recompute_ratio"),
        ("nanotron", ("pp=4", "virtual_stages=2"), "schedule = interleaved"),
        ("nanotron", ("cp=2",), "layout.cp = 2"),
        ("deepspeed", ("tp=2", "zero=3"), "layout.tp = 2"),
        ("maxtext", ("pp=2", "zero=3"), "layout.pp = 2"),
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
    with pytest.raises(BadInputError, match=r"layout.etp = 2.*1 with layout.ep above 1"):
        script(job, "torchtitan")


def test_groups_that_share_state_and_stages_of_different_sizes_are_written() -> None:
    grouped_job = load_job("llama3-8b", ["layout.dp=8", "layout.zero=1", "layout.shard_group=4"])
    grouped = read_command_line(script(grouped_job, "megatron-core"))
    assert grouped["num_distributed_optimizer_instances"] == 2
    assert "pipeline_model_parallel_layout" not in grouped
    uneven_job = load_job("llama3-405b", ["layout.pp=16", "layout.tp=8", "layout.virtual_stages=1"])
    uneven = read_command_line(script(uneven_job, "megatron-core"))
    assert uneven["pipeline_model_parallel_layout"] == "Et*8|(t*8|)*13t*7|t*7L"
    looped_job = load_job("deepseek-v3", ["layout.pp=2", "layout.virtual_stages=4", "layout.zero=1"])
    looped = read_command_line(script(looped_job, "megatron-core"))
    assert looped["pipeline_model_parallel_layout"] == "Et*8|(t*8|)*4(t*7|)*2t*7mL"
    dense_job = load_job("llama3-8b", ["layout.pp=3", "layout.tp=1", "layout.virtual_stages=7"])
    dense = read_command_line(script(dense_job, "megatron-core"))
    assert dense["pipeline_model_parallel_layout"] == "Ett|(tt|)*10(t|)*9tL"
    assert translate_arguments(dense).keys["layout.virtual_stages"] == 7


@pytest.mark.parametrize(("replicas", "size"), [(64, None), (51, 5), (56, 5)])
def test_rounds_of_interleaved_schedules_are_ones_that_megatron_accepts(
    replicas: int, size: int | None
) -> None:
    batch = 512 // replicas * replicas
    keys = ["layout.pp=4", "layout.virtual_stages=2", f"layout.dp={replicas}", f"train.global_batch={batch}"]
    given = read_command_line(script(load_job("llama3-8b", keys), "megatron-core"))
    assert given.get("microbatch_group_size_per_virtual_pipeline_stage") == size
    count = batch // replicas
    assert count % (size or 4) == 0 or count % (size or 4) >= 4


def test_what_a_recipe_may_have_and_the_plan_has_not_is_turned_off() -> None:
    lines = script(
        load_job("llama3-8b", ["layout.dp=8", "layout.tp=1", "layout.zero=0"]), "megatron-bridge"
    ).splitlines()
    for line in (
        "model.virtual_pipeline_model_parallel_size=null",
        "model.pipeline_model_parallel_layout=null",
        "model.num_layers_in_first_pipeline_stage=null",
        "model.context_parallel_size=1",
        "model.sequence_parallel=false",
        "model.recompute_granularity=null",
        "optimizer.use_distributed_optimizer=false",
        "dataset.seq_length=8192",
        "scheduler.lr_warmup_fraction=null",
    ):
        assert f"    {line}" in lines


def test_a_schedule_that_falls_late_has_its_last_steps() -> None:
    keys = ["optimizer.decay=wsd", "optimizer.decay_ratio=0.25", "train.steps=10000"]
    given = read_command_line(script(load_job("llama3-8b", keys), "megatron-core"))
    assert (given["lr_decay_style"], given["lr_wsd_decay_iters"]) == ("WSD", 2500)


def test_hosts_of_a_rack_have_four_accelerators(tmp_path: Path) -> None:
    job = load_job("llama3-8b", ["layout.dp=144", "layout.tp=1", "train.global_batch=1152"])
    cluster = scale_cluster(load_cluster("gb200-576xgb200"), 144)
    words = started(launch_text(job, load_framework("megatron-core"), cluster, HEAD), tmp_path)
    assert words[:4] == ["--nproc-per-node", "4", "--nnodes", "36"]


def test_nanotron_reads_a_file_that_the_script_writes(tmp_path: Path) -> None:
    keys = ["layout.dp=4", "layout.tp=2", "layout.pp=2", "layout.zero=1", "layout.micro_batch=2"]
    job = load_job("qwen2.5-7b", [*keys, "layout.recompute=full", "train.global_batch=64"])
    words = started(script(job, "nanotron"), tmp_path, DATASET="{dataset_folder: tokens}")
    assert words[-2:] == ["--config-file", str(tmp_path / "plan.yaml")]
    given = yaml.safe_load((tmp_path / "plan.yaml").read_text())
    wanted = {
        "dp": 4,
        "tp": 2,
        "pp": 2,
        "pp_engine": "1f1b",
        "tp_mode": "REDUCE_SCATTER",
        "recompute_layer": True,
    }
    assert {key: given["parallelism"][key] for key in wanted} == wanted
    assert given["tokens"]["micro_batch_size"] * given["tokens"]["batch_accumulation_per_replica"] * 4 == 64
    assert (
        given["model"]["model_config"]["attention_bias"] and given["model"]["model_config"]["is_qwen2_config"]
    )
    assert given["optimizer"]["learning_rate_scheduler"]["learning_rate"] == job.optimizer.learning_rate
    assert given["optimizer"]["optimizer_factory"]["adam_eps"] == job.optimizer.epsilon
    assert given["data_stages"][0]["data"]["dataset"] == {"dataset_folder": "tokens"}


def test_deepspeed_and_transformers_get_the_same_batch(tmp_path: Path) -> None:
    keys = ["layout.dp=32", "layout.tp=1", "layout.zero=3", "layout.recompute=full", "layout.micro_batch=2"]
    job = load_job("llama3-8b", [*keys, "train.global_batch=256"])
    words = started(script(job, "deepspeed"), tmp_path, "--model_name", "x", TRAIN="run_clm.py")
    assert words[:6] == ["--num_gpus", "8", "--num_nodes", "4", "run_clm.py", "--deepspeed"]
    given = json.loads((tmp_path / "plan.json").read_text())
    trainer = dict(zip(words[7:-2:2], words[8:-2:2], strict=True))
    assert given["train_micro_batch_size_per_gpu"] == int(trainer["--per_device_train_batch_size"]) == 2
    assert given["gradient_accumulation_steps"] == int(trainer["--gradient_accumulation_steps"]) == 4
    assert given["train_batch_size"] == 256 and given["zero_optimization"]["stage"] == 3
    assert given["bf16"]["enabled"] and trainer["--bf16"] == trainer["--gradient_checkpointing"] == "true"
    assert json.loads(trainer["--lr_scheduler_kwargs"]) == {
        "min_lr_rate": job.optimizer.final_learning_rate_ratio
    }


def test_maxtexts_mesh_fills_nodes_with_the_innermost_axes(tmp_path: Path) -> None:
    keys = ["layout.dp=32", "layout.tp=2", "layout.zero=3", "layout.micro_batch=2", "layout.shard_group=16"]
    job = load_job("llama3-8b", [*keys, "train.global_batch=256"])
    words = started(script(job, "maxtext"), tmp_path, MODEL="llama3-8b")
    assert words[:3] == ["-m", "maxtext.trainers.pre_train.train", "model_name=llama3-8b"]
    given = dict(word.split("=", 1) for word in words[2:])
    wanted = {"ici_tensor_sequence": 2, "ici_fsdp": 4, "dcn_fsdp": 4, "dcn_data": 2, "ici_data": 1}
    assert {key: int(given[f"{key}_parallelism"]) for key in wanted} == wanted
    assert float(given["per_device_batch_size"]) * 64 * int(given["gradient_accumulation_steps"]) == 256


def test_formats_of_blackwell_are_those_of_the_plan() -> None:
    rack, job = load_cluster("64xgb300"), load_job("llama3-8b", ["layout.dp=64", "layout.zero=1"])
    blocks = load_job("llama3-8b", ["layout.dp=64", "layout.zero=1", "train.precision=float8-blocks"])
    nvfp4 = load_framework("megatron-bridge-nvfp4")
    assert "mixed_precision=bf16_with_nvfp4_mixed" in launch_text(job, nvfp4, rack, HEAD)
    bridge, core = load_framework("megatron-bridge"), load_framework("megatron-core")
    assert "mixed_precision=bf16_with_mxfp8_mixed" in launch_text(blocks, bridge, rack, HEAD)
    assert "--fp8-recipe mxfp8" in launch_text(blocks, core, rack, HEAD)
    assert "--fp8-recipe blockwise" in script(blocks, "megatron-core"), "on Hopper"
    with pytest.raises(BadInputError, match='nvfp4": a launcher of Megatron'):
        check_launch(job, replace(nvfp4, launcher="torchtitan"))
