"""Programs that mean harm. Each is bounded by itself, so that a failure here would harm no machine.

After each: none of its processes is left, and the same sandbox runs the next program.
"""

from __future__ import annotations

import platform
import socket
import uuid
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from engines.sandboxes.opening import SupervisedSandbox
from engines.sandboxes.protocol import WORK, Executed
from tests.engines.sandboxes.conftest import is_container, python

MARK = f"hostile-{uuid.uuid4().hex}"  # on the command line of each program, and so of its forks


def left() -> list[int]:
    return [p.pid for p in psutil.process_iter(["cmdline"]) if MARK in (p.info["cmdline"] or [])]


@pytest.fixture(autouse=True)
def works_afterwards(sandbox: SupervisedSandbox) -> Iterator[None]:
    yield
    assert left() == []
    assert run(sandbox, "print(6 * 7)").stdout == b"42\n"


def run(sandbox: SupervisedSandbox, code: str, seconds: float = 10.0) -> Executed:
    return sandbox.exec(python(sandbox, code, MARK), timeout=seconds)


def test_a_fork_bomb(sandbox: SupervisedSandbox) -> None:
    ran = run(
        sandbox,
        "import os, time\nmade = 0\n"
        "try:\n"
        "    for made in range(200):\n"
        "        if os.fork() == 0: time.sleep(60); os._exit(0)\n"
        "except OSError as error: print(made, error.errno)",
    )
    made, error = ran.stdout.split()
    assert int(made) <= 16 and error == b"11"  # EAGAIN
    # Each child forks on: at most 2 ** 8 of them, were there no limit.
    spread = run(
        sandbox,
        "import os, time\nfor _ in range(8):\n"
        "    try: os.fork()\n"
        "    except OSError: pass\n"
        "time.sleep(60)",
        seconds=1.0,
    )
    assert spread.cause == "timed_out"


def test_ten_gigabytes_by_one_process_and_by_many(sandbox: SupervisedSandbox) -> None:
    one = run(
        sandbox,
        "kept = []\n"
        "try:\n"
        "    for _ in range(160): kept.append(b'x' * 2**26)\n"
        "except MemoryError: print(len(kept))",
    )
    assert one.cause == "ended" and int(one.stdout) < 3
    # No process of these exceeds the limit; together they have twice as much.
    many = run(
        sandbox,
        "import os, time\nfor _ in range(3): os.fork()\nx = b'x' * (48 * 2**20)\ntime.sleep(60)",
    )
    assert (many.cause, many.signal) == ("out_of_memory", 9)


def test_memory_that_belongs_to_no_process(sandbox: SupervisedSandbox) -> None:
    ran = run(
        sandbox,
        "import ctypes, os\n"
        "try: os.memfd_create('x'); print('made')\n"
        "except OSError as error: print(error.errno)\n"
        "print(ctypes.CDLL(None).shmget(0, 4096, 0o1600))",
    )
    assert ran.stdout.split() == [b"1", b"-1"]  # EPERM


def test_a_disk_that_is_filled(sandbox: SupervisedSandbox) -> None:
    ran = run(
        sandbox,
        "total = 0\n"
        "try:\n"
        "    for name in range(4):\n"
        "        with open(f'/tmp/{name}', 'wb', 0) as file:\n"
        "            for _ in range(7): total += file.write(b'x' * 2**20)\n"
        "except OSError as error: print(total // 2**20, error.errno)",
    )
    assert ran.stdout.split() == [b"8", b"28"] or ran.stdout.split() == [b"7", b"28"]  # ENOSPC
    assert b"File too large" in run(sandbox, "open('/tmp/0', 'wb').truncate(9 * 2**20)").stderr
    for place in ("/", "/usr", "/dev", "/etc"):
        made = run(sandbox, f"open('{place}/made', 'w')")
        assert b"Read-only file system" in made.stderr or b"Permission denied" in made.stderr
    run(
        sandbox,
        "import os\nfor name in os.listdir('/tmp'):\n  if name != 'work': os.remove('/tmp/' + name)",
    )


def test_the_network_and_this_machines_own_services(sandbox: SupervisedSandbox) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with socket.socket(socket.AF_UNIX) as hidden:
            hidden.bind(f"\0{MARK}")  # found by name, not by a file
            hidden.listen()
            ran = run(
                sandbox,
                "import socket\n"
                "def reach(family, address):\n"
                "    try: socket.socket(family).connect(address); print('reached')\n"
                "    except OSError as error: print(type(error).__name__, error.errno)\n"
                f"reach(socket.AF_INET, ('127.0.0.1', {port}))\n"
                "reach(socket.AF_INET, ('192.0.2.1', 80))\n"
                f"reach(socket.AF_UNIX, '\\0{MARK}')\n"
                "print([name for _, name in socket.if_nameindex()])",
            )
    lines = ran.stdout.decode().splitlines()
    unreachable, refused = "OSError 101", "ConnectionRefusedError 111"
    # A container has a loopback device of its own, and nobody there.
    assert lines[0] == unreachable or (is_container(sandbox) and lines[0] == refused)
    assert lines[1:3] == [unreachable, refused]
    assert "'eth0'" not in lines[3] and "'lo'" in lines[3]


