"""The way into a sandbox: new namespaces, and a root folder with nothing but what programs need.

Started as root, programs get another user of the machine, nobody: the kernel counts root's processes
without a limit. Started as anybody else they keep that user, in a user namespace with no other.

Loaded in the process that becomes the sandbox: only the standard library is imported.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections.abc import Iterator
from typing import Any, NoReturn

from engines.processes.parent_death import die_with_parent
from engines.sandboxes.protocol import send
from engines.sandboxes.supervisor import main as supervise
from engines.sandboxes.system_calls import (
    MS_BIND,
    MS_NOATIME,
    MS_NODEV,
    MS_NODIRATIME,
    MS_NOEXEC,
    MS_NOSUID,
    MS_PRIVATE,
    MS_RDONLY,
    MS_REC,
    MS_RELATIME,
    MS_REMOUNT,
    NEW_NAMESPACES,
    make_root,
    mount,
    unshare,
)

USER = 1000  # of programs, as they see it
NOBODY = 65534  # of programs, as the machine sees it, where root starts them
ROOT = "/sys"  # where the new root is built; of the folder that is there nothing is needed
FILES = 10_000  # that programs may have
DEVICES = ("null", "zero", "full", "random", "urandom")
FLAGS = {
    "ro": MS_RDONLY,
    "nosuid": MS_NOSUID,
    "nodev": MS_NODEV,
    "noexec": MS_NOEXEC,
    "noatime": MS_NOATIME,
    "nodiratime": MS_NODIRATIME,
    "relatime": MS_RELATIME,
}


def main(setup: dict[str, Any]) -> NoReturn:
    """Enter new namespaces and become the supervisor.

    setup: as of `supervisor.main`, save of users; "visible": folders and files that programs can
    read, "links": paths that lead elsewhere. Where the machine does not let it, {"failed": why} is
    sent and the process ends.
    """
    root = os.getuid() == 0
    try:
        _enter(root)
        child = os.fork()
    except OSError as error:
        _fail(error)
    if child:
        # The owner must see the end of the supervisor's output, and the supervisor that of its input.
        null = os.open("/dev/null", os.O_RDWR)
        os.dup2(null, 0)
        os.dup2(null, 1)
        _, status = os.waitpid(child, 0)
        os._exit(status != 0)
    die_with_parent()
    try:
        _build(setup["visible"], setup["links"], setup["limits"]["disk_mib"])
    except OSError as error:
        _fail(error)
    user = {"user": USER, "ours": 0} if root else {"user": None, "ours": 2}
    supervise({**setup, **user})


def _fail(error: OSError) -> NoReturn:
    send(1, {"failed": str(error)})
    os._exit(1)


def _enter(root: bool) -> None:
    user, group = os.getuid(), os.getgid()
    if not root:
        unshare(NEW_NAMESPACES)
        _tell("/proc/self/setgroups", "deny")
        _tell("/proc/self/uid_map", f"{USER} {user} 1")
        _tell("/proc/self/gid_map", f"{USER} {group} 1")
        return
    # Two users have to be named from outside of the new namespace: by a process that stays there.
    entered, done = os.pipe(), os.pipe()
    pid = os.getpid()
    helper = os.fork()
    if helper == 0:
        os.close(entered[1])
        os.read(entered[0], 1)
        try:
            for kind in ("uid", "gid"):
                _tell(f"/proc/{pid}/{kind}_map", f"0 0 1\n{USER} {NOBODY} 1")
        except OSError as error:
            os.write(done[1], str(error).encode())
        os._exit(0)
    os.close(done[1])
    try:
        unshare(NEW_NAMESPACES)
    finally:
        os.close(entered[1])
        problem = os.read(done[0], 1000).decode()
        os.waitpid(helper, 0)
    if problem:
        raise OSError(0, f"the users of the sandbox could not be named: {problem}")


def _tell(file: str, text: str) -> None:
    with open(file, "w") as opened:
        opened.write(text)


def _build(visible: list[str], links: dict[str, str], disk: int) -> None:
    """Make the root that programs see, of folders that stand at their own paths, read-only."""
    mount(None, "/", None, MS_REC | MS_PRIVATE)
    mount("sandbox", ROOT, "tmpfs", MS_NOSUID | MS_NODEV, "size=1m,mode=755")
    inside = [path for path in visible if path.startswith("/tmp/")]  # of the folder of their own
    for path in visible:
        if path not in inside:
            _show(path)
    for path, target in links.items():
        os.makedirs(os.path.dirname(f"{ROOT}{path}"), exist_ok=True)
        os.symlink(target, f"{ROOT}{path}")
    for folder in ("proc", "dev", "tmp"):
        os.makedirs(f"{ROOT}/{folder}", exist_ok=True)
    for device in DEVICES:
        _bind(f"/dev/{device}", f"{ROOT}/dev/{device}")
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        os.symlink(f"/proc/self/fd/{number}", f"{ROOT}/dev/{name}")
    os.symlink("/proc/self/fd", f"{ROOT}/dev/fd")
    os.symlink("/tmp", f"{ROOT}/dev/shm")
    for point, flags in list(_mounts()):
        _remount(point, flags | MS_RDONLY | MS_NOSUID)
    mount("proc", f"{ROOT}/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    mount(
        "tmp",
        f"{ROOT}/tmp",
        "tmpfs",
        MS_NOSUID | MS_NODEV,
        f"size={disk}m,nr_inodes={FILES},mode=1777",
    )
    for path in inside:
        _show(path)
    places = tuple(f"{ROOT}{path}" for path in inside)
    for point, flags in list(_mounts()):
        if point.startswith(places):
            _remount(point, flags | MS_RDONLY | MS_NOSUID)
    make_root(ROOT)
    socket.sethostname("sandbox")
    with contextlib.suppress(OSError):  # the filter of system calls refuses them too
        _tell("/proc/sys/user/max_user_namespaces", "0")
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def _show(path: str) -> None:
    """Put what is at a path there in the new root, with the folders above it; a link as a link."""
    if not os.path.lexists(path):
        return
    place = f"{ROOT}{path}"
    os.makedirs(os.path.dirname(place), exist_ok=True)
    if os.path.islink(path):
        if not os.path.lexists(place):
            os.symlink(os.readlink(path), place)
    else:
        _bind(path, place)


def _bind(path: str, place: str) -> None:
    if os.path.isdir(path):
        os.makedirs(place, exist_ok=True)
    else:
        with open(place, "x"):
            pass
    mount(path, place, None, MS_BIND | MS_REC)


def _mounts() -> Iterator[tuple[str, int]]:
    """Mount points of the new root with their flags, the root's own first."""
    ours: set[str] = set()  # ids
    with open("/proc/self/mountinfo") as file:
        lines = [line.split() for line in file]
    newest = max(n for n, fields in enumerate(lines) if fields[4] == ROOT)  # over what was there
    for number, (id, above, _, _, place, words, *_rest) in enumerate(lines):
        if number == newest or above in ours:
            ours.add(id)
            point = place.encode().decode("unicode_escape").encode("latin-1").decode()
            yield point, sum(FLAGS.get(word, 0) for word in words.split(","))


def _remount(point: str, flags: int) -> None:
    mount(None, point, None, MS_REMOUNT | MS_BIND | flags)
