"""If these break: tokens of packed windows see other documents, or their losses count at a border."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from myriad.kernels.attention import attention
from myriad.kernels.attention_blocks import Heads
from myriad.kernels.attention_choice import Scores
from myriad.kernels.documents import Documents
from myriad.kernels.memory_order import is_sequence_first, lay_sequence_first
from myriad.kernels.rotary import Rotary, rotary_turns
from myriad.model.config import ModelConfig
from myriad.model.definition import Context
from myriad.model.gpt import build_full

TINY = {"layers": 2, "hidden": 32, "heads": 4, "sequence": 24, "vocabulary": 90, "vocabulary_multiple": 16}
HOW = [(torch.float32, Scores()), (torch.float64, Scores()), (torch.float32, Scores(softcap=1.5))]
LENGTHS = [[9, 1, 10, 4], [24]]


def documents_of(lengths: list[list[int]]) -> Documents:
    positions = torch.tensor([[at for length in row for at in range(length)] for row in lengths])
    return Documents.of(positions.int().numpy(), lambda x: x)


def spans(lengths: list[list[int]]) -> list[tuple[int, slice]]:
    return [
        (window, slice(sum(row[:number]), sum(row[: number + 1])))
        for window, row in enumerate(lengths)
        for number in range(len(row))
    ]


@st.composite
def windows(draw: st.DrawFn) -> list[list[int]]:
    """Lengths of the documents of each window."""
    sequence = draw(st.sampled_from([1, 7, 30, 200]))
    found = []
    for _ in range(draw(st.integers(1, 3))):
        cuts = sorted(draw(st.sets(st.integers(1, sequence), max_size=6)) | {sequence})
        found.append([stop - start for start, stop in zip([0, *cuts], cuts, strict=False)])
    return found


@settings(max_examples=25, deadline=None)
@given(
    windows(),
    st.sampled_from([None, 5, 100]),
    st.booleans(),
    st.sampled_from(HOW),
    st.booleans(),
    st.booleans(),
)
def test_positions_attend_inside_their_document(lengths, window, rotates, how, has_sinks, lies_first):
    torch.manual_seed(0)
    dtype, how = how
    heads, sequence = Heads(4, 2, 8), sum(lengths[0])
    sinks = torch.randn(4, dtype=dtype, requires_grad=True) if has_sinks else None
    fused = torch.randn(len(lengths), sequence, 64, dtype=dtype)
    if lies_first:
        fused = lay_sequence_first(fused)
    fused.requires_grad_()
    turns = rotary_turns(Rotary(100.0, 8), sequence, fused.device) if rotates else None
    found = attention(fused, heads, window, turns, "auto", how, sinks, documents_of(lengths))
    alone = torch.zeros_like(found)
    for row, span in spans(lengths):
        part = fused[row : row + 1, span]
        of_part = None if turns is None else turns[: part.shape[1]]
        alone[row, span] = attention(part, heads, window, of_part, "auto", how, sinks)[0]
    assert is_sequence_first(found) == is_sequence_first(fused)
    torch.testing.assert_close(found, alone)
    leaves = [fused] if sinks is None else [fused, sinks]
    wave = torch.arange(found.numel(), dtype=dtype).view(found.shape).sin()
    for one, other in zip(*(torch.autograd.grad(y, leaves, wave) for y in (found, alone)), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


MODELS = {
    "rotary": {},
    "learned": {"position": "learned"},
    "windows": {"window": 5, "window_pattern": (True, False), "z_loss": 0.01},
    "latent": {"kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6},
    "predictions": {"prediction_layers": 2, "z_loss": 0.01, "logit_softcap": 3.0},
}


@pytest.mark.parametrize("keys", MODELS.values(), ids=MODELS)
def test_a_packed_window_trains_like_its_documents_alone(keys: dict[str, object]) -> None:
    """The last document of the first window is padding, and a token in the middle has no loss."""
    layers = build_full(ModelConfig(**(TINY | keys)), seed=1)
    inputs, targets = torch.randint(90, (2, 2, 24), generator=torch.Generator().manual_seed(2))
    targets[:, :-1] = inputs[:, 1:]
    targets[0, -4:] = ~targets[0, -4:]
    masked = targets.clone()
    masked[1, 11] = ~masked[1, 11]

    def loss(x: torch.Tensor, context: Context) -> torch.Tensor:
        for layer in layers:
            x = layer(x, context)
        return x

    found = loss(inputs, Context(targets=masked, documents=documents_of(LENGTHS)))
    alone = torch.zeros_like(found)
    for row, span in spans(LENGTHS):
        tokens, wanted = inputs[row : row + 1, span], masked[row : row + 1, span]
        alone += loss(tokens, Context(targets=wanted, documents=documents_of([[tokens.shape[1]]])))
    torch.testing.assert_close(found, alone)
    parameters = [one for one in layers.parameters() if one.requires_grad]
    pairs = (torch.autograd.grad(total.sum(), parameters) for total in (found, alone))
    for one, other in zip(*pairs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    every = loss(inputs[1:], Context(targets=targets[1:]))
    skipped = loss(inputs[1:], Context(targets=masked[1:], documents=documents_of([[24]])))
    assert skipped.flatten()[0] < every.flatten()[0]
