"""Text of others on its way to a terminal: of models, environments, data, user code, other machines.

A terminal obeys control characters: they clear the screen, write the clipboard (OSC 52), show links
that lead elsewhere. Whatever such text may stand in goes out by `print_text`, or by
tasks/commands/command.py's console, and never by `print`.
"""

import json
import re
import sys
from collections.abc import Callable
from typing import TextIO

# All that a terminal may obey, C1 too, but tab and newline; what reorders the text around it
# (https://trojansource.codes) or ends a line unseen; halves of surrogate pairs, which are no text.
CONTROL = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff"
    r"\U000e0000-\U000e007f]"
)
COLOURS = re.compile(r"\x1b\[[0-9;]*m")


def terminal_text(text: object) -> str:
    r"""Text with each control character written out, such as \x1b or \u202e."""
    return CONTROL.sub(_written_out, str(text))


def _written_out(match: re.Match[str]) -> str:
    code = ord(match[0])
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def without_colours(text: str) -> str:
    """Text of a log without the colours that libraries print."""
    return COLOURS.sub("", text)


def print_text(*parts: object, error: bool = False, end: str = "\n", flush: bool = False) -> None:
    """Print text of whatever origin; `error`: to standard error."""
    stream: TextIO = sys.stderr if error else sys.stdout
    print(*map(terminal_text, parts), file=stream, end=end, flush=flush)


def json_text(record: object, default: Callable[[object], object] | None = None) -> str:
    """A record as JSON, every control character in it escaped as JSON does."""
    return json.dumps(record, indent=1, default=default).replace("\x7f", "\\u007f")


def bytes_text(count: float) -> str:
    """Bytes for people."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def memory_text(count: float) -> str:
    """Bytes of memory in GiB, below one of those in MiB."""
    return f"{count / 2**30:,.1f} GiB" if count >= 2**30 else f"{count / 2**20:,.0f} MiB"
