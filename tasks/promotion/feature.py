"""What a promotion adds to a run: after its last step the policy is judged, and an alias may move."""

from __future__ import annotations

from tasks.promotion.judging import judge_policy
from tasks.promotion.listener import listen
from tasks.run.features import Feature

FEATURE = Feature(after_steps=judge_policy, listen=listen)
