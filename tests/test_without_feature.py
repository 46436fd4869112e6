"""Features can be taken out as tests/without_feature.py says: read, and not run."""

from __future__ import annotations

import re

import pytest

from tests.without_feature import FEATURES, PACKAGES, ROOT, files_of, names


@pytest.mark.parametrize("name", FEATURES)
def test_nothing_outside_its_rooms_and_records_imports_a_feature(name: str) -> None:
    feature = FEATURES[name]
    own = set(files_of(feature.rooms, ROOT))
    modules = {path[:-3].replace("/", ".").removesuffix(".__init__") for path in own}
    for path in feature.tests:
        assert (ROOT / path).exists(), path
    for test in feature.unfit:  # pytest says nothing where it finds none to leave out
        path, _, called = test.partition("::")
        function = called.partition("[")[0]
        assert not function or f"def {function}(" in (ROOT / path).read_text(), test
    texts = {
        str(path.relative_to(ROOT)): path.read_text()
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
    }
    for path, expressions in feature.records.items():
        texts[path] = (ROOT / path).read_text()
        for expression in expressions:
            texts[path], found = re.subn(expression, "", texts[path])
            assert found, f"{path} has no lines {expression!r}"
    python = {path: text for path, text in texts.items() if path.endswith(".py")}
    assert len(python) > 600
    assert [path for path in sorted(python.keys() - own) if names(python[path], modules)] == []


def test_an_import_over_several_lines_is_seen() -> None:
    text = "def f():\n    from tasks.guards import (\n        acting,\n        judging,\n    )\n"
    assert names(text, {"tasks.guards.acting"})
    assert names("import tasks.guards.acting as one\n", {"tasks.guards.acting"})
    assert not names("from tasks.guards import judging\n", {"tasks.guards.acting"})
