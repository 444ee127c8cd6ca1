"""Links of the documentation to files of the repository, for mkdocs.

A page links to the file that it describes (``../src/myriad/units.py``), for readers of the repository. The
site has no such file: there the link is its text. A link to a file that does not exist is an error.
"""

import logging
import re
from pathlib import Path
from typing import Any

_LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)#\s]+)(#[^)\s]*)?\)")
_LOG = logging.getLogger("mkdocs.hooks")


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Return the page with links out of the documentation replaced by their text."""
    docs = Path(config["docs_dir"]).resolve()
    source = Path(page.file.abs_src_path).resolve()

    def replaced(link: re.Match[str]) -> str:
        text, target = link.group(1), link.group(2)
        if "://" in target:
            return link.group()
        path = (source.parent / target).resolve()
        if path.is_relative_to(docs):
            return link.group()
        if not path.exists():
            _LOG.warning("%s links to %s, which does not exist", page.file.src_path, target)
        return text

    return _LINK.sub(replaced, markdown)
