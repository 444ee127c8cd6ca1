"""``myriad data``: prepare corpora as verified token shards, and inspect them."""

import json as json_format
from bisect import bisect_right
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from myriad.cli.progress_bar import bytes_bar, count_bar
from myriad.cli.shared_options import AsJson, RunName
from myriad.run import existing_run

if TYPE_CHECKING:
    from myriad.data.corpus import Corpus
    from myriad.data.corpus_manifest import Manifest
    from myriad.data.records import RecordForm

__all__ = ["register"]

_Corpus = Annotated[
    Path,
    typer.Argument(
        metavar="CORPUS", help="A folder made by `myriad data prepare`, or the prefix of Megatron's files."
    ),
]


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    data = typer.Typer(no_args_is_help=True, help="Prepare, verify and inspect tokenized corpora.")
    data.command("prepare")(_prepare)
    data.command("verify")(_verify)
    data.command("hash")(_hash)
    data.command("info")(_info)
    data.command("certify")(_certify)
    app.add_typer(data, name="data")


def _prepare(
    inputs: Annotated[
        list[str],
        typer.Argument(metavar="INPUT", help="Text, JSONL or Parquet: files, folders, globs or fsspec URLs."),
    ],
    output: Annotated[Path, typer.Option(help="Output folder; an interrupted one is continued.")],
    tokenizer: Annotated[
        Path | None,
        typer.Option(help="A tokenizer.json or a folder with one. Default: trained on the input."),
    ] = None,
    vocabulary: Annotated[
        int, typer.Option(min=257, max=2**24, help="Vocabulary size of the trained tokenizer.")
    ] = 32768,
    validation: Annotated[
        float,
        typer.Option(
            help="Fraction of documents held out for validation, 0 to 1; with few documents, the end of the "
            "text."
        ),
    ] = 0.02,
    key: Annotated[
        str,
        typer.Option("--key", "--jsonl-key", help="JSONL field or Parquet column that holds the text."),
    ] = "text",
    prompt_key: Annotated[
        str | None,
        typer.Option(help="Field or column of prompts, which have no loss. Needs --completion-key."),
    ] = None,
    completion_key: Annotated[
        str | None, typer.Option(help="Field or column of the completions of --prompt-key.")
    ] = None,
    chat_template: Annotated[
        Path | None,
        typer.Option(
            help="Chat template in Jinja, or a tokenizer's folder with one: records hold messages, and what "
            "the assistant writes has a loss. Needs --tokenizer."
        ),
    ] = None,
    messages_key: Annotated[
        str, typer.Option(help="Field or column of the messages of --chat-template.")
    ] = "messages",
    workers: Annotated[
        int | None, typer.Option(min=1, help="Number of tokenizing processes. Default: one for each core.")
    ] = None,
    shard_size: Annotated[str, typer.Option(help='Largest shard, e.g. "256 MiB".')] = "256 MiB",
    json: AsJson = False,
) -> None:
    """Tokenize text into shards in Megatron's format, with a manifest of hashes.

    If it is killed, the same command continues where it stopped. A folder with another corpus is refused.
    """
    from myriad.data.prepare import PrepareOptions, prepare
    from myriad.system.machine import num_cores

    options = PrepareOptions(
        tokenizer=tokenizer,
        vocabulary=vocabulary,
        validation=validation,
        form=_form(key, prompt_key, completion_key, chat_template, messages_key, tokenizer),
        shard_bytes=_bytes(shard_size),
        workers=workers or num_cores(),
    )
    with bytes_bar() as show:
        manifest = prepare(
            inputs, output, options, lambda now: show(now.stage, now.done_bytes, now.total_bytes)
        )
    _print_result(json, {"folder": str(output), **_summary(manifest)}, _summary_lines(str(output), manifest))


