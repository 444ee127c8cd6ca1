"""A plan as the arguments of Megatron-LM and as overrides of Megatron-Bridge, which name the layout alike.

    Megatron-LM      megatron/training/arguments.py, and dataclasses of megatron/core that become arguments
    Megatron-Bridge  ConfigContainer (src/megatron/bridge/training/config.py), by
    scripts/training/run_recipe.py

Megatron-LM begins with defaults, so that what is off is left out. An override changes a recipe, which may
have pipelines, recomputation or shared sequences of its own: every option is given, ``null`` where it is
off.
"""

from collections.abc import Iterator, Mapping

from myriad.comm.layout import Layout
from myriad.errors import BadInputError
from myriad.forecasts.launch.launch_options import (
    KEY,
    LaunchScript,
    Value,
    check_layout,
    falling_steps,
    micro_batches,
    option_lines,
    product_format,
    torchrun,
)
from myriad.forecasts.launch.megatron_model import model_arguments
from myriad.job import Job
from myriad.planner import Cluster, Framework
from myriad.program.partition import partition_layers

__all__ = ["BRIDGE_PRECISIONS", "PRECISIONS", "megatron_bridge_script", "megatron_script"]

Option = tuple[str, Value]

PRECISIONS: dict[str, Mapping[str, Value]] = {
    "bfloat16": {"bf16": True},
    "float16": {"fp16": True},
    "float32": {},
    "float8": {"bf16": True, "fp8_format": "hybrid", "fp8_recipe": "tensorwise"},
    "float8-blocks": {"bf16": True, "fp8_format": "hybrid", "fp8_recipe": "blockwise"},
}
BRIDGE_PRECISIONS = {
    "bfloat16": "bf16_mixed",
    "float16": "fp16_mixed",
    "float8": "bf16_with_fp8_current_scaling_mixed",
    "float8-blocks": "bf16_with_fp8_subchannel_scaling_mixed",
}
_ON_BLACKWELL: dict[str, Mapping[str, Value]] = {
    "mxfp8": {"bf16": True, "fp8_format": "e4m3", "fp8_recipe": "mxfp8"},
    "nvfp4": {"bf16": True, "fp4_format": "e2m1"},
}
_BRIDGE_ON_BLACKWELL = {"mxfp8": "bf16_with_mxfp8_mixed", "nvfp4": "bf16_with_nvfp4_mixed"}
_SHARDING = {2: "optim_grads", 3: "optim_grads_params"}
_DECAYS = {"cosine": "cosine", "linear": "linear", "wsd": "WSD", "constant": "constant"}


def megatron_script(job: Job, framework: Framework, cluster: Cluster) -> LaunchScript:
    """Return what starts Megatron-LM. Raises `BadInputError`."""
    options = {**model_arguments(job.model), **dict(_megatron(job, framework, cluster))}
    return LaunchScript(
        torchrun(job.layout, cluster, "pretrain_gpt.py", '"${ARGUMENTS[@]}" "$@"'),
        option_lines(options.items()),
        "Run it in a checkout of Megatron-LM. Data, tokenizer and checkpoints are not part of a plan: give "
        "their options to this script.",
        _environment(job.layout),
    )


def megatron_bridge_script(job: Job, framework: Framework, cluster: Cluster) -> LaunchScript:
    """Return what starts Megatron-Bridge. Raises `BadInputError`."""
    program = 'scripts/training/run_recipe.py --recipe "${RECIPE:?such as llama3_8b_pretrain_config}"'
    reduced = "" if framework.profile.gradient_bytes == 4 else _GRADIENT_NOTES
    return LaunchScript(
        torchrun(job.layout, cluster, program, '--mode pretrain "${ARGUMENTS[@]}" "$@"'),
        option_lines(_megatron_bridge(job, framework, cluster), "="),
        "Run it in a checkout of Megatron-Bridge. RECIPE is of the planned model. Data, tokenizer and "
        f"checkpoints are not part of a plan: give their options to this script.{reduced}",
        _environment(job.layout),
    )


_GRADIENT_NOTES = (
    " The plan reduces gradients in bfloat16, and a mixed precision by name in float32: for the plan's, set "
    "mixed_precision.grad_reduce_in_fp32 to False in the recipe."
)


def _environment(layout: Layout) -> dict[str, str]:
    """Return the variable that keeps the order of kernels and communication, which Megatron-LM asks for."""
    ordered = layout.tp * layout.cp > 1 and layout.zero < 2
    return {"CUDA_DEVICE_MAX_CONNECTIONS": "1"} if ordered else {}


