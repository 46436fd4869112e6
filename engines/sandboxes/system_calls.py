"""Calls of Linux that Python has no names for: namespaces, mounts, and a filter of system calls.

Constants are those of linux/sched.h, mount.h, prctl.h, seccomp.h, bpf_common.h and the tables of
system calls. Loaded within the sandbox: only the standard library is imported.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct

from engines.processes.parent_death import prctl

CLONE_NEWNS = 0x00020000
CLONE_NEWCGROUP = 0x02000000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000
NEW_NAMESPACES = (
    CLONE_NEWNS
    | CLONE_NEWCGROUP
    | CLONE_NEWUTS
    | CLONE_NEWIPC
    | CLONE_NEWUSER
    | CLONE_NEWPID
    | CLONE_NEWNET
)

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC = 1, 2, 4, 8
MS_REMOUNT, MS_NOATIME, MS_NODIRATIME = 32, 1024, 2048
MS_BIND, MS_REC, MS_PRIVATE, MS_RELATIME = 4096, 16384, 1 << 18, 1 << 21
MNT_DETACH = 2

PR_SET_DUMPABLE = 4
PR_SET_NO_NEW_PRIVS = 38
_PR_SET_SECCOMP = 22
_SECCOMP_MODE_FILTER = 2

_ALLOW, _KILL = 0x7FFF0000, 0x80000000
_REFUSE = 0x00050000  # with the error's number
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
# Offsets in struct seccomp_data; of arguments the low half, all that the kernel reads of an int.
_NR, _ARCH, _FIRST_ARGUMENT, _THIRD_ARGUMENT = 0, 4, 16, 32
_X32 = 0x40000000  # calls of another ABI of x86_64, under numbers of their own

# Families of sockets that programs may have: those that a network namespace holds. Others reach the
# machine's host (AF_VSOCK) or are a larger part of the kernel than a program needs (AF_ALG). Of
# netlink the routes, protocol 0, which getaddrinfo and if_nameindex of the C library ask.
_AF_UNIX, _AF_INET, _AF_INET6, _AF_NETLINK, _NETLINK_ROUTE = 1, 2, 10, 16, 0

# By machine: its name in the filter, clone, clone3, prlimit64, socket and socketpair, and the calls
# that are refused. Those give memory that no limit and no process's size shows (memfd_create, shmget
# and its kin), reach into other processes, make what the filter would refuse (io_uring_setup), or
# are a larger part of the kernel than a program needs. There is no socketcall: it is of 32-bit
# programs, which are another machine to the filter, and are killed.
_MACHINES: dict[str, tuple[int, int, int, int, tuple[int, int], dict[str, int]]] = {
    "x86_64": (
        0xC000003E,
        56,
        435,
        302,
        (41, 53),
        {
            "memfd_create": 319,
            "memfd_secret": 447,
            "shmget": 29,
            "msgget": 68,
            "semget": 64,
            "mq_open": 240,
            "unshare": 272,
            "setns": 308,
            "mount": 165,
            "umount2": 166,
            "pivot_root": 155,
            "fsopen": 430,
            "open_tree": 428,
            "move_mount": 429,
            "mount_setattr": 442,
            "open_by_handle_at": 304,
            "ptrace": 101,
            "process_vm_readv": 310,
            "process_vm_writev": 311,
            "pidfd_getfd": 438,
            "kcmp": 312,
            "bpf": 321,
            "perf_event_open": 298,
            "userfaultfd": 323,
            "io_uring_setup": 425,
            "add_key": 248,
            "request_key": 249,
            "keyctl": 250,
            "kexec_load": 246,
        },
    ),
    "aarch64": (
        0xC00000B7,
        220,
        435,
        261,
        (198, 199),
        {
            "memfd_create": 279,
            "memfd_secret": 447,
            "shmget": 194,
            "msgget": 186,
            "semget": 190,
            "mq_open": 180,
            "unshare": 97,
            "setns": 268,
            "mount": 40,
            "umount2": 39,
            "pivot_root": 41,
            "fsopen": 430,
            "open_tree": 428,
            "move_mount": 429,
            "mount_setattr": 442,
            "open_by_handle_at": 265,
            "ptrace": 117,
            "process_vm_readv": 270,
            "process_vm_writev": 271,
            "pidfd_getfd": 438,
            "kcmp": 272,
            "bpf": 280,
            "perf_event_open": 241,
            "userfaultfd": 282,
            "io_uring_setup": 425,
            "add_key": 217,
            "request_key": 218,
            "keyctl": 219,
            "kexec_load": 104,
        },
    ),
}
MACHINES = tuple(_MACHINES)  # on which programs can be filtered


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_void_p)]


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def unshare(flags: int) -> None:
    """Move this process into new namespaces. OSError where the machine does not let it."""
    _check(_libc().unshare(flags), "unshare")


def mount(source: str | None, target: str, kind: str | None, flags: int, options: str = "") -> None:
    """mount(2); OSError with both paths."""
    arguments = [None if text is None else os.fsencode(text) for text in (source, target, kind)]
    result = _libc().mount(*arguments, ctypes.c_ulong(flags), options.encode())
    _check(result, f"mount {source or kind or ''} on {target}")


def make_root(folder: str) -> None:
    """Make a mount the root of this process and let go of the old one."""
    os.chdir(folder)
    libc = _libc()
    _check(libc.pivot_root(b".", b"."), f"pivot_root {folder}")
    _check(libc.umount2(b".", MNT_DETACH), "umount of the old root")
    os.chdir("/")


def forbid_new_rights() -> None:
    """Have no program that this process starts gain rights by being started."""
    prctl(PR_SET_NO_NEW_PRIVS, 1)


def hide_memory() -> None:
    """Let no other process of the same user look into this one."""
    prctl(PR_SET_DUMPABLE, 0)


def is_hidden(user: int | None) -> bool:
    """Whether a child, of that user or of this process's own, cannot look into this one; it is tried.

    True for root that stays root, who may.
    """
    if user is None and os.geteuid() == 0:
        return True
    pid = os.fork()
    if pid == 0:
        seen = 0
        try:
            if user is not None:
                os.setresuid(user, user, user)
            with open(f"/proc/{os.getppid()}/environ", "rb"):
                seen = 1
        except OSError:
            seen = 0
        finally:
            os._exit(seen)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def filter_system_calls() -> None:
    """Refuse, from now on and in all that this process starts, what a program has no use for.

    Also limits set on another process, namespaces made by clone, and sockets of other families than
    Unix, IPv4, IPv6 and netlink's routes; clone3, whose flags a filter cannot see, is said not to
    exist, upon which the C library takes clone. OSError if it cannot be set. After
    `forbid_new_rights`.
    """
    architecture, clone, clone3, prlimit, sockets, refused = _MACHINES[os.uname().machine]
    steps: list[tuple[int, int, int, int]] = [  # code, skipped if true, skipped if false, operand
        (_LOAD, 0, 0, _ARCH),
        (_EQUAL, 1, 0, architecture),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NR),
        (_AT_LEAST, 0, 1, _X32),
        (_RETURN, 0, 0, _REFUSE | errno.ENOSYS),
        (_EQUAL, 0, 1, clone3),
        (_RETURN, 0, 0, _REFUSE | errno.ENOSYS),
    ]
    for number in refused.values():
        steps += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _REFUSE | errno.EPERM)]
    steps += [
        (_EQUAL, 0, 4, clone),
        (_LOAD, 0, 0, _FIRST_ARGUMENT),
        (_ANY_BIT, 0, 1, NEW_NAMESPACES),
        (_RETURN, 0, 0, _REFUSE | errno.EPERM),
        (_RETURN, 0, 0, _ALLOW),
        (_EQUAL, 0, 4, prlimit),
        (_LOAD, 0, 0, _FIRST_ARGUMENT),
        (_EQUAL, 1, 0, 0),
        (_RETURN, 0, 0, _REFUSE | errno.EPERM),
        (_RETURN, 0, 0, _ALLOW),
        (_EQUAL, 1, 0, sockets[0]),
        (_EQUAL, 0, 8, sockets[1]),
        (_LOAD, 0, 0, _FIRST_ARGUMENT),
        (_EQUAL, 6, 0, _AF_UNIX),
        (_EQUAL, 5, 0, _AF_INET),
        (_EQUAL, 4, 0, _AF_INET6),
        (_EQUAL, 0, 2, _AF_NETLINK),
        (_LOAD, 0, 0, _THIRD_ARGUMENT),
        (_EQUAL, 1, 0, _NETLINK_ROUTE),
        (_RETURN, 0, 0, _REFUSE | errno.EPERM),
        (_RETURN, 0, 0, _ALLOW),
    ]
    packed = b"".join(struct.pack("HBBI", *step) for step in steps)
    code = ctypes.create_string_buffer(packed, len(packed))
    program = _Program(len(steps), ctypes.addressof(code))
    result = _libc().prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0)
    _check(result, "a filter of system calls")
