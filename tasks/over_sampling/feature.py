"""What more groups under way than a step waits for add to a run."""

from tasks.over_sampling.drawing import to_draw
from tasks.over_sampling.groups import finished_groups
from tasks.run.features import Feature

FEATURE = Feature(draw=to_draw, rollout=finished_groups)
