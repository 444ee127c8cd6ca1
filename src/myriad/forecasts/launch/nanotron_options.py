"""A plan as the YAML that nanotron's ``run_train.py --config-file`` reads (src/nanotron/config/config.py).

nanotron has no options on its command line, so that the script writes the whole file. What a plan does not
say are shell variables in it, with values in YAML: DATASET (null is nanotron's generated data), TOKENIZER,
CHECKPOINTS.

A model is one of ``LlamaConfig``, or of ``Qwen2Config`` where queries, keys and values have biases.
"""

from typing import Any

import yaml

from myriad.errors import BadInputError
from myriad.forecasts.launch.launch_options import (
    KEY,
    LaunchScript,
    check_layout,
    falling_steps,
    micro_batches,
    planned_type,
    torchrun,
)
from myriad.job import Job
from myriad.model.config import ModelConfig
from myriad.planner import Cluster, Framework

__all__ = ["nanotron_model", "nanotron_script"]

_SCHEDULES = {"gpipe": "afab", "1f1b": "1f1b"}
_DECAYS = {"cosine": "cosine", "linear": "linear", "wsd": "linear", "constant": "linear"}


def nanotron_script(job: Job, framework: Framework, cluster: Cluster) -> LaunchScript:
    """Return what starts nanotron. Raises `BadInputError`."""
    return LaunchScript(
        torchrun(job.layout, cluster, 'run_train.py --config-file "$CONFIG" "$@"'),
        notes="Run it in a checkout of nanotron. Not part of a plan are the variables DATASET, such as "
        "{dataset_folder: tokens}, without which data are generated; TOKENIZER, the name of one; "
        "CHECKPOINTS, a folder; and CHECKPOINT_INTERVAL, in steps.",
        environment={"CUDA_DEVICE_MAX_CONNECTIONS": "1"},
        config=(".yaml", yaml.safe_dump(nanotron_config(job, framework), sort_keys=False)),
    )


def nanotron_config(job: Job, framework: Framework) -> dict[str, Any]:
    """Return nanotron's configuration. Raises `BadInputError`."""
    layout, train, optimizer = job.layout, job.train, job.optimizer
    check_layout(layout, _SCHEDULES)
    for key, given, allowed in (
        ("cp", layout.cp, "1: its attention with shared sequences is not in a plan"),
        ("virtual_stages", layout.virtual_stages if layout.pp > 1 else 1, "1: nanotron has no others"),
        ("shard_group", layout.shard_group, "off: nanotron shards over all replicas"),
    ):
        if given not in (1, None):
            raise BadInputError(KEY, f"layout.{key} = {given}", allowed)
    return {
        "general": {"project": "myriad", "run": "%date_%jobid", "seed": train.seed},
        "checkpoints": {
            "checkpoints_path": "${CHECKPOINTS:-checkpoints}",
            "checkpoint_interval": "${CHECKPOINT_INTERVAL:-1000}",
        },
        "data_stages": [
            {
                "name": "train",
                "start_training_step": 1,
                "data": {"dataset": "${DATASET:-null}", "num_loading_workers": 1, "seed": train.seed},
            }
        ],
        "model": {
            "dtype": planned_type(job),
            "ddp_bucket_cap_mb": round((framework.profile.bucket_bytes or _DDP_BUCKET_BYTES) / 2**20),
            "init_method": {"std": job.model.initial_deviation},
            "make_vocab_size_divisible_by": 1,
            "model_config": nanotron_model(job.model),
        },
        "optimizer": {
            "zero_stage": layout.zero,
            "accumulate_grad_in_fp32": True,
            "clip_grad": optimizer.clip_norm,
            "weight_decay": optimizer.weight_decay,
            "optimizer_factory": {
                "name": "adamW",
                "adam_beta1": optimizer.beta1,
                "adam_beta2": optimizer.beta2,
                "adam_eps": optimizer.epsilon,
                "torch_adam_is_fused": True,
            },
            "learning_rate_scheduler": _schedule(job),
        },
        "parallelism": {
            "dp": layout.dp,
            "tp": layout.tp,
            "pp": layout.pp,
            "expert_parallel_size": 1,
            "context_parallel_size": 1,
            "pp_engine": _engine(job),
            "tp_mode": "REDUCE_SCATTER" if framework.profile.sequence_parallel else "ALL_REDUCE",
            "tp_linear_async_communication": layout.tp > 1 and framework.profile.hides_input_grad_comm,
            "recompute_layer": layout.recompute == "full",
        },
        "tokenizer": {"tokenizer_name_or_path": "${TOKENIZER:-null}"},
        "tokens": {
            "sequence_length": job.model.sequence,
            "micro_batch_size": layout.micro_batch,
            "batch_accumulation_per_replica": micro_batches(job),
            "train_steps": train.steps,
        },
    }


