"""The policy on its devices: sharding, loading, attention, LoRA, float32 masters."""
