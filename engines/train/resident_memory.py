"""What a rank on a CPU keeps resident beside its tensors; without torch.

glibc's heap (engines/processes/process_setup.py) grows where nothing free is long enough, and what
has grown stays: at most 1 GiB at its end is given back. So the most that a process holds is not the
most that its tensors are at once, and this says how much more. What it was measured against is in
docs/benchmarks.md.
"""

from __future__ import annotations

LIBRARIES = 27 * 2**20  # bytes: what they touch once a rank computes, in the heap and beside it
# oneDNN's compiled products, by which bfloat16 goes on a CPU; it keeps 1,024. Bytes.
PRIMITIVES = 16 * 2**20
FRAGMENTS = 0.2  # of what a forward pass gives out is lost between tensors that stay


def buffer_bytes(layers: int, gathered: int, reduced: int, shards: int) -> int:
    """What the buffers of all layers take, through which FSDP gathers weights and reduces gradients.

    They are as long as a layer, one for the rank's shard and one for the whole, and free most of the
    time. Tensors of the layer settle in them then, so that the next layer's find no room. Gathering
    and reducing use the same; Gloo reduces in a copy.

    Args:
        layers: Of the decoder.
        gathered: Bytes of a layer's weights, whole.
        reduced: Of its gradients in float32, whole; 0: it has none.
        shards: Ranks that share a copy of the model.
    """
    copy = reduced if shards > 1 else 0
    longest = max(gathered, reduced)
    return layers * (longest + longest // shards + copy)


def most_resident(
    peak: int, held: int, passing: dict[str, int], *, forward: int, buffers: int, table: int
) -> int:
    """Bytes of the heap and of mappings at most, free ones among them; without the libraries.

    When the first layer's backward pass is done, the heap still has the room of all activations,
    and beside it the buffers of all layers; then comes the embedding's gradient, for which there is
    nowhere a hole that is long enough.

    Args:
        peak: Of tensors at once; there is never less.
        held: All the time.
        passing: As MemoryPlan has it.
        forward: What the forward passes of all layers give out, whether it is kept or not.
        buffers: See `buffer_bytes`.
        table: The embedding's gradient, its copy in float32, and what is reduced of it.
    """
    busy = max(passing["logits"], passing["one layer"])
    heap = held + passing["gathered"] + passing.get("activations", 0) + busy
    return max(peak, heap + int(FRAGMENTS * forward) + buffers + table)
