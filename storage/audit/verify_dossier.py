"""Check a dossier, and the store that it tells of, without Refrain.

python -I verify.py [--store FOLDER]

Needs Python 3.9 and nothing else. It reads every file of this folder and every object of the run that
objects.json lists, and compares sizes and SHA-256. Where the package xxhash is installed, it also
makes the store's own digests again: the chain of commits, the heads of batches, the weights. Exit
code 0: all is as it was; 1: something is not. A store that is no folder is copied into one first.

Nothing beside it is imported, with -I or without. Compare the digest of verify.py with the one that
`refrain dossier` printed, by a tool of your own: a script that was replaced says what it likes.
"""

import sys

# Before any other import: a file argparse.py that somebody put here would be it. Without -I the first
# place is the folder of the script.
if __name__ == "__main__" and not sys.flags.isolated:
    del sys.path[0]

import os

HERE = os.path.realpath(os.path.dirname(__file__))
if __name__ == "__main__":
    sys.dont_write_bytecode = True
    inside = f"{HERE}{os.sep}"
    sys.path[:] = [p for p in sys.path if not f"{os.path.realpath(p)}{os.sep}".startswith(inside)]

import argparse  # noqa: E402
import hashlib  # noqa: E402
import json  # noqa: E402
from collections.abc import Callable  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

BLOCK = 1 << 20  # bytes read at once
OWN = (
    "SHA256SUMS"  # of the dossier's files; its own digest is what whoever made the dossier told you
)


def sha256(path: Path) -> str:
    """SHA-256 of a file, in hex."""
    total = hashlib.sha256()
    with open(path, "rb") as file:
        for block in iter(lambda: file.read(BLOCK), b""):
            total.update(block)
    return total.hexdigest()


def own_files(here: Path) -> list[str]:
    """Problems of the dossier itself: files that differ, lack, or are not listed."""
    listed: dict[str, str] = {}
    if not (here / OWN).is_file():
        return [f"{OWN}: missing from the dossier"]
    for line in (here / OWN).read_text(encoding="utf-8", errors="surrogateescape").splitlines():
        digest, _, name = line.partition("  ")
        listed[name] = digest
    there = {
        str(path.relative_to(here))
        for path in here.rglob("*")
        if path.is_symlink() or not path.is_dir()
    } - {OWN}
    problems = [
        f"{name}: not in the dossier when it was made" for name in sorted(there - set(listed))
    ]
    for name, digest in listed.items():
        if name not in there:
            problems.append(f"{name}: missing from the dossier")
        elif (here / name).is_symlink() or not (here / name).is_file():
            problems.append(f"{name}: no file, but a link or the like")
        elif sha256(here / name) != digest:
            problems.append(f"{name}: altered since the dossier was made")
    return problems


def objects(listed: list[dict[str, Any]], store: Path) -> list[str]:
    """Problems of the store's objects: missing, of another size, altered."""
    problems = []
    for entry in listed:
        path = store / entry["key"]
        if not path.is_file():
            problems.append(f"{entry['key']}: missing from the store")
        elif path.stat().st_size != entry["bytes"]:
            problems.append(f"{entry['key']}: {path.stat().st_size} bytes of {entry['bytes']}")
        elif sha256(path) != entry["sha256"]:
            problems.append(f"{entry['key']}: altered since the dossier was made")
    return problems


def own_digests(
    lineage: dict[str, Any], listed: list[dict[str, Any]], store: Path, xxhash: Any
) -> list[str]:
    """Problems of the store's own digests: the chain of commits, batches' heads, weights."""
    problems = []
    keys = {entry["key"]: entry for entry in listed}

    def digest(data: bytes) -> str:
        return "xxh3:" + xxhash.xxh3_128_hexdigest(data)

    before = None
    for step in lineage["steps"]:
        data = (store / step["commit"]).read_bytes()
        body = json.loads(data)["body"]
        if before is not None and body["parent_digest"] not in (None, before):
            problems.append(f"{step['commit']}: does not follow the commit before it")
        if body["version_out"]["digest"] != step["weights"]["digest"]:
            problems.append(f"{step['commit']}: made other weights than lineage.json says")
        before = digest(data)
        manifest = f"{step['weights']['key']}/manifest.json"
        if manifest in keys:
            problems += weights(store, step["weights"], manifest, digest)
    for key, entry in keys.items():
        if (
            "head" in entry
            and digest((store / key).read_bytes()[: entry["head"]]) != entry["digest"]
        ):
            problems.append(f"{key}: its head is not the one that commits name")
    return problems


def weights(
    store: Path, record: dict[str, Any], manifest: str, digest: Callable[[bytes], str]
) -> list[str]:
    """Problems of a policy version: its files, and the digest of its tensors."""
    body = json.loads((store / manifest).read_bytes())["body"]
    problems = []
    for name, file in body["files"].items():
        if digest((store / record["key"] / name).read_bytes()) != file["digest"]:
            problems.append(f"{record['key']}/{name}: its digest does not match")
    lines = b""
    for name, tensor in sorted(body["tensors"].items()):
        entry = [name, tensor["dtype"], tensor["shape"], tensor["digest"]]
        lines += json.dumps(entry, sort_keys=True, separators=(",", ":")).encode() + b"\n"
    if body.get("adapter") is None and digest(lines) != record["digest"]:
        problems.append(f"{manifest}: its tensors have another digest than the commit says")
    return problems


def imported() -> list[str]:
    """Problems of this process: what was imported from the dossier before this script began."""
    files = {name: vars(module).get("__file__") for name, module in list(sys.modules.items())}
    return [
        f"{os.path.basename(file)}: was imported as {name}. Run python -I verify.py"
        for name, file in sorted(files.items())
        if name != "__main__" and file and os.path.realpath(file).startswith(f"{HERE}{os.sep}")
    ]


def shown(text: str) -> str:
    """A text on one line: a file's name may hold what a terminal obeys."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def main() -> int:
    """Check everything; returns the exit code."""
    words = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    words.add_argument("--store", metavar="FOLDER", help="the store, or a copy of it [as recorded]")
    arguments = words.parse_args()
    here = Path(HERE)
    problems = imported() + own_files(here)
    sums = sha256(here / OWN) if (here / OWN).is_file() else "?"
    told = f"dossier {sums}\nverify.py {sha256(Path(__file__).resolve())}"
    if not problems:
        lineage = json.loads((here / "lineage.json").read_text(encoding="utf-8"))
        listed = json.loads((here / "objects.json").read_text(encoding="utf-8"))
        store = Path(arguments.store or lineage["store"].partition("://")[2])
        problems += objects(listed, store)
        told += f"\n{len(listed)} objects of {lineage['run']} in {store}"
        try:
            import xxhash
        except ImportError:
            told += "\nthe store's own digests were not made again: there is no package xxhash"
        else:
            if not problems:
                problems += own_digests(lineage, listed, store, xxhash)
                told += "\nthe store's own digests were made again too"
    for line in (*told.splitlines(), *problems):  # names in it are others'
        print(shown(line).encode("ascii", "backslashreplace").decode())
    print(f"{len(problems)} problems." if problems else "All is as it was.")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