def test_sockets_that_no_namespace_holds(sandbox: SupervisedSandbox) -> None:
    """AF_VSOCK (40) reaches the machine's host; the filter itself answers, with EPERM."""
    ran = run(
        sandbox,
        "import ctypes, errno, os, socket\n"
        "libc = ctypes.CDLL(None, use_errno=True)\n"
        "def ask(call, *arguments):\n"
        "    ctypes.set_errno(0)\n"
        "    return 'made' if call(*arguments) >= 0 else errno.errorcode[ctypes.get_errno()]\n"
        "pair = (ctypes.c_int * 2)()\n"
        "for family in range(64):\n"
        "    for kind in (1, 2, 3):\n"
        "        print(family, ask(libc.socket, family, kind, 0),\n"
        "              ask(libc.socketpair, family, kind, 0, pair))\n"
        "for protocol in (4, 9, 12, 15, 16, 21):\n"  # of netlink: diagnoses, audit, netfilter, …
        "    print('netlink', ask(libc.socket, 16, 3, protocol))\n",
    )
    assert ran.cause == "ended", ran.stderr
    for line in ran.stdout.decode().splitlines():
        family, *answers = line.split()
        if family not in ("1", "2", "10", "16"):
            assert set(answers) == {"EPERM"}, line
    assert b"1 made made" in ran.stdout and b"2 made" in ran.stdout


def test_sockets_that_programs_need(sandbox: SupervisedSandbox) -> None:
    ran = run(
        sandbox,
        "import asyncio, socket, socketserver\n"
        "a, b = socket.socketpair(); a.send(b'x'); print(b.recv(1))\n"
        "print(socket.getaddrinfo('127.0.0.1', 80)[0][4], bool(socket.if_nameindex()))\n"
        "print(asyncio.run(asyncio.sleep(0, 'slept')))\n"
        "for family in (socket.AF_INET, socket.AF_INET6):\n"
        "    try: socket.socket(family, socket.SOCK_STREAM).close()\n"
        "    except OSError as error: assert error.errno == 97, error\n"  # a machine without IPv6
        "try: socket.getaddrinfo('localhost', 80)\n"
        "except socket.gaierror: pass\n",
    )
    assert ran.stdout.splitlines() == [b"b'x'", b"('127.0.0.1', 80) True", b"slept"], ran.stderr
    assert (ran.cause, ran.exit_code) == ("ended", 0)


INTEL = pytest.mark.skipif(platform.machine() != "x86_64", reason="other calls of x86_64")


@INTEL
@pytest.mark.parametrize(
    ("number", "code", "signal"),
    [
        # socketcall(SYS_SOCKET, [AF_VSOCK, SOCK_STREAM, 0]) and socket(…) of 32-bit programs: they die.
        ("socketcall", "b8 66000000 bb 01000000 31c9 cd80 c3", 31),
        ("socket of i386", "b8 67010000 bb 28000000 b9 01000000 31d2 cd80 c3", 31),
        ("socket of x32", "b8 29000040 bf 28000000 be 01000000 31d2 0f05 c3", None),
        ("io_uring_setup", "b8 a9010000 bf 01000000 31f6 0f05 c3", None),
        # The kernel reads 32 bits of a family: what stands above them hides nothing.
        ("above", "b8 29000000 48bf 2800000001000000 be 01000000 31d2 0f05 c3", None),
    ],
)
def test_sockets_by_other_doors(
    sandbox: SupervisedSandbox, number: str, code: str, signal: int | None
) -> None:
    ran = run(
        sandbox,
        "import ctypes, mmap\n"
        "page = mmap.mmap(-1, 4096, prot=7)\n"
        f"page.write(bytes.fromhex('{code}'))\n"
        "at = ctypes.addressof(ctypes.c_char.from_buffer(page))\n"
        "print(ctypes.CFUNCTYPE(ctypes.c_long)(at)())\n",
    )
    if signal is not None:
        assert (ran.cause, ran.signal) == ("killed", signal), number
    else:
        refused = b"-38" if "x32" in number else b"-1"  # ENOSYS, EPERM
        assert ran.stdout.strip() == refused, (number, ran.stderr)


