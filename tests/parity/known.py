"""Where we differ from the reference on purpose. docs/algorithms.md has the same lines as a table."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Known:
    """One deliberate difference; patterns as in a shell (`*` matches anything)."""

    function: str
    case: str
    output: str
    reason: str  # what the reference does, and what we do instead


KNOWN_DIFFERENCES: tuple[Known, ...] = ()
