"""Policies that look at images and write action tokens, in the form of OpenVLA's checkpoints."""
