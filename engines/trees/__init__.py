"""Tree rollouts: how the completions of a prompt branch, and their nodes in the store."""
