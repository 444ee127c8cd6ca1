"""Files by URL, through fsspec: S3, HTTP, HDFS and the rest, for corpora, checkpoints and inputs alike.

``hdfs://`` is reached through WebHDFS (`myriad.system.webhdfs`), which needs no Java; fsspec alone would load
libhdfs and a Java virtual machine into every process.
"""

from functools import cache
from typing import Any

__all__ = ["is_url", "open_url"]

_NO_PACKAGE = "needs the package requests: pip install 'myriad-train[hdfs]'"


def is_url(name: str) -> bool:
    """Whether a name is a URL, of another scheme than a local file's."""
    return "://" in name and not name.startswith("file://")


def open_url(url: str, **options: Any) -> tuple[Any, str]:
    """The fsspec file system of a URL, and the path there. Raises ``ImportError``, ``ValueError`` or
    ``OSError`` for one that is unknown, lacks its package, or cannot be opened."""
    import fsspec

    _register()
    file_system, path = fsspec.core.url_to_fs(url, **options)
    return file_system, str(path)


@cache
def _register() -> None:
    from fsspec import register_implementation

    for scheme in ("hdfs", "webhdfs", "swebhdfs"):
        register_implementation(scheme, "myriad.system.webhdfs.HdfsByHttp", clobber=True, errtxt=_NO_PACKAGE)
