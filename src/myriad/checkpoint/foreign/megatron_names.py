"""Map each of Myriad's tensors to rows of Megatron's full tensors.

    qkv      Megatron: for each group of queries [its queries | its key | its value], group after group
             Myriad:   [all queries | all keys | all values]
    fc1      with SwiGLU [gate | up], in both
    rotary   a pair is half a head apart in Megatron (rotary_interleaved: adjacent, as in Myriad)
    norms    of the Transformer Engine's fused layers are named by the linear layer that they precede

Names are those of Megatron Core's ``GPTModel`` with global layer numbers. `canonical` returns them for the
names of the model before it (``language_model.encoder``) and of fused layers. Source:
``megatron/core/transformer`` (``attention.py``: ``get_query_key_value_tensors``), checked against its own
forward pass.

Legend: G groups, R queries of a group, D head size.
"""

import re
from collections.abc import Iterator, Mapping

from myriad.checkpoint.foreign.hugging_face_names import RowSlice, TensorMapping
from myriad.model.config import ModelConfig

__all__ = ["canonical", "cut_dim", "megatron_mappings"]

_FUSED = {
    "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
    "mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm.",
}
_BEFORE_CORE = {
    "input_norm": "input_layernorm",
    "post_attention_norm": "pre_mlp_layernorm",
    "post_attention_layernorm": "pre_mlp_layernorm",
    "self_attention.query_key_value": "self_attention.linear_qkv",
    "self_attention.dense": "self_attention.linear_proj",
    "attention.query_key_value": "self_attention.linear_qkv",
    "attention.dense": "self_attention.linear_proj",
    "mlp.dense_h_to_4h": "mlp.linear_fc1",
    "mlp.dense_4h_to_h": "mlp.linear_fc2",
}
_OUTSIDE = {
    "embedding.word_embeddings.weight": "embedding.word_embeddings.weight",
    "embedding.position_embeddings.weight": "embedding.position_embeddings.weight",
    "word_embeddings_for_head.weight": "output_layer.weight",
    "output_layer.weight": "output_layer.weight",
}
_FINAL = ("final_layernorm", "final_norm")
_LAYER = re.compile(r"(?:decoder|encoder|transformer)\.layers\.(\d{1,5})\.(.+)")


def canonical(name: str, first_layer: int = 0) -> str | None:
    """Return the name in a full Megatron Core model of the tensor that a rank calls ``name``.

    ``first_layer``: global number of the rank's first layer. Return ``None`` for a tensor that is not a
    parameter (``_extra_state``)."""
    if name.endswith("_extra_state") or ".rotary_pos_emb." in f".{name}":
        return None
    name = name.removeprefix("module.").removeprefix("model.").removeprefix("language_model.")
    if name in _OUTSIDE:
        return _OUTSIDE[name]
    end = name.rpartition(".")[2]
    if any(name.endswith(f"{norm}.{end}") for norm in _FINAL) and ".layers." not in name:
        return f"decoder.final_layernorm.{end}"
    if (found := _LAYER.fullmatch(name)) is None:
        return name
    rest = found[2]
    for before, after in _FUSED.items():
        rest = rest.replace(before, after)
    part, _, end = rest.rpartition(".")
    return f"decoder.layers.{int(found[1]) + first_layer}.{_BEFORE_CORE.get(part, part)}.{end}"


def cut_dim(name: str) -> int | None:
    """Return the dimension along which tensor-parallel ranks shard the tensor with this canonical name.

    Return ``None`` if every rank has the full tensor."""
    if name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        return 0
    if ".linear_qkv." in name or ".linear_fc1." in name:
        return 0
    return 1 if name.endswith(("linear_proj.weight", "linear_fc2.weight")) else None


def megatron_mappings(model: ModelConfig, *, neighbours: bool = False) -> Mapping[str, TensorMapping]:
    """Return all mappings by Myriad's tensor name. ``neighbours``: the source's rotary pairs are adjacent."""
    return {mapping.name: mapping for mapping in _mappings(model, 0 if neighbours else model.rotary_width)}


