"""Sandboxes: where code that a model wrote is run, and what it may use there."""

from typing import Annotated, Literal

from pydantic import Field

from configs.base import Settings

START_SECONDS = 20.0  # deadline of the start of a sandbox of processes
GRACE = 10.0  # seconds beyond a program's deadline until its supervisor counts as lost


class SandboxLimits(Settings):
    """What a program in a sandbox may use. Beyond it, it is stopped or its calls fail."""

    memory_mib: int = Field(
        512, ge=32, description="Memory of all processes of a program together, in MiB."
    )
    processes: int = Field(32, ge=1, description="Processes and threads at once.")
    disk_mib: int = Field(64, ge=1, description="Files that it may write, in MiB; held in memory.")
    output_kib: int = Field(
        256, ge=64, description="Of its output, and of its errors, what is kept, in KiB."
    )
    cpu_seconds: int = Field(20, ge=1, description="CPU time of each of its processes, in seconds.")
    timeout: float = Field(
        30.0, gt=0, description="Deadline of a program, in seconds; all tests of a sample together."
    )

    @property
    def longest_start(self) -> float:
        """Seconds after which one that is not ready, or that does not answer, has failed."""
        return START_SECONDS + 2 * GRACE


class ProcessSandbox(SandboxLimits):
    """Processes in Linux namespaces of their own: no network, no files but the interpreter's."""

    kind: Literal["processes"] = "processes"
    python: str | None = Field(
        None,
        pattern="^/",
        description="Interpreter of the programs, an absolute path; its folder and packages are "
        "visible in the sandbox. None: the one that Refrain's environment was made with, "
        "without that environment's packages.",
    )


class ContainerSandbox(SandboxLimits):
    """Containers of Docker or Podman, started by command."""

    kind: Literal["container"] = "container"
    command: str = Field("docker", min_length=1, description="The program: docker or podman.")
    image: str = Field(
        min_length=1, pattern="^[^-]", description="Image with Python >= 3.10, pulled before."
    )
    python: str = Field("python3", min_length=1, description="Interpreter within the image.")
    runtime: str | None = Field(
        None, description="Runtime of the containers, such as runsc (gVisor). None: the daemon's."
    )
    start_timeout: float = Field(60.0, gt=0, description="Deadline of a start, in seconds.")

    @property
    def longest_start(self) -> float:
        """As above."""
        return self.start_timeout + 2 * GRACE


SandboxConfig = Annotated[ProcessSandbox | ContainerSandbox, Field(discriminator="kind")]
