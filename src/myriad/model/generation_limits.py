"""Limits of the memory of generated texts, and the size of their caches. This module does not import torch.

`myriad.model.generate` and `myriad.evaluation.greedy_texts` keep to them, and
`myriad.planner.memory.generation_memory` counts them.
"""

from myriad.model.config import ModelConfig

__all__ = ["MOST_NEXT_SCORES", "SCORES_OF_HEAD", "cached_values"]

SCORES_OF_HEAD = 1 << 22
"""Largest number of attention scores of one head when prompts are read; one longer text is read in pieces."""
MOST_NEXT_SCORES = 1 << 28
"""Largest number of scores of next tokens, texts times vocabulary; one text may have more."""


def cached_values(model: ModelConfig, tp: int) -> int:
    """Return the number of values that a tensor-parallel rank caches of one position in one block: keys and
    values of its heads, or the latent and the shared rotated key."""
    if model.latent is not None:
        return model.latent.key_value_rank + model.latent.rotated
    return 2 * model.kv_heads_of_rank(tp) * model.head_width
