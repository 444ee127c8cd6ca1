"""If these break: a job made of another system's configuration trains something else, or an option of it
vanishes without a word."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from myriad.cli.main import build_app
from myriad.errors import BadInputError
from myriad.job import load_job
from myriad.job.translation.deepspeed_json import translate_deepspeed
from myriad.job.translation.megatron_arguments import read_command_line, translate_arguments

SCRIPT = r"""#!/bin/bash
# the shape of Megatron-LM's examples/gpt3/train_gpt3_175b_distributed.sh
GPUS_PER_NODE=8
CHECKPOINT_PATH=$1
DISTRIBUTED_ARGS=(
    --nproc_per_node $GPUS_PER_NODE
    --master_addr $MASTER_ADDR
)
GPT_MODEL_ARGS=(
    --num-layers 96
    --hidden-size 12288
    --num-attention-heads 96
    --seq-length 2048 --max-position-embeddings 2048 --vocab-size 51200
)
TRAINING_ARGS=(
    --micro-batch-size 1 --global-batch-size 1536 --train-iters 500000 --weight-decay 0.1
    --adam-beta1 0.9 --adam-beta2 0.95 --init-method-std 0.006 --clip-grad 1.0 --bf16
    --lr 6.0e-5 --lr-decay-style cosine --min-lr 6.0e-6 --lr-warmup-fraction .001
    --lr-decay-iters 430000 --use-distributed-optimizer --disable-bias-linear --normalization RMSNorm
    --swiglu --group-query-attention --num-query-groups 8 --position-embedding-type rope
)
torchrun ${DISTRIBUTED_ARGS[@]} pretrain_gpt.py ${GPT_MODEL_ARGS[@]} ${TRAINING_ARGS[@]} \
    --tensor-model-parallel-size 8 --pipeline-model-parallel-size 16 --sequence-parallel \
    --num-layers-per-virtual-pipeline-stage 2 --recompute-activations \
    --data-path 0.3 one_text_document 0.7 two_text_document --split 949,50,1 \
    --save $CHECKPOINT_PATH --no-such-option 3 --save-interval 10000
