"""A plan as DeepSpeed's ``ds_config.json`` and as arguments of Transformers' ``Trainer``, which reads it.

    deepspeed --num_gpus 8 --num_nodes 4 $TRAIN --deepspeed FILE.json --per_device_train_batch_size 1 ...

Keys are those of ``deepspeed/runtime/config.py`` and ``deepspeed/runtime/zero/config.py``; arguments those of
``TrainingArguments`` (transformers/training_args.py). The model, its data and its optimizer are the
training script's. ``Trainer`` refuses batch sizes, clipping and precision that differ from the file's: both
come from one plan here.
"""

import json
from collections.abc import Iterator
from typing import Any

from myriad.errors import BadInputError
from myriad.forecasts.launch.launch_options import (
    KEY,
    LaunchScript,
    Value,
    check_layout,
    falling_steps,
    hosts,
    micro_batches,
    option_lines,
    planned_type,
)
from myriad.job import Job
from myriad.planner import Cluster, Framework

__all__ = ["deepspeed_config", "deepspeed_script"]

_LARGEST_BUCKET = 500_000_000
"""Values of DeepSpeed's default buckets."""
_LIVE_PARAMETERS = 1_000_000_000
"""Parameters that DeepSpeed keeps gathered by default."""


def deepspeed_script(job: Job, framework: Framework, cluster: Cluster) -> LaunchScript:
    """Return what starts DeepSpeed. Raises `BadInputError`."""
    number, each = hosts(job.layout, cluster)
    return LaunchScript(
        (
            "deepspeed",
            f"--num_gpus {each} --num_nodes {number}",
            '${HOSTFILE:+--hostfile "$HOSTFILE"}',
            '"${TRAIN:?such as run_clm.py of Transformers}" --deepspeed "$CONFIG" "${ARGUMENTS[@]}" "$@"',
        ),
        option_lines(((name, _worded(value)) for name, value in _trainer(job)), "_"),
        "TRAIN is a script that trains the planned model with Transformers' Trainer. The model and its "
        f"sequences of {job.model.sequence} tokens, data and checkpoints are its arguments: give them to "
        "this script.",
        config=(".json", json.dumps(deepspeed_config(job, framework), indent=2) + "\n"),
    )


def deepspeed_config(job: Job, framework: Framework) -> dict[str, Any]:
    """Return DeepSpeed's configuration. Raises `BadInputError`."""
    layout = job.layout
    check_layout(layout)
    for key, given in (
        ("tp", layout.tp),
        ("cp", layout.cp),
        ("ep", layout.ep),
        ("shard_group", layout.shard_group),
    ):
        if given not in (1, None):
            raise BadInputError(KEY, f"layout.{key} = {given}", "left out: DeepSpeed's plans have only ZeRO")
    precision = planned_type(job)
    return {
        "bf16": {"enabled": precision == "bfloat16"},
        "fp16": {"enabled": precision == "float16"},
        "zero_optimization": _zero(job, framework),
        "gradient_clipping": job.optimizer.clip_norm or 0.0,
        "train_micro_batch_size_per_gpu": layout.micro_batch,
        "gradient_accumulation_steps": micro_batches(job),
        "train_batch_size": job.train.global_batch,
    }


def _zero(job: Job, framework: Framework) -> dict[str, Any]:
    """Return the section of ZeRO. Its messages are those of the plan: a block is gathered while another
    computes, and its gradients are reduced together, up to DeepSpeed's own sizes."""
    zero, block = job.layout.zero, _block_parameters(job)
    found: dict[str, Any] = {
        "stage": zero,
        "overlap_comm": framework.overlap.data,
        "contiguous_gradients": True,
        "reduce_scatter": True,
        "reduce_bucket_size": min(block, _LARGEST_BUCKET),
    }
    if zero < 3:
        return {**found, "allgather_bucket_size": min(block, _LARGEST_BUCKET)}
    return {
        **found,
        "stage3_prefetch_bucket_size": min(block, _LARGEST_BUCKET),
        "stage3_max_live_parameters": max(2 * block, _LIVE_PARAMETERS),
        "stage3_gather_16bit_weights_on_model_save": True,
    }


def _block_parameters(job: Job) -> int:
    """Return the parameters of a block, the largest one."""
    model = job.model
    return max(model.of_block(layer).block_parameters for layer in range(model.layers))


def _trainer(job: Job) -> Iterator[tuple[str, Value]]:
    """Yield the arguments of Transformers' ``Trainer``."""
    layout, optimizer, precision = job.layout, job.optimizer, planned_type(job)
    yield "bf16", precision == "bfloat16"
    yield "fp16", precision == "float16"
    yield "per_device_train_batch_size", layout.micro_batch
    yield "gradient_accumulation_steps", micro_batches(job)
    yield "gradient_checkpointing", layout.recompute == "full"
    yield "max_steps", job.train.steps
    yield "learning_rate", optimizer.learning_rate
    yield from _schedule(job)
    yield "warmup_steps", optimizer.warmup_steps
    yield "weight_decay", optimizer.weight_decay
    yield "adam_beta1", optimizer.beta1
    yield "adam_beta2", optimizer.beta2
    yield "adam_epsilon", optimizer.epsilon
    yield "max_grad_norm", optimizer.clip_norm or 0.0


def _schedule(job: Job) -> Iterator[tuple[str, Value]]:
    """Yield the schedule of learning rates. ``Trainer``'s linear one ends at zero."""
    optimizer = job.optimizer
    ratio = optimizer.final_learning_rate_ratio
    if optimizer.decay == "cosine":
        yield "lr_scheduler_type", "cosine_with_min_lr"
        yield "lr_scheduler_kwargs", json.dumps({"min_lr_rate": ratio})
    elif optimizer.decay == "wsd":
        yield "lr_scheduler_type", "warmup_stable_decay"
        kwargs = {"num_decay_steps": falling_steps(job), "min_lr_ratio": ratio, "decay_type": "linear"}
        yield "lr_scheduler_kwargs", json.dumps(kwargs)
    else:
        yield "lr_scheduler_type", "constant_with_warmup" if optimizer.decay == "constant" else "linear"


def _worded(value: Value) -> Value:
    """Return a flag as a word, which every release of Transformers takes."""
    return str(value).lower() if isinstance(value, bool) else value