def _form(
    key: str,
    prompt_key: str | None,
    completion_key: str | None,
    chat_template: Path | None,
    messages_key: str,
    tokenizer: Path | None,
) -> "RecordForm":
    """Return how records hold their documents. Raises `BadInputError` for options that exclude each other."""
    from myriad.data.records import RecordForm, read_template
    from myriad.errors import BadInputError

    if (prompt_key is None) != (completion_key is None):
        given, missing = ("--prompt-key", "--completion-key")[:: 1 if prompt_key else -1]
        raise BadInputError(given, prompt_key or completion_key, f"only with {missing}")
    if chat_template is not None and prompt_key is not None:
        raise BadInputError("--chat-template", str(chat_template), "not with --prompt-key")
    if chat_template is not None and tokenizer is None:
        allowed = "only with --tokenizer, whose tokens the template uses"
        raise BadInputError("--chat-template", str(chat_template), allowed)
    if key != "text" and (chat_template is not None or prompt_key is not None):
        raise BadInputError("--key", key, "not with --prompt-key or --chat-template")
    if chat_template is not None:
        return RecordForm(messages_key, template=read_template(chat_template))
    return RecordForm(key) if prompt_key is None else RecordForm(prompt_key, completion_key)


def _verify(folder: _Corpus, json: AsJson = False) -> None:
    """Read every byte and list damaged files; exit code 1 if there are any."""
    from myriad.data.block_hashes import verify_corpus, verify_prefix

    with bytes_bar() as show:
        if prefix := _prefix(folder):
            problems = verify_prefix(prefix)
        else:
            problems = verify_corpus(folder, lambda done, total: show("reading", done, total))
    result = {"folder": str(folder), "whole": not problems, "problems": [one._asdict() for one in problems]}
    where = prefix.parent if prefix else folder
    lines = [f"{where / one.file}: {one.what}" for one in problems] or [f"{folder}: whole"]
    _print_result(json, result, lines)
    if problems:
        raise typer.Exit(1)


def _hash(corpus: _Corpus, json: AsJson = False) -> None:
    """Add block hashes to a corpus that has none, so that training checks tokens as it reads them.

    A folder of an earlier version is first compared with its manifest. Megatron's files have no manifest:
    their present content is recorded as correct, also over earlier hashes.
    """
    from myriad.data.block_hashes import add_block_hashes, hash_prefix

    with bytes_bar() as show:
        if prefix := _prefix(corpus):
            size = hash_prefix(prefix).size_bytes
        else:
            manifest = add_block_hashes(corpus, lambda done, total: show("hashing", done, total))
            size = sum(manifest.files[f"{shard.name}.bin"].size_bytes for shard in manifest.shards)
    _print_result(
        json,
        {"corpus": str(corpus), "bytes": size},
        [f"{corpus}: {size:,} bytes of tokens have block hashes"],
    )


def _certify(
    run: RunName,
    every: Annotated[
        int, typer.Option(min=1, help="Read the tokens of each N-th step and of the last one again.")
    ] = 1,
    json: AsJson = False,
) -> None:
    """Show that each planned sample was trained on exactly once; exit code 1 if not.

    The digests of metrics.jsonl are compared with the corpora, which are read again, and the numbers of
    samples must follow each other from the first step on.
    """
    from myriad.run import Run
    from myriad.train.data_certificate import certify

    what, folder = "reading the samples again", Run(existing_run(run))
    with count_bar(what) as show:
        found = certify(folder, every, lambda done, total: show(what, done, total))
    result = {
        "run": run,
        "whole": found.is_whole,
        "steps": found.steps,
        "samples": found.samples,
        "compared_steps": found.compared,
        "skipped_steps": found.skipped,
        "num_problems": found.num_problems,
        "problems": found.problems,
    }
    lines = [
        f"{found.samples:,} samples in {found.steps:,} steps: "
        + ("each exactly once, in the planned order" if found.is_whole else "not as planned"),
        f"tokens of {found.compared:,} steps read again and equal; {found.skipped:,} updates skipped",
        *found.problems,
    ]
    if found.num_problems > len(found.problems):
        lines.append(f"and {found.num_problems - len(found.problems):,} more")
    _print_result(json, result, lines)
    if not found.is_whole:
        raise typer.Exit(1)


def _prefix(corpus: Path) -> Path | None:
    """Return the prefix of Megatron's files; ``None`` for a folder or a missing path."""
    if corpus.is_dir():
        return None
    prefix = corpus.with_suffix("") if corpus.suffix in (".bin", ".idx") else corpus
    return prefix if prefix.with_name(prefix.name + ".idx").is_file() else None


