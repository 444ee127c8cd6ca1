"""Rules of the optimizer, of what is measured of its steps, and of the precision, each a function.

They raise `BadInputError` as the rules of `myriad.job.job_rules` do, which calls them in this order.
"""

from collections.abc import Callable

from myriad.errors import need
from myriad.job.job_values import JobValues
from myriad.model.product_widths import product_widths
from myriad.optim.config import LossScaleConfig, OptimizerConfig, check_loss_scale, float8_scaling

__all__ = ["OPTIMIZER_RULES", "PRECISION_RULES", "check_precision"]


_MUON_KEYS = (
    "muon_momentum",
    "muon_nesterov",
    "muon_iterations",
    "muon_precision",
    "muon_scaling",
    "qk_clip",
)


def _check_muon(job: JobValues) -> None:
    optimizer = job.optimizer
    for key in _MUON_KEYS if not optimizer.orthogonalizes else ():
        value, default = getattr(optimizer, key), OptimizerConfig.model_fields[key].default
        allowed = f"only with optimizer.name = muon, which is {optimizer.name}"
        need(value == default, f"optimizer.{key}", value, allowed)


def _check_qk_clip(job: JobValues) -> None:
    limit, model = job.optimizer.qk_clip, job.model
    copies = model.kv_lora_rank is None and job.layout.tp > model.num_kv_heads
    for wrong, needs in (
        (model.qk_norm != "none", "model.qk_norm = none: norms of queries and keys undo the scaling"),
        (
            model.attention_softcap is not None,
            "model.attention_softcap = off, which bounds the scores already",
        ),
        (job.comm.sync_every > 1, "comm.sync_every = 1: with DiLoCo replicas have scores of their own"),
        (job.train.cuda_graphs, "train.cuda_graphs = false: captures do not record scores"),
        (copies, f"layout.tp of at most {model.num_kv_heads}: ranks share key and value heads"),
    ):
        need(limit is None or not wrong, "optimizer.qk_clip", limit, f"needs {needs}")


def _check_average(job: JobValues) -> None:
    optimizer, comm = job.optimizer, job.comm
    decay, every, validates = optimizer.ema_decay, optimizer.ema_every, job.train.validate_ema
    need(decay is not None or every == 1, "optimizer.ema_every", every, "only with optimizer.ema_decay")
    allowed = "needs comm.sync_every = 1: with DiLoCo replicas have different parameters between agreements"
    need(decay is None or comm.sync_every == 1, "optimizer.ema_decay", decay, allowed)
    need(decay is not None or not validates, "train.validate_ema", validates, "needs optimizer.ema_decay")
    allowed = "needs comm.compress_parameters = off: only changes of the trained parameters are sent"
    need(not validates or comm.compress_parameters is None, "train.validate_ema", validates, allowed)


def _check_batch_loads(job: JobValues) -> None:
    """Check what follows the loads of the global batch."""
    model, early = job.model, job.overlap.optimizer_in_backward
    for key, used in (("balance_bias_rate", model.has_router_bias), ("balance_scope", model.has_batch_loads)):
        value = getattr(model, key)
        allowed = "needs comm.sync_every = 1: with DiLoCo replicas have loads of their own"
        need(not used or job.comm.sync_every == 1, f"model.{key}", value, allowed)
        allowed = "needs overlap.optimizer_in_backward = false: loads are complete after the backward"
        need(not (used and early), f"model.{key}", value, allowed)


def _check_statistics(job: JobValues) -> None:
    telemetry, layout, comm = job.telemetry, job.layout, job.comm
    alone = comm.sync_every > 1
    every, decay = telemetry.layer_norms_every, telemetry.noise_scale_decay
    allowed = "needs comm.sync_every = 1: with DiLoCo replicas have different parameters"
    need(not (every and alone), "telemetry.layer_norms_every", every, allowed)
    if not telemetry.noise_scale:
        need(decay == 0.99, "telemetry.noise_scale_decay", decay, "only with telemetry.noise_scale = true")
        return
    copies = job.model.kv_lora_rank is None and layout.tp > job.model.num_kv_heads
    for wrong, needs in (
        (
            layout.dp == 1 and job.num_micro_batches == 1,
            "layout.dp of at least 2, or two micro-batches a step: they are the small batches",
        ),
        (layout.reduce == "each", "layout.reduce = last: a replica's whole gradient is not in memory"),
        (alone, "comm.sync_every = 1: with DiLoCo replicas send no gradients"),
        (comm.compress_gradients is not None, "comm.compress_gradients = off: sums of gradients are rounded"),
        (copies, f"layout.tp of at most {job.model.num_kv_heads}: ranks share key and value heads"),
    ):
        need(not wrong, "telemetry.noise_scale", True, f"needs {needs}")


def check_precision(job: JobValues) -> None:
    """Float8 matrix products need dimensions that are multiples of 16."""
    scaling = float8_scaling(job.train.precision)
    if scaling is None:
        return
    precision, experts = job.train.precision, job.model.experts
    allowed = "float8-blocks, or without float8, with model.experts: each gets any number of tokens"
    need(experts is None or scaling == "blocks", "train.precision", precision, allowed)
    widths = product_widths(job.model, job.layout.tp, job.layout.expert_tp)
    tokens = job.layout.micro_batch * job.model.sequence // job.layout.cp
    lengths = [(one.name, one.size) for one in widths]
    for key, length in [*lengths, ("layout.micro_batch x model.sequence / layout.cp", tokens)]:
        allowed = f"a multiple of 16, for train.precision = {job.train.precision}"
        need(length % 16 == 0, key, length, allowed)


def _check_float16(job: JobValues) -> None:
    precision, unused = job.train.precision, LossScaleConfig()
    check_loss_scale(job.loss_scale)
    for key in LossScaleConfig.model_fields if precision not in ("auto", "float16") else ():
        value = getattr(job.loss_scale, key)
        allowed = f"only with train.precision = float16: {precision} has no loss scale"
        need(value == getattr(unused, key), f"loss_scale.{key}", value, allowed)
    early = job.overlap.optimizer_in_backward and precision == "float16"
    allowed = "needs overlap.optimizer_in_backward = false: a step whose gradients overflow cannot be undone"
    need(not early, "train.precision", precision, allowed)


def _check_slices(job: JobValues) -> None:
    precision = job.train.precision
    has_slices = float8_scaling(precision) is None or job.overlap.tensor != "slices"
    allowed = f"turns, auto or off with train.precision = {precision}: its scales belong to whole tensors"
    need(has_slices, "overlap.tensor", "slices", allowed)
    allowed = "turns, auto or off with model.experts, which take a whole gathered sequence"
    sliced = job.overlap.tensor == "slices" and job.model.experts is not None
    need(not sliced, "overlap.tensor", "slices", allowed)


OPTIMIZER_RULES: tuple[Callable[[JobValues], None], ...] = (
    _check_muon,
    _check_qk_clip,
    _check_average,
    _check_batch_loads,
    _check_statistics,
)

PRECISION_RULES: tuple[Callable[[JobValues], None], ...] = (
    check_precision,
    _check_float16,
    _check_slices,
)
