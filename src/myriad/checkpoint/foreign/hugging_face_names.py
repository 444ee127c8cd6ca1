"""Map each of Myriad's tensors to Hugging Face's tensors: rows, order and transposition.

    Myriad (fused)               Hugging Face
    qkv [q | k | v]              q_proj, k_proj, v_proj        c_attn (GPT-2's Conv1D is [in, out])
    up [gate | up] (SwiGLU)      gate_proj, up_proj
    experts.3.up [gate | up]     gate_up_proj[3]: the fourth entry of a stack [E, in, out] (GPT-OSS), in whose
                                 columns gates and values take turns
    embedding, padded rows       the first rows, as many as the vocabulary has; padding is zero
    bias of qkv [q | v]          c_attn's, without the keys': softmax does not depend on it

In Myriad a rotary pair is two adjacent rows (2 i, 2 i + 1); in Hugging Face's layout they are half a head
apart (i, i + D/2). So the rows of a head's queries and keys are permuted. Values never change: an exported
and imported tensor is bitwise equal.

Legend: H hidden, D head size, F width of the MLP, V vocabulary.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from myriad.checkpoint.foreign.hugging_face_config import kind_of
from myriad.checkpoint.foreign.hugging_face_families import FAMILIES
from myriad.checkpoint.foreign.hugging_face_family import TensorNames
from myriad.checkpoint.foreign.safetensors_file import Box, whole_box
from myriad.model.config import ModelConfig

__all__ = ["RowSlice", "TensorMapping", "missing_or_other", "prediction_mappings", "tensor_mappings"]


@dataclass(frozen=True)
class RowSlice:
    """Rows of one Hugging Face tensor."""

    name: str
    num_rows: int
    first_row: int = 0
    head_width: int = 0
    """Head size of rows that are rotary pairs, head by head; 0: the rows keep their order."""
    rotary_width: int = 0
    """Number of leading rows of each head that are rotary pairs; 0: all."""
    step: int = 1
    """Distance of the rows; above 1 without heads, for as many slices that take turns from the start of the
    tensor."""

    @property
    def rows(self) -> slice:
        """The rows of the source tensor."""
        return slice(self.first_row, self.first_row + (self.num_rows - 1) * self.step + 1, self.step)


@dataclass(frozen=True)
class TensorMapping:
    """One of Myriad's tensors: slices of rows of Hugging Face's tensors, one after another."""

    name: str
    shape: tuple[int, ...]
    row_slices: tuple[RowSlice, ...]
    transposed: bool = False
    """Whether the source tensor has shape ``[in, out]``."""
    swaps_halves: bool = False
    """Whether the two halves of the columns change places. Such a tensor is only read."""

    def their_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every source tensor that this tensor is made of."""
        ends: dict[str, int] = {}
        for row_slice in self.row_slices:
            ends[row_slice.name] = max(ends.get(row_slice.name, 0), row_slice.rows.stop)
        shapes = {name: (rows, *self.shape[1:]) for name, rows in ends.items()}
        return {name: shape[::-1] if self.transposed else shape for name, shape in shapes.items()}

    def read(self, theirs: Callable[[str], torch.Tensor]) -> torch.Tensor:
        """Return Myriad's tensor from the source tensors, in their dtype. Missing rows are zero."""
        tensors = {name: theirs(name) for name in self.their_shapes()}
        return self.read_box(lambda name, box: tensors[name][box], whole_box(self.shape))

    def read_box(self, theirs: Callable[[str, Box], torch.Tensor], box: Box) -> torch.Tensor:
        """Return a part of Myriad's tensor. ``theirs`` is called for those parts of source tensors that it is
        made of, and for the other rows of a head of which it has some. Missing rows are zero."""
        if self.swaps_halves:
            return self._read_swapped(theirs, box)
        ours, row = torch.empty(0), 0
        for row_slice in self.row_slices:
            low, high = max(box[0].start, row), min(box[0].stop, row + row_slice.num_rows)
            if low < high:
                rows = self._read_rows(theirs, row_slice, slice(low - row, high - row), box[1:])
                if len(rows) == box[0].stop - box[0].start:
                    return rows
                ours = ours if ours.numel() else rows.new_zeros([one.stop - one.start for one in box])
                ours[low - box[0].start : high - box[0].start] = rows
            row += row_slice.num_rows
        return ours if ours.numel() else torch.zeros([one.stop - one.start for one in box])

    def _read_swapped(self, theirs: Callable[[str, Box], torch.Tensor], box: Box) -> torch.Tensor:
        rows, columns = box
        plain, half = replace(self, swaps_halves=False), self.shape[1] // 2
        found = []
        for low, moved in ((0, half), (half, -half)):
            first, last = max(columns.start, low), min(columns.stop, low + half)
            if first < last:
                found.append(plain.read_box(theirs, (rows, slice(first + moved, last + moved))))
        return torch.cat(found, 1)

    def _read_rows(
        self, theirs: Callable[[str, Box], torch.Tensor], row_slice: RowSlice, rows: slice, columns: Box
    ) -> torch.Tensor:
        """Return rows of a slice, counted from its first one, in Myriad's order."""
        unit, start, step = row_slice.head_width or 1, row_slice.first_row, row_slice.step
        first, last = rows.start // unit * unit, -(-rows.stop // unit) * unit
        box = (slice(start + first, start + last), *columns)
        if step > 1:
            box = (slice(first * step, last * step), *columns)
        found = theirs(row_slice.name, box[::-1]).T if self.transposed else theirs(row_slice.name, box)
        found = found[start::step] if step > 1 else found
        ordered = _neighbours(found, row_slice.head_width, row_slice.rotary_width)
        return ordered[rows.start - first : rows.stop - first]

    def write(self, ours: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the source tensors from Myriad's tensor. Missing rows are zero."""
        assert not self.swaps_halves, "exports have no prediction layers"
        theirs = {name: ours.new_zeros(shape) for name, shape in self.their_shapes().items()}
        row = 0
        for row_slice in self.row_slices:
            target = self._rows_first(theirs[row_slice.name])
            rows = ours[row : row + row_slice.num_rows]
            target[row_slice.rows] = _halves(rows, row_slice.head_width, row_slice.rotary_width)
            row += row_slice.num_rows
        return theirs

    def _rows_first(self, theirs: torch.Tensor) -> torch.Tensor:
        return theirs.T if self.transposed else theirs


def _halves(rows: torch.Tensor, head_width: int, rotary_width: int = 0) -> torch.Tensor:
    """Reorder rows ``[heads D, ...]``: the pairs of a head from adjacent to half the rotary width apart."""
    if not head_width:
        return rows
    heads = rows.unflatten(0, (-1, head_width))
    width = rotary_width or head_width
    turned = heads[:, :width].unflatten(1, (width // 2, 2)).transpose(1, 2).flatten(1, 2)
    return torch.cat([turned, heads[:, width:]], 1).flatten(0, 1)


def _neighbours(rows: torch.Tensor, head_width: int, rotary_width: int = 0) -> torch.Tensor:
    """Reorder rows ``[heads D, ...]``: the pairs of a head from half the rotary width apart to adjacent."""
    if not head_width:
        return rows
    heads = rows.unflatten(0, (-1, head_width))
    width = rotary_width or head_width
    turned = heads[:, :width].unflatten(1, (2, width // 2)).transpose(1, 2).flatten(1, 2)
    return torch.cat([turned, heads[:, width:]], 1).flatten(0, 1)


def tensor_mappings(model: ModelConfig, kind: str | None = None) -> Sequence[TensorMapping]:
    """Return a mapping for every tensor of the model. ``kind``: model type of the files, by default the first
    that fits. Raises `BadInputError` if the model has no counterpart."""
    kind = kind_of(model) if kind is None else kind
    return tuple(_gpt2(model) if kind == "gpt2" else _decoder(model, FAMILIES[kind].names(model)))


def _decoder(model: ModelConfig, names: TensorNames) -> Iterator[TensorMapping]:
    yield _table(model, "embedding.tokens.weight", f"{names.base}.{names.tokens}.weight")
    for layer in range(model.layers):
        yield from _block(model, names, layer, f"blocks.{layer}", f"{names.base}.{names.layers}.{layer}")
    yield from _norm(model, "head.norm", f"{names.base}.{names.final_norm}")
    if not model.tied:
        yield _table(model, "head.output.weight", f"{names.head}.weight")


def _block(
    model: ModelConfig, names: TensorNames, layer: int, ours: str, theirs: str
) -> Iterator[TensorMapping]:
    """Yield the mappings of block ``layer``, or of the block of a prediction layer."""
    for own, name in names.norms.items():
        yield from _norm(model, f"{ours}.{own}", f"{theirs}.{name}")
    rotated = 0 if model.layer_rotary(layer) is None else model.rotary_width
    attention = f"{ours}.attention", f"{theirs}.{names.attention}"
    if model.latent is None:
        yield from _attention(model, names, *attention, rotated)
    else:
        yield from _latent_attention(model, names, *attention)
    mlp, block = (f"{ours}.mlp", f"{theirs}.{names.mlp}"), model.of_block(layer)
    if block.experts is None:
        yield from _mlp(block, names, *mlp, block.ffn_width)
    else:
        yield from _experts(block, names, *mlp)


def prediction_mappings(model: ModelConfig, kind: str) -> Sequence[TensorMapping]:
    """Return a mapping for every tensor of the model's prediction layers, which follow its blocks in
    DeepSeek's files. ``kind``: model type of the files."""
    return tuple(_predictions(model, FAMILIES[kind].names(model)))


def _predictions(model: ModelConfig, names: TensorNames) -> Iterator[TensorMapping]:
    hidden = model.hidden
    for number in range(model.prediction_layers):
        layer = model.layers + number
        ours, theirs = f"head.predictions.{number}", f"{names.base}.{names.layers}.{layer}"
        norms = {"stream_norm": "hnorm", "token_norm": "enorm", "norm": "shared_head.norm"}
        for own, name in norms.items():
            yield from _norm(model, f"{ours}.{own}", f"{theirs}.{name}")
        rows = (RowSlice(f"{theirs}.eh_proj.weight", hidden),)  # columns of the token first
        yield TensorMapping(f"{ours}.projection.weight", (hidden, 2 * hidden), rows, swaps_halves=True)
        yield from _block(model, names, layer, f"{ours}.block", theirs)


def _norm(model: ModelConfig, ours: str, theirs: str) -> Iterator[TensorMapping]:
    yield _vector(f"{ours}.weight", f"{theirs}.weight", model.hidden)
    if model.has_norm_bias:
        yield _vector(f"{ours}.bias", f"{theirs}.bias", model.hidden)


def _attention(
    model: ModelConfig, names: TensorNames, ours: str, theirs: str, rotated: int
) -> Iterator[TensorMapping]:
    """Yield the mappings of a block's attention. ``rotated``: values of each head that are rotated."""
    width = model.head_width
    q, kv = model.heads * width, model.num_kv_heads * width
    for kind, columns in (("weight", (model.hidden,)), ("bias", ())):
        if kind == "weight" or model.has_qkv_bias:
            slices = tuple(_qkv_slices(model, names, theirs, kind, rotated))
            yield TensorMapping(f"{ours}.qkv.{kind}", (q + 2 * kv, *columns), slices)
    yield _rows(f"{ours}.output.weight", q, (f"{theirs}.{names.output}.weight", model.hidden, 0))
    if model.has_output_bias:
        yield _vector(f"{ours}.output.bias", f"{theirs}.{names.output}.bias", model.hidden)
    if model.attention_sinks:
        yield _vector(f"{ours}.sinks", f"{theirs}.sinks", model.heads)
    yield from _query_key_norms(model, names, ours, theirs, rotated)


def _query_key_norms(
    model: ModelConfig, names: TensorNames, ours: str, theirs: str, rotated: int
) -> Iterator[TensorMapping]:
    if model.qk_norm == "none":
        return
    width = model.head_width
    for letter, name, heads in zip("qk", names.qk_norms, (model.heads, model.num_kv_heads), strict=True):
        rows = width if model.qk_norm == "head" else heads * width
        order = (0, width if rotated else 0, rotated)
        slices = [RowSlice(f"{theirs}.{name}.weight", rows, *order)]
        if model.qk_norm == "heads":
            slices = [RowSlice(f"{theirs}.{name}.{head}.weight", width, *order) for head in range(heads)]
        yield TensorMapping(f"{ours}.{letter}_norm.weight", (rows,), tuple(slices))


def _latent_attention(
    model: ModelConfig, names: TensorNames, ours: str, theirs: str
) -> Iterator[TensorMapping]:
    """Yield the mappings of latent attention. Each head has its rows without positions first."""
    latent, heads = model.latent, model.heads
    assert latent is not None
    halves, rank = names.latent_pairs == "halves", latent.key_value_rank
    shared = tuple(_plain_and_rotated(f"{theirs}.kv_a_proj_with_mqa.weight", 1, rank, latent.rotated, halves))
    if latent.query_rank is None:
        queries, columns, down = f"{theirs}.q_proj.weight", model.hidden, shared
    else:
        queries, columns = f"{theirs}.q_b_proj.weight", latent.query_rank
        down = (RowSlice(f"{theirs}.q_a_proj.weight", columns), *shared)
        yield _vector(f"{ours}.q_norm.weight", f"{theirs}.q_a_layernorm.weight", columns)
    yield TensorMapping(f"{ours}.down.weight", (sum(one.num_rows for one in down), model.hidden), down)
    up = tuple(_plain_and_rotated(queries, heads, latent.plain, latent.rotated, halves))
    name = "query" if latent.query_rank is None else "q_up"
    yield TensorMapping(f"{ours}.{name}.weight", (heads * latent.head, columns), up)
    yield _vector(f"{ours}.kv_norm.weight", f"{theirs}.kv_a_layernorm.weight", latent.key_value_rank)
    keys_values = f"{theirs}.kv_b_proj.weight", heads * (latent.plain + latent.value), 0
    yield _rows(f"{ours}.kv_up.weight", latent.key_value_rank, keys_values)
    yield _rows(f"{ours}.output.weight", model.mixed_width, (f"{theirs}.o_proj.weight", model.hidden, 0))


def _plain_and_rotated(name: str, heads: int, plain: int, rotated: int, halves: bool) -> Iterator[RowSlice]:
    """Yield the row slices of heads that have ``plain`` rows first and ``rotated`` rows after them.
    ``halves``: the two rows of a rotary pair are half of the rotated rows apart, not adjacent."""
    if not halves:
        yield RowSlice(name, heads * (plain + rotated))
        return
    for start in range(0, heads * (plain + rotated), plain + rotated):
        yield RowSlice(name, plain, start)
        yield RowSlice(name, rotated, start + plain, rotated)


def _qkv_slices(
    model: ModelConfig, names: TensorNames, theirs: str, kind: str, rotated: int
) -> Iterator[RowSlice]:
    """Yield the rows of all queries, all keys and all values, from three tensors or from one."""
    width, shared = model.head_width, model.heads // model.num_kv_heads
    counts = (model.heads, model.num_kv_heads, model.num_kv_heads)
    rotary_widths = (width if rotated else 0, width if rotated else 0, 0)
    if len(names.qkv) == 3:
        for name, count, rotary_width in zip(names.qkv, counts, rotary_widths, strict=True):
            yield RowSlice(f"{theirs}.{name}.{kind}", count * width, 0, rotary_width, rotated)
        return
    fused = f"{theirs}.{names.qkv[0]}.{kind}"
    if names.qkv_order == "rows":
        first = 0
        for count, rotary_width in zip(counts, rotary_widths, strict=True):
            yield RowSlice(fused, count * width, first, rotary_width, rotated)
            first += count * width
        return
    group = (shared + 2) * width
    for start, rows, rotary_width in zip(
        (0, shared * width, (shared + 1) * width), (shared * width, width, width), rotary_widths, strict=True
    ):
        for number in range(model.num_kv_heads):
            yield RowSlice(fused, rows, number * group + start, rotary_width, rotated)


def _mlp(
    model: ModelConfig, names: TensorNames, ours: str, theirs: str, inner: int
) -> Iterator[TensorMapping]:
    """Yield the mappings of an MLP of this inner width."""
    hidden = model.hidden
    each = inner * model.up_matrices // len(names.up)
    yield _rows(f"{ours}.up.weight", hidden, *((f"{theirs}.{name}.weight", each, 0) for name in names.up))
    yield _rows(f"{ours}.down.weight", inner, (f"{theirs}.{names.down}.weight", hidden, 0))
    if model.bias:
        slices = tuple(RowSlice(f"{theirs}.{name}.bias", each) for name in names.up)
        yield TensorMapping(f"{ours}.up.bias", (inner * model.up_matrices,), slices)
        yield _vector(f"{ours}.down.bias", f"{theirs}.{names.down}.bias", hidden)


def _experts(model: ModelConfig, names: TensorNames, ours: str, theirs: str) -> Iterator[TensorMapping]:
    assert model.experts is not None
    router = f"{theirs}.{names.router}.weight", model.experts, 0
    yield _rows(f"{ours}.router.weight", model.hidden, router)
    if model.has_router_bias:
        yield _vector(f"{ours}.router.bias", f"{theirs}.{names.router_bias}", model.experts)
    if model.router_logit_bias:
        yield _vector(f"{ours}.router.logit_bias", f"{theirs}.{names.router_logit_bias}", model.experts)
    width = model.expert_width
    for number in range(model.experts):
        expert = f"{ours}.experts.{number}"
        if names.stacked is None:
            yield from _mlp(model, names, expert, f"{theirs}.experts.{number}", width)
        else:
            yield from _stacked_expert(model, names.stacked, expert, f"{theirs}.experts", number)
    if model.shared_experts:
        shared = f"{ours}.shared", f"{theirs}.{names.shared}"
        yield from _mlp(model, names, *shared, model.shared_experts * width)
    if model.shared_expert_gate:
        gate = f"{theirs}.{names.shared_gate}.weight", 1, 0
        yield _rows(f"{ours}.shared.gate.weight", model.hidden, gate)


def _stacked_expert(
    model: ModelConfig, names: tuple[str, str], ours: str, theirs: str, number: int
) -> Iterator[TensorMapping]:
    """Yield the mappings of an expert whose tensors are entries of stacks."""
    hidden, width, (up, down) = model.hidden, model.expert_width, names
    for kind, suffix, columns in (("weight", "", (hidden,)), ("bias", "_bias", ())):
        slices = [RowSlice(f"{theirs}.{up}{suffix}[{number}]", width, first, step=2) for first in (0, 1)]
        shape = (2 * width, *columns)
        yield TensorMapping(f"{ours}.up.{kind}", shape, tuple(slices), transposed=kind == "weight")
    yield _transposed(f"{ours}.down.weight", f"{theirs}.{down}[{number}]", hidden, width)
    yield _vector(f"{ours}.down.bias", f"{theirs}.{down}_bias[{number}]", hidden)


def _gpt2(model: ModelConfig) -> Iterator[TensorMapping]:
    hidden, inner = model.hidden, model.ffn_width
    yield _table(model, "embedding.tokens.weight", "transformer.wte.weight")
    yield _rows("embedding.positions.weight", hidden, ("transformer.wpe.weight", model.sequence, 0))
    for layer in range(model.layers):
        ours, theirs = f"blocks.{layer}", f"transformer.h.{layer}"
        yield from _layer_norm(f"{ours}.norm1", f"{theirs}.ln_1", hidden)
        attention = f"{theirs}.attn.c_attn"
        yield _transposed(f"{ours}.attention.qkv.weight", f"{attention}.weight", 3 * hidden, hidden)
        queries, values = (
            RowSlice(f"{attention}.bias", hidden),
            RowSlice(f"{attention}.bias", hidden, 2 * hidden),
        )
        yield TensorMapping(f"{ours}.attention.qkv.bias", (2 * hidden,), (queries, values))
        yield from _conv(f"{ours}.attention.output", f"{theirs}.attn.c_proj", hidden, hidden)
        yield from _layer_norm(f"{ours}.norm2", f"{theirs}.ln_2", hidden)
        yield from _conv(f"{ours}.mlp.up", f"{theirs}.mlp.c_fc", inner, hidden)
        yield from _conv(f"{ours}.mlp.down", f"{theirs}.mlp.c_proj", hidden, inner)
    yield from _layer_norm("head.norm", "transformer.ln_f", hidden)
    if not model.tied:
        yield _table(model, "head.output.weight", "lm_head.weight")


def _table(model: ModelConfig, ours: str, theirs: str) -> TensorMapping:
    return TensorMapping(ours, (model.vocabulary, model.hidden), (RowSlice(theirs, model.vocabulary),))


def _vector(ours: str, theirs: str, size: int) -> TensorMapping:
    return TensorMapping(ours, (size,), (RowSlice(theirs, size),))


def _rows(ours: str, columns: int, *parts: tuple[str, int, int]) -> TensorMapping:
    """Return a mapping of concatenated rows. ``parts``: name, number of rows, head size of rotary rows."""
    row_slices = tuple(RowSlice(name, rows, 0, width) for name, rows, width in parts)
    return TensorMapping(ours, (sum(row_slice.num_rows for row_slice in row_slices), columns), row_slices)


def _transposed(ours: str, theirs: str, rows: int, columns: int) -> TensorMapping:
    return TensorMapping(ours, (rows, columns), (RowSlice(theirs, rows),), transposed=True)


def _layer_norm(ours: str, theirs: str, size: int) -> Iterator[TensorMapping]:
    for name in ("weight", "bias"):
        yield _vector(f"{ours}.{name}", f"{theirs}.{name}", size)


def _conv(ours: str, theirs: str, rows: int, columns: int) -> Iterator[TensorMapping]:
    yield _transposed(f"{ours}.weight", f"{theirs}.weight", rows, columns)
    yield _vector(f"{ours}.bias", f"{theirs}.bias", rows)


def missing_or_other(
    mappings: Sequence[TensorMapping], found: Mapping[str, tuple[int, ...]]
) -> Iterator[str]:
    """Yield a message for each source tensor that is missing or has another shape."""
    for name, shape in (
        (name, shape) for mapping in mappings for name, shape in mapping.their_shapes().items()
    ):
        there = found.get(name)
        if there != shape:
            yield f"{name} should be {shape}, is {'not there' if there is None else there}"
