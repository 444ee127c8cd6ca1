"""Megatron-LM's arguments about positions, windows, latent attention, prediction layers and muP, as values of
`ModelConfig`. Without torch.

| argument                                            | `ModelConfig`                                   |
|-----------------------------------------------------|-------------------------------------------------|
| rotary_percent                                      | rotary_fraction                                 |
| rotary_seq_len_interpolation_factor                 | rotary_scaling linear                           |
| use_rope_scaling, rope_scaling_factor               | rotary_scaling llama3, original_sequence 8192   |
| position_embedding_type yarn, or latent attention:  | rotary_scaling yarn, if the factor is above 1   |
| rotary_scaling_factor, mscale, mscale_all_dim       |                                                 |
| no_rope_freq; window_attn_skip_freq                 | rotary_pattern; window_pattern                  |
| multi_latent_attention, kv_lora_rank, q_lora_rank,  | kv_lora_rank, q_lora_rank, qk_nope_head_dim,    |
| qk_head_dim, qk_pos_emb_head_dim, v_head_dim        | qk_rope_head_dim, v_head_dim                    |
| mtp_num_layers, mtp_loss_scaling_factor             | prediction_layers, prediction_weight            |
| softmax_scale; softmax_type learnable               | attention_scale; attention_sinks                |
| use_mup, mup_base_hidden_size, mup_embedding_mult   | mup_base_width, embedding_scale                 |

Names, defaults and meaning are those of ``megatron/training/arguments.py`` and ``megatron/core/transformer``
(``MLATransformerConfig``, ``RotaryEmbedding``, ``YarnRotaryEmbedding``).
"""

import ast
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

from myriad.errors import BadInputError

__all__ = [
    "LAYER_ARGUMENTS",
    "latent_values",
    "layer_differences",
    "mup_values",
    "position_values",
    "prediction_values",
    "refuse",
    "score_values",
    "size_of",
    "unused_arguments",
    "window_values",
]

Values = dict[str, Any]
"""Values of `ModelConfig` by name."""

_LATENT = ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim", "rope_type")
_YARN = ("rotary_scaling_factor", "mscale", "mscale_all_dim")
_BOUNDS = ("original_max_position_embeddings", "beta_fast", "beta_slow", "correction_range_round_to_int")
_MUP = (
    "mup_base_hidden_size",
    "mup_embedding_mult",
    "mup_output_mult",
    "mup_base_head_dim",
    "mup_attn_scale_power",
)
_PREDICTION = ("mtp_loss_scaling_factor",)

LAYER_ARGUMENTS = frozenset({
    "position_embedding_type", "use_rotary_position_embeddings", "no_position_embedding", "rotary_base",
    "rotary_percent", "rotary_interleaved", "rotary_seq_len_interpolation_factor", "use_rope_scaling",
    "rope_scaling_factor", "no_rope_freq", "window_size", "window_attn_skip_freq", "multi_latent_attention",
    "mtp_num_layers", "softmax_scale", "softmax_type", "use_mup", *_LATENT, *_YARN, *_BOUNDS, *_MUP,
    *_PREDICTION, *(f"yarn_{name}" for name in _BOUNDS),
})  # fmt: skip
"""Arguments that this module reads."""


def refuse(key: str, name: str, value: object, allowed: str) -> NoReturn:
    """Raise `BadInputError` for the argument ``name``. ``key``: the user's input key."""
    raise BadInputError(key, str(value)[:100], f"{name} must be {allowed}")


def size_of(arguments: Mapping[str, Any], name: str, key: str, default: int | None = None) -> int:
    """Return a whole number of at least 1."""
    value = arguments.get(name)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 2**30:
        refuse(key, name, value, "a whole number of at least 1")
    assert isinstance(value, int)
    return value


def _number(arguments: Mapping[str, Any], name: str, key: str, default: float, least: float = 0.0) -> float:
    value = arguments.get(name)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= 1e9:
        refuse(key, name, value, f"a number of at least {least:g}")
    assert isinstance(value, int | float)
    return float(value)


