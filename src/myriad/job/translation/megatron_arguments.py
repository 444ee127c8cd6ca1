"""Convert Megatron-LM's arguments to a job.

    --tensor-model-parallel-size 4 --bf16 ...      a command line, a shell script's text, or a saved namespace
        │  read_command_line                       flags to names and values, as its argparse does
        ▼
    {"tensor_model_parallel_size": 4, ...}
        │  translate_arguments                     `_KEYS`, the model's, then rules for several arguments
        ▼
    Translation                                    keys of a job; `_INSTEAD`; unknown

Names are those of ``megatron/training/arguments.py``.
"""

import ast
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from myriad.checkpoint.foreign.megatron_args import MODEL_ARGUMENTS, model_of_arguments
from myriad.errors import BadInputError
from myriad.job.translation.outcome import Translation

__all__ = ["read_command_line", "translate_arguments"]

_KEY = "CONFIG"
_TEXT_BYTES = 2**20

_KEYS: dict[str, str] = {
    "train_iters": "train.steps",
    "global_batch_size": "train.global_batch",
    "micro_batch_size": "layout.micro_batch",
    "seed": "train.seed",
    "lr": "optimizer.learning_rate",
    "lr_warmup_iters": "optimizer.warmup_steps",
    "weight_decay": "optimizer.weight_decay",
    "adam_beta1": "optimizer.beta1",
    "adam_beta2": "optimizer.beta2",
    "adam_eps": "optimizer.epsilon",
    "tensor_model_parallel_size": "layout.tp",
    "pipeline_model_parallel_size": "layout.pp",
    "context_parallel_size": "layout.cp",
    "save_interval": "checkpoint.every",
    "eval_interval": "train.validate_every",
    "eval_iters": "data.validation_batches",
}
"""Arguments whose value is copied to a job key unchanged."""

_HANDLED = frozenset({
    "min_lr", "lr_decay_style", "lr_decay_iters", "lr_wsd_decay_iters", "lr_warmup_fraction", "clip_grad",
    "optimizer", "bf16", "fp16", "fp8", "fp8_recipe", "use_distributed_optimizer", "use_megatron_fsdp",
    "use_torch_fsdp2", "data_parallel_sharding_strategy", "data_parallel_size", "world_size",
    "num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank",
    "virtual_pipeline_model_parallel_size", "recompute_granularity", "recompute_activations",
    "recompute_method", "recompute_num_layers", "overlap_p2p_comm", "data_path", "decoupled_weight_decay",
    "train_samples", "lr_warmup_samples", "lr_decay_samples", "cuda_graph_impl", "enable_cuda_graph",
    "expert_model_parallel_size",
})  # fmt: skip
"""Arguments that this module converts by a rule of their own."""

