"""The decoder transformer as a `Definition`: a list of layers that can be built on any rank.

    embedding   tokens [B, S] -> residual stream [B, S/tp, H]
    blocks.i    residual stream -> residual stream
    head        residual stream -> sum of losses; with the prediction layers, also the sum of each

Initial values depend on (seed, full parameter name) alone, so that every layout starts from the same model.
"""

from collections.abc import Collection, Mapping, Sequence
from functools import cached_property

import torch
from torch import nn

from myriad.kernels.random import key_of, seeded_normal
from myriad.model.boundary import Boundary
from myriad.model.config import ModelConfig
from myriad.model.definition import Shard, shard_of, values_of_rank
from myriad.model.head import Head
from myriad.model.layers import Block, Embedding

__all__ = ["GPT", "build_full"]


class GPT:
    """A decoder transformer described by a `ModelConfig`."""

    def __init__(self, config: ModelConfig, seed: int) -> None:
        self.config, self.seed = config, seed

    @cached_property
    def names(self) -> Sequence[str]:
        """Layer names: embedding, blocks.0, ..., head."""
        return ("embedding", *(f"blocks.{i}" for i in range(self.config.layers)), "head")

    @cached_property
    def kinds(self) -> Sequence[str]:
        """Layer kinds: Embedding, Block, ..., Head."""
        return self.config.layer_kinds

    @cached_property
    def shards(self) -> Mapping[str, Shard]:
        """Return how tensor parallelism shards parameters. Norms, positions, row-parallel biases, routers
        and projections to latents are whole."""
        config = self.config
        q, kv = config.heads * config.head_width, config.num_kv_heads * config.head_width

        def up(width: int) -> Shard:
            return Shard(0, (width,) * config.up_matrices)

        heads = (config.heads, config.num_kv_heads, config.num_kv_heads)
        table = Shard(0, (config.vocabulary,), padded=config.padded_vocabulary())
        biased = 3 if config.has_key_bias else 2
        by_head = {
            "attention.q_norm.*": Shard(0),
            "attention.k_norm.*": Shard(0, (kv,), (config.num_kv_heads,)),
        }
        in_block = (by_head if config.qk_norm in ("heads", "all") else {}) | {
            "attention.qkv.weight": Shard(0, (q, kv, kv), heads),
            "attention.qkv.bias": Shard(0, (q, kv, kv)[:biased], heads[:biased]),
            "attention.query.weight": Shard(0),
            "attention.*_up.weight": Shard(0),
            "attention.sinks": Shard(0),
            "attention.output.weight": Shard(1),
            "mlp.up.*": up(config.ffn_width),
            "mlp.down.weight": Shard(1),
            "mlp.experts.*.up.*": up(config.expert_width),
            "mlp.experts.*.down.weight": Shard(1),
            "mlp.shared.up.*": up(config.shared_experts * config.expert_width),
            "mlp.shared.down.weight": Shard(1),
        }
        blocks = ("blocks.*", "head.predictions.*.block") if config.prediction_layers else ("blocks.*",)
        return {f"{block}.{name}": shard for block in blocks for name, shard in in_block.items()} | {
            "embedding.tokens.weight": table,
            "head.output.weight": table,
            "head.tokens.weight": table,
        }

    @cached_property
    def tied(self) -> Mapping[str, str]:
        """Tied parameters: the output projection shares the token embedding, if the config says so, and
        prediction layers embed tokens by it."""
        shared = ["output"] if self.config.tied else []
        shared += ["tokens"] if self.config.prediction_layers else []
        return {f"head.{name}.weight": "embedding.tokens.weight" for name in shared}

    @property
    def num_experts(self) -> int:
        """Experts of each block; 0: none."""
        return self.config.experts or 0

    def is_expert(self, name: str) -> bool:
        """Return whether a parameter belongs to an expert that a router chooses."""
        return ".mlp.experts." in name

    @cached_property
    def mixtures(self) -> Sequence[str]:
        """Full name of each module that holds a router and its experts."""
        first = self.config.layers
        names = (
            f"blocks.{block}" if block < first else f"head.predictions.{block - first}.block"
            for block in self.config.mixture_blocks
        )
        return tuple(f"{name}.mlp" for name in names)

    @property
    def balance_bias_rate(self) -> float | None:
        """Change of an expert's bias in a step; ``None``: experts have no biases."""
        return self.config.balance_bias_rate

    @property
    def keeps_loads(self) -> bool:
        """Whether routers keep the loads of the last batch, for their balance loss."""
        return self.config.has_batch_loads

    @property
    def drops_tokens(self) -> bool:
        """Whether experts drop tokens in training."""
        return self.config.experts is not None and self.config.expert_capacity is not None

    @property
    def sequence_parallel(self) -> bool:
        """Whether the residual stream is cut along the sequence: always."""
        return True

    def build(self, index: int, boundary: Boundary) -> nn.Module:
        """Build layer ``index`` with this rank's shapes, in uninitialised memory on the default device."""
        if index == 0:
            return Embedding(self.config, boundary)
        if index == self.config.layers + 1:
            return Head(self.config, boundary)
        return Block(self.config, index - 1, boundary)

    def output_shape(self, index: int, inputs: torch.Size, boundary: Boundary) -> torch.Size:
        """Return the shape of an output: a rank's share of the residual stream, or the sum of losses."""
        if index == self.config.layers + 1:
            further = self.config.prediction_layers
            return torch.Size((1 + further,) if further else ())
        sequences, positions = inputs
        return torch.Size((sequences, positions // boundary.size, self.config.hidden))

    def initial(self, index: int, names: Collection[str] | None = None) -> dict[str, torch.Tensor]:
        """Return whole initial parameters of layer ``index``, or those of ``names``."""
        with torch.device("meta"):
            layer = self.build(index, Boundary())
        prefix = self.names[index]
        found = {
            name: self._initial_values(f"{prefix}.{name}", parameter.shape)
            for name, parameter in layer.named_parameters()
            if names is None or name in names
        }
        for name in found:
            shard = shard_of(self, f"{prefix}.{name}")
            if shard is not None and shard.padded:  # drawn with padding, on which the last values depend
                found[name] = found[name][: self.config.vocabulary]
        return found

    def rate_of(self, name: str) -> float:
        """Return the factor of the learning rate of a matrix: 1 / width in a block, with a base width."""
        return 1 / self.config.width_ratio if self.is_hidden(name) else 1.0

    def is_hidden(self, name: str) -> bool:
        """Return whether both dimensions of a matrix grow with the width. Those of the embedding and the
        output projection include the vocabulary or the positions, those of a router the experts, and the
        gate of shared experts is a row."""
        outside = name.startswith(("embedding.", "head.output.", "head.tokens."))
        return not outside and not name.endswith(("mlp.router.weight", "mlp.shared.gate.weight"))

    def _initial_values(self, name: str, shape: torch.Size) -> torch.Tensor:
        if len(shape) == 1:
            is_zero = name.endswith((".bias", ".logit_bias", ".sinks")) or self.config.norm_zero_centered
            is_zero = is_zero and not name.endswith(".batch_loads")  # 1: all experts have equally many tokens
            return torch.full(shape, 0.0 if is_zero else 1.0, device="cpu")
        deviation = self.config.initial_deviation
        if name.endswith(("attention.output.weight", ".down.weight")):
            deviation /= (2 * self.config.layers) ** 0.5
        if self.is_hidden(name):
            deviation /= self.config.width_ratio**0.5
        return seeded_normal(key_of(self.seed, self.tied.get(name, name)), shape, deviation)


def build_full(config: ModelConfig, seed: int) -> nn.ModuleList:
    """Build every layer on one device with initial values and tied parameters, for sampling and tests."""
    definition = GPT(config, seed)
    layers = nn.ModuleList()
    parameters: dict[str, nn.Parameter] = {}
    for index, prefix in enumerate(definition.names):
        layer = definition.build(index, Boundary())
        with torch.no_grad():
            for name, values in definition.initial(index).items():
                layer.get_parameter(name).copy_(values_of_rank(definition, f"{prefix}.{name}", values))
        parameters |= {f"{prefix}.{name}": parameter for name, parameter in layer.named_parameters()}
        layers.append(layer)
    for name, original in definition.tied.items():
        module = layers[definition.names.index(name.split(".")[0])]
        path, _, attribute = name.split(".", 1)[1].rpartition(".")
        setattr(module.get_submodule(path), attribute, parameters[original])
    return layers