def position_values(arguments: Mapping[str, Any], key: str) -> Values:
    """Return the values about positions."""
    kind = arguments.get("position_embedding_type", "learned_absolute")
    kind = "rope" if arguments.get("use_rotary_position_embeddings") else kind
    latent = bool(arguments.get("multi_latent_attention"))
    if latent and kind != "rope":
        refuse(key, "position_embedding_type", kind, "rope with multi_latent_attention")
    if kind in ("learned_absolute", "none"):
        return {"position": "learned" if kind == "learned_absolute" else "none"}
    if kind not in ("rope", "yarn"):
        refuse(key, "position_embedding_type", kind, "rope, yarn, learned_absolute or none")
    values: Values = {"position": "rotary", "rotary_base": arguments.get("rotary_base") or 10000.0}
    if latent:
        return values | _latent_scaling(arguments, key)
    fraction = _number(arguments, "rotary_percent", key, 1.0)
    if not 0 < fraction <= 1:
        refuse(key, "rotary_percent", fraction, "above 0, at most 1")
    if kind == "yarn" and fraction != 1:
        refuse(key, "rotary_percent", fraction, "1 with position_embedding_type yarn")
    values |= {"rotary_fraction": fraction} | _scaling(arguments, kind, key)
    rotates = tuple(not skips for skips in _pattern(arguments, "no_rope_freq", key, last=True))
    return {"position": "none"} if rotates and not any(rotates) else values | _if(rotates, "rotary_pattern")


def _if(pattern: tuple[bool, ...], name: str) -> Values:
    return {name: pattern} if pattern else {}


def _scaling(arguments: Mapping[str, Any], kind: str, key: str) -> Values:
    """Return the scaling of the rotary frequencies outside of latent attention."""
    stretch = _number(arguments, "rotary_seq_len_interpolation_factor", key, 1.0)
    llama3 = bool(arguments.get("use_rope_scaling"))
    if stretch != 1 and (llama3 or kind == "yarn"):
        other = "use_rope_scaling" if llama3 else "position_embedding_type yarn"
        refuse(
            key, "rotary_seq_len_interpolation_factor", stretch, f"off with {other}: only one is applied here"
        )
    if kind == "yarn":
        return _yarn_scaling(arguments, "yarn_", key)
    if llama3:
        factor = _number(arguments, "rope_scaling_factor", key, 8.0, 1.0)
        return {"rotary_scaling": {"kind": "llama3", "factor": factor, "original_sequence": 8192}}
    return {} if stretch == 1 else {"rotary_scaling": {"kind": "linear", "factor": stretch}}


def _latent_scaling(arguments: Mapping[str, Any], key: str) -> Values:
    """Return the scaling with latent attention, whose type of rotary positions is yarn by default."""
    kind = arguments.get("rope_type") or "yarn"
    if kind not in ("rope", "yarn"):
        refuse(key, "rope_type", kind, "rope or yarn")
    if kind == "yarn":
        return _yarn_scaling(arguments, "", key)
    if _number(arguments, "rotary_percent", key, 1.0) != 1:
        refuse(key, "rotary_percent", arguments["rotary_percent"], "1 with multi_latent_attention")
    factor, both = _yarn_factor(arguments, key), _number(arguments, "mscale_all_dim", key, 0.0)
    if factor <= 1 or both == 0:
        return {}
    width = size_of(arguments, "qk_head_dim", key, 128) + size_of(arguments, "qk_pos_emb_head_dim", key, 64)
    return {"attention_scale": _magnitude(factor, both) ** 2 / math.sqrt(width)}  # scores alone are scaled


def _yarn_factor(arguments: Mapping[str, Any], key: str) -> float:
    return _number(arguments, "rotary_scaling_factor", key, 1.0)


