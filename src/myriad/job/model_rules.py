"""Rules over several keys of ``[model]``, each a function, in the order in which they are checked.

A key that has no effect without another one is refused unless it has its default, so that a job never holds a
setting that does nothing. A saved job, which has every key, passes, as unused keys have their defaults.
"""

from collections.abc import Callable, Iterable, Mapping

from myriad.config import Config
from myriad.errors import need, plain_value
from myriad.job.job_values import JobValues
from myriad.kernels.rotary_scaling import RotaryScaling
from myriad.model.config import ModelConfig

__all__ = ["MODEL_RULES", "settings_of"]


def _refuse_set(config: Config, prefix: str, keys: Iterable[str], allowed: str) -> None:
    """Refuse values other than the default of these keys of ``config``. ``allowed`` may name the default."""
    for key in keys:
        value, default = getattr(config, key), type(config).model_fields[key].default
        text = allowed.format(default=plain_value(default))
        need(value == default, f"{prefix}.{key}", value, text)


_LATENT_KEYS = ("q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_NOT_LATENT_KEYS = (
    *("kv_heads", "head_dim", "block", "window", "qk_norm", "attention_softcap", "attention_sinks"),
    *("position", "rotary_fraction", "rotary_pattern", "bias", "attention_bias", "norm_zero_centered"),
    "mup_base_width",
)
"""Keys that have their default with latent attention."""


def _check_latent(job: JobValues) -> None:
    model = job.model
    if model.latent is None:
        _refuse_set(model, "model", _LATENT_KEYS, "only with model.kv_lora_rank, else {default}")
        return
    allowed = "{default} with model.kv_lora_rank (latent attention)"
    _refuse_set(model, "model", _NOT_LATENT_KEYS, allowed)
    rotated, value = model.qk_rope_head_dim, model.v_head_dim
    need(rotated % 2 == 0, "model.qk_rope_head_dim", rotated, "an even number: pairs of values are rotated")
    allowed = f"at most model.qk_nope_head_dim + model.qk_rope_head_dim = {model.head_width}"
    need(value <= model.head_width, "model.v_head_dim", value, allowed)


def _check_heads(job: JobValues) -> None:
    model, kv_heads, width = job.model, job.model.num_kv_heads, job.model.head_width
    allowed = f"must be divisible by model.heads = {model.heads}; or set model.head_dim"
    sized = model.head_dim is not None or model.latent is not None
    need(sized or model.hidden % model.heads == 0, "model.hidden", model.hidden, allowed)
    allowed = f"must be divisible by model.kv_heads = {kv_heads}"
    need(model.heads % kv_heads == 0, "model.heads", model.heads, allowed)
    allowed = "must be even with model.position = rotary (off: model.hidden / model.heads)"
    need(model.position != "rotary" or width % 2 == 0, "model.head_dim", width, allowed)


_EXPERT_KEYS = (
    *("experts_per_token", "expert_hidden", "shared_experts", "router_scores", "router_normalized"),
    *("router_scale", "balance_loss", "router_z_loss", "dense_layers", "expert_every"),
    *("shared_expert_gate", "balance_bias_rate", "router_groups", "router_group_limit", "router_group_score"),
    *("router_logit_bias", "expert_capacity", "balance_scope"),
)


def _check_experts(job: JobValues) -> None:
    model, chosen = job.model, job.model.experts_per_token
    if model.experts is None:
        _refuse_set(model, "model", _EXPERT_KEYS, "only with model.experts, else {default}")
        return
    allowed = f"at most model.experts = {model.experts}"
    need(chosen <= model.experts, "model.experts_per_token", chosen, allowed)
    _refuse_set(model, "model", ("block", "mup_base_width"), "{default} with model.experts")
    scope = model.balance_scope
    need(
        scope == "sequence" or model.balance_loss > 0,
        "model.balance_scope",
        scope,
        "needs model.balance_loss",
    )
    load, most = job.layout.expert_load, max(1.0, model.largest_expert_load)
    allowed = f"at most {most:g}: with model.expert_capacity = {model.expert_capacity} experts drop the rest"
    need(model.expert_capacity is None or load <= most, "layout.expert_load", load, allowed)
    gate = model.shared_expert_gate
    need(not gate or model.shared_experts > 0, "model.shared_expert_gate", gate, "needs model.shared_experts")
    learns = chosen > 1 or not model.router_normalized
    need(learns, "model.experts_per_token", chosen, "2 or more, or set model.router_normalized = false")
    every, dense = model.expert_every, model.dense_layers
    has_any = any(map(model.has_experts, range(model.layers)))
    allowed = f"at most model.layers = {model.layers}: a block with experts follows model.dense_layers"
    need(has_any or every == 1, "model.expert_every", every, allowed)
    need(has_any, "model.dense_layers", dense, f"below model.layers = {model.layers}")
    if model.expert_hidden is not None and not model.has_dense_blocks:
        _refuse_set(model, "model", ("ffn_hidden",), "{default} with model.expert_hidden: no MLP has it")


