"""If these break: a job made of another system's configuration trains something else, or an option of it
vanishes without a word."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from myriad.cli.main import build_app
from myriad.errors import BadInputError
from myriad.job import load_job
from myriad.job.translation.deepspeed_json import translate_deepspeed
from myriad.job.translation.megatron_arguments import read_command_line, translate_arguments
from myriad.model.config import ModelConfig
from myriad.model.latent_shape import LatentShape

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


SMALL = "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --vocab-size 4096 --seq-length 64"
ROPE = "--position-embedding-type rope"
LATENT_ONLY = f"{SMALL} {ROPE} --normalization RMSNorm --disable-bias-linear --multi-latent-attention"
LATENT = f"{ROPE} --normalization RMSNorm --disable-bias-linear --multi-latent-attention --qk-layernorm"


def model_of(text: str) -> ModelConfig:
    """The model of the job that a command line becomes."""
    return translate_arguments(read_command_line(f"{SMALL} --swiglu {text}")).job("small").model


def test_latent_attention_and_prediction_layers_are_megatrons() -> None:
    """With its defaults, and yarn's concentration and softmax scale as ``MultiLatentAttention`` has them."""
    model = model_of(f"{LATENT} --q-lora-rank 24 --rotary-scaling-factor 40 --mtp-num-layers 1")
    assert model.latent == LatentShape(24, 32, 128, 64, 128)
    assert (model.prediction_layers, model.prediction_weight) == (1, 0.1)
    scaling = model.rotary_scaling
    assert (scaling.kind, scaling.factor, scaling.original_sequence) == ("yarn", 40.0, 4096)
    assert scaling.magnitude == pytest.approx(0.1 * math.log(40) + 1) and scaling.score_factor == 1
    sizes = (
        "--kv-lora-rank 16 --qk-head-dim 8 --qk-pos-emb-head-dim 4 --v-head-dim 6 --rotary-scaling-factor 4"
    )
    model = model_of(f"{LATENT} {sizes} --mscale 0.7 --mscale-all-dim 1.2")
    assert model.latent == LatentShape(None, 16, 8, 4, 6) and model.head_dim is None
    one, both = (0.1 * mscale * math.log(4) + 1 for mscale in (0.7, 1.2))
    assert model.rotary_scaling.magnitude == pytest.approx(one / both)
    assert model.score_scale == pytest.approx(both**2 / 12**0.5)
    model = model_of(f"{LATENT} {sizes} --mscale-all-dim 1.2 --rope-type rope")
    assert model.rotary_scaling.kind == "none" and model.score_scale == pytest.approx(both**2 / 12**0.5)
    assert model_of(f"{LATENT} --mscale-all-dim 1").rotary_scaling.kind == "none", "the factor is 1"


def test_positions_and_windows_are_megatrons() -> None:
    model = model_of(f"{ROPE} --use-rope-scaling --rotary-base 500000 --rotary-percent 0.5")
    scaling = model.rotary_scaling
    assert (scaling.kind, scaling.factor, scaling.original_sequence) == ("llama3", 8.0, 8192)
    assert (scaling.low_frequency_factor, scaling.high_frequency_factor, model.rotary_width) == (1, 4, 8)
    scaling = model_of(f"{ROPE} --rotary-seq-len-interpolation-factor 4").rotary_scaling
    assert (scaling.kind, scaling.factor) == ("linear", 4)
    text = "--position-embedding-type yarn --rotary-scaling-factor 32 --no-yarn-correction-range-round-to-int"
    scaling = model_of(f"{text} --yarn-beta-fast 16").rotary_scaling
    assert (scaling.kind, scaling.beta_fast, scaling.truncate) == ("yarn", 16, False)
    model = model_of(f"{ROPE} --no-rope-freq ([0]*3+[1])*1 --window-size 8,0 --window-attn-skip-freq 2")
    assert [model.layer_rotary(layer) is None for layer in range(4)] == [False, False, False, True]
    assert [model.layer_window(layer) for layer in range(4)] == [9, None, 9, None]
    model = model_of(f"{ROPE} --no-rope-freq 2 --softmax-type learnable --softmax-scale 0.3")
    assert [model.layer_rotary(layer) is None for layer in range(4)] == [False, True, False, True]
    assert model.attention_sinks and model.score_scale == 0.3
    model = model_of("--use-mup --mup-base-hidden-size 16 --mup-base-head-dim 16")
    assert model.width_ratio == 4 and model.score_scale == pytest.approx(4 / 16)


