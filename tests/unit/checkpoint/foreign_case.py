"""Checkpoints as Megatron-LM and DeepSpeed write them, made of a random state of one of Myriad's models.

The layouts follow the published sources: ``megatron/training/checkpointing.py`` (`generate_state_dict`,
`get_checkpoint_name`), ``megatron/core/optimizer/optimizer.py``, ``distrib_optimizer.py``
(`get_parameter_state_dp_zero`), ``param_and_grad_buffer.py``, and ``deepspeed/utils/zero_to_fp32.py``,
``deepspeed/checkpoint/ds_to_universal.py``. `benchmarks/checkpoint/foreign_checkpoints.py` reads files that
the real programs wrote.
"""

import argparse
import math
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch

from myriad.checkpoint.foreign.hugging_face_config import config_of
from myriad.checkpoint.foreign.hugging_face_names import TensorMapping, tensor_mappings
from myriad.checkpoint.foreign.megatron_names import cut_dim, megatron_mappings
from myriad.model.config import ModelConfig

Tensors = dict[str, torch.Tensor]
KINDS = ("weights", "exp_avg", "exp_avg_sq")

GPT = ModelConfig(layers=4, hidden=32, heads=4, vocabulary=320, sequence=16, norm="layer", position="learned",
                  bias=True)  # fmt: skip
LLAMA = ModelConfig(layers=4, hidden=32, heads=4, kv_heads=2, head_dim=8, ffn_hidden=48, vocabulary=320,
                    sequence=16, activation="swiglu", tied=False)  # fmt: skip


def random_state(model: ModelConfig, mappings: dict[str, TensorMapping]) -> dict[str, Tensors]:
    """Kind to Myriad's name to values; weights are of bfloat16's precision plus something below it."""
    generator = torch.Generator().manual_seed(3)
    found: dict[str, Tensors] = {}
    for kind in KINDS:
        found[kind] = {}
        for name, mapping in mappings.items():
            values = torch.randn(mapping.shape, generator=generator)
            found[kind][name] = values.square() if kind == "exp_avg_sq" else values
    return found


def theirs_of(state: dict[str, Tensors], mappings: dict[str, TensorMapping]) -> dict[str, Tensors]:
    """The same under the other system's names."""
    found = {}
    for kind, tensors in state.items():
        found[kind] = {}
        for name, mapping in mappings.items():
            found[kind] |= mapping.write(tensors[name])
    return found


def megatron_state(model: ModelConfig) -> tuple[dict[str, Tensors], dict[str, Tensors]]:
    """Return random tensors under Myriad's names, and the same under Megatron's."""
    mappings = dict(megatron_mappings(model))
    ours = random_state(model, mappings)
    return ours, theirs_of(ours, mappings)


def arguments_of(model: ModelConfig, **changes: Any) -> argparse.Namespace:
    values = {
        "num_layers": model.layers, "hidden_size": model.hidden, "num_attention_heads": model.heads,
        "ffn_hidden_size": model.ffn_width, "group_query_attention": model.kv_heads is not None,
        "num_query_groups": model.num_kv_heads, "kv_channels": model.head_width, "seq_length": model.sequence,
        "max_position_embeddings": model.sequence,
        "normalization": "RMSNorm" if model.norm == "rms" else "LayerNorm",
        "position_embedding_type": "rope" if model.position == "rotary" else "learned_absolute",
        "rotary_base": 10000, "rotary_percent": model.rotary_fraction, "norm_epsilon": 1e-5,
        "swiglu": model.activation == "swiglu",
        "add_bias_linear": model.bias, "add_qkv_bias": model.attention_bias == "qkv",
        "qk_layernorm": model.qk_norm == "head", "bias_gelu_fusion": False,
        "padded_vocab_size": model.vocabulary,
        "untie_embeddings_and_output_weights": not model.tied, "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "consumed_train_samples": 24, "global_batch_size": 4, "train_iters": 10, "lr": 1e-3, "min_lr": 1e-3,
        "lr_decay_style": "constant", "weight_decay": 0.1, "adam_beta1": 0.9, "adam_beta2": 0.95,
        "adam_eps": 1e-8, "clip_grad": 1.0, "optimizer": "adam", "params_dtype": torch.float32,
    }  # fmt: skip
    return argparse.Namespace(**values | changes)


_ORDER = (
    *("input_layernorm", "linear_proj", "linear_qkv", "q_layernorm", "k_layernorm", "pre_mlp_layernorm"),
    *("linear_fc1", "linear_fc2"),
)


def _module_order(name: str) -> tuple[Any, ...]:
    parts = name.split(".")
    if parts[0] == "embedding":
        return (0, name != "embedding.word_embeddings.weight")
    if parts[1] == "layers":
        return (1, int(parts[2]), next(i for i, one in enumerate(_ORDER) if one in name), parts[-1] == "bias")
    return (2, parts[0] == "output_layer", parts[-1] == "bias")


