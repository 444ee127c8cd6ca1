"""A plan as torchtitan's command line: sections of ``Trainer.Config`` (torchtitan/trainer.py,
config/configs.py).

The model, its loss and its optimizer are those of a function that returns a configuration (``--module``,
``--config``); options change it. Batches are counted in tokens: those of a micro-batch of one replica, and
those of an iteration. Recomputation is a kind of configuration, not a value: its word comes last on the
command line.
"""

from collections.abc import Iterator

from myriad.comm.layout import Layout
from myriad.errors import BadInputError
from myriad.forecasts.launch.launch_options import (
    KEY,
    LaunchScript,
    Value,
    check_layout,
    micro_batches,
    option_lines,
    planned_type,
    torchrun,
)
from myriad.job import Job
from myriad.planner import Cluster, Framework

__all__ = ["torchtitan_script"]

_SCHEDULES = {"gpipe": "GPipe", "1f1b": "1F1B", "interleaved": "Interleaved1F1B"}
_DECAYS = {"cosine": "cosine", "linear": "linear", "wsd": "linear"}


def torchtitan_script(job: Job, framework: Framework, cluster: Cluster) -> LaunchScript:
    """Return what starts torchtitan. Raises `BadInputError`."""
    program = (
        '-m torchtitan.train --module "${MODULE:?such as llama3}" --config "${CONFIG:?such as llama3_8b}"'
    )
    recomputation = f"activation-checkpoint:{job.layout.recompute}"
    return LaunchScript(
        torchrun(job.layout, cluster, program, '"${ARGUMENTS[@]}" "$@"', recomputation),
        option_lines(_torchtitan(job), "_"),
        "MODULE and CONFIG name a function that returns torchtitan's configuration of the planned model. "
        "Data, tokenizer and checkpoints are not part of a plan: they are that function's, or options "
        "of this script.",
    )


def _torchtitan(job: Job) -> Iterator[tuple[str, Value]]:
    """Yield layout, batch and optimizer as torchtitan's options. Raises `BadInputError`."""
    layout, train = job.layout, job.train
    check_layout(layout, _SCHEDULES)
    if layout.ulysses > 1:
        raise BadInputError(KEY, f"layout.ulysses = {layout.ulysses}", "1: torchtitan has no Ulysses")
    if layout.expert_tp != (1 if layout.ep > 1 else layout.tp):
        whole = "1 with layout.ep above 1" if layout.ep > 1 else f"layout.tp = {layout.tp} without layout.ep"
        raise BadInputError(KEY, f"layout.etp = {layout.expert_tp}", f"{whole}: torchtitan has no other")
    shard = 1 if layout.zero == 0 else layout.shard_group or layout.dp
    yield "parallelism.data_parallel_replicate_degree", layout.dp // shard
    yield "parallelism.data_parallel_shard_degree", shard
    yield "parallelism.fsdp_reshard_after_forward", "always" if layout.zero == 3 else "never"
    yield "parallelism.tensor_parallel_degree", layout.tp
    yield "parallelism.context_parallel_degree", layout.cp
    yield "parallelism.pipeline_parallel_degree", layout.pp
    yield from _pipeline(job)
    yield "parallelism.expert_parallel_degree", layout.ep
    # Pipelines and exchanges of tokens whose number the host waits for are refused with CUDA graphs.
    yield "training.disable_cuda_graphs", layout.pp > 1 or layout.ep > 1
    yield "training.mixed_precision_param", planned_type(job)
    yield "training.max_context_length", job.model.sequence
    yield "training.num_tokens_per_microbatch_per_dp_rank", layout.micro_batch * job.model.sequence
    yield "training.num_tokens_per_train_step", train.global_batch * job.model.sequence
    yield "training.steps", train.steps
    yield "training.max_norm", job.optimizer.clip_norm or "inf"
    yield "optimizer.param_groups.0.optimizer_kwargs.lr", job.optimizer.learning_rate
    yield from _schedule(job)
    yield "compile.enable", True


def _schedule(job: Job) -> Iterator[tuple[str, Value]]:
    """Yield the schedule of learning rates."""
    optimizer = job.optimizer
    constant = optimizer.decay == "constant"
    ratio = optimizer.decay_ratio if optimizer.decay == "wsd" else None
    yield "lr_scheduler.warmup_steps", optimizer.warmup_steps
    yield "lr_scheduler.decay_type", _DECAYS.get(optimizer.decay, "linear")
    yield "lr_scheduler.decay_ratio", "None" if ratio is None else ratio
    yield "lr_scheduler.min_lr_factor", 1.0 if constant else optimizer.final_learning_rate_ratio


def _pipeline(job: Job) -> Iterator[tuple[str, Value]]:
    """Yield the stages. torchtitan infers one for each rank, or two with looped schedules; other numbers
    follow from the layers of a stage, with which as many stages are filled."""
    layout, layers = job.layout, job.model.layers
    if layout.pp == 1:
        return
    yield "parallelism.pipeline_parallel_schedule", _schedule_name(layout)
    yield "parallelism.num_pp_microbatches", micro_batches(job)
    each = -(-layers // layout.num_stages)
    fills = -(-layers // each) == layout.num_stages
    if not fills and layout.virtual_stages > 2:
        allowed = f"a number that {layers} layers fill with {each} in each"
        raise BadInputError(KEY, f"{layout.num_stages} pipeline stages", allowed)
    yield "parallelism.pipeline_parallel_layers_per_stage", each if fills else "None"
    yield "parallelism.pipeline_parallel_first_stage_less_layers", 0
    yield "parallelism.pipeline_parallel_last_stage_less_layers", 0


def _schedule_name(layout: Layout) -> str:
    looped = layout.schedule_name == "gpipe" and layout.virtual_stages > 1
    return "LoopedBFS" if looped else _SCHEDULES[layout.schedule_name]
