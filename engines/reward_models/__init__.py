"""Judges of the run's own: frozen language models that score samples, in rollout engines."""
