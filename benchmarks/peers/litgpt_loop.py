"""litgpt's GPT of the same dimensions, with its own chunked cross-entropy; positions are rotary there."""

import torch
from litgpt.config import Config
from litgpt.model import GPT
from litgpt.utils import chunked_cross_entropy
from torch import nn

from peers.nanogpt_loop import GPTConfig


class LitGPT(nn.Module):
    """The model and its loss."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.gpt = GPT(
            Config(
                name="peer",
                block_size=config.block_size,
                vocab_size=config.vocab_size,
                padded_vocab_size=config.vocab_size,
                n_layer=config.n_layer,
                n_head=config.n_head,
                n_embd=config.n_embd,
                intermediate_size=4 * config.n_embd,
                rotary_percentage=1.0,
                parallel_residual=False,
                bias=False,
            )
        )
        self.gpt.transformer.wte.weight = self.gpt.lm_head.weight

    def forward(self, idx: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return chunked_cross_entropy(self.gpt(idx), targets)
