"""Trees into a sandbox and out of it, by programs that run there.

The programs are handed to Python as text, in isolated mode: nothing that an agent left in the sandbox
is imported, and none of its processes lives any more. Only the standard library is imported.
"""

from __future__ import annotations

import hashlib
import json

from engines.sandboxes.protocol import Executed, Sandbox, SandboxFailed
from storage.prompts.coding.trees import File, Link, Tree, is_left_out, leads_inside, packed

NO_ROOM = 3  # exit status
PUT = """
import errno, os, shutil, sys, tarfile
folder = sys.argv[1]
try:
    shutil.rmtree(folder, ignore_errors=True)
    os.makedirs(folder)
    with tarfile.open(fileobj=sys.stdin.buffer, mode="r|") as tar:
        for one in tar:
            path = os.path.join(folder, one.name)
            os.makedirs(os.path.dirname(path), exist_ok=True)
            if one.issym():
                os.symlink(one.linkname, path)
                continue
            with open(path, "wb") as file:
                shutil.copyfileobj(tar.extractfile(one), file)
            os.chmod(path, one.mode)
            os.utime(path, (one.mtime, one.mtime))
except OSError as error:
    sys.stderr.write(str(error))
    sys.exit(3 if error.errno in (errno.ENOSPC, errno.EFBIG, errno.ENAMETOOLONG) else 1)
"""

CHANGES = """
import hashlib, json, os, stat, sys
folder, before = sys.argv[1], json.load(sys.stdin)
changed, there = [], set()
for place, folders, files in os.walk(folder):
    for name in folders:
        if not os.path.islink(os.path.join(place, name)):
            os.chmod(os.path.join(place, name), 0o755)
    for name in files + [one for one in folders if os.path.islink(os.path.join(place, one))]:
        full = os.path.join(place, name)
        path = os.path.relpath(full, folder)
        try:
            path.encode()
            about = os.lstat(full)
            if stat.S_ISLNK(about.st_mode):
                found = ["link", os.readlink(full)]
            elif stat.S_ISREG(about.st_mode):
                os.chmod(full, about.st_mode | 0o600)
                with open(full, "rb") as file:
                    digest = hashlib.sha256(file.read()).hexdigest()
                found = [digest, bool(about.st_mode & 0o100)]
            else:
                continue
        except (OSError, UnicodeError):
            continue
        there.add(path)
        if before.get(path) != found:
            changed.append([path, *found])
print(json.dumps([changed, [path for path in before if path not in there]]))
"""


class TooMuch(Exception):
    """What a program left cannot be taken out, or put in: its own doing; the text says what."""


def put(sandbox: Sandbox, python: str, folder: str, tree: Tree) -> None:
    """Make a folder below the working folder that holds a tree and nothing else.

    TooMuch where there is no room for it, SandboxFailed where it fails otherwise.
    """
    ran = sandbox.exec([python, "-I", "-S", "-B", "-c", PUT, folder], packed(tree))
    if ran.exit_code == NO_ROOM:
        raise TooMuch(f"the files do not fit into the sandbox: {_last_line(ran)}")
    if ran.exit_code != 0:
        raise SandboxFailed(f"The files were not put into the sandbox: {_last_line(ran)}")


def taken_out(sandbox: Sandbox, python: str, folder: str, before: Tree) -> Tree:
    """The tree of a folder that held `before` once; TooMuch where it cannot be listed.

    Without what is no part of a repository, links that lead out of it, and files with names that are
    no text.
    """
    known = {
        path: ["link", one.target]
        if isinstance(one, Link)
        else [hashlib.sha256(one.data).hexdigest(), one.executable]
        for path, one in before.items()
    }
    words = [python, "-I", "-S", "-B", "-c", CHANGES, folder]
    ran = sandbox.exec(words, json.dumps(known).encode())
    if ran.truncated:
        raise TooMuch("more files were changed than can be listed")
    try:
        changed, removed = json.loads(ran.stdout)
    except ValueError:
        raise SandboxFailed(f"The changed files were not listed. {_last_line(ran)}") from None
    tree = {path: one for path, one in before.items() if path not in removed}
    for path, digest, about in changed:
        tree.pop(path, None)
        if is_left_out(path):
            continue
        if digest == "link":
            if leads_inside(path, about):
                tree[path] = Link(about)
            continue
        data = sandbox.read(f"{folder}/{path}", 2**31)
        tree[path] = File(data, about)
    return tree


def _last_line(ran: Executed) -> str:
    lines = ran.stderr.decode(errors="replace").strip().splitlines()
    return lines[-1][:200] if lines else ran.cause
