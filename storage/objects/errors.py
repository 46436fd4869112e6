"""What can go wrong with a store, by name, and trying again what may pass.

Every message is one sentence that names the object.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from typing import TypeVar

log = logging.getLogger(__name__)

ATTEMPTS = 6
FIRST_DELAY = 0.1  # seconds; doubles with each attempt, times a random factor in [0.5, 1.5)
LONGEST_DELAY = 10.0  # seconds

T = TypeVar("T")


class StoreError(RuntimeError):
    """The store refused or failed: no permission, no space, a bad answer."""


class StoreUnavailable(StoreError):
    """The store still failed after the retries: the cause may pass, so a task may be retried."""


class ObjectMissing(StoreError):
    """No object is stored under the key."""


class ObjectDamaged(StoreError):
    """An object's bytes are not those that were written, or not those that the ref names."""


class Conflict(StoreError):
    """A compare-and-swap found another value than the one expected."""


class VersionTaken(StoreError):
    """Other weights are published under a policy version's name."""


class OutOfAttempts(Exception):
    """Every attempt failed with an error that may pass; `__cause__` is the last one."""


def retry(what: str, attempt: Callable[[int], T], transient: Callable[[BaseException], bool]) -> T:
    """`attempt(number)` until it returns, at most ATTEMPTS times (six take 1.5 to 4.7 seconds).

    An error that is not `transient` passes through at once; after the last attempt
    OutOfAttempts is raised from the transient one.
    """
    delay = FIRST_DELAY
    for number in range(ATTEMPTS):
        try:
            return attempt(number)
        except Exception as error:
            if not transient(error):
                raise
            if number == ATTEMPTS - 1:
                raise OutOfAttempts(f"{what} failed {ATTEMPTS} times") from error
            log.warning("%s failed, attempt %d of %d: %s", what, number + 1, ATTEMPTS, error)
        time.sleep(min(delay, LONGEST_DELAY) * random.uniform(0.5, 1.5))
        delay *= 2
    raise AssertionError("unreachable")
