"""A plan for another framework as the shell script that starts it: `myriad plan --framework X --out FILE.sh`.

    megatron-lm        torchrun pretrain_gpt.py --tensor-model-parallel-size 4 ...
    megatron-bridge    torchrun run_recipe.py --recipe $RECIPE model.tensor_model_parallel_size=4 ...
    torchtitan         torchrun -m torchtitan.train --module $MODULE --config $CONFIG
                       --parallelism.tensor_parallel_degree 4 ...

Names are those of ``megatron/training/arguments.py``, of Megatron-Bridge's ``ConfigContainer``
(``scripts/training/run_recipe.py``), and of ``torchtitan/config/configs.py``. Megatron-LM's arguments hold
the model as well: they are read back as `myriad translate` reads them, and refused if that is another model.
The other two have a recipe or configuration for the model.
"""

from collections.abc import Collection, Iterator, Mapping

from myriad.comm.layout import Layout
from myriad.errors import BadInputError
from myriad.forecasts.megatron_model import KEY, Value, model_arguments, option_line
from myriad.job import Job
from myriad.planner import Cluster, Framework
from myriad.planner.frameworks import Launcher

__all__ = ["SCRIPT_HEAD", "check_launch", "launch_text"]

SCRIPT_HEAD = "#!/usr/bin/env bash\n"


def check_launch(job: Job, framework: Framework) -> None:
    """Raise `BadInputError` if no script can start this job's model in the framework."""
    if framework.launcher is None:
        allowed = "without --framework, or with one whose file names a launcher, such as megatron-core"
        raise BadInputError(KEY, framework.name, allowed)
    if framework.launcher == "megatron-lm":
        model_arguments(job.model)
    if job.optimizer.name != "adamw":
        raise BadInputError(KEY, f"optimizer.name = {job.optimizer.name}", "adamw, for another framework")
    known, precision = _PRECISIONS_OF[framework.launcher], _precision(job)
    if precision not in known:
        raise BadInputError(KEY, f"train.precision = {precision}", f"one of {', '.join(known)}")


def launch_text(job: Job, framework: Framework, cluster: Cluster, head: str) -> str:
    """Return the script. ``job``: with the planned layout and overlap. ``head``: lines of comments. Raises
    `BadInputError`."""
    check_launch(job, framework)
    assert framework.launcher is not None
    program, values, separator = _of(framework.launcher, job, framework)
    shown = [option_line(name, value, separator) for name, value in values.items()]
    lines = [line for line in shown if line]
    nodes = job.layout.world // min(job.layout.world, cluster.accelerators_per_node)
    start = [
        "torchrun",
        f"--nproc-per-node {job.layout.world // nodes} --nnodes {nodes}",
        '--node-rank "${NODE_RANK:-0}" --master-addr "${MASTER_ADDR:-localhost}"',
        f'--master-port "${{MASTER_PORT:-29500}}" {program}',
        '"${ARGUMENTS[@]}" "$@"',
    ]
    return (
        f"{SCRIPT_HEAD}{head}"
        f"# Data, tokenizer and checkpoints are not part of a plan: give their options to this script.\n"
        f"set -euo pipefail\n{_environment(job.layout, framework.launcher)}ARGUMENTS=(\n"
        + "".join(f"    {line}\n" for line in lines)
        + ")\n"
        + " \\\n    ".join(start)
        + "\n"
    )


def _environment(layout: Layout, launcher: Launcher) -> str:
    """Return the line that keeps the order of kernels and communication, which Megatron-LM asks for."""
    ordered = launcher != "torchtitan" and layout.tp * layout.cp > 1 and layout.zero < 2
    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    return f'export {name}="${{{name}:-1}}"\n' if ordered else ""


