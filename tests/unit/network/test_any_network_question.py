"""Whatever is asked of the network's verbs and of `simulate`: strict JSON, or one line and exit code 2."""

import json
import math
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from myriad.cli.main import main

ODD = st.sampled_from(
    ["0", "-1", "nan", "inf", "1e300", "1e-300", "9" * 400, "", "x", "²", "1,2", "1:2", "2"]
)
ANY = settings(
    derandomize=True,
    deadline=None,
    max_examples=60,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
SWITCH = ("network", "ecmp")
FLAP = ("network", "flap", "--no-adaptive", "--timeout", "18")
SIMULATE = ("simulate", "tiny", "--cluster", "laptop", "--layout.dp", "2")
QUESTIONS = {
    SWITCH: ["--flows", "--uplinks", "--split", "--queue-pairs", "--seed", "--gpus", "--draws"],
    FLAP: ["--down", "--flaps", "--dead", "--links", "--queue-pairs", "--longer", "--patience", "--restart"],
    SIMULATE: ["--jitter", "--seed", "--straggler", "--flap", "--congested", "--timers", "--weeks", "--runs"],
}


@st.composite
def questions(draw: st.DrawFn) -> list[str]:
    verb = draw(st.sampled_from(list(QUESTIONS)))
    options = draw(st.lists(st.sampled_from(QUESTIONS[verb]), max_size=2, min_size=1, unique=True))
    return [*verb, *(part for option in options for part in (option, draw(ODD))), "--json"]


def no_constant(text: str) -> Any:
    raise AssertionError(f"{text} is no JSON")


@ANY
@given(questions())
def test_a_question_has_an_answer_in_finite_figures_or_one_line(
    capsys: pytest.CaptureFixture[str], question: list[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(question)
    out, err = capsys.readouterr()
    if ended.value.code == 2:
        assert err.count("\n") == 1 and len(err) < 1000
        return
    assert ended.value.code in (0, None), err
    assert all(map(math.isfinite, numbers(json.loads(out, parse_constant=no_constant))))


def numbers(value: Any) -> list[float]:
    if isinstance(value, dict):
        return numbers(list(value.values()))
    if isinstance(value, list):
        return [number for one in value for number in numbers(one)]
    return [value] if isinstance(value, float) else []
