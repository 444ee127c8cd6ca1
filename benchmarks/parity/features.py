"""Every model feature and layout dimension with its values, and the job that a choice of them makes."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from myriad.errors import BadInputError
from myriad.job.job_rules import RULES
from myriad.job.job_values import JobValues

__all__ = ["FEATURES", "GLOBAL_BATCH", "MOST_RANKS", "NO_EFFECT", "Features", "PairJob", "job_of", "reasons"]

Features = Mapping[str, Any]
"""A value of each feature, by its name in `FEATURES`."""

MOST_RANKS = 8
GLOBAL_BATCH = 8
BASE: dict[str, Any] = {
    "layers": 6,
    "hidden": 32,
    "heads": 4,
    "sequence": 16,
    "vocabulary": 90,
    "vocabulary_multiple": 16,
}
"""Six blocks, embedding and head: eight stages, one for each rank or two for each of four."""

FEATURES: dict[str, tuple[Any, ...]] = {
    "layout.tp": (1, 2, 4),
    "layout.pp": (1, 2, 4),
    "layout.dp": (2, 1, 4),
    "layout.zero": (0, 1, 2, 3),
    "layout.schedule": (
        None,
        "1f1b",
        "gpipe",
        "eager-1f1b",
        "interleaved",
        "zero-bubble",
        "zero-bubble-v",
        "eager-zero-bubble",
    ),
    "layout.virtual_stages": (1, 2),
    "layout.recompute": ("none", "selective", "full"),
    "layout.recompute_ratio": (1.0, 0.5),
    "layout.reduce": ("last", "each"),
    "layout.micro_batch": (1, 2),
    "layout.partition": ("uniform", "parameters"),
    "layout.shard_group": (None, 2),
    "layout.offload_activations": (0.0, 0.5),
    "layout.offload_optimizer": (False, True),
    "shares": ("equal", "unequal"),
    "optimizer": ("adamw", "lamb", "adamw in the backward", "muon", "muon with QK-clip"),
    "optimizer.ema_decay": (None, 0.9),
    "data.documents": ("joined", "packed"),
    "overlap": ("on", "off", "small messages"),
    "model.activation": ("gelu", "gelu_tanh", "relu2", "swiglu", "geglu", "geglu_tanh"),
    "model.kv_heads": (None, 2, 1),
    "model.head_dim": (None, 16),
    "latent": ("none", "keys and values", "queries too"),
    "experts": ("none", "softmax", "sigmoid and shared"),
    "model.block": ("serial", "parallel"),
    "model.parallel_norms": (1, 2),
    "model.norm": ("rms", "layer"),
    "model.norm_placement": ("before", "after", "both"),
    "model.norm_zero_centered": (False, True),
    "model.norm_bias": (False, True),
    "model.bias": (False, True),
    "model.attention_bias": ("default", "qkv", "all"),
    "model.qk_norm": ("none", "head", "heads", "all"),
    "model.qk_norm_kind": ("rms", "layer"),
    "model.qk_norm_bias": (False, True),
    "model.attention_scale": (None, 0.4),
    "model.attention_softcap": (None, 2.0),
    "model.attention_sinks": (False, True),
    "model.position": ("rotary", "learned", "none"),
    "model.rotary_fraction": (1.0, 0.5),
    "model.rotary_pattern": ((True,), (True, False)),
    "rotary_scaling": ("none", "linear", "dynamic", "yarn", "longrope", "llama3"),
    "model.window": (None, 6),
    "model.window_pattern": ((True,), (True, False)),
    "model.window_rotary_base": (None, 100.0),
    "model.tied": (True, False),
    "model.vocabulary": (90, 89),
    "model.prediction_layers": (0, 2),
    "model.embedding_scale": (1.0, 5.0),
    "model.residual_scale": (1.0, 0.3),
    "model.logit_scale": (1.0, 0.25),
    "model.logit_softcap": (None, 4.0),
    "model.z_loss": (0.0, 0.01),
    "model.mup_base_width": (None, 16),
    "model.dropout": (0.0, 0.1),
}
"""Keys of a job with the values that are combined; the first one of each is the plainest. The seven names
without a section stand for several keys (`job_of`)."""

LATENT = {"kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6}
EXPERTS: dict[str, dict[str, Any]] = {
    "none": {},
    "softmax": {
        "experts": 4,
        "dense_layers": 1,
        "expert_hidden": 32,
        "balance_loss": 0.1,
        "router_z_loss": 0.01,
    },
    "sigmoid and shared": {
        "experts": 6,
        "experts_per_token": 3,
        "expert_every": 2,
        "expert_hidden": 16,
        "shared_experts": 1,
        "shared_expert_gate": True,
        "router_scores": "sigmoid",
        "router_scale": 2.5,
        "balance_bias_rate": 0.01,
        "router_groups": 3,
        "router_group_limit": 2,
        "router_group_score": "two_largest",
    },
}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw": {"name": "adamw"},
    "lamb": {"name": "lamb"},
    "adamw in the backward": {"name": "adamw", "clip_norm": None},
    "muon": {"name": "muon"},
    "muon with QK-clip": {"name": "muon", "qk_clip": 0.02},
}
OVERLAPS: dict[str, dict[str, Any]] = {
    "on": {},
    "off": dict.fromkeys(("pipeline", "data", "optimizer", "tensor"), False),
    "small messages": {
        "message_bytes": 1000,
        "max_in_flight_bytes": 1000,
        "chunks": 3,
        "receive_ahead": 3,
    },
}


@dataclass(frozen=True)
class PairJob:
    """The sections of a job that features decide."""

    model: dict[str, Any]
    layout: dict[str, Any]
    optimizer: dict[str, Any]
    overlap: dict[str, Any]
    packed: bool


def _scaling(features: Features) -> dict[str, Any]:
    """A model that was trained on sequences of 8 and now reads twice as long ones."""
    kind = features["rotary_scaling"]
    if kind == "none":
        return {}
    head_dim = features["model.head_dim"] or BASE["hidden"] // BASE["heads"]
    head_dim = head_dim if features["latent"] == "none" else LATENT["qk_rope_head_dim"]
    pairs = int(head_dim * features["model.rotary_fraction"]) // 2
    scaling: dict[str, Any] = {"kind": kind, "factor": 2.0, "original_sequence": 8}
    if kind == "longrope":
        scaling["short_factors"] = tuple(1.0 + 0.1 * pair for pair in range(pairs))
        scaling["long_factors"] = tuple(1.5 + 0.5 * pair for pair in range(pairs))
    return {"rotary_scaling": scaling}


def _shares(layout: Mapping[str, Any]) -> tuple[int, ...]:
    """The first replica has a micro-batch more than the others, the last one less."""
    each = GLOBAL_BATCH // (layout["dp"] * layout["micro_batch"])
    if layout["dp"] == 1 or each < 2:
        raise BadInputError("layout.shares", "unequal", "two micro-batches for each replica at least")
    return (each + 1, *[each] * (layout["dp"] - 2), each - 1)


def job_of(features: Features) -> PairJob:
    """Return the job. Raises `BadInputError` for unequal shares that cannot be."""
    keys: dict[str, dict[str, Any]] = {"model": {}, "layout": {}, "optimizer": {}, "data": {}}
    for name, value in features.items():
        section, _, key = name.partition(".")
        if key:
            keys[section][key] = value
    layout, optimizer = keys["layout"], features["optimizer"]
    if features["shares"] == "unequal":
        layout["shares"] = _shares(layout)
    early = {"optimizer_in_backward": optimizer == "adamw in the backward"}
    latent: dict[str, Any] = {} if features["latent"] == "none" else dict(LATENT)
    if features["latent"] == "queries too":
        latent["q_lora_rank"] = 12
    model = BASE | keys["model"] | latent | EXPERTS[features["experts"]] | _scaling(features)
    optimizes = keys["optimizer"] | OPTIMIZERS[optimizer]
    packed = keys["data"]["documents"] == "packed"
    return PairJob(model, layout, optimizes, OVERLAPS[features["overlap"]] | early, packed)


NO_EFFECT = "no effect: "
"""Begins the reasons for combinations that validation accepts and that would not be a test."""


def _without_effect(features: Features) -> Iterator[str]:
    """Yield the values that change nothing beside the others, and why one process would be compared with
    itself."""
    layout = {key: features[f"layout.{key}"] for key in ("tp", "pp", "dp")}
    for unused, changed in (
        (layout["pp"] == 1, ("layout.schedule", "layout.partition")),
        (layout["dp"] == 1, ("layout.zero", "layout.reduce", "shares")),
        (features["model.window"] is None, ("model.window_pattern",)),
    ):
        for name in changed if unused else ():
            if features[name] != FEATURES[name][0]:
                yield f"{NO_EFFECT}{name}"
    if not 1 < layout["tp"] * layout["pp"] * layout["dp"] <= MOST_RANKS:
        yield f"{NO_EFFECT}number of ranks"


def reasons(features: Features) -> tuple[str, ...]:
    """Return why the validation of jobs refuses the features, by rule and key, and why training them would
    not test anything. Without any, they can be trained."""
    found = list(_without_effect(features))
    try:
        job = _validated(features)
    except BadInputError as error:  # the rules cannot look at such a job: each may refuse it
        return (*found, f"section: {error.key}", *(rule.__name__ for rule in RULES))
    for rule in RULES:
        try:
            rule(job)
        except BadInputError:
            found.append(rule.__name__)
        except (ArithmeticError, AssertionError, LookupError):  # an earlier rule refuses what it relies on
            assert found, "no earlier rule refuses the job"
            found.append(rule.__name__)
    return tuple(found)


def _validated(features: Features) -> JobValues:
    """Return the job with each section valid by itself. Raises `BadInputError`."""
    made = job_of(features)
    return JobValues.model_validate(
        {
            "data": {"corpus": "prepared", "documents": features["data.documents"]},
            "model": made.model,
            "layout": made.layout,
            "optimizer": {"warmup_steps": 5} | made.optimizer,
            "overlap": made.overlap,
            "train": {"global_batch": GLOBAL_BATCH, "precision": "float32", "device": "cpu"},
        }
    )