def _cut(name: str, tensor: torch.Tensor, rank: int, tp: int, *, gated: bool) -> torch.Tensor:
    dim = cut_dim(name)
    if dim is None:
        return tensor
    if gated and ".linear_fc1." in name:
        return torch.cat([half.chunk(tp, 0)[rank] for half in tensor.chunk(2, 0)], 0)
    return tensor.chunk(tp, dim)[rank].contiguous()


def write_megatron(
    folder: Path, model: ModelConfig, theirs: dict[str, Tensors], *, tp: int = 1, pp: int = 1,
    chunks: int = 1, low: bool = False, spread: bool = False, **arguments: Any,
) -> Path:  # fmt: skip
    """``torch`` format. ``low``: bfloat16 with masters; ``spread``: a distributed optimizer's file."""
    each = model.layers // (pp * chunks)
    for rank in range(tp):
        for stage in range(pp):
            own = folder / "iter_0000006" / (f"mp_rank_{rank:02d}" + (f"_{stage:03d}" if pp > 1 else ""))
            own.mkdir(parents=True)
            content: dict[str, Any] = {
                "args": arguments_of(model, **arguments), "checkpoint_version": 3.0, "iteration": 6,
            }  # fmt: skip
            parts: list[list[tuple[str, dict[str, torch.Tensor]]]] = []
            for chunk in range(chunks):
                first = (chunk * pp + stage) * each
                names = [
                    name
                    for name in theirs["weights"]
                    if _is_here(name, first, each, model, stage, chunk, pp, chunks)
                ]
                cut = [
                    (
                        n,
                        {
                            k: _cut(n, theirs[k][n], rank, tp, gated=model.activation == "swiglu")
                            for k in KINDS
                        },
                    )
                    for n in sorted(names, key=_module_order)
                ]
                if model.tied and pp > 1 and stage == pp - 1 and chunk == chunks - 1:
                    table = "embedding.word_embeddings.weight"
                    cut.append(
                        (
                            "output_layer.weight",
                            {k: _cut(table, theirs[k][table], rank, tp, gated=False) for k in KINDS},
                        )
                    )
                state = OrderedDict(
                    (_local(name, first), one["weights"].bfloat16() if low else one["weights"])
                    for name, one in cut
                )
                state["decoder.layers.0.self_attention.linear_qkv._extra_state"] = None
                content["model" if chunks == 1 else f"model{chunk}"] = state
                parts.append(cut)
            if spread:
                content["optimizer"] = {"optimizer": {"param_groups": [{"step": 6, "wd_mult": 1.0}]}}
                torch.save(_spread(parts, tied=model.tied and pp > 1), own / "distrib_optim.pt")
            else:
                content["optimizer"] = _numbered([one for chunk in parts for one in chunk], low=low)
            torch.save(content, own / "model_optim_rng.pt")
    (folder / "latest_checkpointed_iteration.txt").write_text("6")
    return folder


def _is_here(
    name: str, first: int, each: int, model: ModelConfig, stage: int, chunk: int, pp: int, chunks: int
) -> bool:
    if ".layers." in name:
        return first <= int(name.split(".")[2]) < first + each
    if name.startswith("embedding."):
        return stage == 0 and chunk == 0
    return stage == pp - 1 and chunk == chunks - 1


def _local(name: str, first: int) -> str:
    parts = name.split(".")
    if parts[1] == "layers":
        parts[2] = str(int(parts[2]) - first)
    return ".".join(parts)


def _decays(name: str, tensor: torch.Tensor) -> bool:
    return tensor.dim() > 1


def _numbered(parts: list[tuple[str, dict[str, torch.Tensor]]], *, low: bool) -> dict[str, Any]:
    groups: list[dict[str, Any]] = []
    state: dict[int, Any] = {}
    masters: list[list[torch.Tensor]] = []
    for decays in (True, False):
        members = [one for name, one in parts if _decays(name, one["weights"]) == decays]
        numbers = list(range(len(state), len(state) + len(members)))
        for number, one in zip(numbers, members, strict=True):
            state[number] = {
                "step": torch.tensor(6.0),
                "exp_avg": one["exp_avg"],
                "exp_avg_sq": one["exp_avg_sq"],
            }
        masters.append([one["weights"] for one in members])
        groups.append({"params": numbers, "wd_mult": float(decays), "lr": 1e-3})
    inner = {"state": state, "param_groups": groups}
    return {"optimizer": inner, "fp32_from_fp16_params": masters} if low else inner