"""


def test_megatrons_script_becomes_a_job_and_every_option_is_accounted_for(tmp_path: Path) -> None:
    (tmp_path / "train.sh").write_text(SCRIPT)
    out = tmp_path / "job.toml"
    asked = ["translate", str(tmp_path / "train.sh"), "--out", str(out), "--name", "big", "--json"]
    done = CliRunner().invoke(build_app(), asked)
    assert done.exit_code == 0, done.output
    answer, job = json.loads(done.stdout), load_job(str(out))
    model, layout = job.model, job.layout
    assert (model.layers, model.hidden, model.heads, model.kv_heads, model.vocabulary) == (
        96,
        12288,
        96,
        8,
        51200,
    )
    assert (model.norm, model.activation, model.bias, model.position) == ("rms", "swiglu", False, "rotary")
    assert model.ffn_hidden == 32768, "two thirds of 4 h, in steps of 64"
    assert (layout.tp, layout.pp, layout.virtual_stages, layout.zero) == (8, 16, 3, 1)
    assert layout.recompute == "selective" and job.train.precision == "bfloat16"
    assert job.optimizer.warmup_steps == 430 and job.optimizer.final_learning_rate_ratio == pytest.approx(0.1)
    assert [(one.path, one.weight) for one in job.data.mixture] == [
        ("one_text_document", 0.3),
        ("two_text_document", 0.7),
    ]
    assert answer["unknown"] == {"no_such_option": "3"}
    listed = answer["translated"].keys() | answer["without_counterpart"].keys() | answer["unknown"].keys()
    given = read_command_line(SCRIPT)
    assert given.keys() <= listed, given.keys() - listed
    assert "500000, not 430000" in answer["without_counterpart"]["lr_decay_iters"]
    assert "no_such_option" in out.read_text()


@pytest.mark.parametrize(
    "text, problem",
    [
        ("nothing here", "no argument"),
        ("--num-layers 'open", "not a command line"),
        ("--hidden-size $WIDTH --num-layers 2", "--hidden-size holds a shell variable"),
        ("--num-layers 2 --hidden-size 8 --num-attention-heads 2 --num-experts 8", "num_experts must be off"),
        (
            "--num-layers 2 --hidden-size 8 --num-attention-heads 2 --mtp-num-layers 1",
            "mtp_num_layers must be off: .* set model.prediction_layers",
        ),
        ("--num-layers 2 --hidden-size 8 --num-attention-heads 2 --rotary-base x", "rotary_base"),
        (
            "--num-layers 2 --hidden-size 8 --num-attention-heads 2 --train-iters 5 --lr-warmup-fraction .1 "
            "--lr-decay-iters x",
            "lr_decay_iters",
        ),
    ],
)
def test_what_cannot_be_read_is_refused_in_one_line(text: str, problem: str) -> None:
    with pytest.raises(BadInputError, match=problem) as refused:
        translate_arguments(read_command_line(text))
    assert "\n" not in str(refused.value)


DEEPSPEED: dict[str, Any] = {
    "train_batch_size": 64,
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 0.5,
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": 3e-4, "betas": [0.9, 0.98], "eps": 1e-7, "weight_decay": 0.05},
    },
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {"warmup_num_steps": 10, "total_num_steps": 90, "warmup_min_lr": 0},
    },
    "zero_optimization": {
        "stage": 3,
        "overlap_comm": True,
        "offload_optimizer": {"device": "cpu"},
        "mystery": 5,
    },
    "bf16": {"enabled": True},
    "fp16": {"enabled": False},
    "wall_clock_breakdown": False,
    "odd": {"deeper": {"key": 1}},
}


def test_deepspeeds_file_becomes_a_job_and_every_option_is_accounted_for() -> None:
    made = translate_deepspeed(DEEPSPEED)
    job = made.job("small")
    assert (job.train.global_batch, job.layout.micro_batch, job.layout.dp, job.layout.zero) == (64, 4, 8, 3)
    assert (job.optimizer.beta2, job.optimizer.epsilon, job.optimizer.weight_decay) == (0.98, 1e-7, 0.05)
    assert (job.optimizer.decay, job.optimizer.warmup_steps, job.train.steps) == ("linear", 10, 90)
    assert job.optimizer.clip_norm == 0.5 and job.train.precision == "bfloat16"
    assert made.unknown == {"zero_optimization.mystery": "5", "odd.deeper.key": "1"}
    assert "overlap.data" in made.without["zero_optimization.overlap_comm"]
    assert "zero_optimization.offload_optimizer.device" in made.without


def test_float16_keeps_its_loss_scale() -> None:
    half = {"enabled": True, "initial_scale_power": 16, "loss_scale_window": 500, "hysteresis": 2}
    made = translate_deepspeed({"train_batch_size": 8, "fp16": half | {"min_loss_scale": 3}})
    job = made.job("half")
    assert (job.train.precision, job.loss_scale.initial, job.loss_scale.growth_interval) == (
        "float16",
        65536,
        500,
    )
    assert (
        "power of two" in made.without["fp16.min_loss_scale"] and "halved" in made.without["fp16.hysteresis"]
    )
    text = SCRIPT.replace("--bf16", "--fp16 --initial-loss-scale 4294967296 --hysteresis 2")
    job = translate_arguments(read_command_line(text)).job("half")
    assert job.train.precision == "float16" and job.loss_scale.initial == 2**32


@pytest.mark.parametrize(
    "config, problem",
    [
        ({"optimizer": 3}, "optimizer.*section"),
        (
            {"train_batch_size": 10, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 1},
            "multiple",
        ),
        ({"zero_optimization": {"stage": 7}}, "DeepSpeed"),
    ],
)
def test_values_that_cannot_be_are_refused(config: dict[str, Any], problem: str) -> None:
    with pytest.raises(BadInputError, match=problem) as refused:
        translate_deepspeed(config).job("bad")
    assert "\n" not in str(refused.value)


def test_no_name_of_an_option_becomes_a_key_of_the_job(tmp_path: Path) -> None:
    command = 'alerts.exec.command = ["touch", "/tmp/x"]'
    for config in ({f"x\n{command}\n#": 1}, {f"x\n{command}\n#": "auto"}):
        made = translate_deepspeed(config)
        (tmp_path / "job.toml").write_text(made.toml("job"))
        assert load_job(str(tmp_path / "job.toml")).alerts.exec.command == ()
        assert "\n" not in "".join((*made.lists()["unknown"], *made.lists()["without_counterpart"]))


@pytest.mark.parametrize(
    "paths, mixture",
    [
        ("0.5 a 2 b", [("a", 0.5), ("b", 2.0)]),
        ("a b", None),
        ("a b c", None),
    ],
)
def test_corpora_with_and_without_weights(paths: str, mixture: list[tuple[str, float]] | None) -> None:
    text = f"--num-layers 2 --hidden-size 8 --num-attention-heads 2 --data-path {paths} --bf16"
    made = translate_arguments(read_command_line(text))
    found = made.keys.get("data.mixture")
    assert (found and [(one["path"], one["weight"]) for one in found]) == mixture
    assert ("data_path" in made.without) == (mixture is None)