_INSTEAD: dict[str, str] = {
    "sequence_parallel": "always on with layout.tp > 1",
    "overlap_grad_reduce": "overlap.data is on by default",
    "overlap_param_gather": "overlap.data is on by default",
    "overlap_param_gather_with_optimizer_step": "overlap.optimizer is on by default",
    "align_grad_reduce": "actions of the program decide the order",
    "align_param_gather": "actions of the program decide the order",
    "tp_comm_overlap": "overlap.tensor is on by default",
    "use_flash_attn": "attention never keeps its scores; train.kernels chooses the kernel",
    "attention_backend": "train.kernels chooses the kernel",
    "transformer_impl": "train.kernels chooses the kernels",
    "masked_softmax_fusion": "train.kernels chooses the kernels",
    "bias_dropout_fusion": "train.kernels chooses the kernels",
    "bias_swiglu_fusion": "train.kernels chooses the kernels",
    "apply_rope_fusion": "train.kernels chooses the kernels",
    "gradient_accumulation_fusion": "gradients are always summed in place, in float32",
    "accumulate_allreduce_grads_in_fp32": "gradients are always summed in float32",
    "cross_entropy_loss_fusion": "the loss never holds the logits of a whole micro-batch",
    "attention_softmax_in_fp32": "softmax is float32",
    "use_cpu_initialization": "initial values are the same on every device",
    "exit_on_missing_checkpoint": "checkpoint.restart_from_scratch says what a missing one means",
    "save": "checkpoint.url, or checkpoints/ of the run",
    "load": "myriad checkpoint import, then --run or --init-from",
    "finetune": "--init-from begins with weights alone",
    "no_load_optim": "--init-from begins with weights alone",
    "no_load_rng": "random states follow from train.seed and the sample",
    "no_save_optim": "the optimizer state is always saved",
    "no_save_rng": "random states follow from train.seed and the sample",
    "ckpt_format": "checkpoints are written so that torch.distributed.checkpoint reads them",
    "use_dist_ckpt": "checkpoints are independent of the layout",
    "dist_ckpt_format": "checkpoints are written so that torch.distributed.checkpoint reads them",
    "async_save": "overlap.checkpoint is on by default",
    "auto_detect_ckpt_format": "checkpoint import finds the format",
    "log_interval": "every step is a line of metrics.jsonl",
    "log_throughput": "every step is a line of metrics.jsonl",
    "log_params_norm": "metrics.jsonl has the gradient norm",
    "log_timers_to_tensorboard": "spans have every action; telemetry.loggers names other targets",
    "timing_log_level": "spans have every action",
    "tensorboard_dir": "telemetry.loggers",
    "wandb_project": "telemetry.loggers",
    "wandb_exp_name": "telemetry.loggers",
    "wandb_save_dir": "telemetry.loggers",
    "distributed_backend": "nccl on GPUs, gloo on CPUs",
    "distributed_timeout_minutes": "comm.timeout_seconds",
    "num_workers": "data.prefetch; a process of the node loads",
    "split": "myriad data prepare holds out validation text",
    "vocab_file": "myriad data prepare takes the tokenizer",
    "merge_file": "myriad data prepare takes the tokenizer",
    "tokenizer_type": "myriad data prepare takes the tokenizer",
    "tokenizer_model": "myriad data prepare takes the tokenizer",
    "data_cache_path": "corpora need no index cache",
    "train_data_path": "data.corpus or data.mixture",
    "valid_data_path": "data.validation_batches of held-out text of the corpus",
    "test_data_path": "myriad eval",
    "mock_data": "data.corpus = embedded is real text without files",
    "rampup_batch_size": "the batch is constant; train.global_batch may change at a resume",
    "weight_decay_incr_style": "weight decay is constant",
    "start_weight_decay": "weight decay is constant",
    "end_weight_decay": "weight decay is constant",
    "lr_warmup_init": "warm-up begins at 1 / optimizer.warmup_steps of the peak",
    "decoupled_lr": "one learning rate for all parameters",
    "decoupled_min_lr": "one learning rate for all parameters",
    "loss_scale": "only float16 has a loss scale, and it is dynamic",
    "initial_loss_scale": "only float16 has a loss scale",
    "min_loss_scale": "only float16 has a loss scale",
    "loss_scale_window": "only float16 has a loss scale",
    "hysteresis": "the loss scale is halved at every overflow",
    "distribute_saved_activations": "layout.recompute keeps each rank's share of the sequence",
    "exit_duration_in_mins": "a stop signal stores a checkpoint; the run resumes",
    "exit_interval": "train.steps",
    "exit_signal_handler": "always on",
    "manual_gc": "train.collect_garbage_every",
    "manual_gc_interval": "train.collect_garbage_every",
    "check_for_nan_in_loss_and_grad": "resilience.on_spike; a step with non-finite gradients changes nothing",
    "rerun_mode": "resilience.verify_every",
    "nccl_communicator_config_path": "environment variables of NCCL hold",
    "use_tp_pp_dp_mapping": "ranks are dp, pp, cp, tp with the last varying fastest; comm.node_order",
    "te_rng_tracker": "dropout depends on the sample, not on a rank's random state",
    "inference_rng_tracker": "dropout depends on the sample, not on a rank's random state",
    "deterministic_mode": "on CPUs every result is reproducible to the bit",
    "use_mcore_models": "one model for every layout",
    "use_legacy_models": "one model for every layout",
    "enable_one_logger": "telemetry.loggers",
    "barrier_with_L1_time": "measuring adds no barriers",
    "ddp_bucket_size": "overlap.message_bytes and overlap.chunks",
    "ddp_num_buckets": "overlap.message_bytes and overlap.chunks",
    "ddp_average_in_collective": "gradients are scaled before they are summed",
    "eod_mask_loss": "every token is a target",
    "reset_position_ids": "positions run over the sequence",
    "reset_attention_mask": "attention sees earlier documents of its sequence",
    "create_attention_mask_in_dataloader": "attention is causal without a mask",
    "fp16_lm_cross_entropy": "the loss is float32",
    **dict.fromkeys(
        (
            "nproc_per_node",
            "nnodes",
            "node_rank",
            "master_addr",
            "master_port",
            "rdzv_id",
            "rdzv_backend",
            "rdzv_endpoint",
            "rdzv_conf",
            "max_restarts",
            "standalone",
        ),
        "myriad train starts the ranks; resilience.nodes",
    ),
    "num_dataset_builder_threads": "corpora need no index cache",
    "log_validation_ppl_to_tensorboard": "validation is an event with its loss and bits per byte",
}
"""Arguments without a job key, with what Myriad does instead."""

