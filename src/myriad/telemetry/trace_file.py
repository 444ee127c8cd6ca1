"""A trace on disk: gzipped when its name ends in .gz, and there when it is complete."""

import gzip
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, cast

__all__ = ["opened_trace"]


@contextmanager
def opened_trace(path: Path) -> Iterator[IO[bytes]]:
    """To be written; whatever goes wrong leaves no part of it. Raises ``OSError``."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with draft.open("wb") as plain:
            if path.suffix == ".gz":
                with gzip.GzipFile(path.stem, "wb", compresslevel=5, fileobj=plain) as packed:
                    yield cast(IO[bytes], packed)
            else:
                yield plain
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
