"""What a record of JSONL or Parquet becomes: a document, perhaps with parts that have no loss.

    text          one field                                   every token has a loss
    completion    two fields, a prompt and its completion     the completion has a loss
    chat          a list of messages and a chat template      what the assistant writes has a loss

Parts are tokenized one by one, as a prompt is when the model continues it. The end of the document has a
loss if the last part has one. A chat template is Jinja, as in Hugging Face's ``tokenizer_config.json``, and
runs in Jinja's sandbox. It is rendered up to and with each message of the assistant, so each rendered
beginning must be the beginning of the next one.
"""

import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from myriad.errors import BadInputError
from myriad.system.whole_file import parse_json, read_regular

__all__ = ["Part", "PartedText", "RecordError", "RecordForm", "read_template"]

_ASSISTANT = "assistant"
_MOST_TEMPLATE_BYTES = 2**24
"""Largest file that a chat template is read from."""


class Part(NamedTuple):
    """A part of a document."""

    text: str
    has_loss: bool


class PartedText(str):
    """The text of a document, with its parts."""

    parts: tuple[Part, ...]

    @classmethod
    def of(cls, parts: Sequence[Part]) -> "PartedText":
        """Return the text of the parts, with those that are not empty."""
        found = cls("".join(part.text for part in parts))
        found.parts = tuple(part for part in parts if part.text)
        return found


class RecordError(ValueError):
    """A record that is no document; the message says why."""


class RecordForm(NamedTuple):
    """How a record holds its document."""

    key: str = "text"
    """Field of the text, of the prompt, or of the messages."""
    completion_key: str | None = None
    """Field of the completion; ``None``: there is none."""
    template: str | None = None
    """Chat template of the messages; ``None``: the field is a text."""

    @property
    def columns(self) -> list[str]:
        """The fields that are read."""
        return [self.key] if self.completion_key is None else [self.key, self.completion_key]

    @property
    def is_text(self) -> bool:
        """Whether a document is the text of one field."""
        return self.completion_key is None and self.template is None

    @property
    def identity(self) -> Any:
        """What the documents depend on, for the plan of a corpus."""
        return self.key if self.is_text else self._asdict()

    def document(self, record: Mapping[str, Any]) -> str | None:
        """Return the document of a record; ``None`` or empty: it has none. Raises `RecordError`."""
        if self.template is not None:
            return _chat(self.template, record.get(self.key))
        values = [record.get(key, 0) for key in self.columns]
        for key, value in zip(self.columns, values, strict=True):
            if not isinstance(value, str | None):
                raise RecordError(f"has no text under the key {key!r}")
        if self.completion_key is None:
            text: str | None = values[0]
            return text
        prompt, completion = values
        if completion is None:
            return None
        return PartedText.of([Part(prompt or "", has_loss=False), Part(completion, has_loss=True)])


def _chat(template: str, messages: object) -> str | None:
    """Return the text of a conversation; empty if the assistant writes nothing."""
    if messages is None:
        return None
    if not isinstance(messages, list) or not all(
        isinstance(one, dict) and isinstance(one.get("role"), str) for one in messages
    ):
        raise RecordError("has no list of messages with a role and a content")
    parts: list[Part] = []
    written = ""
    for number, message in enumerate(messages):
        if message["role"] == _ASSISTANT:
            before = _render(template, messages[:number], asks=True)
            after = _render(template, messages[: number + 1], asks=False)
            parts += [_rest(before, written, has_loss=False), _rest(after, before, has_loss=True)]
            written = after
    if not parts:
        return ""
    whole = _render(template, messages, asks=False)
    return PartedText.of([*parts, _rest(whole, written, has_loss=False)])


def _rest(text: str, beginning: str, *, has_loss: bool) -> Part:
    if not text.startswith(beginning):
        raise RecordError(
            "cannot be cut into messages: its chat template changes earlier text when a message follows"
        )
    return Part(text[len(beginning) :], has_loss)


def _render(template: str, messages: Sequence[Mapping[str, Any]], *, asks: bool) -> str:
    """Render a conversation; ``asks``: as a prompt for the assistant's next message."""
    try:
        return str(_compiled(template).render(messages=messages, add_generation_prompt=asks))
    except Exception as error:  # a template is a program, which may fail in any way
        raise RecordError(f"does not fit its chat template: {error}") from None


@cache
def _compiled(template: str) -> Any:
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.globals["raise_exception"] = _refuse
    environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
    return environment.from_string(template)


def _refuse(message: str) -> None:
    raise ValueError(message)


def read_template(path: Path) -> str:
    """Read a chat template from a file, or from the folder of a tokenizer: ``chat_template.jinja``, else the
    one in ``tokenizer_config.json``. Raises `BadInputError`."""
    import jinja2

    file = path / "chat_template.jinja" if path.is_dir() else path
    try:
        if path.is_dir() and not file.is_file():
            file = path / "tokenizer_config.json"
            found = parse_json(read_regular(file, _MOST_TEMPLATE_BYTES))
            template = found.get("chat_template") if isinstance(found, dict) else None
        else:
            template = read_regular(file, _MOST_TEMPLATE_BYTES).decode()
        if not isinstance(template, str):
            raise ValueError(f"{file.name} has no chat template")
        _compiled(template)
    except (OSError, ValueError, jinja2.TemplateError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise BadInputError("--chat-template", str(path), f"a chat template in Jinja: {reason}") from None
    return template
