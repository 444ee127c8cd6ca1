"""The last layer of a model: from the residual stream to the loss, and prediction layers.

Legend: B batch, S sequence, H hidden, V vocabulary.
"""

import torch
from torch import nn
from torch.nn import functional as F

from myriad.kernels.cross_entropy import linear_cross_entropy_steps
from myriad.kernels.embedding import embedding
from myriad.kernels.linear import Linear, linear
from myriad.kernels.memory_order import is_sequence_first
from myriad.kernels.token_losses import token_losses_steps
from myriad.model.boundary import Boundary
from myriad.model.config import ModelConfig
from myriad.model.definition import Context
from myriad.model.interleave import LayerSteps, SteppedLayer, Steps
from myriad.model.layers import Block, Table, new_norm
from myriad.model.residual import Residual
from myriad.model.token_record import TokenRecord

__all__ = ["Head"]


class _Prediction(nn.Module):
    """The modules of one prediction layer: what the layer before gives and the embedding of one more token
    are normalized and projected to the input of a block."""

    def __init__(self, config: ModelConfig, layer: int, boundary: Boundary) -> None:
        super().__init__()
        self.stream_norm, self.token_norm = new_norm(config, boundary), new_norm(config, boundary)
        # Whole on every rank: it is applied to the rank's share of the sequence, without communication.
        self.projection = Linear(2 * config.hidden, config.hidden)
        self.block = Block(config, layer, boundary)
        self.norm = new_norm(config, boundary)

    def steps(self, x: torch.Tensor, embedded: torch.Tensor, context: Context) -> LayerSteps:
        """Run the layer as steps: ``[B, S/tp, H]`` each to the same shape."""
        both = torch.cat([self.stream_norm(x), self.token_norm(embedded)], -1)
        return self.block.steps(self.projection(both), context)


