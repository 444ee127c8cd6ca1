"""Tasks in JSONL files: one document a line, in the request shape of lm-evaluation-harness.

    {"request_type": "multiple_choice", "arguments": [["2 + 2 =", " 3"], ["2 + 2 =", " 4"]], "target": 1}
    {"request_type": "loglikelihood", "arguments": ["The capital of France is", " Paris"]}
    {"request_type": "loglikelihood_rolling", "arguments": ["A whole text."]}
    {"request_type": "generate_until", "arguments": ["Q: 2 + 2?\\nA:", {"until": ["\\n"]}], "target": "4"}

``request_type`` may be missing, because the arguments show it. Lines that the harness writes with
``--log_samples`` are read as they are: their ``arguments`` are ``{"gen_args_0": {"arg_0": ..., ...}, ...}``,
and a document that is written once for each filter is read once. Other fields are ignored.

Every line is checked before anything is scored.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from myriad.errors import BadInputError

__all__ = ["Generation", "RequestType", "Task", "TaskDocument", "parse_generation", "read_tasks"]

RequestType = Literal["multiple_choice", "loglikelihood", "loglikelihood_rolling", "generate_until"]

DEFAULT_NEW_TOKENS = 256
_MOST_NEW_TOKENS = 1 << 20
_LONGEST_LINE = 1 << 28
_MOST_DIGITS = 9
_SHAPES: Mapping[RequestType, str] = {
    "multiple_choice": "two or more [CONTEXT, CONTINUATION] pairs of texts, the continuations not empty",
    "loglikelihood": "[CONTEXT, CONTINUATION], two texts, the second not empty",
    "loglikelihood_rolling": "[TEXT], a text that is not empty",
    "generate_until": "[PROMPT, SETTINGS], a text and an object",
}
"""The arguments of each type of request, for messages."""


@dataclass(frozen=True)
class Generation:
    """When a generated text ends."""

    until: tuple[str, ...] = ()
    """Texts that end the generation; they are not part of it."""
    max_new_tokens: int = DEFAULT_NEW_TOKENS


@dataclass(frozen=True)
class TaskDocument:
    """One line of a task."""

    where: str
    """Place of the line as ``FILE:LINE``, which messages name."""
    context: str
    """The context or prompt of the first request, or the whole text."""
    pairs: tuple[tuple[str, str], ...] = ()
    """Contexts and continuations of `multiple_choice` and `loglikelihood`."""
    gold: int = 0
    """Index of the right choice."""
    generation: Generation = Generation()
    answers: tuple[str, ...] = ()
    """Texts that count as a right generation."""


@dataclass
class Task:
    """The documents of one task; their requests are of one type."""

    name: str
    request_type: RequestType
    documents: list[TaskDocument] = field(default_factory=list)


def read_tasks(paths: Sequence[str], limit: int | None = None) -> list[Task]:
    """Read the tasks in files, and in the JSONL files of folders, in order of name; of each task at most
    ``limit`` documents. Raises `BadInputError` with the file, the line and what is allowed."""
    tasks: dict[str, Task] = {}
    seen: set[tuple[str, str]] = set()
    for path in _files(paths):
        for where, record in _records(path):
            name = _name(record, path, where)
            if (logged := _logged_id(record)) is not None:
                if (name, logged) in seen:
                    continue
                seen.add((name, logged))
            request_type, document = _document(record, where)
            task = tasks.setdefault(name, Task(name, request_type))
            if task.request_type != request_type:
                allowed = f"{task.request_type}, as the task's first document; one type for each task"
                raise _bad(where, "request_type", request_type, allowed)
            if limit is None or len(task.documents) < limit:
                task.documents.append(document)
    return list(tasks.values())


def _files(paths: Sequence[str]) -> list[Path]:
    found: list[Path] = []
    for given in paths:
        path = Path(given).expanduser()
        if path.is_dir():
            inside = sorted(one for one in path.glob("*.jsonl") if one.is_file())
            if not inside:
                raise BadInputError("tasks", given, "a folder with .jsonl files, and it has none")
            found += inside
        elif path.is_file():
            found.append(path)
        else:
            raise BadInputError("tasks", given, "a JSONL file of requests, or a folder of such files")
    return list(dict.fromkeys(found))


def _records(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the place and the object of each line that is not empty."""
    count = 0
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(iter(lambda: lines.readline(_LONGEST_LINE), b""), 1):
                if line.strip():
                    count += 1
                    yield f"{path}:{number}", _parsed(line, f"{path}:{number}")
    except OSError as error:
        raise BadInputError("tasks", str(path), f"cannot be read: {error.strerror}") from None
    if not count:
        raise BadInputError("tasks", str(path), "one JSON object a line, and the file is empty")