_STATE = frozenset({
    "rank", "local_rank", "iteration", "consumed_train_samples", "consumed_valid_samples", "params_dtype",
    "transformer_pipeline_model_parallel_size", "encoder_num_layers", "encoder_seq_length", "model_type",
    "num_experts", "skipped_train_samples", "start_weight_decay_steps", "do_train", "do_valid", "do_test",
    "variable_seq_lengths", "grad_reduce_in_bf16", "async_tensor_model_parallel_allreduce",
    "iterations_to_skip",
    "dataloader_type", "class", "padded_vocab_size", "retro_project_dir",
})  # fmt: skip
"""Entries of a saved namespace that are not settings."""

_NEGATIONS = {
    "disable_bias_linear": "add_bias_linear",
    "no_gradient_accumulation_fusion": "gradient_accumulation_fusion",
    "no_masked_softmax_fusion": "masked_softmax_fusion",
    "no_bias_gelu_fusion": "bias_gelu_fusion",
    "no_bias_swiglu_fusion": "bias_swiglu_fusion",
    "no_bias_dropout_fusion": "bias_dropout_fusion",
    "no_rope_fusion": "apply_rope_fusion",
    "no_overlap_p2p_communication": "overlap_p2p_comm",
    "no_async_tensor_model_parallel_allreduce": "async_tensor_model_parallel_allreduce",
    "no_check_for_nan_in_loss_and_grad": "check_for_nan_in_loss_and_grad",
}
"""Flags that turn off an argument with another name."""
_ALIASES = {
    "apply_layernorm_1p": "layernorm_zero_centered_gamma",
    "batch_size": "micro_batch_size",
    "model_parallel_size": "tensor_model_parallel_size",
    "warmup": "lr_warmup_fraction",
    "norm_eps": "norm_epsilon",
    "layernorm_epsilon": "norm_epsilon",
}


