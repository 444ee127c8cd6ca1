"""If these break: fine-tuning learns its prompts, or not what the assistant writes."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as arrow
import pyarrow.parquet as parquet
import pytest
from tiny_corpora import make_corpus, options

from myriad.data.config import DataConfig
from myriad.data.corpus import BatchReader
from myriad.data.corpus_opening import open_corpora
from myriad.data.prepare import prepare
from myriad.data.records import RecordForm, read_template
from myriad.data.tokenizer import Tokenizer
from myriad.data.windows import BatchWords, PackedRows
from myriad.errors import BadInputError

CHATML = """{% for message in messages %}
<|im_start|>{{ message['role'] }}
{{ message['content'] }}<|im_end|>
{% endfor %}
{% if add_generation_prompt %}
<|im_start|>assistant
{% endif %}"""
PAIRS = RecordForm("question", "answer")


def write(path: Path, records: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def pairs(count: int) -> list[dict[str, Any]]:
    return [{"question": f"beta {n}" * (n % 3 + 1), "answer": f"alpha {n * 7}"} for n in range(count)]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory, tokenizer: Path) -> Path:
    """Prompts and completions, in several pieces whose tokens fill no whole bytes of the mask."""
    folder = tmp_path_factory.mktemp("pairs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("myriad.data.prepare._PIECE_BYTES", 500)
        found = prepare(
            [write(folder / "pairs.jsonl", pairs(100))],
            folder / "corpus",
            options(tokenizer=tokenizer, form=PAIRS, validation=0.0),
        )
    assert found.format == "myriad-corpus-2"
    return folder / "corpus"


def test_completions_and_their_end_have_a_loss_and_prompts_have_none(corpus: Path) -> None:
    data = DataConfig(corpus=str(corpus), documents="packed")
    corpora = open_corpora(data, 64)
    tokenizer = Tokenizer.load(corpus)
    expected = set()
    for record in pairs(100):
        prompt, completion = tokenizer.encode(record["question"]), tokenizer.encode(record["answer"])
        completion.append(tokenizer.end_of_document)
        expected.add((tuple(prompt + completion), len(prompt)))
    reader, found = BatchReader(corpora, 1, corpora.num_samples, (corpora.num_samples,), 1, None), set()
    rows = np.empty((corpora.num_samples, corpora.width), np.int32)
    reader.read(0, range(len(rows)), rows)
    for inputs, targets, positions in zip(*PackedRows.of(rows), strict=True):
        begins = [*np.flatnonzero(positions == 0), 64]
        for start, stop in pairwise(begins):
            wanted = targets[start:stop]
            tokens = [inputs[start], *np.where(wanted < 0, ~wanted, wanted)]
            learned = wanted >= 0
            if learned.any():
                assert (np.diff(learned.astype(int)) >= 0).all(), "a prompt, then its completion"
                found.add((tuple(map(int, tokens)), int(np.flatnonzero(learned)[0]) + 1))
    assert found == expected
    assert BatchWords.read(rows[0]).num_targets == sum(len(tokens) - prompt for tokens, prompt in expected)
    assert BatchWords.read(rows[0]).num_tokens == sum(len(tokens) - 1 for tokens, _ in expected)


def test_a_remote_mask_is_read_and_a_damaged_one_refused(corpus: Path, tmp_path: Path) -> None:
    data = DataConfig(corpus=f"local://{corpus}", documents="packed", cache=str(tmp_path / "cache"))
    far = open_corpora(data, 64)
    near = open_corpora(data.model_copy(update={"corpus": str(corpus)}), 64)
    assert far.packed[0].counted(0, None) == near.packed[0].counted(0, None)
    for path in corpus.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    mask = next(tmp_path.glob("*.loss"))
    mask.write_bytes(bytes([mask.read_bytes()[0] ^ 1]) + mask.read_bytes()[1:])
    with pytest.raises(BadInputError, match="its bytes differ from those written"):
        open_corpora(data.model_copy(update={"corpus": str(tmp_path)}), 64)


def test_joined_windows_of_such_a_corpus_are_refused(corpus: Path) -> None:
    with pytest.raises(BadInputError, match=r"packed: some tokens of .* have no loss"):
        open_corpora(DataConfig(corpus=str(corpus)), 16)


def chat(template: str) -> RecordForm:
    return RecordForm("messages", template=template)


CONVERSATION = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "2 + 2?"},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "3 + 3?"},
    {"role": "assistant", "content": "6"},
]


def test_what_the_assistant_writes_has_a_loss() -> None:
    document = chat(CHATML).document({"messages": CONVERSATION})
    assert [part.text for part in document.parts if part.has_loss] == ["4<|im_end|>\n", "6<|im_end|>\n"]
    assert document.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n2 + 2?")
    last = [*CONVERSATION, {"role": "user", "content": "Thanks."}]
    parts = chat(CHATML).document({"messages": last}).parts
    assert parts[-1] == ("<|im_start|>user\nThanks.<|im_end|>\n", False)
    assert chat(CHATML).document({"messages": CONVERSATION[:2]}) == ""


def test_a_conversation_is_rendered_as_transformers_renders_it() -> None:
    templating = pytest.importorskip("transformers.utils.chat_template_utils")
    (expected,), _ = templating.render_jinja_template([CONVERSATION], chat_template=CHATML)
    assert chat(CHATML).document({"messages": CONVERSATION}) == expected


def test_parquet_of_messages(tmp_path: Path, tokenizer: Path) -> None:
    table = arrow.table({"messages": [CONVERSATION] * 30})
    parquet.write_table(table, tmp_path / "chats.parquet")
    form = chat(CHATML)
    found = prepare(
        [str(tmp_path / "chats.parquet")], tmp_path / "out", options(tokenizer=tokenizer, form=form)
    )
    assert sum(shard.documents for shard in found.shards) == 30


@pytest.mark.parametrize(
    ("form", "content", "why"),
    [
        (RecordForm("messages", "answer"), "hello", "has no text under the key 'answer'"),
        (chat(CHATML), "hello", "no list of messages with a role"),
        (chat("{{ 1 / 0 }}"), CONVERSATION, "division by zero"),
        (chat("{{ messages[9].x.y }}"), CONVERSATION, "has no element 9"),
        (chat("{{ raise_exception('no system role') }}"), CONVERSATION, "no system role"),
        (chat("{{ messages|length }}"), CONVERSATION, "changes earlier text"),
        (chat("{{ ''.__class__.__mro__ }}"), CONVERSATION, "unsafe"),
    ],
)
def test_a_record_that_is_no_document_is_refused_with_its_place(
    tmp_path: Path, tokenizer: Path, form: RecordForm, content: object, why: str
) -> None:
    source = write(tmp_path / "records.jsonl", [{"messages": content}])
    with pytest.raises(BadInputError, match=f"line at byte 0 .*{why}"):
        prepare([source], tmp_path / "out", options(tokenizer=tokenizer, form=form))


def test_plain_text_has_no_prompts(tmp_path: Path, tokenizer: Path) -> None:
    (tmp_path / "a.txt").write_text("alpha")
    with pytest.raises(BadInputError, match="JSONL or Parquet"):
        prepare([str(tmp_path / "a.txt")], tmp_path / "out", options(tokenizer=tokenizer, form=PAIRS))


def test_a_template_is_found_beside_a_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": CHATML}))
    assert read_template(tmp_path) == CHATML
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    assert read_template(tmp_path) == "{{ messages }}"
    (tmp_path / "chat_template.jinja").write_text("{% for %}")
    with pytest.raises(BadInputError, match="a chat template in Jinja"):
        read_template(tmp_path)