def _megatron(job: Job, framework: Framework, cluster: Cluster) -> Iterator[Option]:
    """Yield layout, batch, precision and optimizer as Megatron-LM's arguments."""
    layout, train, optimizer = job.layout, job.train, job.optimizer
    yield from _megatron_layout(job, framework)
    if layout.zero >= 2:
        yield from (("use_megatron_fsdp", True), ("data_parallel_sharding_strategy", _SHARDING[layout.zero]))
        yield from (("no_gradient_accumulation_fusion", True), ("ckpt_format", "fsdp_dtensor"))
    several = layout.pp > 2 or layout.virtual_stages == 1  # Two ranks with virtual stages need the overlap.
    yield "no_overlap_p2p_communication", layout.pp > 1 and several and not job.overlap.pipeline
    yield from (PRECISIONS | _ON_BLACKWELL)[product_format(job, framework, cluster)].items()
    if framework.profile.gradient_bytes == 2:
        yield "grad_reduce_in_bf16", True
    else:
        yield "accumulate_allreduce_grads_in_fp32", True
    yield "cross_entropy_loss_fusion", framework.profile.memory.logits_backward_bytes == 2
    if job.model.experts is not None:
        yield "moe_permute_fusion", framework.profile.fused_permutation
    rest: tuple[Option, ...] = (
        ("micro_batch_size", layout.micro_batch),
        ("global_batch_size", train.global_batch),
        ("train_iters", train.steps),
        ("lr", optimizer.learning_rate),
        ("min_lr", optimizer.learning_rate * optimizer.final_learning_rate_ratio),
        ("lr_decay_style", _DECAYS[optimizer.decay]),
        ("lr_warmup_iters", optimizer.warmup_steps),
        *_falling(job),
        ("weight_decay", optimizer.weight_decay),
        ("adam_beta1", optimizer.beta1),
        ("adam_beta2", optimizer.beta2),
        ("adam_eps", optimizer.epsilon),
        ("clip_grad", optimizer.clip_norm or 0.0),
    )
    yield from rest


def _falling(job: Job) -> Iterator[Option]:
    """Yield the last steps of a schedule that is constant before them."""
    if job.optimizer.decay == "wsd":
        yield "lr_wsd_decay_iters", falling_steps(job)
        yield "lr_wsd_decay_style", "linear"


def _megatron_layout(job: Job, framework: Framework) -> Iterator[Option]:
    """Yield what Megatron-LM and Megatron-Bridge name alike. Raises `BadInputError`."""
    layout, several = job.layout, job.layout.dp * job.layout.cp > 1
    check_layout(layout, ("1f1b", "interleaved"), has_parts=True)
    yield "tensor_model_parallel_size", layout.tp
    yield "pipeline_model_parallel_size", layout.pp
    yield from _stages(job)
    yield "context_parallel_size", layout.cp
    if layout.cp > 1:
        yield "cp_comm_type", _context_kind(layout)
    if job.model.experts is not None:
        yield "expert_model_parallel_size", layout.ep
        yield "expert_tensor_parallel_size", layout.expert_tp
    yield "sequence_parallel", layout.tp > 1 and framework.profile.sequence_parallel
    yield "tp_comm_overlap", layout.tp > 1 and job.overlap.tensor is not None
    yield "use_distributed_optimizer", layout.zero >= 1
    yield "num_distributed_optimizer_instances", layout.num_shard_groups if layout.zero else 1
    yield "overlap_grad_reduce", job.overlap.data and several
    yield "overlap_param_gather", job.overlap.data and several and layout.zero >= 1
    yield "recompute_granularity", None if layout.recompute == "none" else layout.recompute
    blocks = max(len(stage) for stage in _blocks(job))
    is_full, is_whole = layout.recompute == "full", layout.recompute_ratio == 1
    number = 1 if is_whole else max(1, round(blocks * layout.recompute_ratio))
    yield "recompute_method", ("uniform" if is_whole else "block") if is_full else None
    yield "recompute_num_layers", number if is_full else None


def _blocks(job: Job) -> list[list[str]]:
    """Return what each stage has, as letters of Megatron-Core's ``pipeline_model_parallel_layout``:
    embedding E, blocks t, prediction layers m and the loss L."""
    kinds, layout = job.model.layer_kinds, job.layout
    letters = ["E", *("t" * (len(kinds) - 2)), *("m" * job.model.prediction_layers), "L"]
    stages = partition_layers("uniform", layout.num_stages if layout.pp > 1 else 1, kinds)
    last = stages[-1]
    return [letters[one.start : one.stop] for one in stages[:-1]] + [letters[last.start :]]


def _stages(job: Job) -> Iterator[Option]:
    """Yield how layers are divided: by a number of virtual stages if all have equally many blocks, else by a
    description of every stage, as `PipelineParallelLayerLayout` of Megatron-Core reads it."""
    layout, stages = job.layout, _blocks(job)
    equal = len({stage.count("t") for stage in stages}) == 1
    virtual = layout.virtual_stages if layout.pp > 1 and layout.virtual_stages > 1 else None
    yield "num_virtual_stages_per_pipeline_rank", virtual if equal else None
    yield "pipeline_model_parallel_layout", None if equal else _described(stages)
    yield "microbatch_group_size_per_virtual_pipeline_stage", virtual and _group_size(job)


