"""If these break: a task is read as another one, or a wrong line is found after hours of scoring."""

import json
from pathlib import Path
from typing import Any

import pytest

from myriad.errors import BadInputError
from myriad.evaluation.task_files import Generation, read_tasks


def write(path: Path, *records: Any) -> str:
    lines = [one if isinstance(one, str) else json.dumps(one) for one in records]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(path)


def test_each_type_of_request_is_read(tmp_path: Path) -> None:
    file = write(
        tmp_path / "mixed.jsonl",
        {"task": "choice", "arguments": [["a", " b"], ["a", " c"]], "target": 1},
        "",
        {"task": "next", "request_type": "loglikelihood", "arguments": ["a", " b"]},
        {"task": "text", "arguments": ["whole"]},
        {"task": "made", "arguments": ["a", {"until": ["\n"], "max_gen_toks": 5}], "target": ["x", "y"]},
    )
    choice, following, text, made = read_tasks([file])
    assert [one.request_type for one in (choice, following, text, made)] == [
        "multiple_choice", "loglikelihood", "loglikelihood_rolling", "generate_until",
    ]  # fmt: skip
    assert choice.documents[0].pairs == (("a", " b"), ("a", " c"))
    assert choice.documents[0].gold == 1
    assert following.documents[0].pairs == (("a", " b"),)
    assert following.documents[0].where == f"{file}:3"
    assert text.documents[0].context == "whole"
    assert made.documents[0].generation == Generation(("\n",), 5)
    assert made.documents[0].answers == ("x", "y")


def test_lines_that_the_harness_has_logged_are_read_once_for_all_filters(tmp_path: Path) -> None:
    logged = {
        "doc_id": 0,
        "doc": {"question": "a"},
        "target": "1",
        "arguments": {
            "gen_args_0": {"arg_0": "a", "arg_1": " b"},
            "gen_args_1": {"arg_0": "a", "arg_1": " c"},
        },
        "resps": [[["-1.5", "False"]], [["-0.5", "True"]]],
        "filter": "none",
        "acc": 1.0,
    }
    file = write(tmp_path / "arc.jsonl", logged, logged | {"filter": "other"}, logged | {"doc_id": 1})
    (task,) = read_tasks([file])
    assert (task.name, task.request_type, len(task.documents)) == ("arc", "multiple_choice", 2)
    assert task.documents[0].pairs == (("a", " b"), ("a", " c"))
    assert task.documents[0].gold == 1


def test_a_folder_gives_its_files_in_order_and_limit_counts_each_task(tmp_path: Path) -> None:
    write(tmp_path / "b.jsonl", *({"arguments": [text]} for text in "xyz"))
    write(tmp_path / "a.jsonl", {"arguments": ["x"]})
    (tmp_path / "notes.txt").write_text("not a task")
    assert [(one.name, len(one.documents)) for one in read_tasks([str(tmp_path)], limit=2)] == [
        ("a", 1),
        ("b", 2),
    ]


PAIRS = [["a", " b"], ["a", " c"]]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("{", "one JSON object in UTF-8"),
        ([1], "one JSON object, not a list"),
        ({"argument": ["a"]}, "it has argument"),
        ({"arguments": []}, "arguments"),
        ({"arguments": ["a", ""]}, "the second not empty"),
        ({"arguments": [["a", " b"], ["a"]], "target": 0}, "two or more [CONTEXT, CONTINUATION] pairs"),
        ({"arguments": PAIRS}, "the number of the right choice, 0 to 1"),
        ({"arguments": PAIRS, "target": 2}, "the number of the right choice, 0 to 1"),
        ({"arguments": PAIRS, "target": True}, "the number of the right choice, 0 to 1"),
        ({"arguments": PAIRS, "target": "9" * 5000}, "the number of the right choice, 0 to 1"),
        ({"arguments": ["a"], "request_type": "perplexity"}, "one of multiple_choice, loglikelihood"),
        ({"arguments": ["a", {}]}, "the right text"),
        ({"arguments": ["a", {"until": [""]}], "target": "b"}, "until"),
        ({"arguments": ["a", {"max_gen_toks": 0}], "target": "b"}, "max_gen_toks"),
        ({"arguments": ["a", {"do_sample": True}], "target": "b"}, "generation is greedy"),
        ({"arguments": ["a", {"num_beams": 4}], "target": "b"}, "no such setting"),
        ({"arguments": ["a", "b"]}, "loglikelihood_rolling, as the task's first document"),
    ],
)
def test_a_wrong_line_is_refused_with_its_place(line: Any, expected: str, tmp_path: Path) -> None:
    file = write(tmp_path / "task.jsonl", {"arguments": ["a"]}, line)
    with pytest.raises(BadInputError) as caught:
        read_tasks([file])
    assert f"{file}:2" in str(caught.value)
    assert expected in str(caught.value)


def test_a_path_without_tasks_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "folder").mkdir()
    for name, expected in (("none", "a JSONL file"), ("empty.jsonl", "is empty"), ("folder", "has none")):
        with pytest.raises(BadInputError, match=expected):
            read_tasks([str(tmp_path / name)])
