"""If these fail, text does not survive tokenization, or bits per byte are counted wrong."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_corpora import lines

from myriad.data.tokenizer import Tokenizer
from myriad.errors import BadInputError

TOKENIZER = Tokenizer.train(lines(200), 290)


@settings(deadline=None)
@given(st.text())
def test_any_text_comes_back(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text


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


def test_a_vocabulary_smaller_than_the_bytes_is_refused() -> None:
    with pytest.raises(BadInputError, match="at least 257"):
        Tokenizer.train(["a"], 256)


def test_a_tokenizer_without_an_end_of_document_is_refused(tmp_path: Path) -> None:
    from tokenizers import Tokenizer as Backend
    from tokenizers.models import BPE

    Backend(BPE()).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(BadInputError, match="no end-of-document token"):
        Tokenizer.load(tmp_path)
