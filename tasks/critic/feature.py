"""What a critic adds to a run."""

from tasks.critic.role import CRITIC
from tasks.run.features import Feature

FEATURE = Feature(roles=(CRITIC,))
