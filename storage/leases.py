"""Placeholder until the storage branch lands."""

from __future__ import annotations

from storage.runs import RunStore


class RunLease:
    epoch = 1

    @classmethod
    def acquire(cls, files: RunStore, owner: str, ttl: float) -> RunLease:
        return cls()

    def renew(self) -> None: ...

    def release(self) -> None: ...
