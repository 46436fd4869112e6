"""A real Slurm on this machine: munged, slurmctld and slurmd on loopback, in a folder of their own."""

from __future__ import annotations

import contextlib
import getpass
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from tests.ports import free_ports

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "scancel")
FOLDERS = ("/usr/sbin", "/usr/local/sbin")  # of the daemons; not on everybody's PATH
START_TIMEOUT = 60.0  # seconds until the node is idle

CONFIG = """\
ClusterName=refrain
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmdPort={daemon}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0
SlurmdParameters=config_overrides
JobCompType=jobcomp/none
MailProg=/bin/true
KillWait=5
OverTimeLimit=0
ReturnToService=2
GresTypes=gpu
NodeName={host} NodeAddr=127.0.0.1 CPUs=16 RealMemory=8000 Gres=gpu:4 State=UNKNOWN
PartitionName=main Nodes={host} Default=YES MaxTime=INFINITE State=UP
PartitionName=other Nodes={host} MaxTime=INFINITE State=UP
"""
GPUS = "Name=gpu File={folder}/gpu[0-3]\n"  # names of /dev/null, which Slurm hands out


def program(name: str) -> str | None:
    """Path of one of Slurm's programs."""
    return shutil.which(name) or shutil.which(name, path=os.pathsep.join(FOLDERS))


def missing() -> list[str]:
    """Programs that are not installed."""
    return [name for name in PROGRAMS if program(name) is None]


class Slurm:
    """The running daemons. `environment` makes sbatch and its relatives use them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config = folder / "slurm.conf"
        self._daemons: list[subprocess.Popen[bytes]] = []

    @property
    def environment(self) -> dict[str, str]:
        """What a program that talks to this Slurm needs."""
        return {"SLURM_CONF": str(self.config)}

    def start(self) -> None:
        """Start the daemons and wait until the node takes jobs."""
        for name in ("state", "spool"):
            (self.folder / name).mkdir()
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        ports = free_ports(2)
        self.config.write_text(
            CONFIG.format(
                host=socket.gethostname().partition(".")[0],
                user=getpass.getuser(),
                folder=self.folder,
                controller=ports[0],
                daemon=ports[1],
            )
        )
        (self.folder / "gres.conf").write_text(GPUS.format(folder=self.folder))
        for number in range(4):
            (self.folder / f"gpu{number}").symlink_to(os.devnull)
        files = ["socket", "pid-file", "log-file", "seed-file"]
        paths = [f"--{name}={self.folder}/munge.{name.removesuffix('-file')}" for name in files]
        self._start("munged", "--foreground", "--force", f"--key-file={key}", *paths)
        _until(lambda: (self.folder / "munge.socket").exists(), "munged listens")
        self._start("slurmctld", "-D", "-f", str(self.config))
        self._start("slurmd", "-D", "-f", str(self.config))
        _until(lambda: self.ask("sinfo", "-h", "-o", "%T").startswith("idle"), "the node is idle")

    def _start(self, name: str, *words: str) -> None:
        path = program(name)
        assert path is not None
        with (self.folder / f"{name}.out").open("wb") as log:
            self._daemons.append(
                subprocess.Popen(
                    [path, *words],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                    env={**os.environ, **self.environment},
                )
            )

    def ask(self, *words: str) -> str:
        """What one of Slurm's commands prints; empty while the controller does not answer."""
        done = subprocess.run(
            words,
            env={**os.environ, **self.environment},
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
        return done.stdout

    def jobs(self) -> list[str]:
        """One line for each job or array task that is pending, running or ending."""
        return self.ask("squeue", "-h", "-r", "-o", "%i %j %T").splitlines()

    def clear(self) -> None:
        """Cancel every job."""
        if self.jobs():
            self.ask("scancel", f"--user={getpass.getuser()}")
            with contextlib.suppress(AssertionError):
                _until(lambda: not self.jobs(), "every job has ended", 20.0)

    def stop(self) -> None:
        """Cancel every job and end the daemons."""
        self.clear()
        for daemon in reversed(self._daemons):
            daemon.terminate()
        for daemon in self._daemons:
            with contextlib.suppress(subprocess.TimeoutExpired):
                daemon.wait(10)
            daemon.kill()
            daemon.wait()


@contextlib.contextmanager
def running_slurm(folder: Path) -> Iterator[Slurm]:
    """Slurm for the body."""
    slurm = Slurm(folder)
    try:
        slurm.start()
        yield slurm
    finally:
        slurm.stop()


def _until(done, what: str, timeout: float = START_TIMEOUT) -> None:  # type: ignore[no-untyped-def]
    end = time.monotonic() + timeout
    while not done():
        assert time.monotonic() < end, f"not in {timeout:g} s: {what}"
        time.sleep(0.1)