def test_arguments_that_nothing_turns_on_are_listed_with_what_would() -> None:
    text = f"{SMALL} {ROPE} --kv-lora-rank 8 --mtp-loss-scaling-factor 0.3 --rope-scaling-factor 4"
    made = translate_arguments(read_command_line(text))
    assert made.without["kv_lora_rank"] == "takes effect with multi_latent_attention alone"
    assert {"mtp_loss_scaling_factor", "rope_scaling_factor"} <= made.without.keys() - made.translated.keys()
    assert made.job("plain").model.latent is None


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
        (f"{SMALL} --mtp-num-layers 2 --mtp-hsm", "mtp_hsm must be off: .* mixed inputs of prediction"),
        (f"{SMALL} {LATENT} --group-query-attention", "group_query_attention must be off with multi_latent"),
        (
            LATENT_ONLY,
            "qk_layernorm must be on with multi_latent_attention: Myriad always normalizes latents",
        ),
        (f"{SMALL} {LATENT} --rope-type spiral", "rope_type must be rope or yarn"),
        (f"{SMALL} {ROPE} --rotary-percent 1.5", "rotary_percent must be above 0, at most 1"),
        (
            f"{SMALL} {ROPE} --no-rope-freq [0]*9**9",
            "no_rope_freq must be a whole number, or a list of 0 and 1",
        ),
        (f"{SMALL} {ROPE} --use-rope-scaling --rotary-seq-len-interpolation-factor 2", "only one is applied"),
        (f"{SMALL} --softmax-type off-by-one", "softmax_type must be vanilla or learnable"),
        (f"{SMALL} {ROPE} --rotary-base x", "rotary_base"),
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
    assert job.layout.offload_optimizer


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


def test_a_batch_ramp_is_that_of_megatron() -> None:
    """10 samples in batches of 2, 12 of 4, 12 of 6, then of 8: the stages begin at 10, 20 and 30 samples."""
    arguments = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "seq_length": 64}
    made = translate_arguments(
        arguments | {"global_batch_size": 8, "rampup_batch_size": ["2", "2", "30"], "train_samples": 100}
    )
    ramp = {key: value for key, value in made.keys.items() if "batch_ramp" in key}
    assert list(ramp.values()) == [2, 2, 30] and made.keys["train.steps"] == 5 + 3 + 2 + 9


@pytest.mark.parametrize(
    ("kind", "ulysses"), [("p2p", 1), ("a2a", 4), ("a2a+p2p --hierarchical-context-parallel-sizes 2 2", 2)]
)
def test_ranks_share_sequences_as_megatrons_do(kind: str, ulysses: int) -> None:
    text = f"{SMALL} {ROPE} --context-parallel-size 4 --world-size 8 --cp-comm-type {kind}"
    made = translate_arguments(read_command_line(text))
    layout = made.job("small").layout
    assert (layout.cp, layout.ulysses, layout.dp) == (4, ulysses, 2)
    assert "cp_comm_type" in made.translated


@pytest.mark.parametrize(
    ("more", "key"),
    [
        ("--global-batch-size 0 --train-samples 100", "global_batch"),
        ("--global-batch-size 0 --train-iters 5 --lr-warmup-samples 100", "global_batch"),
        (f"--data-path {'x' * 5000}.txt", ""),
    ],
)
def test_values_that_no_run_has_end_in_one_line(more: str, key: str) -> None:
    made = translate_arguments(read_command_line(f"{SMALL} {ROPE} {more}"))
    if key:
        with pytest.raises(BadInputError, match=key) as refused:
            made.job("small")
        assert "\n" not in str(refused.value)
    else:
        assert made.job("small").data.corpus.startswith("xxx")


def test_float8_and_fsdp_come_with_other_options() -> None:
    text = f"{SMALL} {ROPE} --bf16 --fp8-format hybrid --fp8-recipe blockwise --world-size 2"
    made = translate_arguments(
        read_command_line(
            f"{text} --use-megatron-fsdp --data-parallel-sharding-strategy optim --use-distributed-optimizer"
        )
    )
    job = made.job("small")
    assert (job.train.precision, job.layout.zero, made.unknown) == ("float8-blocks", 1, {})
    assert {"bf16", "fp8_recipe", "use_distributed_optimizer"} <= made.translated.keys()
