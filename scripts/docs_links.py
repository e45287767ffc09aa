"""For MkDocs: links from docs/ to other files of the repository, which are on no page of the site, become their names; one to nothing is an error."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parents[1] / "docs"


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    def name(match: re.Match[str]) -> str:
        text, target = match.groups()
        if not (DOCS / target.partition("#")[0]).exists():
            raise SystemExit(f"docs/{page.file.src_uri}: {target} does not exist")
        shown = target.removeprefix("../")
        return text if text.strip("`") == shown else f"{text} (`{shown}`)"

    return re.sub(r"(?<!!)\[([^\]]*)\]\((\.\./[^)]*)\)", name, markdown)