def read_command_line(text: str) -> dict[str, Any]:
    """Return the arguments in a command line or shell script: every ``--name``, also in bash arrays.

    Variables that the script sets to a plain value are expanded. Raises `BadInputError` if a needed value
    contains any other variable."""
    if len(text) > _TEXT_BYTES:
        raise BadInputError(_KEY, f"{len(text)} characters", f"at most {_TEXT_BYTES}")
    joined = re.sub(r"\\\s*\n", " ", text)
    for name, value in dict(re.findall(r"(?m)^\s*(?:export\s+)?(\w+)=([^\s($`]+)\s*$", joined)).items():
        joined = re.sub(rf"\$(?:\{{{name}\}}|{name}\b)", value.strip("\"'").replace("\\", ""), joined)
    try:
        words = shlex.split(joined, comments=True)
    except ValueError as error:
        raise BadInputError(_KEY, text.strip()[:60], f"not a command line ({error})") from None
    found: dict[str, Any] = {}
    option: str | None = None
    values: list[str] = []
    for word in [*words, "--"]:
        if word.startswith("--"):
            if option is not None:
                found |= _argument(option, values)
            head, equals, value = word[2:].partition("=")
            option, values = head.replace("-", "_") or None, [value] if equals else []
        elif word == ")" and option is not None:  # the end of a bash array
            found |= _argument(option, values)
            option = None
        elif option is not None and not re.fullmatch(r"\w+=.*|\$\{\w+\[@\]\}|\S+\.py", word):
            values.append(word)
    if not found:
        raise BadInputError(_KEY, text.strip()[:60], "holds no argument of the form --name")
    return found


def _argument(name: str, values: list[str]) -> dict[str, Any]:
    needed = name not in _INSTEAD and name not in ("data_path",)
    if needed and any("$" in value for value in values):
        allowed = (
            f"--{name.replace('_', '-')} holds a shell variable that the text does not set: write its value"
        )
        raise BadInputError(_KEY, " ".join(values)[:60], allowed)
    if name in _NEGATIONS:
        return {_NEGATIONS[name]: False}
    name = _ALIASES.get(name, name)
    parsed = [_value(value) for value in values]
    return {name: True if not parsed else parsed[0] if len(parsed) == 1 else tuple(parsed)}


def _value(text: str) -> Any:
    """Return a number, tuple or constant in Python syntax as its value, and other text unchanged."""
    if len(text) < 100 and re.fullmatch(r"[-+\d.eE_]+|\([-+\d., ]*\)|True|False|None", text):
        try:
            return ast.literal_eval(text)
        except (ValueError, SyntaxError):
            return text
    return text


def translate_arguments(arguments: Mapping[str, Any], *, namespace: bool = False) -> Translation:
    """Return arguments as a job. Raises `BadInputError`.

    ``namespace``: the arguments are a saved namespace, which has every argument with its default. Arguments
    that are off and entries that are not settings are then left out of the lists."""
    arguments = {_ALIASES.get(name, name): value for name, value in arguments.items()}
    made = Translation("Megatron-LM")
    model, differences = model_of_arguments(arguments, _KEY)
    for name, value in model.model_dump(mode="json").items():
        if value != getattr(type(model)(), name):
            made.keys[f"model.{name}"] = value
    for option in sorted(MODEL_ARGUMENTS & arguments.keys()):
        made.translated[option] = "model.*"
    if "vocabulary" not in model.model_fields_set:
        made.instead("vocabulary", "not stated there: set model.vocabulary to the tokenizer's")
    for number, text in enumerate(differences):
        made.instead(f"model ({number + 1})", text)
    for option, key in _KEYS.items():
        if arguments.get(option) is not None:
            made.put(option, key, arguments[option])
    _precision(made, arguments)
    _schedule(made, arguments)
    _layout(made, arguments)
    _rest(made, arguments)
    for option, value in arguments.items():
        if option in made.translated or option in made.without or (option in _STATE and namespace):
            continue
        if namespace and (option.startswith("_") or value in (None, False, 0, "", [], ())):
            continue
        if option in _INSTEAD:
            made.instead(option, _INSTEAD[option])
        elif option not in _HANDLED or value not in (None, False):
            made.unknown[option] = str(value)
    return made


def _precision(made: Translation, arguments: Mapping[str, Any]) -> None:
    if arguments.get("fp8"):
        blocks = arguments.get("fp8_recipe") in ("blockwise", "mxfp8")
        made.put("fp8", "train.precision", "float8-blocks" if blocks else "float8")
        made.translated["fp8_recipe"] = made.translated["fp8"]
    elif arguments.get("bf16"):
        made.put("bf16", "train.precision", "bfloat16")
    elif arguments.get("fp16"):
        made.put("fp16", "train.precision", "float16")
        keys = {
            "initial_loss_scale": "initial",
            "loss_scale_window": "growth_interval",
            "min_loss_scale": "minimum",
        }
        made.put_loss_scale({option: (key, arguments.get(option)) for option, key in keys.items()})
    else:
        made.keys["train.precision"] = "float32"


