"""What a process sets right in its environment before anything else reads it.

Its children take it over. Only the standard library is used here.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import stat
import sys
import tempfile
import traceback
from pathlib import Path
from types import TracebackType

from configs.environment import cache_folder
from configs.terminal_text import print_text

LOOPBACK = ("localhost", "127.0.0.1", "::1", "0.0.0.0")
# Bytes of TMPDIR. The address of a socket has room for 107: the folder of a cluster takes 17 of them,
# what multiprocessing, ZeroMQ or a user's code makes in it up to 40.
LONGEST_TMPDIR = 48
SHORT_FOLDERS = ("/tmp", "/var/tmp", "/dev/shm")


def private_folder(folder: Path) -> Path:
    """A folder that only this user can open, made where there is none; returns it.

    Raises OSError where it is a link or somebody else's, or where others could have put files into
    it or could put another one in its place. One that others could only read is closed to them.
    """
    folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    above = folder.parent.stat()
    if above.st_mode & stat.S_IWOTH and not above.st_mode & stat.S_ISVTX:
        raise PermissionError(f"{folder.parent} can be written by everyone")
    with contextlib.suppress(FileExistsError):
        os.mkdir(folder, 0o700)
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        status = os.fstat(handle)
        if status.st_uid != os.getuid():
            raise PermissionError(f"{folder} belongs to the user with the number {status.st_uid}")
        # A group with the user's own number has one member: many systems make folders writable by it.
        group = 0 if status.st_gid == status.st_uid else stat.S_IWGRP
        if status.st_mode & (group | stat.S_IWOTH):
            raise PermissionError(f"{folder} can be written by others")
        if status.st_mode & 0o077:
            os.fchmod(handle, 0o700)
    finally:
        os.close(handle)
    return folder


def machine_folder(name: str, place: str | None = None) -> Path:
    """A folder of this user's on this machine's own disk, the same for all processes.

    It is below refrain-UID in the folder of temporary files, or in `place`. Where that is somebody
    else's it is a new one, which others do not find.
    """
    place = tempfile.gettempdir() if place is None else place
    try:
        return private_folder(private_folder(Path(place, f"refrain-{os.getuid()}")) / name)
    except OSError:
        return private_folder(Path(tempfile.mkdtemp(prefix="refrain-", dir=place), name))


def begin_process() -> None:
    """Set proxies, certificates and the folder of temporary files right. It may be done again."""
    tell_errors_safely()
    past_proxies()
    drop_unusable_certificates()
    shorten_temporary_folder()
    keep_compiled_code()


def close_to_others() -> None:
    """What this process and its children make from now on can be opened by this user alone."""
    os.umask(os.umask(0o077) | 0o077)


def close_folder(folder: Path) -> None:
    """Close a run's own folder to others where it is there, and is this user's.

    One that was given to a group (the set-group-ID bit) stays as it is.
    """
    with contextlib.suppress(FileNotFoundError):
        status = folder.lstat()
        is_user_folder = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
        if is_user_folder and not status.st_mode & stat.S_ISGID and status.st_mode & 0o077:
            folder.chmod(0o700)


def tell_errors_safely() -> None:
    """Have a traceback that ends the program obey nothing on a terminal: it may quote a model."""

    def told(kind: type[BaseException], error: BaseException, at: TracebackType | None) -> None:
        print_text("".join(traceback.format_exception(kind, error, at)), error=True, end="")

    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = told


def past_proxies() -> None:
    """Have libraries reach this machine by no proxy, whatever proxies the environment names.

    What else NO_PROXY and no_proxy list stays. Some libraries read the one, some the other.
    """
    listed = {name: os.environ.get(name) for name in ("NO_PROXY", "no_proxy")}
    other = {"NO_PROXY": listed["no_proxy"], "no_proxy": listed["NO_PROXY"]}
    for name, value in listed.items():
        hosts = [host.strip() for host in (value or other[name] or "").split(",") if host.strip()]
        if "*" not in hosts:
            names = [host for host in (*LOOPBACK, socket.gethostname()) if host not in hosts]
            os.environ[name] = ",".join([*hosts, *names])


def drop_unusable_certificates() -> None:
    """Leave SSL_CERT_FILE out, and say so, where it names no file of certificates.

    httpx reads it for every client, those that speak to this machine without TLS too.
    """
    file = os.environ.get("SSL_CERT_FILE")
    if not file:
        return
    import ssl  # late: seldom needed

    try:
        ssl.create_default_context(cafile=file)
    except OSError as error:
        del os.environ["SSL_CERT_FILE"]
        why = error.strerror or error.args[-1]
        print_text(
            f"SSL_CERT_FILE = {file} is no file of certificates ({why}) and is left out. "
            "Set it to one, or unset it.",
            error=True,
        )


def shorten_temporary_folder() -> None:
    """Call a folder of temporary files with a long path by a short one, a link to it.

    The address of a Unix socket has room for 107 bytes, and jobs of a cluster often have a long
    TMPDIR. The link lies in a folder that is this user's alone, has one name for each folder that it
    leads to, and stays: whoever needs it may outlive this process. ValueError, in one sentence, where
    no link can be made.
    """
    folder = tempfile.gettempdir()
    if len(os.fsencode(folder)) <= LONGEST_TMPDIR:
        return
    digest = hashlib.sha256(os.fsencode(folder)).hexdigest()[:12]
    for place in filter(os.path.isdir, SHORT_FOLDERS):
        with contextlib.suppress(OSError):
            parent = private_folder(Path(place, f"refrain-{os.getuid()}"))
            for old in parent.iterdir():
                if old.is_symlink() and not old.exists():  # of a job that is over
                    old.unlink(missing_ok=True)
            link = parent / digest
            with contextlib.suppress(FileExistsError):
                link.symlink_to(folder)
            if os.readlink(link) == folder:
                os.environ["TMPDIR"] = tempfile.tempdir = str(link)
                return
    raise ValueError(
        f"TMPDIR = {folder} is {len(os.fsencode(folder))} bytes long, too long for sockets in it, "
        f"and no link to it can be made in {', '.join(SHORT_FOLDERS)}. Set TMPDIR to a folder of at "
        f"most {LONGEST_TMPDIR} bytes."
    )


def keep_compiled_code() -> None:
    """Have torch keep the code that it has compiled where only this user can put any.

    By itself it takes a folder of temporary files whose name can be guessed, and loads what is there.
    """
    if "TORCHINDUCTOR_CACHE_DIR" in os.environ:
        return
    try:
        folder = private_folder(private_folder(cache_folder()) / "torchinductor")
    except (OSError, RuntimeError):  # no cache folder, or no home that it could be in
        folder = machine_folder("torchinductor")
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)
