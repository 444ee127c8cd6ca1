"""If these fail, text does not survive tokenization, or bits per byte are counted wrong."""

import base64
import json
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_corpora import lines
from tokenizers import Regex, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from myriad.data.tokenizer import END_OF_DOCUMENT, LONGEST_WORD, WORD_PATTERN, Tokenizer
from myriad.errors import BadInputError

TOKENIZER = Tokenizer.train(lines(200), 290)


@settings(deadline=None)
@given(st.text())
def test_any_text_comes_back(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text


@settings(deadline=None)
@given(st.text(st.sampled_from("aé漢ก\u0e31\u0301 \t\r\n\u3000=_7'\x00\ufeff😀"), max_size=400))
def test_every_character_is_in_a_word_and_no_word_is_long(text: str) -> None:
    words = pre_tokenizers.Split(Regex(WORD_PATTERN), "removed", invert=True).pre_tokenize_str(text)
    assert "".join(word for word, _ in words) == text
    assert all(len(word) <= LONGEST_WORD + 1 for word, _ in words)


@pytest.mark.parametrize("kind", ["x", "漢", "ก\u0e31", "=", " ", "\n", " \r\n", "7", "\u0301", "base64"])
def test_text_without_blanks_trains_and_comes_back(kind: str) -> None:
    """One word of this length took the trainer longer than any test may run."""
    noise = base64.b64encode(random.Random(1).randbytes(300_000)).decode()
    text = noise if kind == "base64" else kind * (400_000 // len(kind))
    trained = Tokenizer.train([text], 2000)
    assert trained.decode(trained.encode(text)) == text


def test_a_tokenizer_of_an_earlier_version_keeps_its_words(tmp_path: Path) -> None:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(["if x:\n    return x\n" * 9], trainer)
    backend.save(str(tmp_path / "tokenizer.json"))
    text = "if x:\n    return x == 漢字\n"
    loaded = Tokenizer.load(tmp_path)
    assert loaded.encode(text) == backend.encode(text).ids and loaded.decode(loaded.encode(text)) == text


def test_a_text_that_spells_the_end_of_a_document_stays_text() -> None:
    text = f"say {END_OF_DOCUMENT} here"
    tokens = TOKENIZER.encode(text)
    assert TOKENIZER.end_of_document not in tokens
    assert TOKENIZER.decode(tokens, skip_special=True) == text


def test_progress_of_training_is_shown() -> None:
    seen: list[tuple[str, int]] = []
    Tokenizer.train(["ab"] * 3, 300, lambda stage, characters: seen.append((stage, characters)))
    assert seen[0][1] == 0 and seen[-1] == ("training the tokenizer", 6)


@settings(deadline=None)
@given(st.text())
def test_token_bytes_add_up_to_the_text(text: str) -> None:
    assert TOKENIZER.token_bytes[TOKENIZER.encode(text)].sum() == len(text.encode())


def test_the_end_of_a_document_is_one_token_without_bytes() -> None:
    assert TOKENIZER.token_bytes[TOKENIZER.end_of_document] == 0
    assert TOKENIZER.decode([*TOKENIZER.encode("a"), TOKENIZER.end_of_document], skip_special=True) == "a"


def test_same_texts_same_fingerprint_and_other_texts_another(tmp_path: Path) -> None:
    TOKENIZER.save(tmp_path)
    again = Tokenizer.train(lines(200), 290)
    assert again.fingerprint == TOKENIZER.fingerprint == Tokenizer.load(tmp_path).fingerprint
    assert Tokenizer.train(lines(200, seed=2), 290).fingerprint != TOKENIZER.fingerprint


def test_vocabulary_is_a_bound_that_small_texts_do_not_reach() -> None:
    assert TOKENIZER.vocabulary == 290
    assert Tokenizer.train(["aaaa"], 5000).vocabulary < 300


@pytest.mark.parametrize("content", [None, "", "{}", "not json"])
def test_a_file_that_is_no_tokenizer_is_refused_by_name(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(BadInputError, match=str(tmp_path)):
        Tokenizer.load(tmp_path)


def changed(folder: Path, **keys: object) -> Path:
    """A tokenizer.json with other keys."""
    content = json.loads(Tokenizer.train(lines(20), 300).as_text())
    path = folder / "tokenizer.json"
    path.write_text(json.dumps({**content, **{key: value for key, value in keys.items() if key in content}}))
    return path


def test_what_a_tokenizer_cuts_off_or_fills_up_for_its_model_is_not_done_to_a_corpus(tmp_path: Path) -> None:
    """Each document had 5 tokens, or 512, and nothing said so."""
    whole = Tokenizer.train(lines(20), 300)
    text = "a text of more than five tokens"
    cut = {"direction": "Right", "max_length": 5, "strategy": "LongestFirst", "stride": 0}
    fill = {"strategy": {"Fixed": 512}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0,
            "pad_type_id": 0, "pad_token": END_OF_DOCUMENT}  # fmt: skip
    for key, value in (("truncation", cut), ("padding", fill)):
        assert Tokenizer.load(changed(tmp_path, **{key: value})).encode(text) == whole.encode(text)


def test_a_tokenizer_that_would_lose_text_or_memory_is_refused(tmp_path: Path) -> None:
    model = json.loads(Tokenizer.train(lines(20), 300).as_text())["model"]
    few = {token: number for token, number in model["vocab"].items() if token not in "xyz"}
    path = changed(tmp_path, model={**model, "vocab": few, "merges": []})
    with pytest.raises(BadInputError, match="3 have none, so text with them would be lost"):
        Tokenizer.load(path).check_complete()
    path = changed(tmp_path, model={**model, "vocab": {**model["vocab"], "x": 2**31}})
    with pytest.raises(BadInputError, match="it has number 2,147,483,648"):
        Tokenizer.load(path)
    with pytest.raises(BadInputError, match="at most 16777216"):
        Tokenizer.train(lines(20), 10**11)


def test_a_vocabulary_smaller_than_the_bytes_is_refused() -> None:
    with pytest.raises(BadInputError, match="at least 257"):
        Tokenizer.train(["a"], 256)


def test_a_tokenizer_without_an_end_of_document_is_refused(tmp_path: Path) -> None:
    Backend(models.BPE()).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(BadInputError, match="no end-of-document token"):
        Tokenizer.load(tmp_path)
