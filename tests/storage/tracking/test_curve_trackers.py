"""What Weights & Biases, Trackio and TensorBoard keep of a run, read back from their own files."""

from __future__ import annotations