def _parsed(line: bytes, where: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise BadInputError("tasks", where, f"one JSON object in UTF-8: {error}") from None
    if not isinstance(record, dict):
        raise BadInputError("tasks", where, f"one JSON object, not a {type(record).__name__}")
    return record


def _bad(where: str, key: str, value: object, allowed: str) -> BadInputError:
    return BadInputError(f"{where}: {key}", value, allowed)


def _name(record: Mapping[str, Any], path: Path, where: str) -> str:
    """Return the task's name: a field of the line, or the name of the file."""
    name = record.get("task") or record.get("task_name") or path.stem
    if not isinstance(name, str) or not name.isprintable():
        raise _bad(where, "task", name, "the task's name, a text")
    return name


def _logged_id(record: Mapping[str, Any]) -> str | None:
    """Return the number of a document that the harness has logged."""
    return str(record["doc_id"]) if "filter" in record and "doc_id" in record else None


def _document(record: Mapping[str, Any], where: str) -> tuple[RequestType, TaskDocument]:
    if "arguments" not in record:
        found = ", ".join(list(record)[:8]) or "nothing"
        allowed = f"an object with a field `arguments`; it has {found}"
        raise BadInputError("tasks", where, allowed)
    requests = _requests(record["arguments"], where)
    request_type: RequestType = _type(record.get("request_type"), requests, where)
    if not _fits(request_type, requests):
        raise _bad(where, "arguments", record["arguments"], f"{request_type} takes {_SHAPES[request_type]}")
    target, context = record.get("target"), requests[0][0]
    if request_type == "multiple_choice":
        gold = _choice(target, len(requests), where)
        return request_type, TaskDocument(where, context, tuple((one[0], one[1]) for one in requests), gold)
    if request_type == "loglikelihood":
        return request_type, TaskDocument(where, context, ((context, requests[0][1]),))
    if request_type == "loglikelihood_rolling":
        return request_type, TaskDocument(where, context)
    generation = parse_generation(requests[0][1], where)
    return request_type, TaskDocument(where, context, generation=generation, answers=_answers(target, where))


def _requests(arguments: object, where: str) -> list[list[Any]]:
    """Return the arguments of each request of a document."""
    given = arguments
    if isinstance(given, dict):  # as the harness logs them
        given = list(given.values())
    if isinstance(given, list) and given and all(isinstance(one, dict) for one in given):
        given = [list(one.values()) for one in given]
    if isinstance(given, list) and given and not all(isinstance(one, list) for one in given):
        given = [given]
    if not isinstance(given, list) or not given or not all(given):
        allowed = "a list of a request's arguments, or a list of such lists for multiple choice"
        raise _bad(where, "arguments", arguments, allowed)
    return given


def _type(given: object, requests: Sequence[list[Any]], where: str) -> RequestType:
    """Return the type of a document. The harness calls each request of a choice a log-likelihood."""
    if given is not None and given not in get_args(RequestType):
        raise _bad(where, "request_type", given, f"one of {', '.join(get_args(RequestType))}")
    if len(requests) > 1 and given in (None, "loglikelihood", "multiple_choice"):
        return "multiple_choice"
    if given is not None:
        found: RequestType = given  # type: ignore[assignment]  # one of the names
        return found
    if len(requests[0]) == 1:
        return "loglikelihood_rolling"
    return "generate_until" if isinstance(requests[0][1], dict) else "loglikelihood"


def _fits(request_type: RequestType, requests: Sequence[list[Any]]) -> bool:
    """Return whether the arguments have the shape of the type (`_SHAPES`)."""
    first = requests[0]
    if request_type == "multiple_choice":
        return len(requests) > 1 and all(map(_is_pair, requests))
    if len(requests) != 1 or not isinstance(first[0], str):
        return False
    if request_type == "loglikelihood":
        return _is_pair(first)
    if request_type == "loglikelihood_rolling":
        return len(first) == 1 and first[0] != ""
    return len(first) == 2 and isinstance(first[1], dict)


def _is_pair(request: list[Any]) -> bool:
    return len(request) == 2 and all(isinstance(text, str) for text in request) and request[1] != ""


def _choice(target: object, count: int, where: str) -> int:
    is_number = isinstance(target, str) and target.isdecimal() and len(target) <= _MOST_DIGITS
    number = int(str(target)) if is_number else target
    if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number < count:
        raise _bad(where, "target", target, f"the number of the right choice, 0 to {count - 1}")
    return number


def _answers(target: object, where: str) -> tuple[str, ...]:
    answers: list[Any] = target if isinstance(target, list) else [target]
    if not answers or not all(isinstance(one, str) for one in answers):
        raise _bad(where, "target", target, "the right text, or a list of right texts")
    return tuple(answers)


def parse_generation(settings: Mapping[str, Any], where: str) -> Generation:
    """Read the settings of a generation, under the harness's names. Raises `BadInputError` for a setting that
    greedy generation does not have."""
    until, length = settings.get("until", ()), settings.get("max_gen_toks", DEFAULT_NEW_TOKENS)
    until = (
        (until,)
        if isinstance(until, str)
        else tuple(until or ())
        if isinstance(until, list | None)
        else until
    )
    if not isinstance(until, tuple) or not all(isinstance(one, str) and one for one in until):
        raise _bad(where, "until", settings.get("until"), "a text, or a list of texts, none of them empty")
    if not isinstance(length, int) or isinstance(length, bool) or not 1 <= length <= _MOST_NEW_TOKENS:
        raise _bad(where, "max_gen_toks", length, f"a number of tokens, 1 to {_MOST_NEW_TOKENS}")
    if settings.get("do_sample") and settings.get("temperature", 1) != 0:
        raise _bad(where, "do_sample", settings["do_sample"], "false: generation is greedy")
    known = ("until", "max_gen_toks", "do_sample", "temperature", "top_p", "top_k")
    if other := [key for key in settings if key not in known]:
        raise _bad(where, other[0], settings[other[0]], f"no such setting; known are {', '.join(known)}")
    return Generation(until, length)
