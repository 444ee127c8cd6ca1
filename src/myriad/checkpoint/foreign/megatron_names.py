"""Where each tensor of Myriad's is in Megatron's: which rows of which whole tensor.

    qkv      theirs: for each group of queries [its queries | its key | its value], group after group
             ours:   [all queries | all keys | all values]
    fc1      with SwiGLU [gate | up], as ours
    rotary   a pair is half a head apart there (rotary_interleaved: neighbours, as here)
    norms    of the Transformer Engine's fused layers are named by the linear that they stand before

Names are those of Megatron Core's ``GPTModel`` with whole layer numbers; `canonical` gives them for those of
the model before it (``language_model.encoder``) and of fused layers. Source: ``megatron/core/transformer``
(``attention.py``: ``get_query_key_value_tensors``), checked on its own forward.

Legend: G groups, R queries of a group, D head size.
"""

import re
from collections.abc import Iterator, Mapping

from myriad.checkpoint.hugging_face_names import Link, Piece
from myriad.model.config import ModelConfig

__all__ = ["canonical", "cut_dim", "key_bias_rows", "links_of_megatron"]

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
    """The name in a whole Megatron Core model of a tensor that a rank calls ``name``, whose layers are
    numbered from ``first_layer``; ``None`` for what is no parameter (``_extra_state``)."""
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
    """Dimension along which tensor-parallel ranks cut the tensor of this canonical name; ``None``: whole on
    each."""
    if name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        return 0
    if ".linear_qkv." in name or ".linear_fc1." in name:
        return 0
    return 1 if name.endswith(("linear_proj.weight", "linear_fc2.weight")) else None


def links_of_megatron(model: ModelConfig, *, neighbours: bool = False) -> Mapping[str, Link]:
    """Every tensor of the model by Myriad's name. ``neighbours``: rotary pairs are neighbours there too."""
    return {link.name: link for link in _links(model, 0 if neighbours else model.head_width)}


def _links(model: ModelConfig, turned: int) -> Iterator[Link]:
    hidden, rows = model.hidden, model.padded_vocabulary()
    yield _rows("embedding.tokens.weight", "embedding.word_embeddings.weight", rows, hidden)
    if model.position == "learned":
        theirs = "embedding.position_embeddings.weight"
        yield _rows("embedding.positions.weight", theirs, model.sequence, hidden)
    for layer in range(model.layers):
        ours, theirs = f"blocks.{layer}", f"decoder.layers.{layer}"
        yield from _norm(model, f"{ours}.norm1", f"{theirs}.input_layernorm")
        yield from _attention(model, f"{ours}.attention", f"{theirs}.self_attention", turned)
        yield from _norm(model, f"{ours}.norm2", f"{theirs}.pre_mlp_layernorm")
        inner = model.ffn_width * (2 if model.activation == "swiglu" else 1)
        yield from _linear(model, f"{ours}.mlp.up", f"{theirs}.mlp.linear_fc1", inner, hidden)
        yield from _linear(model, f"{ours}.mlp.down", f"{theirs}.mlp.linear_fc2", hidden, model.ffn_width)
    yield from _norm(model, "head.norm", "decoder.final_layernorm")
    if not model.tied:
        yield _rows("head.output.weight", "output_layer.weight", rows, hidden)


def _attention(model: ModelConfig, ours: str, theirs: str, turned: int) -> Iterator[Link]:
    width = model.heads * model.head_width
    qkv = f"{theirs}.linear_qkv"
    turned = turned if model.position == "rotary" else 0
    queries, keys, values = _in_groups(model, f"{qkv}.weight", turned)
    rows = sum(piece.num_rows for piece in (*queries, *keys, *values))
    yield Link(f"{ours}.qkv.weight", (rows, model.hidden), (*queries, *keys, *values))
    if model.bias:
        queries, keys, values = _in_groups(model, f"{qkv}.bias", turned)
        rows = sum(piece.num_rows for piece in (*queries, *values))
        yield Link(f"{ours}.qkv.bias", (rows,), (*queries, *values))
    yield from _linear(model, f"{ours}.output", f"{theirs}.linear_proj", model.hidden, width)


def _in_groups(model: ModelConfig, name: str, turned: int) -> tuple[list[Piece], list[Piece], list[Piece]]:
    """Rows of queries, of keys and of values, group by group."""
    width, groups = model.head_width, model.num_kv_heads
    own = model.heads // groups * width
    starts = [group * (own + 2 * width) for group in range(groups)]
    return (
        [Piece(name, own, start, turned) for start in starts],
        [Piece(name, width, start + own, turned) for start in starts],
        [Piece(name, width, start + own + width) for start in starts],
    )


def key_bias_rows(model: ModelConfig) -> list[slice]:
    """Rows of a bias of queries, keys and values that are of keys."""
    _, keys, _ = _in_groups(model, "", 0)
    return [slice(piece.first_row, piece.first_row + piece.num_rows) for piece in keys]


def _rows(ours: str, theirs: str, *shape: int) -> Link:
    return Link(ours, shape, (Piece(theirs, shape[0]),))


def _norm(model: ModelConfig, ours: str, theirs: str) -> Iterator[Link]:
    yield _rows(f"{ours}.weight", f"{theirs}.weight", model.hidden)
    if model.norm == "layer" and model.bias:
        yield _rows(f"{ours}.bias", f"{theirs}.bias", model.hidden)


def _linear(model: ModelConfig, ours: str, theirs: str, rows: int, columns: int) -> Iterator[Link]:
    yield _rows(f"{ours}.weight", f"{theirs}.weight", rows, columns)
    if model.bias:
        yield _rows(f"{ours}.bias", f"{theirs}.bias", rows)