def _check_router_groups(job: JobValues) -> None:
    model, groups, limit = job.model, job.model.router_groups, job.model.router_group_limit
    if groups == 1 or model.experts is None:
        keys = ("router_group_limit", "router_group_score")
        _refuse_set(model, "model", keys, "only with model.router_groups above 1, else {default}")
        return
    allowed = f"a divisor of model.experts = {model.experts}"
    need(model.experts % groups == 0, "model.router_groups", groups, allowed)
    each, chosen = model.experts // groups, model.experts_per_token
    needed = -(-chosen // each)
    allowed = f"{needed} to {groups}: a group has {each} experts, of which a token takes {chosen}"
    need(needed <= limit <= groups, "model.router_group_limit", limit, allowed)
    allowed = "largest where a group has one expert"
    need(
        each > 1 or model.router_group_score == "largest", "model.router_group_score", "two_largest", allowed
    )


def _check_norms(job: JobValues) -> None:
    model = job.model
    serial, placement = model.block == "serial", model.norm_placement
    need(
        serial or placement == "before",
        "model.norm_placement",
        placement,
        "before with model.block = parallel",
    )
    need(not serial or model.parallel_norms == 1, "model.parallel_norms", 2, "1 with model.block = serial")
    zero_centered = model.norm_zero_centered and model.norm != "rms"
    need(not zero_centered, "model.norm_zero_centered", True, "needs model.norm = rms")
    bias = model.norm_bias and model.norm != "layer"
    need(not bias, "model.norm_bias", True, "needs model.norm = layer: RMSNorm has no bias")
    _check_query_key_norm(model)


def _check_query_key_norm(model: ModelConfig) -> None:
    layer = model.qk_norm_kind == "layer"
    allowed = f"rms with model.qk_norm = {model.qk_norm}: a LayerNorm is over each head"
    need(not layer or model.qk_norm in ("head", "heads"), "model.qk_norm_kind", "layer", allowed)
    allowed = "needs model.qk_norm_kind = layer: RMSNorm has no bias"
    need(not model.qk_norm_bias or layer, "model.qk_norm_bias", True, allowed)
    rotated = model.position == "rotary" and all(model.rotary_pattern)
    allowed = "false unless every layer has rotary positions: elsewhere softmax cancels biases of keys"
    need(not model.qk_norm_bias or rotated, "model.qk_norm_bias", True, allowed)


def _check_base_width(job: JobValues) -> None:
    """LAMB's trust ratios and Muon's scaling set the size of each matrix's step themselves."""
    base, name = job.model.mup_base_width, job.optimizer.name
    allowed = f"off with optimizer.name = {name}: rates by kind of parameter need adamw"
    need(base is None or name == "adamw", "model.mup_base_width", base, allowed)


def _check_predictions(job: JobValues) -> None:
    further, sequence = job.model.prediction_layers, job.model.sequence
    allowed = f"below model.sequence = {sequence}: the last layer predicts so many tokens ahead"
    need(further < sequence, "model.prediction_layers", further, allowed)
    if not further:
        allowed = "only with model.prediction_layers, else {default}"
        _refuse_set(job.model, "model", ("prediction_weight", "prediction_input"), allowed)


def _check_window(job: JobValues) -> None:
    model = job.model
    window, sequence, pattern = model.window, model.sequence, model.window_pattern
    if window is None:
        _refuse_set(model, "model", ("window_pattern",), "only with model.window, else {default}")
        return
    allowed = f"at most model.sequence = {sequence}; off for full attention"
    need(window <= sequence, "model.window", window, allowed)
    allowed = "a list with at least one true; without windows, set model.window = off"
    need(any(pattern), "model.window_pattern", list(pattern), allowed)


_SCALING = "model.rotary_scaling"
_ROTARY_KEYS = ("rotary_base", "rotary_fraction", "rotary_pattern", "window_rotary_base")


def _check_rotary(job: JobValues) -> None:
    model, pattern = job.model, job.model.rotary_pattern
    if model.position != "rotary":
        allowed = f"only with model.position = rotary, which is {model.position}"
        _refuse_set(model, "model", _ROTARY_KEYS, f"{allowed}; else {{default}}")
        _refuse_set(model.rotary_scaling, _SCALING, RotaryScaling.model_fields, allowed)
        return
    allowed = "a list with at least one true; without rotary positions, set model.position = none"
    need(any(pattern), "model.rotary_pattern", list(pattern), allowed)
    width = model.rotary_width
    allowed = f"a fraction of model.head_dim = {model.head_width} that is an even number of at least 2"
    need(width >= 2 and width % 2 == 0, "model.rotary_fraction", model.rotary_fraction, allowed)
    base = model.window_rotary_base
    need(base is None or model.window is not None, "model.window_rotary_base", base, "needs model.window")
    _check_scaling(model)


_KINDS_OF_KEY: Mapping[str, tuple[str, ...]] = {
    "factor": ("linear", "dynamic", "yarn", "longrope", "llama3"),
    "original_sequence": ("linear", "dynamic", "yarn", "longrope", "llama3"),
    "attention_factor": ("yarn", "longrope"),
    "mscale": ("yarn",),
    "mscale_all_dim": ("yarn",),
    "beta_fast": ("yarn",),
    "beta_slow": ("yarn",),
    "truncate": ("yarn",),
    "low_frequency_factor": ("llama3",),
    "high_frequency_factor": ("llama3",),
    "short_factors": ("longrope",),
    "long_factors": ("longrope",),
}
"""Kinds of scaling that use a key of `RotaryScaling`."""


def _check_scaling(model: ModelConfig) -> None:
    scaling, kind = model.rotary_scaling, model.rotary_scaling.kind
    for key, kinds in _KINDS_OF_KEY.items():
        if kind not in kinds:
            choices = " or ".join([", ".join(kinds[:-1]), kinds[-1]] if kinds[1:] else kinds)
            allowed = f"only with {_SCALING}.kind = {choices}, which is {kind}"
            _refuse_set(scaling, _SCALING, (key,), allowed)
    original, needs = scaling.original_sequence, kind not in ("none", "linear")
    need(
        not needs or original is not None,
        f"{_SCALING}.original_sequence",
        original,
        f"needed for {kind}: a length",
    )
    pairs = model.rotary_width // 2
    for key in ("short_factors", "long_factors") if kind == "longrope" else ():
        factors = list(getattr(scaling, key))
        need(len(factors) == pairs, f"{_SCALING}.{key}", factors, f"{pairs} numbers with longrope")
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    need(
        high > low,
        f"{_SCALING}.high_frequency_factor",
        high,
        f"above {_SCALING}.low_frequency_factor = {low}",
    )
    _check_mscale(scaling, is_latent=model.latent is not None)


def _check_mscale(scaling: RotaryScaling, *, is_latent: bool) -> None:
    one, both = scaling.mscale, scaling.mscale_all_dim
    allowed = f"needs {_SCALING}.mscale_all_dim: the factor is a ratio of both"
    need(one is None or both is not None, f"{_SCALING}.mscale", one, allowed)
    allowed = f"off with {_SCALING}.attention_factor, which it would decide"
    need(one is None or scaling.attention_factor is None, f"{_SCALING}.mscale", one, allowed)
    allowed = f"only with model.kv_lora_rank, or with {_SCALING}.mscale"
    need(both is None or one is not None or is_latent, f"{_SCALING}.mscale_all_dim", both, allowed)


MODEL_RULES: tuple[Callable[[JobValues], None], ...] = (
    _check_latent,
    _check_heads,
    _check_experts,
    _check_router_groups,
    _check_norms,
    _check_base_width,
    _check_predictions,
    _check_window,
    _check_rotary,
)

_OFF = (None, "off", "none", 0, False)
_SETTINGS = {
    "window": ("window_pattern", "window_rotary_base"),
    "experts": _EXPERT_KEYS,
    "shared_experts": ("shared_expert_gate",),
    "prediction_layers": ("prediction_weight", "prediction_input"),
    "kv_lora_rank": _LATENT_KEYS,
    "qk_norm": ("qk_norm_kind", "qk_norm_bias"),
    "rotary_scaling.kind": tuple(f"rotary_scaling.{key}" for key in _KINDS_OF_KEY),
    "position": (*_ROTARY_KEYS, "rotary_scaling.kind"),
}


def settings_of(key: str, value: object) -> tuple[str, ...]:
    """Return the keys of ``[model]`` that have no effect once ``key`` has this value, e.g. ``window_pattern``
    for a ``window`` that is off."""
    is_off = value not in (None, "rotary") if key == "position" else value in _OFF
    own = _SETTINGS.get(key, ()) if is_off else ()
    return (*own, *(_SETTINGS["rotary_scaling.kind"] if "rotary_scaling.kind" in own else ()))