_DECAYS = {"cosine": "cosine", "linear": "linear", "WSD": "wsd", "constant": "constant"}


def _schedule(made: Translation, arguments: Mapping[str, Any]) -> None:
    steps, batch = arguments.get("train_iters"), arguments.get("global_batch_size")
    if (
        steps is None
        and isinstance(samples := arguments.get("train_samples"), int)
        and isinstance(batch, int)
    ):
        steps = -(-samples // batch)
        made.put("train_samples", "train.steps", steps)
    peak, low = arguments.get("lr"), arguments.get("min_lr", 0.0)
    if isinstance(peak, int | float) and peak > 0 and isinstance(low, int | float):
        made.put("min_lr", "optimizer.final_learning_rate_ratio", low / peak)
    style = arguments.get("lr_decay_style", "linear")
    if style in _DECAYS:
        made.put("lr_decay_style", "optimizer.decay", _DECAYS[style])
    else:
        made.put("lr_decay_style", "optimizer.decay", "cosine")
        made.instead("lr_decay_style", f"{style} is not built; cosine")
    fraction = arguments.get("lr_warmup_fraction")
    if isinstance(fraction, float | int) and isinstance(steps, int):
        over = arguments.get("lr_decay_iters") or steps
        if not isinstance(over, int | float):
            raise BadInputError(_KEY, str(over)[:60], "lr_decay_iters must be a whole number")
        made.put("lr_warmup_fraction", "optimizer.warmup_steps", int(fraction * over))
    if isinstance(warm := arguments.get("lr_warmup_samples"), int) and isinstance(batch, int) and warm:
        made.put("lr_warmup_samples", "optimizer.warmup_steps", warm // batch)
    if isinstance(falls := arguments.get("lr_wsd_decay_iters"), int) and isinstance(steps, int) and steps:
        made.put("lr_wsd_decay_iters", "optimizer.decay_ratio", min(1.0, falls / steps))
    over = arguments.get("lr_decay_iters")
    if over is not None and steps is not None and over != steps:
        made.instead("lr_decay_iters", f"the schedule ends with the run, at step {steps}, not {over}")
    elif over is not None:
        made.translated["lr_decay_iters"] = f"train.steps = {steps}"
    if arguments.get("lr_decay_samples") is not None:
        made.instead("lr_decay_samples", "the schedule ends with the run")
    if "clip_grad" in arguments:
        clip = arguments["clip_grad"]
        made.put("clip_grad", "optimizer.clip_norm", clip if clip else None)
    made.instead(
        "learning rate of step k",
        "k + 1 of the schedule, where Megatron-LM takes k: its first step has rate 0",
    )


def _layout(made: Translation, arguments: Mapping[str, Any]) -> None:
    tp, pp = (
        arguments.get("tensor_model_parallel_size") or 1,
        arguments.get("pipeline_model_parallel_size") or 1,
    )
    cp, world = arguments.get("context_parallel_size") or 1, arguments.get("world_size")
    if not all(isinstance(one, int) for one in (tp, pp, cp)):
        raise BadInputError(_KEY, f"{tp}, {pp}, {cp}", "parallel sizes are whole numbers")
    if arguments.get("data_parallel_size"):
        made.put("data_parallel_size", "layout.dp", arguments["data_parallel_size"])
        made.translated["world_size"] = made.translated["data_parallel_size"]
    elif isinstance(world, int):
        made.put("world_size", "layout.dp", max(1, world // (tp * pp * cp)))
    _virtual(made, arguments, pp)
    if (made_ep := arguments.get("expert_model_parallel_size")) not in (None, 1):
        made.put("expert_model_parallel_size", "layout.ep", made_ep)
    elif made_ep == 1:
        made.translated["expert_model_parallel_size"] = "layout.ep = 1"
    if arguments.get("use_torch_fsdp2") or arguments.get("use_megatron_fsdp"):
        levels = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}
        level = levels.get(arguments.get("data_parallel_sharding_strategy", "optim_grads_params"), 3)
        option = "use_torch_fsdp2" if arguments.get("use_torch_fsdp2") else "use_megatron_fsdp"
        made.put(option, "layout.zero", level)
        made.translated["data_parallel_sharding_strategy"] = made.translated[option]
    elif arguments.get("use_distributed_optimizer"):
        made.put("use_distributed_optimizer", "layout.zero", 1)
        if "data_parallel_sharding_strategy" in arguments:
            made.instead("data_parallel_sharding_strategy", "holds with FSDP alone")


def _virtual(made: Translation, arguments: Mapping[str, Any], pp: int) -> None:
    each = arguments.get("num_layers_per_virtual_pipeline_stage")
    layers = arguments.get("num_layers")
    if isinstance(each, int) and isinstance(layers, int) and each > 0:
        made.put(
            "num_layers_per_virtual_pipeline_stage", "layout.virtual_stages", max(1, layers // pp // each)
        )
    for option in ("num_virtual_stages_per_pipeline_rank", "virtual_pipeline_model_parallel_size"):
        if arguments.get(option):
            made.put(option, "layout.virtual_stages", arguments[option])


def _rest(made: Translation, arguments: Mapping[str, Any]) -> None:
    granularity = arguments.get("recompute_granularity")
    if arguments.get("recompute_activations"):
        granularity = "selective"
    if granularity is not None:
        option = (
            "recompute_granularity" if arguments.get("recompute_granularity") else "recompute_activations"
        )
        made.put(option, "layout.recompute", granularity)
    for option in ("recompute_method", "recompute_num_layers"):
        if arguments.get(option) is not None:
            made.instead(option, "layout.recompute_ratio: the first layers of each stage, as a share")
    name = arguments.get("optimizer", "adam")
    if name != "adam":
        made.instead("optimizer", f"{name} is not built; adamw, whose decay is decoupled")
    else:
        made.put("optimizer", "optimizer.name", "adamw")
    if arguments.get("decoupled_weight_decay") is False:
        made.instead("decoupled_weight_decay", "weight decay is always decoupled")
    elif "decoupled_weight_decay" in arguments:
        made.translated["decoupled_weight_decay"] = "optimizer.name = adamw"
    if arguments.get("overlap_p2p_comm") is False:
        made.put("overlap_p2p_comm", "overlap.pipeline", False)
    elif "overlap_p2p_comm" in arguments:
        made.instead("overlap_p2p_comm", "overlap.pipeline is on by default")
    path = arguments.get("data_path")
    if isinstance(path, str):
        made.put("data_path", "data.corpus", path)
    elif isinstance(path, list | tuple) and len(path) == 1:
        made.put("data_path", "data.corpus", str(path[0]))
    elif isinstance(path, list | tuple) and path:
        _mixture(made, path)
    _graphs(made, arguments)


def _mixture(made: Translation, path: Sequence[Any]) -> None:
    """Set data.mixture from alternating weights and prefixes; prefixes without weights are not converted."""
    weights = [one for one in path[::2] if isinstance(one, int | float) and not isinstance(one, bool)]
    if len(path) % 2 == 0 and len(weights) == len(path) // 2:
        pairs = zip(weights, path[1::2], strict=True)
        made.put("data_path", "data.mixture", [{"path": str(at), "weight": float(w)} for w, at in pairs])
    else:
        made.instead("data_path", "prefixes without weights: give each a weight in data.mixture")


def _graphs(made: Translation, arguments: Mapping[str, Any]) -> None:
    if arguments.get("enable_cuda_graph") or arguments.get("cuda_graph_impl") not in (None, "none"):
        option = "enable_cuda_graph" if arguments.get("enable_cuda_graph") else "cuda_graph_impl"
        made.put(option, "train.cuda_graphs", True)
