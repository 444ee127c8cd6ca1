"""Limits of a model that a ``config.json`` describes: sizes that fit together, and lists that fit in memory.

A model of a job is checked by the job's rules (`myriad.job.model_rules`); a file from elsewhere is checked
here, before anything is made in its sizes.
"""

from myriad.errors import BadInputError
from myriad.model.config import ModelConfig

__all__ = ["check_model"]

_MOST_HEADS = _MOST_EXPERTS = 2**18
"""Largest number in all layers together."""


def check_model(model: ModelConfig) -> None:
    """Raise `BadInputError` for heads, experts or rotary positions that no model here can have."""
    _check_heads(model)
    _check_experts(model)
    _check_rotary(model)


def _check_heads(model: ModelConfig) -> None:
    """Refuse heads that have no size, or do not share key/value heads evenly, and more of them than a list
    should hold: a few words of a file would take all memory."""
    if model.layers * model.heads > _MOST_HEADS:
        allowed = f"at most {_MOST_HEADS:,} in the {model.layers:,} layers of config.json together"
        raise BadInputError("heads", model.heads, allowed)
    if model.head_dim is None and model.latent is None and model.hidden % model.heads:
        raise BadInputError("heads", model.heads, f"a divisor of hidden = {model.hidden} in config.json")
    if model.heads % model.num_kv_heads:
        raise BadInputError(
            "kv_heads", model.num_kv_heads, f"a divisor of {model.heads} heads in config.json"
        )


def _check_experts(model: ModelConfig) -> None:
    """Refuse more experts than a list should hold, and tokens that choose more experts than there are."""
    if model.experts is None:
        return
    if model.layers * model.experts > _MOST_EXPERTS:
        allowed = f"at most {_MOST_EXPERTS:,} in the {model.layers:,} layers of config.json together"
        raise BadInputError("experts", model.experts, allowed)
    if not any(map(model.has_experts, range(model.layers))):
        allowed = f"fewer layers without experts than the {model.layers} layers of config.json"
        raise BadInputError("experts", model.experts, allowed)
    if model.experts_per_token > model.experts:
        allowed = f"at most the {model.experts} experts of config.json"
        raise BadInputError("experts_per_token", model.experts_per_token, allowed)
    each, odd = divmod(model.experts, model.router_groups)
    if odd:
        allowed = f"a divisor of the {model.experts} experts of config.json"
        raise BadInputError("router_groups", model.router_groups, allowed)
    fits = model.experts_per_token <= model.router_group_limit * each
    enough = each > 1 or model.router_groups == 1 or model.router_group_score == "largest"
    if not (fits and enough and model.router_group_limit <= model.router_groups):
        allowed = f"at most router_groups = {model.router_groups}, with enough experts for a token"
        raise BadInputError("router_group_limit", model.router_group_limit, allowed)


def _check_rotary(model: ModelConfig) -> None:
    """Refuse rotary positions that no kernel can compute: an odd part of a head, or too few factors."""
    if model.position != "rotary":
        return
    scaling, (pairs, odd) = model.rotary_scaling, divmod(model.rotary_width, 2)
    if odd or not pairs:
        allowed = f"{model.rotary_width} values of it are rotated: must be even, at least 2, in config.json"
        raise BadInputError("head_dim", model.head_width, allowed)
    for key, factors in (("short_factor", scaling.short_factors), ("long_factor", scaling.long_factors)):
        if scaling.kind == "longrope" and len(factors) != pairs:
            raise BadInputError(
                key, list(factors), f"{pairs} numbers in config.json, one for each rotary pair"
            )
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    if high <= low:
        raise BadInputError("high_freq_factor", high, f"above low_freq_factor = {low} in config.json")
