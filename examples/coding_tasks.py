"""Ten small repositories, each with a fault, tests that show it and a solution.

    python coding_tasks.py tasks

writes them and tasks/rows.jsonl, which coding.yaml trains on. Repositories are folders, but for one
tar file and, where git is installed, one git bundle.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from shutil import which

TAR, BUNDLE = "slug", "versions"  # the repositories that are no folders


@dataclass(frozen=True, kw_only=True)
class Task:
    """A repository, what is wrong with it, and what puts it right."""

    problem: str
    files: Mapping[str, str]
    tests: str  # of a file tests/test_NAME.py, which the agent does not see; a class Fixed
    fixed: tuple[str, str, str]  # file, a text in it, and what comes in its place


def suite_of(imports: str, *methods: tuple[str, str], group: str = "Fixed") -> str:
    """A class of unittest with methods of names and bodies of one line."""
    lines = ["import unittest", "", f"from {imports}", "", "", f"class {group}(unittest.TestCase):"]
    for name, body in methods:
        lines += [f"    def test_{name}(self):", f"        {body}", ""]
    return "\n".join(lines)


TASKS = {
    "roman": Task(
        problem="to_roman(900) returns DCCCC, and it has to be CM. See to_roman in roman.py.",
        files={
            "roman.py": (
                "NUMERALS = [\n"
                '    (1000, "M"), (500, "D"), (400, "CD"), (100, "C"), (90, "XC"),\n'
                '    (50, "L"), (40, "XL"), (10, "X"), (9, "IX"), (5, "V"), (4, "IV"), (1, "I"),\n'
                "]\n\n\n"
                "def to_roman(number):\n"
                '    text = ""\n'
                "    for value, numeral in NUMERALS:\n"
                "        while number >= value:\n"
                "            text += numeral\n"
                "            number -= value\n"
                "    return text\n"
            ),
            "tests/test_small.py": suite_of(
                "roman import to_roman",
                ("four", 'self.assertEqual(to_roman(4), "IV")'),
                ("year", 'self.assertEqual(to_roman(2024), "MMXXIV")'),
                group="Small",
            ),
        },
        tests=suite_of(
            "roman import to_roman",
            ("nine_hundred", 'self.assertEqual(to_roman(900), "CM")'),
            ("year", 'self.assertEqual(to_roman(1999), "MCMXCIX")'),
        ),
        fixed=("roman.py", '(500, "D")', '(900, "CM"), (500, "D")'),
    ),
    "slug": Task(
        problem="slugify('a - b') returns a---b. Several dashes in a row have to become one.",
        files={
            "slug.py": (
                "def slugify(title):\n"
                '    kept = [c if c.isalnum() else "-" for c in title.lower()]\n'
                '    return "".join(kept).strip("-")\n'
            ),
            "tests/test_small.py": suite_of(
                "slug import slugify",
                ("words", 'self.assertEqual(slugify("Two words"), "two-words")'),
                ("edges", 'self.assertEqual(slugify("!a!"), "a")'),
                group="Small",
            ),
        },
        tests=suite_of(
            "slug import slugify",
            ("one_dash", 'self.assertEqual(slugify("a - b"), "a-b")'),
            ("many", 'self.assertEqual(slugify("a...b  c"), "a-b-c")'),
        ),
        fixed=(
            "slug.py",
            '"".join(kept).strip("-")',
            '"-".join(filter(None, "".join(kept).split("-")))',
        ),
    ),
    "intervals": Task(
        problem="merged([(1, 2), (2, 3)]) keeps both, and intervals that touch are one: (1, 3).",
        files={
            "intervals.py": (
                "def merged(intervals):\n"
                "    found = []\n"
                "    for start, end in sorted(intervals):\n"
                "        if found and start < found[-1][1]:\n"
                "            found[-1] = (found[-1][0], max(end, found[-1][1]))\n"
                "        else:\n"
                "            found.append((start, end))\n"
                "    return found\n"
            ),
            "tests/test_small.py": suite_of(
                "intervals import merged",
                ("apart", "self.assertEqual(merged([(4, 5), (1, 2)]), [(1, 2), (4, 5)])"),
                ("overlap", "self.assertEqual(merged([(1, 3), (2, 5)]), [(1, 5)])"),
                group="Small",
            ),
        },
        tests=suite_of(
            "intervals import merged",
            ("touch", "self.assertEqual(merged([(1, 2), (2, 3)]), [(1, 3)])"),
            ("chain", "self.assertEqual(merged([(3, 4), (1, 2), (2, 3)]), [(1, 4)])"),
        ),
        fixed=("intervals.py", "start < found", "start <= found"),
    ),
    "quotes": Task(
        problem='fields() loses a doubled quote: in "a""b" it stands for one quote, a"b.',
        files={
            "quotes.py": (
                "def fields(line):\n"
                '    found, text, quoted = [], "", False\n'
                "    for character in line:\n"
                "        if character == '\"':\n"
                "            quoted = not quoted\n"
                '        elif character == "," and not quoted:\n'
                "            found.append(text)\n"
                '            text = ""\n'
                "        else:\n"
                "            text += character\n"
                "    return [*found, text]\n"
            ),
            "tests/test_small.py": suite_of(
                "quotes import fields",
                ("plain", "self.assertEqual(fields('a,b'), ['a', 'b'])"),
                ("comma", "self.assertEqual(fields('\"a,b\",c'), ['a,b', 'c'])"),
                group="Small",
            ),
        },
        tests=suite_of(
            "quotes import fields",
            ("doubled", "self.assertEqual(fields('\"a\"\"b\",c'), ['a\"b', 'c'])"),
        ),
        fixed=(
            "quotes.py",
            "            quoted = not quoted\n",
            "            quoted = not quoted\n"
            "            if quoted and text:\n"
            "                text += character\n",
        ),
    ),
    "cache": Task(
        problem="Cache drops what was just read: get has to count as a use, as put does.",
        files={
            "cache.py": (
                "class Cache:\n"
                "    def __init__(self, size):\n"
                "        self._size, self._items = size, {}\n\n"
                "    def get(self, key):\n"
                "        return self._items.get(key)\n\n"
                "    def put(self, key, value):\n"
                "        self._items.pop(key, None)\n"
                "        self._items[key] = value\n"
                "        if len(self._items) > self._size:\n"
                "            del self._items[next(iter(self._items))]\n"
            ),
            "tests/test_small.py": suite_of(
                "cache import Cache",
                ("missing", "self.assertIsNone(Cache(1).get('a'))"),
                ("full", "c = Cache(1); c.put(1, 1); c.put(2, 2); self.assertIsNone(c.get(1))"),
                group="Small",
            ),
        },
        tests=suite_of(
            "cache import Cache",
            (
                "read_is_use",
                "c = Cache(2); c.put(1, 1); c.put(2, 2); c.get(1); c.put(3, 3);"
                " self.assertEqual((c.get(1), c.get(2)), (1, None))",
            ),
        ),
        fixed=(
            "cache.py",
            "        return self._items.get(key)\n",
            "        if key in self._items:\n"
            "            self._items[key] = self._items.pop(key)\n"
            "        return self._items.get(key)\n",
        ),
    ),
    "wrapping": Task(
        problem="wrapped() leaves out the last line of a text.",
        files={
            "wrapping.py": (
                "def wrapped(text, width):\n"
                '    lines, line = [], ""\n'
                "    for word in text.split():\n"
                "        if line and len(line) + 1 + len(word) > width:\n"
                "            lines.append(line)\n"
                '            line = ""\n'
                '        line = f"{line} {word}".strip()\n'
                "    return lines\n"
            ),
            "tests/test_small.py": suite_of(
                "wrapping import wrapped",
                ("empty", "self.assertEqual(wrapped('', 5), [])"),
                group="Small",
            ),
        },
        tests=suite_of(
            "wrapping import wrapped",
            ("last", "self.assertEqual(wrapped('one two three', 7), ['one two', 'three'])"),
            ("single", "self.assertEqual(wrapped('one', 7), ['one'])"),
        ),
        fixed=("wrapping.py", "return lines\n", "return [*lines, line] if line else lines\n"),
    ),
    "versions": Task(
        problem="newer('1.10', '1.9') is False: versions are compared as texts, not as numbers.",
        files={
            "versions.py": (
                "def parts(version):\n"
                '    return version.split(".")\n\n\n'
                "def newer(one, other):\n"
                "    return parts(one) > parts(other)\n"
            ),
            "tests/test_small.py": suite_of(
                "versions import newer",
                ("higher", "self.assertTrue(newer('2.0', '1.9'))"),
                ("same", "self.assertFalse(newer('1.0', '1.0'))"),
                group="Small",
            ),
        },
        tests=suite_of(
            "versions import newer",
            ("ten", "self.assertTrue(newer('1.10', '1.9'))"),
            ("nine", "self.assertFalse(newer('1.9.0', '1.10.0'))"),
        ),
        fixed=(
            "versions.py",
            'return version.split(".")',
            'return [int(part) for part in version.split(".")]',
        ),
    ),
    "money": Task(
        problem="split(100, 3) in shares.py loses a cent. The first shares are to get what is over.",
        files={
            "shares.py": "def split(cents, people):\n    return [cents // people] * people\n",
            "bill.py": (
                "from shares import split\n\n\n"
                "def bill(prices, people):\n"
                "    return split(sum(prices), people)\n"
            ),
            "tests/test_small.py": suite_of(
                "bill import bill",
                ("even", "self.assertEqual(bill([50, 50], 2), [50, 50])"),
                ("alone", "self.assertEqual(bill([7], 1), [7])"),
                group="Small",
            ),
        },
        tests=suite_of(
            "bill import bill",
            ("thirds", "self.assertEqual(bill([60, 40], 3), [34, 33, 33])"),
            ("sum", "self.assertEqual(sum(bill([101], 7)), 101)"),
        ),
        fixed=(
            "shares.py",
            "return [cents // people] * people",
            "return [cents // people + (n < cents % people) for n in range(people)]",
        ),
    ),
    "order": Task(
        problem="ordered() in order.py recurses for ever where needs go in a circle. It has to raise "
        "ValueError.",
        files={
            "order.py": (
                "def ordered(needs):\n"
                "    found = []\n\n"
                "    def visit(name):\n"
                "        if name not in found:\n"
                "            for other in needs.get(name, ()):\n"
                "                visit(other)\n"
                "            found.append(name)\n\n"
                "    for name in sorted(needs):\n"
                "        visit(name)\n"
                "    return found\n"
            ),
            "tests/test_small.py": suite_of(
                "order import ordered",
                ("chain", "self.assertEqual(ordered({'a': ['b'], 'b': ['c']}), ['c', 'b', 'a'])"),
                ("diamond", "self.assertEqual(ordered({'a': 'bc', 'b': 'd', 'c': 'd'})[0], 'd')"),
                group="Small",
            ),
        },
        tests=suite_of(
            "order import ordered",
            ("circle", "self.assertRaises(ValueError, ordered, {'a': ['b'], 'b': ['a']})"),
            ("itself", "self.assertRaises(ValueError, ordered, {'a': ['a']})"),
        ),
        fixed=(
            "order.py",
            "    def visit(name):\n        if name not in found:\n"
            "            for other in needs.get(name, ()):\n                visit(other)\n",
            "    def visit(name, above=()):\n        if name in above:\n"
            "            raise ValueError(name)\n        if name not in found:\n"
            "            for other in needs.get(name, ()):\n"
            "                visit(other, (*above, name))\n",
        ),
    ),
    "inventory": Task(
        problem="The report's total leaves out how many there are of each item. See inventory/.",
        files={
            "inventory/__init__.py": "",
            "inventory/items.py": (
                "def item(line):\n"
                '    name, count, price = line.split(";")\n'
                '    return {"name": name, "count": int(count), "price": int(price)}\n'
            ),
            "inventory/report.py": (
                "from inventory.items import item\n\n\n"
                "def total(lines):\n"
                '    return sum(one["price"] for one in map(item, lines))\n\n\n'
                "def names(lines):\n"
                '    return sorted(one["name"] for one in map(item, lines))\n'
            ),
            "tests/test_small.py": suite_of(
                "inventory.report import names, total",
                ("names", "self.assertEqual(names(['b;1;2', 'a;1;1']), ['a', 'b'])"),
                ("one_each", "self.assertEqual(total(['a;1;5']), 5)"),
                group="Small",
            ),
        },
        tests=suite_of(
            "inventory.report import total",
            ("counts", "self.assertEqual(total(['a;3;5', 'b;1;2']), 17)"),
            ("none", "self.assertEqual(total(['a;0;5']), 0)"),
        ),
        fixed=("inventory/report.py", 'one["price"]', 'one["price"] * one["count"]'),
    ),
}


def names_of(text: str, file: str) -> list[str]:
    """The tests of a file, as pytest names them."""
    group = text.partition("class ")[2].partition("(")[0]
    return [
        f"{file}::{group}::{line.split('(')[0].split()[1]}"
        for line in text.splitlines()
        if line.strip().startswith("def test_")
    ]


def write(folder: Path) -> None:
    """Write the repositories, and a file of rows."""
    rows = []
    for name, task in TASKS.items():
        place = folder / name
        for path, text in task.files.items():
            (place / path).parent.mkdir(parents=True, exist_ok=True)
            (place / path).write_text(text)
        file, small = f"tests/test_{name}.py", "tests/test_small.py"
        rows.append(
            {
                "problem": task.problem,
                "repository": _packed(folder, name),
                "tests": {file: task.tests},
                "fail_to_pass": names_of(task.tests, file),
                "pass_to_pass": names_of(task.files[small], small),
                "edits": [[task.fixed[0], task.fixed[1], f"{task.fixed[1]} "], task.fixed],
            }
        )
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def _packed(folder: Path, name: str) -> str:
    """The address of a repository beside the rows."""
    if name == TAR:
        with tarfile.open(folder / f"{name}.tar.gz", "w:gz") as tar:
            tar.add(folder / name, name)
        return f"{name}.tar.gz"
    if name == BUNDLE and which("git"):
        with tempfile.TemporaryDirectory() as git:
            here = ["git", f"--git-dir={git}", f"--work-tree={folder / name}"]
            who = ["-c", "user.name=me", "-c", "user.email=me@example.com"]
            for words in (
                [*here, "init", "--quiet"],
                [*here, "add", "--all"],
                [*here, *who, "commit", "--quiet", "--message", "all"],
                [*here, "bundle", "create", "--quiet", str(folder / f"{name}.bundle"), "HEAD"],
            ):
                subprocess.run(words, check=True)
        return f"{name}.bundle"
    return name


if __name__ == "__main__":
    write(Path(sys.argv[1]))
