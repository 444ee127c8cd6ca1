"""A training of a few steps that gives the same bits every time on the same hardware and torch, or
something is wrong with the hardware: a core or a device that computes wrongly without saying so.

Two things are compared: the bits of neighbours (each core of the node does the same training, the majority
is right), and those stored in the baseline for this hardware and version.
"""

import hashlib
import os
from collections import Counter
from collections.abc import Mapping

import torch

from myriad.model.config import ModelConfig
from myriad.model.definition import Context
from myriad.model.gpt import build_full

__all__ = ["odd_ones_out", "train_bits"]

_MODEL = ModelConfig(layers=2, hidden=64, heads=2, sequence=64, vocabulary=256, activation="swiglu")
_BATCH, _STEPS, _SEED = 4, 4, 20402


def train_bits(device: torch.device) -> str:
    """Losses and final weights as a hash; the last loss in front, for people."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    layers = build_full(_MODEL, _SEED).to(device)
    optimizer = torch.optim.AdamW(layers.parameters(), lr=1e-2)
    bits = hashlib.blake2s(digest_size=8)
    loss = torch.zeros(())
    for step in range(_STEPS):
        loss = _loss(layers, step, device)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        bits.update(float(loss).hex().encode())
    for parameter in layers.parameters():
        bits.update(parameter.detach().cpu().numpy().tobytes())
    return f"loss {float(loss):.6f}, bits {bits.hexdigest()}"


def _loss(layers: torch.nn.ModuleList, step: int, device: torch.device) -> torch.Tensor:
    """The mean over targets; tokens follow a rule that can be learned and needs no random numbers."""
    length = _MODEL.sequence + 1
    places = torch.arange(_BATCH * length).view(_BATCH, length) + 7 * step
    tokens = ((places * places) // 3 % 251).to(device)
    x, targets = tokens[:, :-1], tokens[:, 1:]
    context = Context(targets=targets, samples=torch.arange(_BATCH, device=device))
    for layer in layers:
        x = layer(x, context)
    return x / targets.numel()


def odd_ones_out(bits: Mapping[str, str]) -> list[str]:
    """Who has other bits than most; everybody when there is no majority."""
    if len(set(bits.values())) <= 1:
        return []
    (most, count), *_ = Counter(bits.values()).most_common()
    return [name for name, found in bits.items() if 2 * count <= len(bits) or found != most]
