"""The site of the documents: its navigation, and the reference that is made from the code."""

from __future__ import annotations

import argparse
import re
from collections import Counter
from html import escape
from pathlib import Path

import pytest

from configs.settings_help import fields
from docs.site import reference
from flows.__main__ import commands
from flows.recipe import flows, settings_of
from storage.batches.columns import COLUMNS
from storage.tracking.metric_meanings import MEANINGS

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def pages() -> dict[str, str]:
    return reference.pages()


def in_navigation() -> Counter[str]:
    """Pages that mkdocs.yml's navigation names, and how often."""
    _, _, navigation = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")
    return Counter(re.findall(r"[\w/-]+\.md$", navigation, re.MULTILINE))


def test_the_navigation_has_every_page_once(pages: dict[str, str]) -> None:
    written = {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")}
    made = {f"reference/{name}" for name in pages}
    assert in_navigation() == Counter(written | made)


@pytest.mark.parametrize("flow", flows())
def test_every_setting_of_a_flow_is_there(flow: str, pages: dict[str, str]) -> None:
    missing = [
        name
        for name, *_ in fields(settings_of(flow))
        if f"| `{name}` |" not in pages["settings.md"]
    ]
    assert missing == []


def test_every_command_is_there_with_its_options(pages: dict[str, str]) -> None:
    text = pages["commands.md"]
    for name in commands():
        section = text.partition(f"## refrain {name}\n")[2].partition("\n## ")[0]
        for option in options_of(reference.parser_of(name)):
            assert option in section, f"refrain {name} {option}"


def test_the_page_of_commands_is_not_empty(pages: dict[str, str]) -> None:
    assert pages["commands.md"].count("\n## refrain ") == len(commands()) > 30


def options_of(parser: argparse.ArgumentParser) -> set[str]:
    """Its options, as its own help names them, and its subcommands' with their names."""
    named = set(re.findall(r"(?<=\s)--[a-z][a-z-]+", parser.format_usage()))
    for name, inner in reference.subcommands(parser).items():
        named |= {name, *options_of(inner)}
    return named - {"--help"}


def test_commands_have_their_commands_and_settings(pages: dict[str, str]) -> None:
    assert "### refrain cluster submit" in pages["commands.md"]
    assert "## Of refrain evaluate" in pages["settings.md"]


def test_columns_and_metrics_are_there(pages: dict[str, str]) -> None:
    assert all(f"| `{name}` |" in pages["columns.md"] for name in COLUMNS)
    assert all(f"| `{name}` |" in pages["metrics.md"] for name in MEANINGS)


def test_what_a_table_would_take_for_its_own_signs_is_escaped() -> None:
    assert reference._table(("a",), [("`x | y`",)]).splitlines()[-1] == "| `x \\| y` |"
    assert reference._plain("a*b* <c>") == "a\\*b\\* \\<c\\>"
    assert reference._plain("the `a_b` of a_b") == "the `a_b` of a\\_b"
    assert reference._plain("one ` alone") == "one ' alone"


def test_the_site_is_built_and_its_links_lead_somewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands = pytest.importorskip("mkdocs.commands.build", reason="make docs installs it")
    from mkdocs.config import load_config

    monkeypatch.chdir(ROOT)
    config = load_config(str(ROOT / "mkdocs.yml"), site_dir=str(tmp_path / "site"), strict=True)
    commands.build(config)
    html = [page.read_text() for page in (tmp_path / "site").rglob("*.html")]
    shown = (tmp_path / "site/reference/settings.html").read_text()
    of_all = {name for flow in flows() for name, *_ in fields(settings_of(flow))}
    assert [name for name in sorted(of_all) if f"<code>{escape(name)}</code>" not in shown] == []
    elsewhere = re.compile(r"<(?:script|link|img|iframe)[^>]+(?:src|href)=\"?https?://")
    assert html and not any(elsewhere.search(page) for page in html)
    assert "sampling_mask" in (tmp_path / "site/search/search_index.json").read_text()
