"""If these break: sampled text is not what the model says, or differs from run to run."""

import pytest
import torch

from myriad.errors import BadInputError
from myriad.kernels.rotary_scaling import RotaryScaling
from myriad.model.config import ModelConfig
from myriad.model.definition import Context
from myriad.model.generate import Session, WholeReader, generate, sample
from myriad.model.gpt import build_full

TINY = ModelConfig(
    layers=3, hidden=32, heads=4, vocabulary=50, vocabulary_multiple=8, sequence=24, initial_deviation=0.3
)
TOKENS = torch.randint(50, (24,), generator=torch.Generator().manual_seed(3)).tolist()


def uncached(layers, tokens):
    x = torch.tensor([tokens])
    for layer in layers[:-1]:
        x = layer(x, Context())
    return layers[-1].logits(x)[0]


@pytest.mark.parametrize("position", ["rotary", "learned", "none"])
@pytest.mark.parametrize(
    "keys",
    [{}, {"window": 5}, {"kv_heads": 2, "block": "parallel", "window": 8, "window_pattern": (True, False)}],
)
def test_with_and_without_cache_the_scores_are_the_same(position, keys):
    config = TINY.model_copy(update={"position": position, **keys})
    layers = build_full(config, 1)
    expected = uncached(layers, TOKENS)
    session = Session(WholeReader(layers), config.sequence)
    torch.testing.assert_close(session.add([TOKENS[:7]])[0], expected[6], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(session.read([TOKENS[7:10]])[0], expected[9], rtol=1e-4, atol=1e-4)
    for place in range(10, 24):
        torch.testing.assert_close(session.read([[TOKENS[place]]])[0], expected[place], rtol=1e-4, atol=1e-4)


def test_a_long_text_is_read_in_pieces(monkeypatch):
    layers = build_full(TINY.model_copy(update={"window": 7, "window_pattern": (True, False)}), 1)
    expected = uncached(layers, TOKENS)
    reader, widths = WholeReader(layers), []
    read = reader.read

    def counted(tokens, at, caches):
        widths.append(tokens.shape[1])
        return read(tokens, at, caches)

    monkeypatch.setattr(reader, "read", counted)
    monkeypatch.setattr("myriad.model.generate.SCORES_OF_HEAD", 24 * 5)
    session = Session(reader, 24)
    torch.testing.assert_close(session.add([TOKENS[:23]])[0], expected[22], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(session.read([TOKENS[23:]])[0], expected[23], rtol=1e-4, atol=1e-4)
    assert widths == [5, 5, 5, 5, 3, 1]


def longrope(original):
    divisors = {"short_factors": (1.0, 1.1, 1.2, 1.3), "long_factors": (1.0, 2.0, 4.0, 8.0)}
    return RotaryScaling(kind="longrope", factor=2.0, original_sequence=original, **divisors)


def test_keys_are_computed_again_where_longrope_changes_the_frequencies():
    layers = build_full(TINY.model_copy(update={"rotary_scaling": longrope(12)}), 1)
    session = Session(WholeReader(layers), 24)
    session.add([TOKENS[:9]])
    for end in range(10, 25):
        expected = uncached(layers, TOKENS[:end])[-1]
        torch.testing.assert_close(session.read([[TOKENS[end - 1]]])[0], expected, rtol=1e-4, atol=1e-4)


def test_text_begins_again_before_frequencies_that_the_model_has_not_seen():
    layers = build_full(TINY.model_copy(update={"rotary_scaling": longrope(24)}), 1)
    session = Session(WholeReader(layers), 24)
    session.add([TOKENS])
    expected = uncached(layers, [*TOKENS[-11:], 7])[-1]
    torch.testing.assert_close(session.read([[7]])[0], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("position", ["rotary", "learned"])
def test_text_may_be_longer_than_the_sequence(position):
    config = TINY.model_copy(update={"position": position})
    layers = build_full(config, 1)
    tokens = list(generate(layers, TOKENS * 2, sequence=24, max_new_tokens=60, seed=1))
    assert len(tokens) == 60
    assert all(0 <= token < 50 for token in tokens)


def test_learned_positions_start_again_from_the_second_half():
    config = TINY.model_copy(update={"position": "learned"})
    layers = build_full(config, 1)
    session = Session(WholeReader(layers), 24)
    session.add([TOKENS])
    expected = uncached(layers, [*TOKENS[-11:], 7])[-1]
    torch.testing.assert_close(session.read([[7]])[0], expected, rtol=1e-4, atol=1e-4)


def test_the_same_seed_draws_the_same_text_and_zero_temperature_the_likeliest():
    layers = build_full(TINY, 1)

    def draw(**keys):
        return list(generate(layers, TOKENS[:4], sequence=24, max_new_tokens=12, **keys))

    assert draw(seed=1) == draw(seed=1) != draw(seed=2)
    likeliest = int(uncached(layers, TOKENS[:4])[-1].argmax())
    assert draw(temperature=0.0)[0] == likeliest
    assert draw(top_p=1e-6, seed=9)[0] == likeliest
    whole = draw(seed=1)
    assert draw(seed=1, stop_token=whole[5]) == whole[: whole.index(whole[5])]


def test_top_p_keeps_the_likeliest_tokens_that_have_that_much_together():
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    generator = torch.Generator().manual_seed(0)
    drawn = {sample(logits, 1.0, 0.6, generator) for _ in range(200)}
    assert drawn == {0, 1}


@pytest.mark.parametrize(
    "keys",
    [{"temperature": -1.0}, {"top_p": 0.0}, {"top_p": 1.5}, {"prompt": []}],
    ids=lambda keys: str(keys),
)
def test_bad_values_are_refused(keys):
    with pytest.raises(BadInputError, match=next(iter(keys))):
        next(generate(build_full(TINY, 1), **({"prompt": [1]} | keys), sequence=24, max_new_tokens=1))