def _mappings(model: ModelConfig, turned: int) -> Iterator[TensorMapping]:
    """Yield all mappings. ``turned``: rotated values of a head, if a pair is half of them apart; else 0."""
    hidden, rows = model.hidden, model.vocabulary
    yield _rows("embedding.tokens.weight", "embedding.word_embeddings.weight", rows, hidden)
    if model.position == "learned":
        theirs = "embedding.position_embeddings.weight"
        yield _rows("embedding.positions.weight", theirs, model.sequence, hidden)
    for layer in range(model.layers):
        ours, theirs = f"blocks.{layer}", f"decoder.layers.{layer}"
        yield from _norm(model, f"{ours}.norm1", f"{theirs}.input_layernorm")
        yield from _attention(model, f"{ours}.attention", f"{theirs}.self_attention", turned)
        yield from _norm(model, f"{ours}.norm2", f"{theirs}.pre_mlp_layernorm")
        inner = model.ffn_width * model.up_matrices
        yield from _linear(model, f"{ours}.mlp.up", f"{theirs}.mlp.linear_fc1", inner, hidden)
        yield from _linear(model, f"{ours}.mlp.down", f"{theirs}.mlp.linear_fc2", hidden, model.ffn_width)
    yield from _norm(model, "head.norm", "decoder.final_layernorm")
    if not model.tied:
        yield _rows("head.output.weight", "output_layer.weight", rows, hidden)


def _attention(model: ModelConfig, ours: str, theirs: str, turned: int) -> Iterator[TensorMapping]:
    width = model.heads * model.head_width
    qkv = f"{theirs}.linear_qkv"
    turned = turned if model.position == "rotary" else 0
    queries, keys, values = _in_groups(model, f"{qkv}.weight", turned)
    rows = sum(row_slice.num_rows for row_slice in (*queries, *keys, *values))
    yield TensorMapping(f"{ours}.qkv.weight", (rows, model.hidden), (*queries, *keys, *values))
    if model.has_qkv_bias:
        queries, keys, values = _in_groups(model, f"{qkv}.bias", turned)
        slices = (*queries, *(keys if model.has_key_bias else ()), *values)
        yield TensorMapping(f"{ours}.qkv.bias", (sum(one.num_rows for one in slices),), slices)
    for letter in "qk" if model.qk_norm == "head" else "":
        for end in ("weight", "bias") if model.qk_norm_bias else ("weight",):
            order = (0, model.head_width if turned else 0, turned)
            part = RowSlice(f"{theirs}.{letter}_layernorm.{end}", model.head_width, *order)
            yield TensorMapping(f"{ours}.{letter}_norm.{end}", (model.head_width,), (part,))
    yield from _linear(model, f"{ours}.output", f"{theirs}.linear_proj", model.hidden, width)


def _in_groups(
    model: ModelConfig, name: str, turned: int
) -> tuple[list[RowSlice], list[RowSlice], list[RowSlice]]:
    """Return the rows of queries, of keys and of values, group by group."""
    width, groups = model.head_width, model.num_kv_heads
    own = model.heads // groups * width
    starts, order = [group * (own + 2 * width) for group in range(groups)], (width if turned else 0, turned)
    return (
        [RowSlice(name, own, start, *order) for start in starts],
        [RowSlice(name, width, start + own, *order) for start in starts],
        [RowSlice(name, width, start + own + width) for start in starts],
    )


def _rows(ours: str, theirs: str, *shape: int) -> TensorMapping:
    return TensorMapping(ours, shape, (RowSlice(theirs, shape[0]),))


def _norm(model: ModelConfig, ours: str, theirs: str) -> Iterator[TensorMapping]:
    yield _rows(f"{ours}.weight", f"{theirs}.weight", model.hidden)
    if model.has_norm_bias:
        yield _rows(f"{ours}.bias", f"{theirs}.bias", model.hidden)


def _linear(model: ModelConfig, ours: str, theirs: str, rows: int, columns: int) -> Iterator[TensorMapping]:
    yield _rows(f"{ours}.weight", f"{theirs}.weight", rows, columns)
    if model.bias:
        yield _rows(f"{ours}.bias", f"{theirs}.bias", rows)