class Head(SteppedLayer):
    """Map the residual stream to the sum of the losses of all targets.

    Prediction layer k (from 1) gets the stream of the layer before it and the embedding of the token k
    positions ahead, and predicts the one after that (DeepSeek-V3, arXiv 2412.19437, section 2.2). It shares
    the output projection and the embedding. The last k positions have no such token in the sequence:

        position      0   1   2   3         tokens t0 t1 t2 t3, targets t1 t2 t3 t4
        layer 1       t1  t2  t3  t4        embedded
                      t2  t3  t4  -         predicted

    With ``prediction_input = "normed"`` a layer gets the input of the output projection before it, not the
    stream. The result is then a vector: the sum of the losses, and each prediction layer's times its weight.
    """

    def __init__(self, config: ModelConfig, boundary: Boundary) -> None:
        super().__init__()
        self.boundary, self.vocabulary = boundary, config.vocabulary
        self.norm = new_norm(config, boundary)
        self.scale, self.softcap, self.z_loss = config.logit_factor, config.logit_softcap, config.z_loss
        rows = config.vocabulary_rows(boundary.size)
        self.output = Linear(config.hidden, rows)
        self.first_row, self.vocabulary_size = boundary.rank * rows, rows * boundary.size
        self.embedding_scale, further = config.embedding_scale, config.prediction_layers
        self.weight = config.prediction_weight / max(further, 1)
        self.passes_normed = config.prediction_input == "normed"
        self.tokens = Table(rows, config.hidden) if further else None
        layers = range(config.layers, config.layers + further)
        self.predictions = nn.ModuleList([_Prediction(config, layer, boundary) for layer in layers])

    def steps(self, x: torch.Tensor, context: Context) -> Steps:
        return self._steps(x, None, context)

    def steps_after(self, x: Residual, context: Context) -> Steps:
        return self._steps(x.stream, x.branch, context)

    def _steps(self, x: torch.Tensor, branch: torch.Tensor | None, context: Context) -> Steps:
        x, normed = self.norm.add(x, branch)
        del branch
        loss = yield from self._loss(normed, context.targets, None, context)
        if self.tokens is None:
            return loss
        losses = [loss]
        for number, layer in enumerate(self.predictions, 1):
            assert isinstance(layer, _Prediction)
            if not self.training:
                losses.append(torch.zeros_like(loss))
                continue
            tokens, _ = _ahead(context, number - 1)
            if context.documents is not None or context.share is not None:
                tokens = torch.where(tokens < 0, ~tokens, tokens)
            rows = embedding(tokens, self.tokens.weight, self.first_row, self.vocabulary_size)
            arriving = self.boundary.start_reduce_scatter(rows)
            yield None
            embedded = arriving.wait()
            embedded = embedded if self.embedding_scale == 1 else embedded * self.embedding_scale
            output = yield from layer.steps(normed if self.passes_normed else x, embedded, context)
            stream, last = (output.stream, output.branch) if isinstance(output, Residual) else (output, None)
            x, normed = layer.norm.add(stream, last)
            targets, num_valid = _ahead(context, number)
            targets = _inside_documents(targets, context, number)
            losses.append(self.weight * (yield from self._loss(normed, targets, num_valid, context)))
        return torch.stack(losses)

    def _loss(
        self, normed: torch.Tensor, targets: torch.Tensor, num_valid: int | None, context: Context
    ) -> Steps:
        """Return the sum of the losses of the first ``num_valid`` positions; ``None``: of all."""
        arriving = self.boundary.start_all_gather(self._scaled(normed))
        del normed
        yield None
        whole = arriving.wait()
        if num_valid is not None:
            if num_valid == 0:
                return whole.new_zeros((), dtype=torch.float32)
            whole, targets = whole[:, :num_valid], targets[:, :num_valid]
        if context.record is not None:
            return (yield from self._record(whole, targets, context, context.record))
        if is_sequence_first(whole):
            whole, targets = whole.transpose(0, 1), targets.t()
        steps = linear_cross_entropy_steps(
            whole.flatten(0, 1),
            self.output.weight,
            targets.flatten(),
            self.boundary,
            self.vocabulary,
            kernels=self.boundary.kernels,
            softcap=self.softcap,
            z_loss=self.z_loss if self.training else 0.0,
            skips=context.documents is not None or (context.share is not None and num_valid is not None),
        )
        return (yield from steps)

    def _record(
        self, whole: torch.Tensor, targets: torch.Tensor, context: Context, record: TokenRecord
    ) -> Steps:
        """Record the loss of each target, and return the sum. Other positions are not projected."""
        assert context.samples is not None, "a record needs the rows of the micro-batch"
        at = context.positions(context.first_target, targets.shape[1], targets.device)
        places = record.places(context.samples, at)
        if is_sequence_first(whole):
            whole, targets, places = whole.transpose(0, 1), targets.t(), places.t()
        counted = (targets >= 0).flatten()
        found = yield from token_losses_steps(
            whole.flatten(0, 1)[counted],
            self.output.weight,
            targets.flatten()[counted],
            self.boundary,
            self.vocabulary,
            self.softcap,
        )
        record.write(places.flatten()[counted], found)
        return found.losses.sum()

    def _scaled(self, x: torch.Tensor) -> torch.Tensor:
        """Return the input of the output projection times the logits' factor."""
        return x if self.scale == 1 else x * self.scale

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """Return float32 scores of this rank's part of the vocabulary: ``[..., H]`` to ``[..., V/tp]``, from
        a stream that is whole on this rank."""
        rows = len(self.output.weight)
        used = min(max(self.vocabulary - self.boundary.rank * rows, 0), rows)  # the rest is padding
        logits = linear(self._scaled(self.norm(x)), self.output.weight)[..., :used].float()
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)


def _inside_documents(targets: torch.Tensor, context: Context, distance: int) -> torch.Tensor:
    """Mark the targets ``distance`` positions ahead that lie in another document as targets without a
    loss."""
    if context.documents is None:
        return targets
    positions = context.documents.positions
    later = F.pad(positions[:, distance:], (0, distance), value=-1)
    at = context.positions(context.first_target, targets.shape[1], targets.device)
    at = at.expand(len(targets), -1)
    is_inside = later.gather(1, at) == positions.gather(1, at) + distance
    return torch.where(is_inside | (targets < 0), targets, ~targets)


def _ahead(context: Context, distance: int) -> tuple[torch.Tensor, int]:
    """Return the targets ``distance`` positions ahead ``[B, S]``, and the number of positions that have one;
    the others get token 0. With a share of the sequence, any position may have none: these get a target
    without a loss."""
    targets = context.targets
    if context.share is not None:
        at = context.positions(context.first_target, targets.shape[1], targets.device)
        known = F.pad(context.sequence_targets, (0, distance), value=~0)
        return known.gather(1, at.expand(len(targets), -1) + distance), targets.shape[1]
    if distance == 0:
        return targets, targets.shape[1]
    known = targets if context.following is None else torch.cat([targets, context.following], 1)
    ahead = known[:, distance : distance + targets.shape[1]]
    return F.pad(ahead, (0, targets.shape[1] - ahead.shape[1])), ahead.shape[1]