def _of(launcher: Launcher, job: Job, framework: Framework) -> tuple[str, dict[str, Value], str]:
    """Return the program, its options, and what stands between an option and its value."""
    if launcher == "torchtitan":
        program = (
            '-m torchtitan.train --module "${MODULE:?such as llama3}" --config "${CONFIG:?such as llama3_8b}"'
        )
        return program, dict(_torchtitan(job)), " "
    if launcher == "megatron-bridge":
        program = 'run_recipe.py --recipe "${RECIPE:?such as llama3_8b_pretrain_config}"'
        return program, dict(_megatron_bridge(job, framework)), "="
    arguments = model_arguments(job.model) | dict(_megatron(job, framework))
    return "pretrain_gpt.py", arguments, " "


_SHARDING = {2: "optim_grads", 3: "optim_grads_params"}
_DECAYS = {"cosine": "cosine", "linear": "linear", "wsd": "WSD", "constant": "constant"}
_PRECISIONS: Mapping[str, Mapping[str, Value]] = {
    "bfloat16": {"bf16": True},
    "float16": {"fp16": True},
    "float32": {},
    "float8": {"bf16": True, "fp8_format": "hybrid", "fp8_recipe": "tensorwise"},
    "float8-blocks": {"bf16": True, "fp8_format": "hybrid", "fp8_recipe": "blockwise"},
}


_BRIDGE_PRECISIONS = {
    "bfloat16": "bf16_mixed",
    "float16": "fp16_mixed",
    "float8": "bf16_with_fp8_current_scaling_mixed",
    "float8-blocks": "bf16_with_fp8_subchannel_scaling_mixed",
}
_PRECISIONS_OF: Mapping[Launcher, Collection[str]] = {
    "megatron-lm": _PRECISIONS,
    "megatron-bridge": _BRIDGE_PRECISIONS,
    "torchtitan": ("bfloat16", "float32"),
}


def _megatron(job: Job, framework: Framework) -> Iterator[tuple[str, Value]]:
    """Yield layout, batch, precision and optimizer as Megatron-LM's arguments."""
    layout, train, optimizer = job.layout, job.train, job.optimizer
    yield from _megatron_layout(job, framework)
    if layout.zero >= 2:
        yield from (("use_megatron_fsdp", True), ("data_parallel_sharding_strategy", _SHARDING[layout.zero]))
        yield from (("no_gradient_accumulation_fusion", True), ("ckpt_format", "fsdp_dtensor"))
    yield "no_overlap_p2p_communication", layout.pp > 1 and not job.overlap.pipeline
    yield from _PRECISIONS[_precision(job)].items()
    if framework.profile.gradient_bytes == 2:
        yield "grad_reduce_in_bf16", True
    else:
        yield "accumulate_allreduce_grads_in_fp32", True
    yield from (
        ("micro_batch_size", layout.micro_batch),
        ("global_batch_size", train.global_batch),
        ("train_iters", train.steps),
        ("lr", optimizer.learning_rate),
        ("min_lr", optimizer.learning_rate * optimizer.final_learning_rate_ratio),
        ("lr_decay_style", _DECAYS[optimizer.decay]),
        ("lr_warmup_iters", optimizer.warmup_steps),
        ("weight_decay", optimizer.weight_decay),
        ("adam_beta1", optimizer.beta1),
        ("adam_beta2", optimizer.beta2),
        ("adam_eps", optimizer.epsilon),
        ("clip_grad", optimizer.clip_norm or 0.0),
    )


def _precision(job: Job) -> str:
    """Return the type of the job's computation: on an accelerator ``auto`` is bfloat16."""
    return "bfloat16" if job.train.precision == "auto" else job.train.precision