def test_sockets_in_a_container(container: SupervisedSandbox) -> None:
    ran = run(
        container,
        "import socket\n"
        "for family in (40, 38, 17, 16, 2):\n"
        "    try: socket.socket(family, socket.SOCK_DGRAM); print('made')\n"
        "    except OSError as error: print(error.errno)\n",
    )
    assert ran.stdout.split() == [b"1", b"1", b"1", b"made", b"made"], ran.stderr


def test_files_and_secrets_of_the_owner(
    sandbox: SupervisedSandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    canary = f"canary-{uuid.uuid4().hex}"
    (tmp_path / "secret").write_text(canary)
    home = Path.home() / f".{MARK}"
    home.write_text(canary)
    try:
        ran = run(
            sandbox,
            "import os, resource\n"
            f"files = ['{tmp_path}/secret', '{home}', '{Path(__file__)}', '/etc/passwd',\n"
            "  '/proc/1/environ', '/proc/1/mem', '/proc/1/root', '/proc/1/cwd', '/proc/1/fd/0']\n"
            "for file in files:\n"
            "    try: open(file, 'rb').read(10); print('read', file)\n"
            "    except OSError: pass\n"
            "for folder, folders, names in os.walk('/'):\n"
            "    folders[:] = [f for f in folders if folder != '/' or f not in ('proc', 'usr')]\n"
            "    folders[:] = [f for f in folders if f != 'lib'  # of the interpreter\n    ]\n"
            f"    if any('{MARK}' in name or name == 'secret' for name in names): print(folder)\n"
            "print(sorted(os.environ), sorted(os.listdir('/proc/self/fd')))",
        )
    finally:
        home.unlink()
    *read, last = ran.stdout.decode().splitlines()
    assert read == (["read /etc/passwd"] if is_container(sandbox) else [])  # the image's
    assert canary not in last and "'0', '1', '2', '3'" in last
    assert "PYTHONPATH" not in last and "USER" not in last


def test_its_parent(sandbox: SupervisedSandbox) -> None:
    ran = run(
        sandbox,
        "import os, resource, signal\n"
        "parent = os.getppid()\n"
        "for number in (9, 15, 19, 11, 2):\n"
        "    try: os.kill(parent, number)\n"
        "    except OSError: pass\n"
        "for what in (resource.RLIMIT_CPU, resource.RLIMIT_NOFILE):\n"
        "    try: resource.prlimit(parent, what, (0, 0)); print('limited')\n"
        "    except OSError: pass\n"
        "try: os.kill(-1, 9)\n"
        "except OSError: pass\n"
        "print(parent)",
    )
    assert ran.stdout == b"1\n"
    alone = run(sandbox, "import os; os.kill(os.getpid(), 9)")
    assert (alone.cause, alone.signal) == ("killed", 9)


def test_a_child_that_would_outlive_it(sandbox: SupervisedSandbox) -> None:
    ran = run(
        sandbox,
        "import os, signal, time\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    if os.fork() == 0:\n"
        "        for number in (1, 2, 15): signal.signal(number, signal.SIG_IGN)\n"
        f"        time.sleep(0.3); open('{WORK}/alive', 'w'); time.sleep(60)\n"
        "    os._exit(0)\n"
        "os.wait(); print('gone')",
    )
    assert (ran.cause, ran.stdout) == ("ended", b"gone\n")
    run(sandbox, "import time; time.sleep(0.5)")
    with pytest.raises(ValueError):
        sandbox.read("alive", 1)


def test_rights_that_it_would_gain(sandbox: SupervisedSandbox) -> None:
    ran = run(
        sandbox,
        "import ctypes, os\n"
        "libc = ctypes.CDLL(None, use_errno=True)\n"
        "print(libc.unshare(0x10000000), libc.mount(b'x', b'/tmp', b'tmpfs', 0, None),\n"
        "      libc.ptrace(16, 1, 0, 0), libc.chroot(b'/tmp'))\n"
        "status = open('/proc/self/status').read()\n"
        "print([l for l in status.splitlines() if l.startswith(('CapEff', 'CapPrm', 'NoNewP'))])\n"
        "print(os.getuid(), libc.setuid(0))",
    )
    assert ran.stdout.decode().splitlines() == [
        "-1 -1 -1 -1",
        "['CapPrm:\\t0000000000000000', 'CapEff:\\t0000000000000000', 'NoNewPrivs:\\t1']",
        ran.stdout.decode().splitlines()[2],
    ]
    assert ran.stdout.decode().splitlines()[2].endswith(" -1")
