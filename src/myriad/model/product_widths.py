"""Widths of a block's weight matrices on one tensor-parallel rank, by the keys that make them. Without torch.

Libraries multiply matrices fastest, or only, if their widths are multiples of some number. A width is
``factor`` times a key's value over ``divisor``; from these follows the nearest value of the key that gives a
multiple.
"""

from math import gcd
from typing import NamedTuple

from myriad.model.config import ModelConfig

__all__ = ["ProductWidth", "product_widths"]


class ProductWidth(NamedTuple):
    """One width of matrices on a rank."""

    name: str
    """Keys of the model and of the layout that make it."""
    key: str
    """The key to change for another width."""
    value: int
    """Value of that key."""
    factor: int = 1
    divisor: int = 1

    @property
    def size(self) -> int:
        """The width, in elements."""
        return self.value * self.factor // self.divisor

    def nearest(self, multiple: int) -> int:
        """Return the nearest value of the key that makes the width a multiple; of two, the larger."""
        step = multiple * self.divisor // gcd(multiple * self.divisor, self.factor)
        below = self.value // step * step
        return below if below and self.value - below < step / 2 else below + step


def product_widths(model: ModelConfig, tp: int, expert_tp: int) -> list[ProductWidth]:
    """Return the widths of all matrices but those of the vocabulary. ``expert_tp``: number of tensor-parallel
    ranks that share the width of an expert."""
    return [
        ProductWidth("model.hidden", "model.hidden", model.hidden),
        *_mlp_widths(model, tp, expert_tp),
        *(_head_widths(model, tp) if model.latent is None else _latent_widths(model, tp)),
    ]


def _mlp_widths(model: ModelConfig, tp: int, expert_tp: int) -> list[ProductWidth]:
    found = []
    if model.experts is None or model.has_dense_blocks:
        name = "model.ffn_hidden / layout.tp"
        found.append(ProductWidth(name, "model.ffn_hidden", model.ffn_width, 1, tp))
    if model.experts is not None:
        key, width = "model.expert_hidden", model.expert_width
        found.append(ProductWidth(f"{key} / layout.etp", key, width, 1, expert_tp))
    if model.experts is not None and model.shared_experts:
        name = f"model.shared_experts x {key} / layout.tp"
        found.append(ProductWidth(name, key, width, model.shared_experts, tp))
    return found


def _head_widths(model: ModelConfig, tp: int) -> list[ProductWidth]:
    key, width = "model.head_dim", model.head_width
    return [
        ProductWidth(f"model.heads x {key} / layout.tp", key, width, model.heads, tp),
        ProductWidth(f"model.kv_heads x {key} / layout.tp", key, width, model.kv_heads_of_rank(tp)),
    ]


def _latent_widths(model: ModelConfig, tp: int) -> list[ProductWidth]:
    """Return the widths of latent attention, whose latents every rank computes whole."""
    latent = model.latent
    assert latent is not None
    whole = {
        "model.kv_lora_rank": latent.key_value_rank,
        "model.q_lora_rank": latent.query_rank or 0,
        "model.qk_rope_head_dim": latent.rotated,
    }
    of_heads = {
        "model.qk_nope_head_dim + model.qk_rope_head_dim": latent.head,
        "model.qk_nope_head_dim + model.v_head_dim": latent.plain + latent.value,
        "model.v_head_dim": latent.value,
    }
    found = [ProductWidth(key, key, width) for key, width in whole.items() if width]
    for keys, width in of_heads.items():
        shown = f"({keys})" if "+" in keys else keys
        found.append(ProductWidth(f"model.heads x {shown} / layout.tp", keys, width, model.heads, tp))
    return found