def _megatron_layout(job: Job, framework: Framework) -> Iterator[tuple[str, Value]]:
    """Yield what Megatron-LM and Megatron-Bridge name alike. Raises `BadInputError`."""
    layout = job.layout
    _check_layout(layout, ("1f1b", "interleaved"))
    yield "tensor_model_parallel_size", layout.tp
    yield "pipeline_model_parallel_size", layout.pp
    yield from _megatron_stages(job)
    if layout.cp > 1:
        yield "context_parallel_size", layout.cp
        yield "cp_comm_type", _context_kind(layout)
    if job.model.experts is not None:
        yield "expert_model_parallel_size", layout.ep
        yield "expert_tensor_parallel_size", layout.expert_tp
    if layout.tp > 1:
        yield "sequence_parallel", framework.profile.sequence_parallel
        yield "tp_comm_overlap", job.overlap.tensor is not None
    yield "use_distributed_optimizer", layout.zero >= 1
    if layout.zero and layout.num_shard_groups > 1:
        yield "num_distributed_optimizer_instances", layout.num_shard_groups
    yield "overlap_grad_reduce", job.overlap.data and layout.dp * layout.cp > 1
    yield "overlap_param_gather", job.overlap.data and layout.zero >= 1
    if layout.recompute != "none":
        yield "recompute_granularity", layout.recompute
    if layout.recompute == "full":
        blocks = -(-job.model.layers // layout.num_stages)
        whole = layout.recompute_ratio == 1
        yield "recompute_method", "uniform" if whole else "block"
        yield "recompute_num_layers", 1 if whole else max(1, round(blocks * layout.recompute_ratio))


def _megatron_stages(job: Job) -> Iterator[tuple[str, Value]]:
    """Yield how layers are divided: into equal numbers, with embedding and head as two more if need be."""
    layers, stages = job.model.layers, job.layout.num_stages
    if layers % stages:
        if (layers + 2) % stages:
            allowed = f"a divisor of the {layers} layers, or of {layers + 2} with embedding and head"
            raise BadInputError(KEY, f"{stages} pipeline stages", allowed)
        yield "account_for_embedding_in_pipeline_split", True
        yield "account_for_loss_in_pipeline_split", True
    if job.layout.virtual_stages > 1:
        yield "num_virtual_stages_per_pipeline_rank", job.layout.virtual_stages


def _context_kind(layout: Layout) -> str:
    if layout.ulysses == 1:
        return "p2p"
    if layout.ulysses == layout.cp:
        return "a2a"
    allowed = f"1 or {layout.cp}: hierarchies of both are not written"
    raise BadInputError(KEY, f"layout.ulysses = {layout.ulysses}", allowed)


_FIXED: Mapping[str, object] = {
    "offload_activations": 0.0,
    "offload_optimizer": False,
    "partition": "uniform",
    "shares": None,
}
"""Keys of the layout that no other framework gets."""


def _check_layout(layout: Layout, schedules: Collection[str]) -> None:
    """Raise `BadInputError` for what the other framework does not have; ``schedules``: those that it has."""
    for key, value in _FIXED.items():
        if (given := getattr(layout, key)) != value:
            raise BadInputError(KEY, f"layout.{key} = {given}", f"{value}, for another framework")
    if layout.pp > 1 and layout.schedule_name not in schedules:
        raise BadInputError(
            KEY, f"layout.schedule = {layout.schedule_name}", f"one of {', '.join(schedules)}"
        )


_BRIDGE_DDP = (
    "use_distributed_optimizer",
    "num_distributed_optimizer_instances",
    "overlap_grad_reduce",
    "overlap_param_gather",
)
"""Options whose section is ``ddp``, not ``model``."""


def _megatron_bridge(job: Job, framework: Framework) -> Iterator[tuple[str, Value]]:
    """Yield what differs from a recipe as overrides of Megatron-Bridge's ``ConfigContainer``. Overlap of
    tensor parallelism stays the recipe's: its section may be missing there. Raises `BadInputError`."""
    for name, value in _megatron_layout(job, framework):
        if name == "num_virtual_stages_per_pipeline_rank":
            yield "model.virtual_pipeline_model_parallel_size", value
        elif name != "tp_comm_overlap":
            yield f"{'ddp' if name in _BRIDGE_DDP else 'model'}.{name}", value
    if job.layout.zero >= 2:
        yield "ddp.use_megatron_fsdp", True
        yield "ddp.data_parallel_sharding_strategy", _SHARDING[job.layout.zero]
    yield from (
        ("mixed_precision", _BRIDGE_PRECISIONS[_precision(job)]),
        ("model.seq_length", job.model.sequence),
        ("train.micro_batch_size", job.layout.micro_batch),
        ("train.global_batch_size", job.train.global_batch),
        ("train.train_iters", job.train.steps),
        ("optimizer.lr", job.optimizer.learning_rate),
        ("scheduler.lr_warmup_iters", job.optimizer.warmup_steps),
    )


_SCHEDULES = {"gpipe": "GPipe", "1f1b": "1F1B", "interleaved": "Interleaved1F1B"}


def _torchtitan(job: Job) -> Iterator[tuple[str, Value]]:
    """Yield layout, batch and optimizer as torchtitan's options. Raises `BadInputError`."""
    layout, train = job.layout, job.train
    _check_layout(layout, _SCHEDULES)
    if layout.ulysses > 1:
        raise BadInputError(KEY, f"layout.ulysses = {layout.ulysses}", "1: torchtitan has no Ulysses")
    if layout.expert_tp not in (1, layout.tp):
        allowed = f"1 or layout.tp = {layout.tp}: torchtitan has no other"
        raise BadInputError(KEY, f"layout.etp = {layout.etp}", allowed)
    shard = 1 if layout.zero == 0 else layout.shard_group or layout.dp
    yield "parallelism.data_parallel_replicate_degree", layout.dp // shard
    yield "parallelism.data_parallel_shard_degree", shard
    if layout.zero == 3:
        yield "parallelism.fsdp_reshard_after_forward", "always"
    yield "parallelism.tensor_parallel_degree", layout.tp
    yield "parallelism.context_parallel_degree", layout.cp
    yield "parallelism.pipeline_parallel_degree", layout.pp
    yield from _torchtitan_pipeline(job)
    if job.model.experts is not None:
        yield "parallelism.expert_parallel_degree", layout.ep
        yield "parallelism.expert_tensor_parallel_degree", layout.expert_tp
    yield "training.mixed_precision_param", _precision(job)
    yield "training.seq_len", job.model.sequence
    yield (
        "training.local_batch_size",
        layout.micro_batch if layout.pp == 1 else train.global_batch // layout.dp,
    )
    yield "training.global_batch_size", train.global_batch
    yield "training.steps", train.steps
    yield "optimizer.lr", job.optimizer.learning_rate
    yield "lr_scheduler.warmup_steps", job.optimizer.warmup_steps
    yield from _torchtitan_recompute(layout)
    yield "compile.enable", True


def _torchtitan_pipeline(job: Job) -> Iterator[tuple[str, Value]]:
    layout, layers = job.layout, job.model.layers
    if layout.pp == 1:
        return
    each = -(-layers // layout.num_stages)
    if -(-layers // each) != layout.num_stages:
        allowed = f"a number that {layers} layers fill with {each} in each"
        raise BadInputError(KEY, f"{layout.num_stages} pipeline stages", allowed)
    yield "parallelism.pipeline_parallel_schedule", _SCHEDULES[layout.schedule_name]
    yield "parallelism.pipeline_parallel_microbatch_size", layout.micro_batch
    yield "parallelism.pipeline_parallel_layers_per_stage", each
    yield "parallelism.pipeline_parallel_first_stage_less_layers", 0
    yield "parallelism.pipeline_parallel_last_stage_less_layers", 0


def _torchtitan_recompute(layout: Layout) -> Iterator[tuple[str, Value]]:
    """Yield activation checkpointing. A share of the layers becomes every n-th layer. Selective recomputation
    becomes that of single operators: torchtitan's attention never stores its scores."""
    if layout.recompute == "full" and layout.recompute_ratio < 1:
        yield "activation_checkpoint.mode", "selective"
        yield "activation_checkpoint.selective_ac_option", max(1, int(1 / layout.recompute_ratio))
    elif layout.recompute == "selective":
        yield "activation_checkpoint.mode", "selective"
        yield "activation_checkpoint.selective_ac_option", "op"
    else:
        yield "activation_checkpoint.mode", layout.recompute
