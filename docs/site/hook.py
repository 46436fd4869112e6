"""What mkdocs asks of us while it builds the site (mkdocs.yml).

Pages made from the code are added below reference/. Files of the repository that a page links to
are copied below source/, as text that a browser shows: the site needs no address of the repository.
"""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from docs.site import reference

ROOT = Path(__file__).parents[2]
LINKS = re.compile(r"\]\(((?:\.\./)+[^)#\s]*)\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are made from the code, and the files that pages link to outside docs/."""
    for name, text in reference.pages().items():
        files.append(File.generated(config, f"reference/{name}", content=text))
    for page in list(files.documentation_pages()):
        for link in LINKS.findall(page.content_string):
            path = _outside(page.src_uri, link)
            if path and (ROOT / path).is_file():
                text = (ROOT / path).read_text(encoding="utf-8")
                name = f"source/{path}.txt"
                if files.get_file_from_path(name) is None:
                    files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links to files outside docs/ at their copies; a folder's become plain text."""
    up = "../" * page.file.src_uri.count("/")

    def replaced(found: re.Match[str]) -> str:
        path = _outside(page.file.src_uri, found[1])
        return f"]({up}source/{path}.txt)" if path and (ROOT / path).is_file() else found[0]

    def named(found: re.Match[str]) -> str:
        path = _outside(page.file.src_uri, found[2])
        return found[1] if path and (ROOT / path).is_dir() else found[0]

    markdown = re.sub(r"\[([^\]]*)\]\(((?:\.\./)+[^)#\s]*/)\)", named, markdown)
    return LINKS.sub(replaced, markdown)


def _outside(page: str, link: str) -> str | None:
    """The path in the repository of what a page links to; None for what is below docs/."""
    parts: list[str] = ["docs", *PurePosixPath(page).parent.parts]
    for part in PurePosixPath(link).parts:
        if part == "..":
            parts.pop()
        else:
            parts.append(part)
    return "/".join(parts) if parts and parts[0] != "docs" else None
