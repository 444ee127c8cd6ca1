"""How fast tokenizers are trained and texts encoded, for texts with and without blanks, over sizes.

    python benchmarks/data/tokenizer.py

A rate that stays the same as the text grows is linear time. English and code are the installed Python's own
prose and source; base64, Chinese and Thai are drawn at random, so that nearly every word is new: the worst
case.
"""

import argparse
import base64
import os
import random
import re
import time

from myriad.data.corpus_cache import embedded_documents
from myriad.data.tokenizer import Tokenizer


def make_texts(num_bytes: int) -> dict[str, str]:
    """A text of each kind, of about so many bytes of UTF-8."""
    draw = random.Random(1)
    documents = list(embedded_documents())
    prose = "\n".join(one.text for one in documents if one.name.startswith("pydoc_data"))
    code = "\n".join(one.text for one in documents if not one.name.startswith("pydoc_data"))
    return {
        "English": _fill(prose, num_bytes),
        "code": _fill(code, num_bytes),
        "minified code": _fill(re.sub(r"#.*|\s+", "", code), num_bytes),
        "base64": base64.b64encode(draw.randbytes(num_bytes)).decode()[:num_bytes],
        "Chinese": "".join(map(chr, draw.choices(range(0x4E00, 0x9000), k=num_bytes // 3))),
        "Thai": "".join(map(chr, draw.choices(range(0x0E01, 0x0E3A), k=num_bytes // 3))),
        "blanks": " " * num_bytes,
    }


def _fill(text: str, num_bytes: int) -> str:
    return (text * (1 + num_bytes // len(text)))[:num_bytes]


def rates(text: str, vocabulary: int) -> tuple[float, float]:
    """Megabytes per second of training and of encoding one text."""
    size, began = len(text.encode()) / 1e6, time.perf_counter()
    tokenizer = Tokenizer.train([text], vocabulary)
    trained = time.perf_counter()
    tokens = tokenizer.encode(text)
    done = time.perf_counter()
    assert tokenizer.decode(tokens) == text, "every text comes back"
    return size / (trained - began), size / (done - trained)


def main() -> None:
    """A table: a row for each kind of text, a column for each size."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--vocabulary", type=int, default=4096, help="tokens (default 4096)")
    sizes = [0.25, 1.0, 4.0]
    parser.add_argument("--megabytes", type=float, nargs="+", default=sizes, help="sizes (default 0.25 1 4)")
    settings = parser.parse_args()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    columns = [make_texts(int(size * 1e6)) for size in settings.megabytes]
    heads = [f"{size:g} MB" for size in settings.megabytes]
    print(f"MB/s of training (vocabulary {settings.vocabulary:,}) and of encoding, one text, one thread")
    print("| text | " + " | ".join(heads) + " |\n|" + "---|" * (1 + len(heads)))
    for kind in columns[0]:
        found = [rates(texts[kind], settings.vocabulary) for texts in columns]
        print(f"| {kind} | " + " | ".join(f"{train:.2f}, {encode:.2f}" for train, encode in found) + " |")


if __name__ == "__main__":
    main()
