"""Task folders of Harbor and of Terminal-Bench, as they are.

Both describe an image that is built of a Dockerfile. Here none is built: a task runs on this
machine's system, in a sandbox, where its Dockerfile does no more than put files into a working
folder. What needs more, such as packages or a service, is left out, by a sentence that says why.

    Harbor:          task.toml, instruction.md, environment/Dockerfile, tests/test.sh
    Terminal-Bench:  task.yaml, Dockerfile, docker-compose.yaml, run-tests.sh, tests/
"""

from __future__ import annotations

import posixpath
import re
import shlex
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import fsspec
import yaml

from storage.prompts.coding.repositories import repository
from storage.prompts.coding.trees import File, Link, Tree, leads_inside, overlaid

TESTS = "/tests"
REWARD = "/logs/verifier/reward.txt"
# Images in whose place this machine's system stands.
_BASES = re.compile(
    r"^((docker\.io/)?(library/)?(ubuntu|debian|python)|ghcr\.io/laude-institute/t-bench/[\w-]+)"
    r"(:[\w.-]+)?(@sha256:[0-9a-f]+)?$"
)
_NAMED = re.compile(r"^ghcr\.io/laude-institute/t-bench/")  # these work in /app
_HARMLESS = frozenset(
    {
        *("mkdir", "touch", "chmod", "echo", "printf", "cp", "mv", "ln", "rm", "cat", "sed"),
        *("head", "tail", "tr", "sort", "cd", "true", "set", "export"),
    }
)
_IGNORED = frozenset({"CMD", "ENTRYPOINT", "LABEL", "EXPOSE", "STOPSIGNAL", "SHELL", "MAINTAINER"})
_OF_HARNESS = frozenset({"tmux", "asciinema", "curl", "ca-certificates"})  # no task's own
_OF_PYTEST = frozenset({"pytest", "pytest-json-ctrf"})
_TOP = frozenset(
    {"usr", "bin", "sbin", "lib", "lib32", "lib64", "etc", "proc", "dev", "tmp", "sys"}
)
_NETWORK = re.compile(r"\b(apt|apt-get|apk|curl|wget|uv|uvx|pip|pip3|npm|conda|git\s+clone)\b")
_PYTEST = re.compile(r"\bpytest\b(?!-)")
_CANARY = re.compile(r"canary", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskFolder:
    """A task that can run here."""

    problem: str
    repository: Tree  # of the working folder
    folder: str  # where that stands
    tests: Tree
    passes: tuple[str, ...]  # commands, or files of tests
    tests_at: str = TESTS
    setup: str = ""  # commands in the working folder
    reward_file: str | None = None  # that the command writes; None: its exit status counts
    variables: Mapping[str, str] = field(default_factory=dict)  # of the environment
    test_timeout: float | None = None  # seconds


class NotHere(Exception):
    """A task cannot run here; the text is the reason."""


def task_folders(
    address: str, only_look: bool = False
) -> Iterator[tuple[str, TaskFolder | str | None]]:
    """The name of each task folder with the task, or with why it is left out; sorted by name.

    only_look: with nothing, and of no folder the files are read.
    """
    filesystem, path = fsspec.core.url_to_fs(address)
    if not filesystem.isdir(path):
        return
    inner = sorted(one["name"] for one in filesystem.ls(path, detail=True) if _is_folder(one))
    for place in [path.rstrip("/"), *inner]:
        kind = next((k for k in _READERS if filesystem.isfile(f"{place}/{k}")), None)
        if kind is None:
            continue
        name = place.rpartition("/")[2]
        if only_look:
            yield name, None
            continue
        try:
            yield name, _READERS[kind](repository(filesystem.unstrip_protocol(place)))
        except (NotHere, ValueError, KeyError) as error:
            said = f"there is no {error}" if isinstance(error, KeyError) else str(error)
            yield name, said.rstrip(".")


def _is_folder(entry: Mapping[str, object]) -> bool:
    return entry["type"] == "directory"


def harbor(files: Tree) -> TaskFolder:
    """A task of Harbor; NotHere, or ValueError for one that is none."""
    about = tomllib.loads(_text(files, "task.toml"))
    environment, verifier = about.get("environment", {}), about.get("verifier", {})
    if "environment/Dockerfile" not in files:
        image = environment.get("docker_image")
        raise NotHere(
            f"it needs the image {image}" if image else "it has no environment/Dockerfile"
        )
    if "environment/docker-compose.yaml" in files:
        raise NotHere("it has services of docker-compose.yaml")
    if verifier.get("env"):
        raise NotHere(f"its tests need {', '.join(verifier['env'])} of the environment")
    if _below(files, "steps"):
        raise NotHere("it has several steps")
    tests = _below(files, "tests")
    passes, stock = _passes(tests, "test.sh")
    return _task(
        problem=_problem(_text(files, "instruction.md")),
        image=_Image(_below(files, "environment")),
        tests=tests,
        passes=passes,
        reward=None if stock else REWARD,
        timeout=verifier.get("timeout_sec"),
    )


def terminal_bench(files: Tree) -> TaskFolder:
    """A task of Terminal-Bench; NotHere, or ValueError for one that is none."""
    try:
        about = yaml.safe_load(_text(files, "task.yaml"))
        services = yaml.safe_load(_text(files, "docker-compose.yaml"))["services"]
    except KeyError:
        services = {}
    except yaml.YAMLError as error:
        raise ValueError(f"it is no YAML: {' '.join(str(error).split())}") from None
    if not isinstance(about, dict) or not isinstance(about.get("instruction"), str):
        raise ValueError("its task.yaml has no instruction")
    if len(services) > 1:
        raise NotHere(f"it has the services {', '.join(services)}")
    if "Dockerfile" not in files:
        raise NotHere("it has no Dockerfile")
    tests = _below(files, "tests")
    if "run-tests.sh" in files:
        tests = {**tests, "run-tests.sh": files["run-tests.sh"]}
    passes, _ = _passes(tests, "run-tests.sh")
    secret = ("tests", "task.yaml", "run-tests.sh", "docker-compose.yaml", "Dockerfile")
    context = {
        path: one
        for path, one in files.items()
        if path.partition("/")[0] not in secret and not path.startswith("solution")
    }
    return _task(
        problem=_problem(about["instruction"]),
        image=_Image({**context, "Dockerfile": files["Dockerfile"]}),
        tests=tests,
        passes=passes,
        reward=None,
        timeout=about.get("max_test_timeout_sec"),
    )


_READERS = {"task.toml": harbor, "task.yaml": terminal_bench}


def _task(
    *,
    problem: str,
    image: _Image,
    tests: Tree,
    passes: tuple[str, ...],
    reward: str | None,
    timeout: object,
) -> TaskFolder:
    return TaskFolder(
        problem=problem,
        repository=image.tree,
        folder=image.folder,
        setup="\n".join(image.commands),
        variables={**image.variables, "TEST_DIR": TESTS, "T_BENCH_TEST_DIR": TESTS},
        tests=tests,
        passes=passes,
        reward_file=reward,
        test_timeout=float(timeout) if isinstance(timeout, int | float) else None,
    )


def _text(files: Tree, path: str) -> str:
    one = files[path]
    if not isinstance(one, File):
        raise ValueError(f"its {path} is a link")
    return one.data.decode(errors="replace")


def _below(files: Tree, folder: str) -> Tree:
    start = f"{folder}/"
    return {path.removeprefix(start): one for path, one in files.items() if path.startswith(start)}


def _problem(text: str) -> str:
    """An instruction without lines before it that are for those who look for leaked benchmarks."""
    lines = text.strip().splitlines()
    while lines and (_CANARY.search(lines[0]) or not lines[0].strip()):
        lines.pop(0)
    return "\n".join(lines).strip()


class _Image:
    """What a Dockerfile makes of the files beside it, as far as that needs no image."""

    def __init__(self, context: Tree) -> None:
        self._context = {p: one for p, one in context.items() if p != "Dockerfile"}
        self.tree: Tree = {}
        self.commands: list[str] = []
        self.variables: dict[str, str] = {}
        folder = ""
        for word, rest in _instructions(_text(context, "Dockerfile")):
            if word == "FROM":
                base = rest.split()[0]
                if folder or not _BASES.match(base):
                    raise NotHere(f"it needs the image {base}")
                folder = "/app" if _NAMED.match(base) else "/"
            elif word == "WORKDIR":
                inside = posixpath.normpath(posixpath.join(folder, rest.strip().strip('"')))
                if inside.strip("/").partition("/")[0] in _TOP:
                    raise NotHere(f"it works in {inside}, which is the system's")
                if (self.tree or self.commands) and inside != folder:
                    raise NotHere("it changes its WORKDIR after files were put there")
                folder = inside
            elif word in ("COPY", "ADD"):
                self._copy(word, rest, folder)
            elif word == "ENV":
                self.variables |= _variables(rest)
            elif word == "RUN":
                self._run(rest)
            elif word not in _IGNORED and (word, rest) != ("USER", "root"):
                raise NotHere(f"its Dockerfile has {word} {rest:.60}")
        if folder in ("", "/"):
            raise NotHere(
                "its Dockerfile names no WORKDIR, and the root of the system is not its own"
            )
        self.folder = folder

    def _copy(self, word: str, rest: str, folder: str) -> None:
        try:
            *sources, target = shlex.split(rest)
        except ValueError:
            sources = []
        odd = ("--", "http:", "https:", "git@", "[")
        if not sources or any(one.startswith(odd) for one in (*sources, target)):
            raise NotHere(f"its Dockerfile has {word} {rest:.60}")
        place = posixpath.normpath(posixpath.join(folder, target))
        if f"{place}/" != f"{folder}/" and not place.startswith(f"{folder}/"):
            raise NotHere(f"its Dockerfile puts files into {place}, outside of its WORKDIR")
        start = place.removeprefix(folder).strip("/")
        into = target.endswith("/") or len(sources) > 1 or place == folder
        for source in sources:
            name = posixpath.normpath(source)
            below = self._context if name == "." else _below(self._context, name)
            if name in self._context:
                below = {name.rpartition("/")[2] if into else "": self._context[name]}
            if not below:
                raise NotHere(f"its Dockerfile has {word} {rest:.60}, and there is no {source}")
            moved = {"/".join(filter(None, (start, path))): one for path, one in below.items()}
            for path, one in moved.items():
                if isinstance(one, Link) and not leads_inside(path, one.target):
                    raise NotHere(f"its link {path} leads out of its WORKDIR")
            self.tree = overlaid(self.tree, moved)

    def _run(self, rest: str) -> None:
        parts = [part.strip() for part in re.split(r"&&|;|\n", rest) if part.strip()]
        kept = []
        for part in parts:
            words = part.split()
            if words[0] in ("apt-get", "apt"):
                wanted = {one for one in words[2:] if not one.startswith("-")}
                if words[1:2] == ["update"] or words[1:2] == ["clean"] or wanted <= _OF_HARNESS:
                    continue
            elif words[:2] == ["rm", "-rf"] and words[2:] == ["/var/lib/apt/lists/*"]:
                continue
            elif words[0] in _HARMLESS:
                kept.append(part)
                continue
            raise NotHere(f"its Dockerfile has RUN {part:.80}")
        if kept:
            self.commands.append(" && ".join(kept))


def _instructions(text: str) -> Iterator[tuple[str, str]]:
    """The instructions of a Dockerfile with what follows them, lines that go on joined."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    for line in re.sub(r"\\[ \t]*\n", " ", "\n".join(lines)).splitlines():
        if line.strip():
            word, _, rest = line.strip().partition(" ")
            if "<<" in rest and word.upper() in ("RUN", "COPY"):
                raise NotHere(f"its Dockerfile has {line.strip():.60}")
            yield word.upper(), rest.strip()


def _variables(rest: str) -> dict[str, str]:
    words = shlex.split(rest)
    if words and "=" not in words[0]:
        return {words[0]: " ".join(words[1:])}
    return {name: value for name, _, value in (one.partition("=") for one in words)}


# The lines of a script that installs pytest and runs it on the files of tests, and does nothing else.
_STOCK = tuple(
    re.compile(one)
    for one in (
        r"(set|cd|export|source|echo|exit|fi|else|then|uv init|uv venv|mkdir)\b.*",
        r"(apt-get|apt) (update|install)\b.*",
        r"curl -LsSf https://astral\.sh/uv\S* \| sh",
        r"(uv add|uv pip install|pip3? install)\b.*",
        r"(uv run|uvx|python3? -m)?\s*.*\bpytest\b.*",
        r"if \[.*",
    )
)
_INSTALLED = re.compile(
    r"\b(?:apt-get install|apt install|uv add|uv pip install|pip3? install)\s+([^&|;\n]*)"
    r"|(?:\s-w|\s--with)[ =](\S+)"
)


def _passes(tests: Tree, script: str) -> tuple[tuple[str, ...], bool]:
    """What has to pass, and whether that is the files of tests in the place of the script."""
    files = tuple(
        f"{TESTS}/{path}" for path in sorted(tests) if re.fullmatch(r"test_\w+\.py", path)
    )
    if script not in tests:
        if not files:
            raise NotHere(f"it has neither {script} nor files of tests")
        return files, True
    text = re.sub(r"\\[ \t]*\n", " ", _text(tests, script))
    if not _NETWORK.search(text):
        return (f"bash {TESTS}/{script}",), False
    lines = [line.strip() for line in text.splitlines()]
    lines = [line for line in lines if line and not line.startswith("#")]
    odd = [line for line in lines if not any(one.fullmatch(line) for one in _STOCK)]
    if odd or not files or not _PYTEST.search(text):
        line = odd[0] if odd else next(one for one in lines if _NETWORK.search(one))
        raise NotHere(f"its {script} needs the network or more than pytest: {line:.80}")
    named = " ".join(" ".join(pair) for pair in _INSTALLED.findall(text))
    wanted = {re.split(r"[=<>~\[]", one)[0] for one in shlex.split(named) if one[0] != "-"}
    if more := wanted - _OF_HARNESS - _OF_PYTEST:
        raise NotHere(f"its tests need {', '.join(sorted(more))}")
    return files, True