def _spread(chunks: list[list[tuple[str, dict[str, torch.Tensor]]]], *, tied: bool) -> dict[Any, Any]:
    found: dict[Any, Any] = {"buckets_coalesced": True}
    for number, parts in enumerate(chunks):
        flats = {}
        for key, kind in (("param", "weights"), ("exp_avg", "exp_avg"), ("exp_avg_sq", "exp_avg_sq")):
            buckets: list[list[torch.Tensor]] = [[]]
            for name, one in reversed(parts):
                alone = tied and name in ("embedding.word_embeddings.weight", "output_layer.weight")
                length = sum(len(part) for part in buckets[-1])
                buckets[-1].append(torch.zeros(-length % 64))
                if alone and length:
                    buckets.append([])
                buckets[-1].append(one[kind].flatten())
                if alone:
                    buckets.append([])
            flats[key] = torch.cat([part for bucket in buckets for part in bucket])
        found[number] = {(torch.bfloat16, torch.float32): flats | {"numel_unpadded": len(flats["param"])}}
    return found


def deepspeed_state(model: ModelConfig) -> tuple[dict[str, Tensors], dict[str, Tensors]]:
    mappings = {mapping.name: mapping for mapping in tensor_mappings(model)}
    ours = random_state(model, mappings)
    return ours, theirs_of(ours, mappings)


def write_deepspeed(
    folder: Path, model: ModelConfig, theirs: dict[str, Tensors], *, stage: int, ranks: int = 2,
    universal: bool = False, low: bool = False,
) -> Path:  # fmt: skip
    """ZeRO 1 to 3 of a Hugging Face model, or universal."""
    import json

    step = folder / "global_step6"
    step.mkdir(parents=True)
    names = list(theirs["weights"])
    groups = [
        [n for n in names if theirs["weights"][n].dim() > 1],
        [n for n in names if theirs["weights"][n].dim() < 2],
    ]
    shapes = [OrderedDict((n, theirs["weights"][n].shape) for n in group) for group in groups]
    settings = {"train_batch_size": 4, "gradient_clipping": 1.0, "zero_optimization": {"stage": stage}}
    common = {
        "buffer_names": [], "param_shapes": shapes, "shared_params": {}, "global_steps": 6,
        "skipped_steps": 0, "global_samples": 24, "dp_world_size": ranks, "mp_world_size": 1,
        "ds_config": settings, "ds_version": "0.19.8", "module": theirs["weights"] if stage < 3 else {},
    }  # fmt: skip
    if low:
        common["module"] = {n: x.bfloat16() for n, x in theirs["weights"].items()} if stage < 3 else {}
    prefix = "mp_rank_00" if stage < 3 else "zero_pp_rank_0_mp_rank_00"
    torch.save(common, step / f"{prefix}_model_states.pt")
    if universal:
        for name in names:
            own = step / "zero" / name
            own.mkdir(parents=True)
            for kind, file in zip(KINDS, ("fp32", "exp_avg", "exp_avg_sq"), strict=True):
                torch.save({"param": theirs[kind][name]}, own / f"{file}.pt")
            torch.save(torch.tensor(6.0), own / "step.pt")
    else:
        for rank in range(ranks):
            flats = {
                kind: [_part(theirs[kind], group, stage, rank, ranks) for group in groups] for kind in KINDS
            }
            inner = {
                "state": {i: {"step": torch.tensor(6.0), "exp_avg": flats["exp_avg"][i],
                              "exp_avg_sq": flats["exp_avg_sq"][i]} for i in range(2)},
                "param_groups": [{"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": decay}
                                 for decay in (0.1, 0.0)],
            }  # fmt: skip
            state = {"zero_stage": stage, "partition_count": ranks}
            state |= (
                {"base_optimizer_state": inner, "single_partition_of_fp32_groups": flats["weights"]}
                if stage < 3
                else {"optimizer_state_dict": inner, "fp32_flat_groups": flats["weights"]}
            )
            name = f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
            torch.save({"optimizer_state_dict": state}, step / name)
    (folder / "latest").write_text("global_step6")
    (folder / "config.json").write_text(json.dumps(config_of(model, "float32", None)))
    return folder


def _part(tensors: Tensors, names: list[str], stage: int, rank: int, ranks: int) -> torch.Tensor:
    if stage < 3:
        flat = torch.cat([tensors[name].flatten() for name in names])
        flat = torch.cat([flat, torch.zeros(-len(flat) % (2 * ranks))])
        return flat.chunk(ranks)[rank].clone()
    parts = []
    for name in names:
        flat, own = tensors[name].flatten(), math.ceil(tensors[name].numel() / ranks)
        parts.append(torch.cat([flat, torch.zeros(own * ranks - len(flat))])[rank * own : (rank + 1) * own])
    return torch.cat(parts)
