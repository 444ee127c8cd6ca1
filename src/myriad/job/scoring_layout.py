"""The layout of ranks that only compute forward passes, for `myriad eval`. This module does not import torch.

Keys about gradients, optimizer state or recomputed activations have no effect there: typed ones are refused,
and those of a run's own layout have their default. ZeRO 3 shards parameters, which forward passes have; what
ZeRO 1 and 2 shard, they do not.
"""

from collections.abc import Mapping, Sequence

from myriad.comm.layout import Layout
from myriad.errors import BadInputError
from myriad.job.job_rules import check_model_in_layout
from myriad.job.job_values import JobValues
from myriad.job.typed_job import read_layout
from myriad.model.config import ModelConfig

__all__ = ["check_scoring", "has_effect", "scoring_layout"]

_STAYS = "leave it out: forward passes"
_WITHOUT_EFFECT: Mapping[str, str] = {
    "micro_batch": "leave it out: --batch-tokens sets the tokens of a forward pass",
    "whole_documents": "leave it out: documents of requests are cut into a part for each rank",
    "shares": "leave it out: replicas take equally many windows of requests",
    "reduce": f"{_STAYS} have no gradients",
    "recompute": f"{_STAYS} keep no activations",
    "recompute_ratio": f"{_STAYS} keep no activations",
    "offload_activations": f"{_STAYS} keep no activations",
    "offload_optimizer": f"{_STAYS} have no optimizer state",
    "offload_optimizer_ratio": f"{_STAYS} have no optimizer state",
}
"""Keys that have no effect on forward passes, and what to do instead."""


def has_effect(key: str) -> bool:
    """Return whether a job key has an effect on forward passes in ranks."""
    section, _, name = key.partition(".")
    return section == "layout" and name not in _WITHOUT_EFFECT


def scoring_layout(overrides: Sequence[str], own: Layout | None = None) -> Layout:
    """Return the layout that ``layout.KEY=VALUE`` overrides describe. ``own``: a run's layout, which they
    change. Raises `BadInputError`."""
    for override in overrides:
        key, _, value = override.partition("=")
        if not key.startswith("layout."):
            raise BadInputError(key, value, "only keys of the layout, such as --layout.tp")
        if not has_effect(key):
            raise BadInputError(key, value, _WITHOUT_EFFECT[key.removeprefix("layout.")])
    layout = read_layout(overrides, _forward_only(own or Layout()))
    if layout.zero in (1, 2):
        allowed = "0 or 3: what 1 and 2 shard, gradients and optimizer state, forward passes do not have"
        raise BadInputError("layout.zero", layout.zero, allowed)
    if layout.partition == "profile":
        allowed = "uniform, parameters, type:REGEX or manual:B1,B2,..: a profile times training"
        raise BadInputError("layout.partition", layout.partition, allowed)
    return layout


def _forward_only(own: Layout) -> Layout:
    """Return the layout without what only training has."""
    changed = {key: Layout.model_fields[key].default for key in _WITHOUT_EFFECT}
    if own.zero < 3:
        changed |= {"zero": 0, "shard_group": None}
    if own.partition == "profile":
        changed["partition"] = "parameters"
    return own.model_copy(update=changed)


def check_scoring(model: ModelConfig, layout: Layout) -> None:
    """Refuse a layout that does not divide the model. Raises `BadInputError`."""
    check_model_in_layout(JobValues().model_copy(update={"model": model, "layout": layout}))
