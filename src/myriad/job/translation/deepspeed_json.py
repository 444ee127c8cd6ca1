"""Convert DeepSpeed's JSON configuration to a job.

Keys are those of https://www.deepspeed.ai/docs/config-json. A key within a section is listed as
``section.key``. The file does not describe a model: the job gets the given model, or the default.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from myriad.errors import BadInputError
from myriad.job.translation.outcome import Translation, plain_text

__all__ = ["translate_deepspeed"]

_INSTEAD: dict[str, str] = {
    "gradient_accumulation_steps": "follows from train.global_batch, layout.micro_batch and layout.dp",
    "steps_per_print": "every step is a line of metrics.jsonl",
    "wall_clock_breakdown": "spans have every action",
    "dump_state": "job.toml of the run holds every value",
    "prescale_gradients": "gradients are scaled before they are summed",
    "gradient_predivide_factor": "gradients are scaled before they are summed",
    "communication_data_type": "comm.compress_gradients",
    "sparse_gradients": "gradients are dense",
    "disable_allgather": "the program decides what travels",
    "zero_allow_untested_optimizer": "every optimizer works with every layout.zero",
    "zero_force_ds_cpu_optimizer": "the optimizer runs where its state is",
    "seed": "train.seed",
    "amp": "train.precision",
    "data_types": "gradients are summed in float32",
    "zero_optimization.overlap_comm": "overlap.data is on by default",
    "zero_optimization.contiguous_gradients": "gradients are always in one buffer",
    "zero_optimization.reduce_scatter": "gradients are reduce-scattered from layout.zero = 1 on",
    "zero_optimization.reduce_bucket_size": "overlap.chunks; overlap.message_bytes is a message's size",
    "zero_optimization.allgather_partitions": "parameters are gathered by chunk",
    "zero_optimization.allgather_bucket_size": "overlap.chunks; overlap.message_bytes is a message's size",
    "zero_optimization.stage3_prefetch_bucket_size": "overlap.max_in_flight_bytes bounds the bytes under way",
    "zero_optimization.prefetch_bucket_size": "overlap.max_in_flight_bytes bounds the bytes under way",
    "zero_optimization.stage3_param_persistence_threshold": "every parameter of a chunk is sharded",
    "zero_optimization.param_persistence_threshold": "every parameter of a chunk is sharded",
    "zero_optimization.stage3_max_live_parameters": "the program frees a chunk after its last use",
    "zero_optimization.max_live_parameters": "the program frees a chunk after its last use",
    "zero_optimization.stage3_max_reuse_distance": "the program frees a chunk after its last use",
    "zero_optimization.max_reuse_distance": "the program frees a chunk after its last use",
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": "myriad checkpoint export",
    "zero_optimization.gather_16bit_weights_on_model_save": "myriad checkpoint export",
    "zero_optimization.round_robin_gradients": "chunks are cut evenly",
    "zero_optimization.sub_group_size": "chunks are updated one by one",
    "zero_optimization.elastic_checkpoint": "checkpoints are independent of the layout",
    "zero_optimization.load_from_fp32_weights": "checkpoints hold float32",
    "zero_optimization.offload_optimizer": "layout.offload_optimizer keeps the state in host memory",
    "zero_optimization.offload_param": "parameters stay on the device; layout.zero spreads it",
    "zero_optimization.cpu_offload": "layout.offload_optimizer keeps the state in host memory",
    "zero_optimization.zero_hpz_partition_size": "comm.hierarchy gathers within nodes first",
    "zero_optimization.zero_quantized_weights": "comm.compress_parameters",
    "zero_optimization.zero_quantized_gradients": "comm.compress_gradients",
    "bf16.immediate_grad_update": "gradients are summed in float32 as they arrive",
    "fp16.loss_scale": "only float16 has a loss scale, and it is dynamic",
    "fp16.initial_scale_power": "only float16 has a loss scale",
    "fp16.loss_scale_window": "only float16 has a loss scale",
    "fp16.hysteresis": "the loss scale is halved at every overflow",
    "fp16.consecutive_hysteresis": "the loss scale is halved at every overflow",
    "fp16.min_loss_scale": "only float16 has a loss scale",
    "fp16.auto_cast": "train.precision",
    "activation_checkpointing": "layout.recompute",
    "tensorboard": "telemetry.loggers",
    "wandb": "telemetry.loggers",
    "csv_monitor": "metrics.jsonl",
    "comet": "telemetry.loggers",
    "monitor_config": "telemetry.loggers",
    "comms_logger": "spans have every action",
    "flops_profiler": "metrics.jsonl has MFU; spans have every action",
    "checkpoint": "checkpoint.url and checkpoint.every",
    "load_universal_checkpoint": "myriad checkpoint import reads universal checkpoints",
    "use_node_local_storage": "checkpoint.memory_every keeps snapshots on the node",
    "elasticity": "resilience.on_lost = fewer",
    "autotuning": "myriad plan",
    "pipeline": "layout.pp and layout.schedule",
    "dataloader_drop_last": "a run reads whole batches",
    "data_efficiency": "no counterpart: the sequence length is constant",
    "curriculum_learning": "no counterpart: the sequence length is constant",
    "sparse_attention": "model.window",
    "compression_training": "no counterpart",
    "eigenvalue": "no counterpart",
    "progressive_layer_drop": "no counterpart",
    "aio": "no counterpart: nothing is offloaded to disks",
    "hybrid_engine": "no counterpart",
    "compile": "no counterpart: train.kernels chooses fused kernels",
    "torch_autocast": "train.precision",
    "zero_allow_untrained_optimizer": "every optimizer works with every layout.zero",
}
"""Options without a job key, by dotted key or by section, with what Myriad does instead."""

_MOST = 2**62
_OPTIMIZERS = {"adam": "adamw", "adamw": "adamw", "fusedadam": "adamw", "lamb": "lamb", "onebitadam": "adamw",
               "zerooneadam": "adamw", "onebitlamb": "lamb"}  # fmt: skip
_SCHEDULERS = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}


def translate_deepspeed(config: Mapping[str, Any]) -> Translation:
    """Return a configuration as a job. For values of ``"auto"`` the job's defaults hold.

    Raises `BadInputError`."""
    made = Translation("DeepSpeed")
    for option, value in _flatten(config):
        if isinstance(value, int | float) and not abs(value) <= _MOST:
            raise BadInputError(option, value, "must be a finite number of at most 2**62")
        if value == "auto":
            made.instead(option, "auto: filled in by another program; the job's default holds")
    _batch(made, config)
    _precision(made, config)
    _optimizer(made, config)
    _scheduler(made, config)
    zero = _section(config, "zero_optimization")
    if (stage := zero.get("stage")) not in (None, "auto"):
        made.put("zero_optimization.stage", "layout.zero", stage)
    if isinstance(size := _section(config, "tensor_parallel").get("autotp_size"), int) and size > 1:
        made.put("tensor_parallel.autotp_size", "layout.tp", size)
    if _section(zero, "offload_optimizer").get("device") == "cpu":
        made.put("zero_optimization.offload_optimizer.device", "layout.offload_optimizer", True)
    _activation_checkpointing(made, config)
    for option, value in _flatten(config):
        if option in made.translated or option in made.without:
            continue
        section = option.partition(".")[0]
        whole = next(
            (key for key in (option, ".".join(option.split(".")[:2]), section) if key in _INSTEAD), None
        )
        if whole is not None:
            made.instead(option, _INSTEAD[whole])
        elif not option.endswith(".enabled") or value:
            made.unknown[option] = plain_text(value)
        else:
            made.instead(option, "off there, and off here")
    return made


def _flatten(config: Mapping[str, Any], prefix: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    for name, value in config.items():
        dotted = f"{prefix}{name}"
        if isinstance(value, Mapping) and value and depth < 8:
            yield from _flatten(value, f"{dotted}.", depth + 1)
        else:
            yield dotted, value


def _section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = config.get(name, {})
    if not isinstance(found, Mapping):
        raise BadInputError(name, str(found)[:60], "is a section of DeepSpeed's configuration")
    return found


def _batch(made: Translation, config: Mapping[str, Any]) -> None:
    batch, micro = config.get("train_batch_size"), config.get("train_micro_batch_size_per_gpu")
    steps = config.get("gradient_accumulation_steps", 1)
    if isinstance(batch, int):
        made.put("train_batch_size", "train.global_batch", batch)
    if isinstance(micro, int):
        made.put("train_micro_batch_size_per_gpu", "layout.micro_batch", micro)
    if not (isinstance(micro, int) and isinstance(steps, int) and micro > 0 and steps > 0):
        return
    if isinstance(batch, int) and "gradient_accumulation_steps" in config:
        replicas, left = divmod(batch, micro * steps)
        if left:
            allowed = f"must be a multiple of {micro} x {steps} (micro-batch, accumulation)"
            raise BadInputError("train_batch_size", batch, allowed)
        made.put("gradient_accumulation_steps", "layout.dp", replicas)
    elif not isinstance(batch, int):
        made.put("train_micro_batch_size_per_gpu", "layout.micro_batch", micro)
        made.keys["train.global_batch"] = micro * steps
        text = f"train.global_batch = {micro * steps}, for one replica: multiply it by layout.dp"
        made.instead("gradient_accumulation_steps", text)


def _precision(made: Translation, config: Mapping[str, Any]) -> None:
    if _section(config, "bf16").get("enabled") is True or _section(config, "bfloat16").get("enabled") is True:
        option = "bf16.enabled" if "bf16" in config else "bfloat16.enabled"
        made.put(option, "train.precision", "bfloat16")
    elif (half := _section(config, "fp16")).get("enabled") is True:
        made.put("fp16.enabled", "train.precision", "float16")
        power = half.get("initial_scale_power")
        made.put_loss_scale(
            {
                "fp16.initial_scale_power": (
                    "initial",
                    2.0**power if isinstance(power, int) and 0 <= power < 64 else None,
                ),
                "fp16.loss_scale_window": ("growth_interval", half.get("loss_scale_window")),
                "fp16.min_loss_scale": ("minimum", half.get("min_loss_scale")),
            }
        )
    else:
        made.keys["train.precision"] = "float32"
    if isinstance(clip := config.get("gradient_clipping"), int | float):
        made.put("gradient_clipping", "optimizer.clip_norm", clip if clip > 0 else None)
    else:
        made.keys["optimizer.clip_norm"] = None
        made.instead("gradient_clipping (not set)", "optimizer.clip_norm = off")


def _optimizer(made: Translation, config: Mapping[str, Any]) -> None:
    section = _section(config, "optimizer")
    if not section:
        return
    kind, values = str(section.get("type", "AdamW")), _section(section, "params")
    ours = _OPTIMIZERS.get(kind.lower())
    made.put("optimizer.type", "optimizer.name", ours or "adamw")
    if ours is None:
        made.instead("optimizer.type", f"{kind[:50]} is not built; adamw")
    elif kind.lower().startswith(("onebit", "zeroone")):
        made.instead("optimizer.type", f"{ours}; comm.compress_gradients sends fewer bits")
    named = {"lr": "learning_rate", "eps": "epsilon", "weight_decay": "weight_decay"}
    for option, key in named.items():
        if isinstance(value := values.get(option), int | float):
            made.put(f"optimizer.params.{option}", f"optimizer.{key}", value)
    betas = values.get("betas")
    if isinstance(betas, list | tuple) and len(betas) == 2:
        made.keys["optimizer.beta1"], made.keys["optimizer.beta2"] = betas
        made.translated["optimizer.params.betas"] = f"optimizer.beta1, beta2 = {betas[0]}, {betas[1]}"
    for option in ("torch_adam", "adam_w_mode", "bias_correction", "fused"):
        if option in values:
            made.instead(f"optimizer.params.{option}", "AdamW with bias correction, fused where it can be")


def _scheduler(made: Translation, config: Mapping[str, Any]) -> None:
    section = _section(config, "scheduler")
    if not section:
        made.keys["optimizer.decay"] = "constant"
        return
    kind, values = str(section.get("type", "")), _section(section, "params")
    made.put("scheduler.type", "optimizer.decay", _SCHEDULERS.get(kind, "cosine"))
    if kind not in _SCHEDULERS:
        made.instead("scheduler.type", f"{kind[:50]} is not built; cosine")
    if isinstance(warm := values.get("warmup_num_steps"), int):
        made.put("scheduler.params.warmup_num_steps", "optimizer.warmup_steps", warm)
    if isinstance(total := values.get("total_num_steps"), int):
        made.put("scheduler.params.total_num_steps", "train.steps", total)
    if isinstance(peak := values.get("warmup_max_lr"), int | float):
        made.put("scheduler.params.warmup_max_lr", "optimizer.learning_rate", peak)
    if isinstance(low := values.get("cos_min_ratio"), int | float):
        made.put("scheduler.params.cos_min_ratio", "optimizer.final_learning_rate_ratio", low)
    elif kind == "WarmupDecayLR":
        made.keys["optimizer.final_learning_rate_ratio"] = 0.0
    if "warmup_min_lr" in values or "warmup_min_ratio" in values:
        name = "warmup_min_lr" if "warmup_min_lr" in values else "warmup_min_ratio"
        made.instead(f"scheduler.params.{name}", "warm-up begins at 1 / optimizer.warmup_steps of the peak")
    if "warmup_type" in values:
        made.instead("scheduler.params.warmup_type", "warm-up is linear")


def _activation_checkpointing(made: Translation, config: Mapping[str, Any]) -> None:
    section = _section(config, "activation_checkpointing")
    if section.get("number_checkpoints") not in (None, "auto") or section.get("partition_activations"):
        made.keys["layout.recompute"] = "full"
        for option in section:
            made.translated[f"activation_checkpointing.{option}"] = "layout.recompute = full"
