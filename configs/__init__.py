"""Typed settings and recipes. Imports nothing else of Refrain, and neither torch nor vllm."""
