"""The table of model families: what the tests of `tests/processes/test_hugging_face.py` cover for each.

The cases are read from that file, so that a cell says "yes" only if a test covers it. A case that a row names
and the file does not have is an error.
"""

import ast
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

__all__ = ["family_rows"]

_TESTS = Path(__file__).parents[1] / "tests" / "processes" / "test_hugging_face.py"


class _Row(NamedTuple):
    """A family: its name, type, the case of a model that comes and of one that leaves, and its recipes."""

    name: str
    kind: str
    comes: str
    leaves: str
    recipes: tuple[str, ...]
    """Beginnings of the names of its recipes."""


_ROWS = (
    _Row("Llama 2, 3", "llama", "llama", "llama, shared heads", ("llama2-", "llama3-")),
    _Row("Llama 3.1, 3.2, 3.3", "llama", "llama 3.1", "llama 3.1", ("llama3.",)),
    _Row("SmolLM 2", "llama", "llama, tied, wide", "llama, wide heads", ("smollm2-",)),
    _Row("Mistral", "mistral", "mistral", "mistral", ("mistral-",)),
    _Row("Qwen 2, 2.5", "qwen2", "qwen 2.5", "qwen 2", ("qwen2",)),
    _Row("Qwen 3", "qwen3", "qwen 3", "qwen 3", ("qwen3-0", "qwen3-1", "qwen3-4", "qwen3-8", "qwen3-32")),
    _Row("Qwen 1.5, 2 MoE", "qwen2_moe", "qwen 2 moe", "qwen 2 moe", ("qwen1.5-moe",)),
    _Row("Qwen 3 MoE", "qwen3_moe", "qwen 3 moe", "qwen 3 moe", ("qwen3-30b", "qwen3-235b")),
    _Row("Mixtral", "mixtral", "mixtral", "mixtral", ("mixtral-",)),
    _Row("OLMoE", "olmoe", "olmoe", "olmoe", ("olmoe-",)),
    _Row("GPT-OSS", "gpt_oss", "gpt-oss", "gpt-oss", ("gpt-oss-",)),
    _Row("Gemma 2", "gemma2", "gemma 2", "gemma 2", ("gemma2-",)),
    _Row("Gemma 3 (text)", "gemma3_text", "gemma 3", "gemma 3", ("gemma3-",)),
    _Row("OLMo 2", "olmo2", "olmo 2", "olmo 2", ("olmo2-",)),
    _Row("OLMo 3", "olmo3", "olmo 3", "olmo 3", ("olmo3-",)),
    _Row("Phi 3, 4", "phi3", "phi 4 mini", "phi 4", ("phi3-", "phi4-")),
    _Row("Granite 3", "granite", "granite 3", "granite", ("granite3-",)),
    _Row("SmolLM 3", "smollm3", "smollm 3", "smollm 3", ("smollm3-",)),
    _Row("StableLM 2 1.6B", "stablelm", "stablelm 2", "stablelm", ("stablelm2-1.6b",)),
    _Row("StableLM 2 12B", "stablelm", "stablelm, parallel", "stablelm, parallel", ("stablelm2-12b",)),
    _Row("GPT-NeoX, Pythia", "gpt_neox", "pythia", "pythia", ("pythia-",)),
    _Row("Falcon 7B", "falcon", "falcon 7b", "falcon", ("falcon-7b",)),
    _Row("Falcon 40B", "falcon", "falcon 40b", "falcon 2", ("falcon-40b",)),
    _Row("Arcee (AFM)", "arcee", "arcee", "arcee, relu2", ("afm-", "tiny")),
    _Row("DeepSeek V3", "deepseek_v3", "deepseek 3, experts", "deepseek 3, experts", ("deepseek-v3",)),
    _Row("DeepSeek V2", "deepseek_v2", "deepseek 2, experts", "deepseek 2, experts", ("deepseek-v2",)),
    _Row("DeepSeek V3, dense", "deepseek_v3", "deepseek 3", "deepseek 3", ()),
    _Row("DeepSeek V2, dense", "deepseek_v2", "deepseek 2 lite", "deepseek 2 lite", ()),
    _Row("MiniCPM 1, 2", "minicpm", "minicpm", "minicpm", ("minicpm-",)),
    _Row("MiniCPM 3", "minicpm3", "minicpm 3", "minicpm 3", ()),
    _Row("GPT-2", "gpt2", "gpt2", "gpt2, tanh", ("gpt2-", "gpt-", "megascale-")),
)


def family_rows(classes: Mapping[str, str], recipes: Sequence[str]) -> Iterator[str]:
    """Yield the lines of the table. ``classes``: the class in transformers of each type. ``recipes``: names
    of the recipes that a type of Hugging Face computes."""
    comes, leaves, shared = _cases()
    named = {row.kind for row in _ROWS}
    others = [_Row(kind, kind, "", "", ()) for kind in classes if kind not in named]
    yield "| family | `model_type` | class in transformers | import | export | logits | bits | tp | recipes |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for row in (*_ROWS, *others):
        if row.comes and (row.comes not in comes or row.leaves not in leaves):
            raise KeyError(f"{row.name}: {_TESTS.name} has no case {row.comes!r} or {row.leaves!r}")
        own = [name for name in recipes if name.startswith(row.recipes)] if row.recipes else []
        imported, exported, tp = row.comes in comes, row.leaves in leaves, row.comes in shared
        tested = [("yes", imported), ("yes", exported), ("3e-5", imported), ("yes", exported), ("yes", tp)]
        cells = [text if one else "-" for text, one in tested]
        names = ", ".join(f"`{name}`" for name in own)
        yield f"| {row.name} | `{row.kind}` | `{classes[row.kind]}` | {' | '.join(cells)} | {names} |"


def _cases() -> tuple[set[str], set[str], set[str]]:
    """Return the cases of models that come, of models that leave, and of those on two ranks."""
    found: dict[str, set[str]] = {}
    for node in ast.parse(_TESTS.read_text(encoding="utf-8")).body:
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        value = getattr(node, "value", None)
        if isinstance(target, ast.Name) and isinstance(value, ast.Dict):
            found[target.id] = {str(ast.literal_eval(key)) for key in value.keys if key is not None}
        elif isinstance(target, ast.Name) and isinstance(value, ast.Tuple):
            found[target.id] = {one.value for one in value.elts if isinstance(one, ast.Constant)}  # type: ignore[misc]
    own = found["CASES"]  # beside those of THEIRS: with a reference of the test's own
    return found["THEIRS"] | own, found["OURS"] | own, found["THEIRS"] | own
