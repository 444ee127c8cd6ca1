"""Are a contender's gradients those of one process? On the links that it will be timed on."""

from typing import Protocol, runtime_checkable

import torch.distributed as dist

from peers.plain_gpt import PlainGPT, mean_loss
from peers.work import Peer, Work

__all__ = ["largest_difference"]


@runtime_checkable
class KeepsGradients(Protocol):
    """A contender that has to be told beforehand that its gradients are wanted."""

    def keep_gradients(self) -> None: ...


def largest_difference(contender: Peer, work: Work) -> float:
    """Over all parameters and ranks: the largest difference of a gradient's elements, relative to the largest
    element of that gradient. infinity where a gradient is missing on every rank."""
    tokens, targets = work.batch(0)
    if isinstance(contender, KeepsGradients):
        contender.keep_gradients()
    contender.forward_backward(tokens, targets)
    found = contender.gradients()
    model = PlainGPT(work)
    mean_loss(model(tokens), targets).backward()
    own, seen = 0.0, set[str]()
    for name, parameter in model.named_parameters():
        if name in found and parameter.grad is not None:
            difference = (found[name] - parameter.grad).abs().max() / parameter.grad.abs().max()
            own, seen = max(own, float(difference)), seen | {name}
    everyone: list[tuple[float, set[str]]] = [(0.0, set())] * dist.get_world_size()
    dist.all_gather_object(everyone, (own, seen))
    missing = {name for name, _ in model.named_parameters()} - set().union(*(names for _, names in everyone))
    return float("inf") if missing else max(difference for difference, _ in everyone)
