"""From stored samples to micro-batches: plan, packing, reading ahead, shared prefixes."""
