"""Units of systemd for commands that run until they are stopped."""

from __future__ import annotations

import getpass
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from configs.overrides import ConfigError

BAD_SETTINGS = 2  # exit code of a command whose words are wrong; to start it again helps nobody
PLAIN = re.compile(r"[\w@+=:,./-]+")


def unit(command: str, words: Sequence[str], lines: Sequence[str]) -> str:
    """The text of a service that runs `refrain COMMAND WORDS` as this user, in this folder.

    It is started again whenever it ends. `lines`: what else its section [Service] says.
    """
    run = [sys.executable, "-m", "flows", command, *words]
    return "\n".join(
        [
            f"# Printed by: refrain {command} --systemd",
            "[Unit]",
            f"Description=Refrain: {command}",
            "Wants=network-online.target",
            "After=network-online.target",
            "StartLimitIntervalSec=0",
            "",
            "[Service]",
            "Type=exec",
            f"User={getpass.getuser()}",
            f"WorkingDirectory={_value(os.getcwd())}",
            f"EnvironmentFile=-/etc/refrain/{command}.env",
            f"ExecStart={' '.join(_word(word) for word in run)}",
            "Restart=always",
            "RestartSec=5",
            f"RestartPreventExitStatus={BAD_SETTINGS}",
            "KillMode=mixed",
            "TimeoutStopSec=60",
            "UMask=0077",
            "NoNewPrivileges=yes",
            "ProtectKernelTunables=yes",
            "ProtectKernelModules=yes",
            "ProtectControlGroups=yes",
            *lines,
            "",
            "[Install]",
            "WantedBy=multi-user.target",
        ]
    )


def writable(folder: Path) -> list[str]:
    """Lines that leave a service one folder to write into, its own temporary files aside."""
    return [
        "PrivateTmp=yes",
        "PrivateDevices=yes",
        "ProtectSystem=strict",
        "CapabilityBoundingSet=",
        "RestrictAddressFamilies=AF_INET AF_INET6 AF_UNIX AF_NETLINK",
        f"ReadWritePaths={_word(str(folder))}",
    ]


def _word(text: str) -> str:
    """A word of a command line; ConfigError for a line break, which no unit can hold."""
    value = _value(text)
    if PLAIN.fullmatch(value):
        return value
    quoted = value.replace("\\", "\\\\").replace('"', '\\"').replace("$", "$$")
    return f'"{quoted}"'


def _value(text: str) -> str:
    if "\n" in text:
        raise ConfigError(f"{text!r} has a line break, which a unit of systemd cannot hold.")
    return text.replace("%", "%%")
