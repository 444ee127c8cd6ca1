"""Text to tokens and back: byte-level BPE by the `tokenizers` library, in its own ``tokenizer.json``.

A byte-level tokenizer returns any text exactly and has no unknown token. Token 0 of a tokenizer trained here
ends a document; a tokenizer from elsewhere keeps its own end token.

Before BPE, text is cut into words by `WORD_PATTERN`, which follows GPT-4's: a word takes one character before
its letters (``.append``, ``(self``), and digits come in threes. Unlike GPT-4's, no word is longer than
`LONGEST_WORD` characters (and one before them). BPE training takes time quadratic in the length of a word, so
that without this bound one line of minified code, base64, Chinese or Thai would stall it. The pattern is part
of ``tokenizer.json``: corpora and tokenizers made with another one keep theirs.
"""

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from myriad.errors import BadInputError

__all__ = [
    "END_OF_DOCUMENT",
    "LARGEST_VOCABULARY",
    "LONGEST_WORD",
    "TOKENIZER_FILE",
    "WORD_PATTERN",
    "Tokenizer",
]

LONGEST_WORD = 64
"""Characters of one kind (letters, punctuation, white space) after which a word is cut."""

WORD_PATTERN = "|".join(
    (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)",
        rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]{{1,{LONGEST_WORD}}}",
        r"\p{N}{1,3}",
        rf" ?[^\s\p{{L}}\p{{M}}\p{{N}}]{{1,{LONGEST_WORD}}}",
        rf"\s{{1,{LONGEST_WORD}}}(?!\S)",
        rf"\s{{1,{LONGEST_WORD}}}",
    )
)
"""Pattern of the words of a text, for BPE; every character is in a word."""

LARGEST_VOCABULARY = 1 << 24
"""Upper bound of token numbers; the largest vocabularies in use have about 2^18."""
END_OF_DOCUMENT = "<|endoftext|>"
TOKENIZER_FILE = "tokenizer.json"

_ENDS = (END_OF_DOCUMENT, "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]", "[SEP]", "<|im_end|>")
_TEXT_INDEPENDENT_KEYS = ("version", "truncation", "padding")


class Tokenizer:
    """Encode and decode text, and count the bytes of text of each token."""

    def __init__(self, backend: Backend, source: str) -> None:
        """``source`` is the user's name for the tokenizer, for messages."""
        self._backend = backend
        self.source = source
        _check_growth(backend, source)
        backend.no_truncation()  # a tokenizer.json of a model with short inputs would drop the rest of a text
        backend.no_padding()
        self.end_of_document = self._find_end()
        """The token after each document."""
        special = [token for token in self._added().values() if token.special]
        if len(special) == 1:  # a document that spells the token's name holds text, not the end of a document
            backend.encode_special_tokens = True

    @classmethod
    def train(
        cls,
        texts: Iterable[str],
        vocabulary: int,
        progress: Callable[[str, int], None] = lambda _stage, _characters: None,
    ) -> "Tokenizer":
        """Train byte-level BPE of at most ``vocabulary`` tokens (fewer if the texts are too small to need
        them).

        ``progress`` gets the stage and the characters read so far; other threads run while it trains.
        """
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        if not len(alphabet) < vocabulary <= LARGEST_VOCABULARY:
            least = f"at least {len(alphabet) + 1}, the bytes and the end of a document"
            allowed = f"{least}; at most {LARGEST_VOCABULARY}"
            raise BadInputError("vocabulary", vocabulary, allowed)
        backend = Backend(models.BPE())
        words = pre_tokenizers.Split(Regex(WORD_PATTERN), "isolated")
        in_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.pre_tokenizer = pre_tokenizers.Sequence([words, in_bytes])
        backend.decoder = decoders.ByteLevel()
        end = AddedToken(END_OF_DOCUMENT, special=True)
        trainer = trainers.BpeTrainer(
            vocab_size=vocabulary,
            special_tokens=[end],
            initial_alphabet=sorted(alphabet),
            show_progress=False,
        )
        backend.train_from_iterator(_reported(texts, progress), trainer)
        return cls(backend, "trained")

    @classmethod
    def load(cls, path: Path) -> "Tokenizer":
        """Load a ``tokenizer.json``, or the one in a folder."""
        file = path / TOKENIZER_FILE if path.is_dir() else path
        if not file.is_file():
            raise BadInputError("tokenizer", str(path), f"a {TOKENIZER_FILE} or a folder that holds one")
        with _refused(str(file), f"not a readable {TOKENIZER_FILE}"):
            backend = Backend.from_file(str(file))
        if (
            largest := max(backend.get_vocab(with_added_tokens=True).values(), default=0)
        ) >= LARGEST_VOCABULARY:
            allowed = f"token numbers below {LARGEST_VOCABULARY:,}; it has number {largest:,}"
            raise BadInputError("tokenizer", str(file), allowed)
        return cls(backend, str(file))

    @classmethod
    def of_text(cls, text: str, source: str) -> "Tokenizer":
        """Return the tokenizer of `as_text`. ``source`` is its name for messages."""
        with _refused(source, f"not a readable {TOKENIZER_FILE}"):
            backend = Backend.from_str(text)
        return cls(backend, source)

    def check_complete(self) -> None:
        """Raise `BadInputError` for byte-level BPE without a token for each byte, because it drops text
        silently."""
        if not self._byte_level or getattr(self._backend.model, "unk_token", None) is not None:
            return
        known = self._backend.get_vocab(with_added_tokens=False)
        if missing := [byte for byte in pre_tokenizers.ByteLevel.alphabet() if byte not in known]:
            allowed = f"a token for each byte: {len(missing)} have none, so text with them would be lost"
            raise BadInputError("tokenizer", self.source, allowed)

    def save(self, folder: Path) -> Path:
        """Write ``tokenizer.json`` into ``folder``."""
        path = folder / TOKENIZER_FILE
        path.write_text(self.as_text(), encoding="utf-8")
        return path

    def as_text(self) -> str:
        """Return the content of ``tokenizer.json``."""
        return str(self._backend.to_str(pretty=True))

    def encode(self, text: str) -> list[int]:
        """Return the tokens of one text, without the end of document."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode several texts on all cores. Raises `BadInputError` if the tokenizer lacks a needed token."""
        with _refused(self.source, "cannot encode text"):
            found = self._backend.encode_batch_fast(texts, add_special_tokens=False)
        return [encoding.ids for encoding in found]

    def decode(self, tokens: Iterable[int], *, skip_special: bool = False) -> str:
        """Return the text; incomplete characters at the edges become U+FFFD."""
        numbers = [int(token) for token in tokens]
        with _refused(self.source, "cannot decode tokens"):
            text = self._backend.decode(numbers, skip_special_tokens=skip_special)
        return text

    def token(self, identifier: int) -> str:
        """Return the tokenizer's text form of one token."""
        token = self._backend.id_to_token(identifier)
        assert token is not None, "one of the tokenizer's own"
        return token

    @property
    def vocabulary(self) -> int:
        """Number of tokens: the largest identifier plus one."""
        return max(self._backend.get_vocab(with_added_tokens=True).values()) + 1

    @cached_property
    def token_bytes(self) -> NDArray[np.int64]:
        """[V] bytes of text of each token (0 for the end of a document), for bits per byte."""
        sizes = np.zeros(self.vocabulary, np.int64)
        special = {identifier for identifier, token in self._added().items() if token.special}
        for token, identifier in self._backend.get_vocab(with_added_tokens=True).items():
            if identifier not in special:
                sizes[identifier] = self._text_bytes(token)
        return sizes

    @cached_property
    def fingerprint(self) -> str:
        """Hash that is equal for tokenizers that turn the same text into the same tokens."""
        content = json.loads(self._backend.to_str())
        for key in _TEXT_INDEPENDENT_KEYS:
            content.pop(key, None)
        canonical = json.dumps(content, sort_keys=True, ensure_ascii=True, separators=(",", ":"))
        return hashlib.blake2b(canonical.encode(), digest_size=16).hexdigest()

    def _added(self) -> dict[int, AddedToken]:
        return self._backend.get_added_tokens_decoder()

    @cached_property
    def _byte_level(self) -> bool:
        return "ByteLevel" in json.dumps(json.loads(self._backend.to_str()).get("decoder"))

    def _text_bytes(self, token: str) -> int:
        if self._byte_level:
            return len(token)  # the byte alphabet writes each byte as one character
        if len(token) == 6 and token.startswith("<0x"):
            return 1
        return len(token.replace("▁", " ").removeprefix("##").encode())

    def _find_end(self) -> int:
        for token in _ENDS:
            if (identifier := self._backend.token_to_id(token)) is not None:
                return identifier
        raise BadInputError(
            "tokenizer", self.source, f"has no end-of-document token; one of {', '.join(_ENDS)}"
        )


