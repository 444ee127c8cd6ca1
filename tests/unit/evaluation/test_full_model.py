"""If these break: `myriad eval` prints scores that the model does not have."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner
from untrained_run import TEXT, make_run

from myriad.cli.main import build_app
from myriad.data.tokenizer import Tokenizer
from myriad.errors import BadInputError
from myriad.evaluation.full_model import FullModel
from myriad.evaluation.packed_pieces import PieceScore
from myriad.evaluation.task_files import Generation, Task, TaskDocument
from myriad.evaluation.task_scores import score_task
from myriad.evaluation.token_requests import RequestEncoder, RequestPiece
from myriad.kernels.rotary_scaling import RotaryScaling
from myriad.model.config import ModelConfig
from myriad.model.definition import Context
from myriad.model.gpt import build_full

TINY = ModelConfig(
    layers=2, hidden=32, heads=4, vocabulary=300, vocabulary_multiple=8, sequence=24, initial_deviation=0.3
)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train([TEXT] * 4, 280)


def full_model(tokenizer: Tokenizer, **keys: object) -> FullModel:
    config = TINY.model_copy(update=keys)
    return FullModel(build_full(config, 1), tokenizer, config.sequence)


def alone(model: FullModel, piece: RequestPiece) -> PieceScore:
    """Score a piece in a forward pass of its own."""
    tokens = torch.tensor(piece.tokens)
    x = tokens[None, :-1]
    with torch.no_grad():
        for layer in model.layers[:-1]:
            x = layer(x, Context())
        logits = model.layers[-1].logits(x)[0].double().log_softmax(-1)
    targets = tokens[1:, None]
    found = logits.gather(1, targets)[-piece.num_scored :]
    is_greedy = bool((logits.argmax(1, keepdim=True) == targets)[-piece.num_scored :].all())
    return PieceScore(float(found.sum()), is_greedy)


@pytest.mark.parametrize(
    "keys", [{}, {"position": "learned"}, {"window": 5, "logit_softcap": 3.0}, {"prediction_layers": 1}]
)
def test_requests_in_one_window_have_the_scores_that_each_has_alone(
    keys: dict[str, object], tokenizer: Tokenizer
) -> None:
    model = full_model(tokenizer, **keys)
    draw = np.random.default_rng(1)
    lengths = [25, 2, 9, 3, 17, 25, 4, 11]
    pieces = [
        RequestPiece(draw.integers(300, size=length).tolist(), int(draw.integers(1, length)))
        for length in lengths
    ]
    first = alone(model, RequestPiece([5, 0], 1))  # the likeliest token after 5 is greedy, and no other
    best = max(range(300), key=lambda token: alone(model, RequestPiece([5, token], 1)).log_likelihood)
    pieces += [RequestPiece([5, best], 1), RequestPiece([5, 0], 1)]
    found = model.score(pieces, batch_tokens=48)
    expected = [alone(model, piece) for piece in pieces]
    assert [one.is_greedy for one in found] == [one.is_greedy for one in expected]
    assert found[-2].is_greedy
    assert found[-1].log_likelihood == pytest.approx(first.log_likelihood, rel=1e-5)
    for one, other in zip(found, expected, strict=True):
        assert one.log_likelihood == pytest.approx(other.log_likelihood, rel=1e-5)


def test_a_text_is_scored_once_with_as_much_before_it_as_a_window_holds(tokenizer: Tokenizer) -> None:
    encoder = RequestEncoder(tokenizer, 4)
    text = "print(f(i))" * 3
    tokens, end = tokenizer.encode(text), tokenizer.end_of_document
    (pieces,) = encoder.texts([text])
    assert pieces[0] == RequestPiece([end, *tokens[:4]], 4)
    assert [token for tokens, scored in pieces for token in tokens[-scored:]] == tokens
    assert all(len(piece.tokens) == 5 for piece in pieces)


def test_spaces_before_a_continuation_belong_to_it_and_long_contexts_lose_their_start(
    tokenizer: Tokenizer,
) -> None:
    encoder = RequestEncoder(tokenizer, 8)
    spaced, joined, empty, long = encoder.pairs(
        [("for ", "i"), ("for", " i"), ("", "for"), (TEXT, " i")], ["a"] * 4
    )
    assert spaced == joined
    assert empty.tokens[0] == tokenizer.end_of_document
    assert empty.num_scored == len(tokenizer.encode("for"))
    assert list(long.tokens) == tokenizer.encode(TEXT.rstrip() + "\n i")[-9:]
    with pytest.raises(BadInputError, match=r"task:7: continuation.*at most model.sequence = 8 tokens"):
        encoder.pairs([("a", TEXT)], ["task:7"])


def test_generation_ends_before_the_first_stop_text(tokenizer: Tokenizer) -> None:
    model = full_model(tokenizer)
    (whole,) = model.generate([("for", Generation((), 20))], 1)
    assert len(whole) > 6
    stopped, short = model.generate(
        [("for", Generation((whole[5:7], whole[3:5]), 20)), ("for", Generation((), 2))], 99
    )
    assert stopped == whole[: whole.find(whole[3:5])]
    assert whole.startswith(short)


LONGROPE = {"kind": "longrope", "factor": 2.0, "original_sequence": 15}
FACTORS = {"short_factors": (1.0, 1.1, 1.2, 1.3), "long_factors": (1.0, 2.0, 4.0, 8.0)}
LATENT = {"kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}


@pytest.mark.parametrize(
    "keys",
    [
        {"kv_heads": 2, "window": 5, "window_pattern": (True, False)},
        {"position": "learned"},
        {"position": "none"},
        {"rotary_scaling": RotaryScaling(**LONGROPE, **FACTORS)},
        {"rotary_scaling": RotaryScaling(kind="dynamic", factor=2.0, original_sequence=9)},
        {"attention_softcap": 2.0, "attention_sinks": True, "block": "parallel"},
        {"qk_norm": "head", "norm_placement": "both", "logit_softcap": 3.0},
        LATENT,
        {**LATENT, "q_lora_rank": 8},
    ],
    ids=lambda keys: " ".join(keys),
)
def test_a_text_does_not_depend_on_the_batch_in_which_it_is_generated(
    keys: dict[str, object], tokenizer: Tokenizer
) -> None:
    check_batches(full_model(tokenizer, **keys))


def test_rounding_does_not_choose_between_tokens_with_nearly_the_same_score(tokenizer: Tokenizer) -> None:
    """Every even token's score differs from the next one's by less than the rounding of a product."""
    model = full_model(tokenizer)
    weights = model.layers[-1].output.weight.detach()
    weights[1::2] = weights[::2] * (1 + 2e-7)
    check_batches(model)


def check_batches(model: FullModel) -> None:
    draw = np.random.default_rng(2)
    prompts = [
        (TEXT[: int(draw.integers(1, 60))], Generation(("x", "in", "\n")[: number % 4], int(length)))
        for number, length in enumerate(draw.integers(1, 30, size=24))
    ]
    alone = [model.generate([prompt], 1)[0] for prompt in prompts]
    assert len(set(alone)) > 12
    assert model.generate(prompts, 24 * 24) == alone  # all together
    assert model.generate(prompts, 24 * 5) == alone  # some wait, and join the others


def documents(count: int, **keys: object) -> list[TaskDocument]:
    return [TaskDocument("x", "ab cd", **keys) for _ in range(count)]  # type: ignore[arg-type]


def test_scores_are_those_of_the_definitions() -> None:
    pairs = (("a", " b"), ("a", " long one"))
    results = [
        [PieceScore(-1.0, False), PieceScore(-2.0, False)],
        [PieceScore(-3.0, False), PieceScore(-2.0, True)],
    ]
    found = score_task(Task("t", "multiple_choice", documents(2, pairs=pairs, gold=0)), results).scores
    assert found["acc"].value == 0.5  # the second document's log-likelihood is higher for the wrong choice
    assert found["acc_norm"].value == 0.0  # -1 a character against -2 / 8, and -3 against -2 / 8
    assert found["acc"].standard_error == pytest.approx(0.5 / math.sqrt(2), rel=0.1)

    words = Task("w", "loglikelihood", documents(2, pairs=pairs[:1]))
    found = score_task(words, [[PieceScore(-1.0, True)], [PieceScore(-3.0, False)]]).scores
    assert (found["acc"].value, found["perplexity"].value) == (0.5, pytest.approx(math.exp(2)))

    texts = Task("r", "loglikelihood_rolling", documents(1))
    found = score_task(texts, [[PieceScore(-10.0, False)]]).scores
    assert found["bits_per_byte"].value == pytest.approx(10 / 5 / math.log(2))
    assert found["byte_perplexity"].value == pytest.approx(math.exp(10 / 5))
    assert found["word_perplexity"].value == pytest.approx(math.exp(10 / 2))
    assert found["word_perplexity"].standard_error is None

    made = Task("g", "generate_until", documents(2, answers=("4", "four")))
    assert score_task(made, [" four\n", "5"]).scores["exact_match"].value == 0.5


def test_the_command_scores_a_run(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    tasks = tmp_path / "tasks.jsonl"
    lines = [
        {"task": "choice", "arguments": [["for", " i"], ["for", " x"]], "target": 0},
        {"task": "text", "arguments": [TEXT]},
        {"task": "made", "arguments": ["for", {"until": ["\n"], "max_gen_toks": 3}], "target": "never made"},
    ]
    tasks.write_text("".join(json.dumps(line) + "\n" for line in lines))
    command = ["eval", str(run), "--tasks", str(tasks)]
    found = CliRunner().invoke(build_app(), [*command, "--json"], catch_exceptions=False)
    assert found.exit_code == 0
    choice, text, made = json.loads(found.stdout)["tasks"]
    assert choice["scores"]["acc"]["value"] in (0.0, 1.0)
    assert 3 < text["scores"]["bits_per_byte"]["value"] < 9  # an untrained model: log2(300) bits a token
    assert made["scores"]["exact_match"] == {"value": 0.0, "standard_error": None}
    table = CliRunner().invoke(build_app(), command, catch_exceptions=False)
    assert "bits_per_byte" in table.stdout

    tasks.write_text(json.dumps({"arguments": ["x", TEXT * 20]}))
    refused = CliRunner().invoke(build_app(), command)
    assert isinstance(refused.exception, BadInputError)
    assert f"{tasks}:1: continuation" in str(refused.exception)
