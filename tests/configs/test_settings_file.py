"""Files of settings: each reader of one says the same of a file that holds none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from configs.deployments import read_deployments
from configs.grpo import GRPOConfig
from configs.overrides import ConfigError, read_settings
from configs.recipe import read_recipe
from tasks.launch.kubernetes import words_of

READERS: list[Callable[[Path], object]] = [
    read_settings,
    read_deployments,
    lambda path: read_recipe(GRPOConfig, str(path)),
    lambda path: words_of(str(path)),
]


@pytest.mark.parametrize("read", READERS)
@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "There is no file {}. Give the path of a YAML file."),
        ("folder", "{} is a folder. Give the path of a YAML file."),
        (b"\x80\x81", "{} is no text. Give a YAML file, in UTF-8."),
        (b"a: \x00", "{} is no text. Give a YAML file, in UTF-8."),
        (b"a: [1", "{} is not valid YAML: expected ',' or ']', but got '<stream end>', in line 1, column 6."),
        (b"a:\n\tb: 1", "{} is not valid YAML: in line 2, column 1 is a tab. Indent with spaces."),
        (b"a: !!binary YQ==", "{} is not valid YAML: could not determine a constructor for the tag "
            "'tag:yaml.org,2002:binary', in line 1, column 4."),
        (b"[" * 2000, "{} is not valid YAML: its groups are too deep."),
        (b"a: 1\na: 2", "{}: the key a stands twice in one group, in line 1 and in line 2. Remove one."),
        (b"", "{} holds no settings: its top level must be key: value lines."),
        (b"- a", "{} holds no settings: its top level must be key: value lines."),
        (b"5: a", "{}: 5 is no name of a setting. Write it as a word."),
    ],
)  # fmt: skip
def test_one_sentence_says_why_a_file_holds_no_settings(
    tmp_path: Path, read: Callable[[Path], object], content: bytes | str | None, said: str
) -> None:
    file = tmp_path / "own.yaml"
    if content == "folder":
        file.mkdir()
    elif isinstance(content, bytes):
        file.write_bytes(content)
    with pytest.raises(ConfigError) as error:
        read(file)
    assert str(error.value) == said.format(file)


def test_dates_are_the_texts_that_they_are(tmp_path: Path) -> None:
    file = tmp_path / "own.yaml"
    file.write_text("a: 2026-11-29\nb: {c: [2026-11-29 10:00:00, 2026-13-45], 2026-11-29: d}\n")
    dates = ["2026-11-29 10:00:00", "2026-13-45"]
    assert read_settings(file) == {"a": "2026-11-29", "b": {"c": dates, "2026-11-29": "d"}}
    assert words_of(str(file)) == [
        'a="2026-11-29"',
        'b.c=["2026-11-29 10:00:00", "2026-13-45"]',
        'b.2026-11-29="d"',
    ]


def test_a_file_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    file = tmp_path / "own.yaml"
    file.write_bytes(b"\xef\xbb\xbfsteps: 5\n")
    assert read_settings(file) == {"steps": 5}
