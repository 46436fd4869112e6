"""Encoders of what episodes see, and rewards for progress by their embeddings."""