def _engine(job: Job) -> str:
    """Return the pipeline's engine. That of 1f1b refuses fewer micro-batches than later stages, with which
    it would do what the other does: all forwards first."""
    layout, few = job.layout, micro_batches(job) < job.layout.pp - 1
    return "afab" if few else _SCHEDULES[layout.schedule_name] if layout.pp > 1 else "1f1b"


_DDP_BUCKET_BYTES = 25 * 2**20


def _schedule(job: Job) -> dict[str, Any]:
    """Return the schedule of learning rates. One that stays constant before it falls has the step at which
    it does."""
    optimizer, steps = job.optimizer, job.train.steps
    falls = falling_steps(job)
    constant, ratio = optimizer.decay == "constant", optimizer.final_learning_rate_ratio
    return {
        "learning_rate": optimizer.learning_rate,
        "lr_warmup_steps": optimizer.warmup_steps,
        "lr_warmup_style": "linear",
        "lr_decay_style": _DECAYS[optimizer.decay],
        "lr_decay_steps": falls if optimizer.decay == "wsd" else None,
        "lr_decay_starting_step": steps - falls if optimizer.decay == "wsd" else None,
        "min_decay_lr": float(f"{optimizer.learning_rate * (1 if constant else ratio):.10g}"),
    }


_FREE = {"vocabulary_multiple", "initial_deviation", "z_loss", "ffn_hidden", "kv_heads", "head_dim"}
"""Keys that do not decide between its models, or that are compared as widths."""


def nanotron_model(model: ModelConfig) -> dict[str, Any]:
    """Return a model as nanotron's configuration of one. Raises `BadInputError` if it has none for it."""
    has_bias = model.attention_bias == "qkv"
    own = ModelConfig(
        layers=model.layers,
        hidden=model.hidden,
        heads=model.heads,
        sequence=model.sequence,
        vocabulary=model.vocabulary,
        position="rotary",
        rotary_base=model.rotary_base,
        norm="rms",
        norm_epsilon=model.norm_epsilon,
        activation="swiglu",
        tied=model.tied,
        attention_bias="qkv" if has_bias else "default",
    )
    wanted, got = (one.model_dump(mode="json", exclude=_FREE) for one in (model, own))
    wanted["head_dim"], got["head_dim"] = model.head_width, model.hidden // model.heads
    for key, value in wanted.items():
        if value != got[key]:
            raise BadInputError(
                KEY, f"model.{key} = {value}", f"only {_shown(got[key])}: nanotron has no model with others"
            )
    return {
        "is_qwen2_config" if has_bias else "is_llama_config": True,
        **({"attention_bias": True} if has_bias else {}),
        "hidden_act": "silu",
        "hidden_size": model.hidden,
        "initializer_range": model.initial_deviation,
        "intermediate_size": model.ffn_width,
        "max_position_embeddings": model.sequence,
        "num_attention_heads": model.heads,
        "num_hidden_layers": model.layers,
        "num_key_value_heads": model.num_kv_heads,
        "rms_norm_eps": model.norm_epsilon,
        "rope_theta": model.rotary_base,
        "rope_interleaved": False,
        "tie_word_embeddings": model.tied,
        "vocab_size": model.vocabulary,
        "z_loss_enabled": model.z_loss > 0,
        "z_loss_coefficient": model.z_loss,
    }


def _shown(value: object) -> object:
    """Return a key's value as job files say it."""
    return "off" if value is None else value
