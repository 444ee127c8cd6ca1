"""A plan as MaxText's command line (src/maxtext/configs/types.py), one process on each host.

    python3 -m maxtext.trainers.pre_train.train model_name=$MODEL ici_fsdp_parallelism=8
    dcn_fsdp_parallelism=4 ...

MaxText's mesh has an axis for each kind of parallelism, in a node (``ici_``) and between nodes (``dcn_``).
Axes fill a node in the order tensor, experts, sharded and plain replicas, as ranks of a plan are numbered;
what does not fit goes between nodes. Batches are counted for each device, of which tensor-parallel ones
share a sequence.
"""

from collections.abc import Iterator
from math import gcd

from myriad.errors import BadInputError
from myriad.forecasts.launch.launch_options import (
    KEY,
    LaunchScript,
    Value,
    check_layout,
    hosts,
    micro_batches,
    option_lines,
    planned_type,
)
from myriad.job import Job
from myriad.planner import Cluster, Framework

__all__ = ["maxtext_script"]

_KEPT = ("query_proj", "key_proj", "value_proj", "out_proj", "mlpwo")
"""Products that a recomputing plan keeps: those of its profile's ``recomputed_ratio``."""
_REMAT = {"none": "minimal_with_context", "full": "custom"}
_QUANTIZATION = {"float8": "fp8"}


def maxtext_script(job: Job, framework: Framework, cluster: Cluster) -> LaunchScript:
    """Return what starts MaxText. Raises `BadInputError`."""
    number, _ = hosts(job.layout, cluster)
    on_nodes = number > 1 and not _is_tpu(cluster)  # JAX finds the other hosts of a TPU slice by itself.
    several = {
        "JAX_COORDINATOR_IP": "${MASTER_ADDR:-localhost}",
        "JAX_COORDINATOR_PORT": "${MASTER_PORT:-29500}",
        "NNODES": str(number),
        "NODE_RANK": "0",
    }
    return LaunchScript(
        (
            "python3 -m maxtext.trainers.pre_train.train",
            '"model_name=${MODEL:?such as llama3-8b}" "${ARGUMENTS[@]}" "$@"',
        ),
        option_lines(_maxtext(job, framework, cluster), "="),
        "MODEL is MaxText's name of the planned model. Data, tokenizer and the folder of results are not "
        "part of a plan: give them to this script, such as run_name=first base_output_directory=results "
        "dataset_type=synthetic.",
        several if on_nodes else {},
    )


def _is_tpu(cluster: Cluster) -> bool:
    """Return whether accelerators are TPUs, which are one slice: links connect all of them."""
    return cluster.accelerator.name.startswith("TPU")


def _maxtext(job: Job, framework: Framework, cluster: Cluster) -> Iterator[tuple[str, Value]]:
    """Yield layout, batch and optimizer as MaxText's values. Raises `BadInputError`."""
    layout, optimizer, steps = job.layout, job.optimizer, job.train.steps
    check_layout(layout)
    if layout.cp > 1:
        raise BadInputError(KEY, f"layout.cp = {layout.cp}", "1: MaxText's plans do not share sequences")
    yield "hardware", "tpu" if _is_tpu(cluster) else "gpu"
    if not _is_tpu(cluster):
        yield "attention", "cudnn_flash_te"
    yield from _mesh(job, framework, cluster)
    yield "max_target_length", job.model.sequence
    yield "per_device_batch_size", layout.micro_batch * layout.dp / layout.world
    yield "gradient_accumulation_steps", micro_batches(job)
    yield "remat_policy", _REMAT[layout.recompute]
    if layout.recompute == "full":
        yield from ((name, "device") for name in ("decoder_layer_input", *_KEPT))
    yield "dtype", "float32" if planned_type(job) == "float32" else "bfloat16"
    if (quantized := _QUANTIZATION.get(planned_type(job))) is not None:
        yield "quantization", quantized
    yield "steps", steps
    yield "learning_rate", optimizer.learning_rate
    yield "lr_schedule_type", optimizer.decay
    yield "learning_rate_final_fraction", optimizer.final_learning_rate_ratio
    yield "warmup_steps_fraction", optimizer.warmup_steps / steps if steps else 0.0
    if optimizer.decay == "wsd":
        yield "wsd_decay_steps_fraction", optimizer.decay_ratio
    yield from (
        ("opt_type", "adamw"),
        ("adam_b1", optimizer.beta1),
        ("adam_b2", optimizer.beta2),
        ("adam_eps", optimizer.epsilon),
        ("adam_weight_decay", optimizer.weight_decay),
        ("gradient_clipping_threshold", optimizer.clip_norm or 0.0),
    )


def _mesh(job: Job, framework: Framework, cluster: Cluster) -> Iterator[tuple[str, Value]]:
    """Yield the axes of the mesh. Ranks that share experts are among those that shard the state."""
    layout = job.layout
    room = layout.world if _is_tpu(cluster) else min(layout.world, cluster.accelerators_per_node)
    shard = 1 if layout.zero == 0 else layout.shard_group or layout.dp
    if shard % layout.ep:
        raise BadInputError(
            KEY, f"layout.ep = {layout.ep}", f"a divisor of the {shard} ranks that shard the state"
        )
    tensor = "tensor_sequence" if framework.profile.sequence_parallel else "tensor"
    for name, ranks in (
        (tensor, layout.tp),
        ("expert", layout.ep),
        ("fsdp", shard // layout.ep),
        ("data", layout.dp // shard),
    ):
        inside = gcd(ranks, room)
        room //= inside
        yield f"ici_{name}_parallelism", inside
        yield f"dcn_{name}_parallelism", ranks // inside