def _magnitude(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0


def _yarn_scaling(arguments: Mapping[str, Any], prefix: str, key: str) -> Values:
    """Return yarn's values. ``prefix`` of the arguments about the ramp."""
    factor = _yarn_factor(arguments, key)
    if factor <= 1:
        return {}
    scaling: Values = {
        "kind": "yarn",
        "factor": factor,
        "original_sequence": size_of(arguments, f"{prefix}original_max_position_embeddings", key, 4096),
        "beta_fast": _number(arguments, f"{prefix}beta_fast", key, 32.0),
        "beta_slow": _number(arguments, f"{prefix}beta_slow", key, 1.0),
        "truncate": arguments.get(f"{prefix}correction_range_round_to_int") is not False,
    }
    one, both = _number(arguments, "mscale", key, 1.0), _number(arguments, "mscale_all_dim", key, 0.0)
    if one and both:
        return {"rotary_scaling": scaling | {"mscale": one, "mscale_all_dim": both}}
    if (one, both) != (1, 0):
        scaling["attention_factor"] = _magnitude(factor, one) / _magnitude(factor, both)
    if both and not prefix:
        scaling["mscale_all_dim"] = both
    return {"rotary_scaling": scaling}


def _pattern(arguments: Mapping[str, Any], name: str, key: str, last: bool) -> tuple[bool, ...]:
    """Return which layers are marked by 1. With a number N, the last one of each N layers differs from the
    others, and is marked if ``last``. Empty: not given."""
    value = arguments.get(name)
    if value in (None, 0):
        return ()
    try:
        found = _evaluated(ast.parse(value, mode="eval").body) if isinstance(value, str) else value
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        found = None
    if isinstance(found, int) and not isinstance(found, bool) and 1 <= found <= _MOST_LAYERS:
        return (*[not last] * (found - 1), last)
    if not isinstance(found, list | tuple) or not found or any(one not in (0, 1) for one in found):
        refuse(key, name, value, 'a whole number, or a list of 0 and 1 such as "([0]*3+[1])*4"')
    return tuple(map(bool, found))


_MOST_LAYERS = 10_000


def _evaluated(node: ast.expr) -> Any:
    """Return the value of an expression of numbers, lists, + and *, of limited size."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.List):
        return [_evaluated(one) for one in node.elts]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Mult):
        left, right = _evaluated(node.left), _evaluated(node.right)
        length = len(left) if isinstance(left, list) else len(right) if isinstance(right, list) else 1
        times = next((one for one in (left, right) if isinstance(one, int)), 1)
        if length * abs(times) > _MOST_LAYERS:
            raise ValueError(times)
        return left + right if isinstance(node.op, ast.Add) else left * right
    raise ValueError(ast.dump(node)[:50])


def window_values(arguments: Mapping[str, Any], key: str) -> Values:
    """Return the values about windows."""
    window = arguments.get("window_size")
    if window is None:
        return {}
    if isinstance(window, str) and re.fullmatch(r"\(?\d{1,9}, ?\d{1,9}\)?", window):
        window = tuple(map(int, window.strip("()").split(",")))
    left, right = window if isinstance(window, list | tuple) and len(window) == 2 else (None, None)
    if right != 0 or not isinstance(left, int) or left < 0:
        refuse(key, "window_size", window, "(n, 0) with n of at least 0")
    assert isinstance(left, int)
    slides = _pattern(arguments, "window_attn_skip_freq", key, last=False)
    return {} if slides and not any(slides) else {"window": left + 1} | _if(slides, "window_pattern")


def latent_values(arguments: Mapping[str, Any], key: str) -> Values:
    """Return the values of latent attention, which replace those of heads; empty without it."""
    if not arguments.get("multi_latent_attention"):
        return {}
    needs = "with multi_latent_attention"
    for name, default, right in (
        ("group_query_attention", False, False),
        ("add_bias_linear", True, False),
        ("add_qkv_bias", False, False),
        ("qk_layernorm", False, True),
    ):
        value = arguments.get(name, default)
        if bool(value) != right:
            why = ": Myriad always normalizes latents" if right else ""
            refuse(key, name, value, f"{'on' if right else 'off'} {needs}{why}")
    if arguments.get("normalization", "LayerNorm") != "RMSNorm":
        refuse(key, "normalization", arguments.get("normalization", "LayerNorm"), f"RMSNorm {needs}")
    queries = arguments.get("q_lora_rank")
    return {
        "kv_lora_rank": size_of(arguments, "kv_lora_rank", key, 32),
        "q_lora_rank": None if queries is None else size_of(arguments, "q_lora_rank", key),
        "qk_nope_head_dim": size_of(arguments, "qk_head_dim", key, 128),
        "qk_rope_head_dim": size_of(arguments, "qk_pos_emb_head_dim", key, 64),
        "v_head_dim": size_of(arguments, "v_head_dim", key, 128),
        "kv_heads": None,
        "head_dim": None,
        "qk_norm": "none",
        "qk_norm_kind": "rms",
        "qk_norm_bias": False,
    }


def prediction_values(arguments: Mapping[str, Any], key: str) -> Values:
    """Return the values of prediction layers; empty without them."""
    if not arguments.get("mtp_num_layers"):
        return {}
    weight = _number(arguments, "mtp_loss_scaling_factor", key, 0.1)
    return {"prediction_layers": size_of(arguments, "mtp_num_layers", key), "prediction_weight": weight}


def score_values(arguments: Mapping[str, Any], key: str) -> Values:
    """Return the values of attention scores."""
    kind = arguments.get("softmax_type") or "vanilla"
    if kind not in ("vanilla", "learnable"):
        refuse(key, "softmax_type", kind, "vanilla or learnable")
    values: Values = {"attention_sinks": kind == "learnable"}
    if arguments.get("softmax_scale") is not None and not arguments.get("multi_latent_attention"):
        values["attention_scale"] = _number(arguments, "softmax_scale", key, 1.0)
    return values


def mup_values(arguments: Mapping[str, Any], hidden: int, head_width: int, key: str) -> Values:
    """Return the values of maximal update parametrization; empty without it."""
    if not arguments.get("use_mup"):
        return {}
    base = size_of(arguments, "mup_base_hidden_size", key, hidden)
    values: Values = {"mup_base_width": base}
    values["embedding_scale"] = _number(arguments, "mup_embedding_mult", key, 1.0)
    if (output := _number(arguments, "mup_output_mult", key, 1.0)) != 1:
        values["logit_scale"] = output * hidden / base
    power = _number(arguments, "mup_attn_scale_power", key, 1.0)
    base_head = _number(arguments, "mup_base_head_dim", key, 1.0)
    if arguments.get("softmax_scale") is None and (power, base_head) != (1, 1):
        values["attention_scale"] = math.sqrt(base_head) / head_width**power
    return values


def layer_differences(arguments: Mapping[str, Any]) -> Iterator[str]:
    """Yield a sentence for each difference in how such a model is trained."""
    if arguments.get("multi_latent_attention"):
        epsilon = arguments.get("norm_epsilon", arguments.get("layernorm_epsilon", 1e-5))
        if epsilon != 1e-6:
            yield f"norms of latents add 1e-6 under the square root, not {epsilon}, as DeepSeek's do"
        if arguments.get("q_lora_rank") is None:
            yield "the input of queries is normalized once, as in the block; Megatron-LM may do it twice"
    if arguments.get("mtp_num_layers"):
        yield "prediction layers take the stream before the final norm, as in DeepSeek-V3, not after it"
        yield "losses of prediction layers are divided by all tokens, not by those that have a target"
    if arguments.get("use_mup"):
        yield "optimizer.epsilon holds for all parameters; Megatron-LM divides it by the width's factor"


def unused_arguments(arguments: Mapping[str, Any]) -> dict[str, str]:
    """Return the given arguments that another one must turn on, with that one."""
    kind = arguments.get("position_embedding_type")
    rotary = kind in ("rope", "yarn") or bool(arguments.get("use_rotary_position_embeddings"))
    latent = bool(arguments.get("multi_latent_attention"))
    plain = rotary and kind != "yarn" and not latent
    rows = (
        (latent, _LATENT, "multi_latent_attention"),
        (latent or kind == "yarn", _YARN, "multi_latent_attention, or position_embedding_type yarn"),
        (kind == "yarn" and not latent, [f"yarn_{name}" for name in _BOUNDS], "position_embedding_type yarn"),
        (bool(arguments.get("mtp_num_layers")), _PREDICTION, "mtp_num_layers"),
        (bool(arguments.get("use_mup")), _MUP, "use_mup"),
        (plain, ("use_rope_scaling",), "position_embedding_type rope, without multi_latent_attention"),
        (plain and bool(arguments.get("use_rope_scaling")), ("rope_scaling_factor",), "use_rope_scaling"),
        (rotary, ("rotary_base", "rotary_percent", "no_rope_freq"), "position_embedding_type rope"),
        (arguments.get("window_size") is not None, ("window_attn_skip_freq",), "window_size"),
    )
    return {
        name: f"takes effect with {by} alone"
        for on, names, by in rows
        if not on
        for name in names
        if name in arguments
    }