def _described(stages: list[list[str]]) -> str:
    """Return ``Et*3|(t*2|)*29tL`` for stages of 3, 29 times 2, and 1 blocks."""
    names = [_counted(stage) for stage in stages]
    words, done = [names[0] + "|"], 1
    while done < len(names) - 1:
        same = next((n for n in range(done, len(names) - 1) if names[n] != names[done]), len(names) - 1)
        words.append(f"({names[done]}|)*{same - done}" if same > done + 1 else f"{names[done]}|")
        done = same
    return "".join((*words, names[-1]))


def _counted(stage: list[str]) -> str:
    number = stage.count("t")
    blocks = f"t*{number}" if number > 2 else "t" * number
    first, last = [one for one in stage if one == "E"], [one for one in stage if one in "mL"]
    return "".join((*first, blocks, *last))


def _group_size(job: Job) -> int | None:
    """Return the micro-batches of a round of the interleaved schedule; ``None``: as many as pipeline ranks.
    The last round has as many or none, which Megatron-Core requires."""
    count, pp = micro_batches(job), job.layout.pp
    if count % pp == 0:
        return None
    sizes = (-(-count // rounds) for rounds in range(count // pp, 0, -1))
    return next((size for size in sizes if count % size == 0 or count % size >= pp), None)


def _context_kind(layout: Layout) -> str:
    if layout.ulysses == 1:
        return "p2p"
    if layout.ulysses == layout.cp:
        return "a2a"
    allowed = f"1 or {layout.cp}: hierarchies of both are not written"
    raise BadInputError(KEY, f"layout.ulysses = {layout.ulysses}", allowed)


_BRIDGE_NAMES = {
    "num_virtual_stages_per_pipeline_rank": "model.virtual_pipeline_model_parallel_size",
    "microbatch_group_size_per_virtual_pipeline_stage": "model.microbatch_group_size_per_vp_stage",
    "use_distributed_optimizer": "ddp.use_distributed_optimizer",
    "num_distributed_optimizer_instances": "ddp.num_distributed_optimizer_instances",
    "overlap_grad_reduce": "ddp.overlap_grad_reduce",
    "overlap_param_gather": "ddp.overlap_param_gather",
}
"""Options whose name is not their Megatron-LM name in the section ``model``."""
_OTHER_DIVISIONS = (
    ("model.account_for_embedding_in_pipeline_split", False),
    ("model.account_for_loss_in_pipeline_split", False),
    ("model.num_layers_in_first_pipeline_stage", None),
    ("model.num_layers_in_last_pipeline_stage", None),
)
"""Other ways in which a recipe may divide layers."""


def _megatron_bridge(job: Job, framework: Framework, cluster: Cluster) -> Iterator[Option]:
    """Yield what differs from a recipe as overrides of Megatron-Bridge's ``ConfigContainer``. Overlap of
    tensor parallelism stays the recipe's: its section may be missing there. Raises `BadInputError`."""
    layout, optimizer = job.layout, job.optimizer
    precision = (BRIDGE_PRECISIONS | _BRIDGE_ON_BLACKWELL)[product_format(job, framework, cluster)]
    virtual = layout.virtual_stages if layout.pp > 1 and layout.virtual_stages > 1 else None
    for name, value in _megatron_layout(job, framework):
        if name == "num_virtual_stages_per_pipeline_rank":
            yield _BRIDGE_NAMES[name], virtual
        elif name != "tp_comm_overlap":
            yield _BRIDGE_NAMES.get(name, f"model.{name}"), value
    yield from _OTHER_DIVISIONS
    yield "optimizer.use_distributed_optimizer", layout.zero >= 1
    yield "ddp.use_megatron_fsdp", layout.zero >= 2
    yield "ddp.data_parallel_sharding_strategy", _SHARDING.get(layout.zero, "no_shard")
    rest: tuple[Option, ...] = (
        ("mixed_precision", precision),
        ("dataset.seq_length", job.model.sequence),
        ("model.seq_length", job.model.sequence),
        ("train.micro_batch_size", layout.micro_batch),
        ("train.global_batch_size", job.train.global_batch),
        ("train.train_iters", job.train.steps),
        ("optimizer.lr", optimizer.learning_rate),
        ("optimizer.min_lr", optimizer.learning_rate * optimizer.final_learning_rate_ratio),
        ("optimizer.weight_decay", optimizer.weight_decay),
        ("optimizer.adam_beta1", optimizer.beta1),
        ("optimizer.adam_beta2", optimizer.beta2),
        ("optimizer.adam_eps", optimizer.epsilon),
        ("optimizer.clip_grad", optimizer.clip_norm or 0.0),
        ("scheduler.lr_decay_style", _DECAYS[optimizer.decay]),
        ("scheduler.lr_warmup_iters", optimizer.warmup_steps),
        ("scheduler.lr_warmup_fraction", None),
        ("scheduler.lr_decay_iters", None),
        *((f"scheduler.{name}", value) for name, value in _falling(job)),
    )
    yield from rest
