"""If this fails, ranks that start together make the embedded corpus several times, or read it half made."""

import subprocess
import sys
from pathlib import Path

from myriad.data.block_hashes import verify_corpus

ASK = """
import sys
from pathlib import Path
from myriad.data import corpus_cache as cache
from myriad.data.corpus_cache import Document
cache.embedded_documents = lambda: [Document(f"d{n}", f"text number {n} " * 400) for n in range(300)]
print(cache.prepare_embedded(Path(sys.argv[1]), 300, lambda stage: print(stage)))
"""


def test_ranks_that_start_together_make_it_once(tmp_path: Path) -> None:
    command = [sys.executable, "-c", ASK, str(tmp_path / "cache")]
    ranks = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    outputs = [rank.communicate(timeout=120)[0].splitlines() for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * 4
    assert sorted(map(len, outputs)) == [1, 1, 1, 4]
    assert len({output[-1] for output in outputs}) == 1
    assert verify_corpus(Path(outputs[0][-1])) == []
