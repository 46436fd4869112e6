"""Runs that go on from earlier ones: where they begin."""

from typing import Literal

CONTINUE_FROM = r"^(models:/[^@/\s]+@[^@/\s]+|[A-Za-z0-9][A-Za-z0-9._-]*(@[1-9][0-9]*)?)$"

ContinueState = Literal["weights", "trainer"]
ContinueData = Literal["unseen", "cursor", "restart"]