def _info(
    corpus: Annotated[str, typer.Argument(help="A prepared folder, a Megatron prefix, or `embedded`.")],
    samples: Annotated[int, typer.Option(min=0, help="Number of documents to show.")] = 3,
    vocabulary: Annotated[
        int, typer.Option(min=257, max=2**24, help="Vocabulary size, for `embedded`.")
    ] = 4096,
    json: AsJson = False,
) -> None:
    """Show the sizes of a corpus and the beginnings of a few documents."""
    from myriad.data.corpus_opening import open_corpus

    with count_bar("opening the corpus"):  # The embedded corpus is built at its first use.
        opened = open_corpus(corpus, "train", vocabulary)
    texts = _samples(opened, samples)
    if opened.manifest is not None:
        summary, lines = _summary(opened.manifest), _summary_lines(opened.name, opened.manifest)
    else:
        documents = sum(shard.num_documents for shard in opened.shards)
        summary = {
            "train": {"tokens": opened.num_tokens, "documents": documents, "shards": len(opened.shards)}
        }
        lines = [f"{opened.name}: {opened.num_tokens:,} tokens in {documents:,} documents (Megatron's files)"]
    if texts:
        lines += ["", f"the beginning of {len(texts)} documents, spread over the corpus:"]
    lines += [f"  {text!r}" for text in texts]
    _print_result(json, {"corpus": opened.name, **summary, "samples": texts}, lines)


def _samples(corpus: "Corpus", count: int, tokens: int = 48) -> list[str]:
    """Return the beginnings of documents that are evenly spread over the corpus."""
    ends = list(accumulate(shard.num_documents for shard in corpus.shards))
    total = ends[-1] if ends else 0
    starts: list[list[int]] = []
    for number in (index * total // count for index in range(min(count, total))):
        shard = corpus.shards[place := bisect_right(ends, number)]
        document = shard.document(number - (ends[place] - shard.num_documents))
        starts.append(document[:tokens].tolist())
    tokenizer = corpus.tokenizer
    return [tokenizer.decode(start, skip_special=True) if tokenizer else str(start) for start in starts]


def _summary(manifest: "Manifest") -> dict[str, Any]:
    summary: dict[str, Any] = {"vocabulary": manifest.vocabulary, "tokenizer": manifest.fingerprint}
    summary["skipped"] = manifest.skipped
    for split, text_bytes in sorted(manifest.text_bytes.items()):
        summary[split] = {
            "tokens": manifest.num_tokens(split),
            "documents": manifest.num_documents(split),
            "text_bytes": text_bytes,
            "shards": len(manifest.of(split)),
        }
    return summary


def _summary_lines(name: str, manifest: "Manifest") -> list[str]:
    from myriad.units import format_bytes

    lines = [f"{name}: vocabulary {manifest.vocabulary:,}, tokenizer {manifest.fingerprint[:12]}"]
    for split, text_bytes in sorted(manifest.text_bytes.items()):
        tokens, documents = manifest.num_tokens(split), manifest.num_documents(split)
        ratio = f", {text_bytes / tokens:.2f} bytes a token" if tokens else ""
        shards = f"{len(manifest.of(split))} shards"
        text = format_bytes(text_bytes)
        lines.append(
            f"  {split:<10} {tokens:>14,} tokens  {documents:>10,} documents  {text} of text  {shards}{ratio}"
        )
    if skipped := sum(manifest.skipped.values()):
        kinds = " and ".join(f"{count:,} {kind}" for kind, count in sorted(manifest.skipped.items()))
        lines.append(f"  skipped {skipped:,} records without text ({kinds})")
    if manifest.plan.get("validation") and not manifest.num_documents("validation"):
        lines.append(
            "  no document fell to validation (whole ones do, by chance): no validation loss will be shown; "
            "give more of them, as a folder of files or JSONL, or a larger --validation"
        )
    return lines


def _bytes(text: str) -> int:
    from myriad.errors import BadInputError
    from myriad.units import parse_bytes

    try:
        return parse_bytes(text)
    except ValueError as error:
        raise BadInputError("--shard-size", text, str(error)) from None


def _print_result(as_json: bool, result: dict[str, Any], lines: list[str]) -> None:
    typer.echo(json_format.dumps(result) if as_json else "\n".join(lines))