@contextmanager
def _refused(source: str, problem: str) -> Iterator[None]:
    """Raise `BadInputError` for what the library raises about a file.

    It raises plain Exception, for example without its unknown token, and pyo3's PanicException, which is a
    BaseException without a public class."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise BadInputError("tokenizer", source, f"{problem}: {str(error)[:300]}") from None


_MOST_GROWTH = 1000.0
"""Times by which a tokenizer may make a text longer; those in use stay below 20."""


def _check_growth(backend: Backend, source: str) -> None:
    """Refuse steps that together could make a short text so long that it fills the memory, which ends the
    process: in a sequence, each step of a few bytes may double what the one before it made."""
    before = [one for one in (backend.normalizer, backend.pre_tokenizer) if one is not None]
    for steps in (before, [] if backend.decoder is None else [backend.decoder]):
        growth = 1.0
        for one in steps:
            with _refused(source, f"not a readable {TOKENIZER_FILE}"):
                growth *= _growth(json.loads(one.__getstate__()))
        if growth > _MOST_GROWTH:
            allowed = f"steps that make a text at most {_MOST_GROWTH:,.0f} times as long"
            raise BadInputError("tokenizer", source, allowed)


def _growth(step: object) -> float:
    """Return a bound of the factor by which a normalizer, pre-tokenizer or decoder makes a text longer."""
    if isinstance(step, list):
        return math.prod(map(_growth, step))
    if not isinstance(step, dict):
        return 1.0
    kind, inside = step.get("type"), math.prod(map(_growth, step.values()))
    added = len(str(step.get("content", step.get("prepend", ""))).encode())
    if kind == "Replace":
        replaced = step.get("pattern", {}).get("String")  # else a pattern that may match nothing
        return inside * (max(1.0, added / len(replaced.encode())) if replaced else 1.0 + added)
    if kind == "Prepend":
        return inside * (1.0 + added)
    return inside * {"ByteLevel": 2.0, "Metaspace": 3.0, "BertNormalizer": 3.0}.get(str(kind), 1.0)


def _reported(texts: Iterable[str], progress: Callable[[str, int], None]) -> Iterator[str]:
    """Yield the texts, and report to ``progress`` how far the trainer has read."""
    characters = 0
    for text in texts:
        progress("reading text for the tokenizer", characters)
        yield text
        characters += len(text)
    progress("training the tokenizer", characters)
