"""What trees of completions add to a run."""

from tasks.run.features import Feature
from tasks.trees.roles import TREES

FEATURE = Feature(roles=(TREES,))
