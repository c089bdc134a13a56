"""Split-KV: how the keys of one sequence are divided among programs.

A split follows from a sequence's own length, so a row's sum never depends on the rest of the batch.
Kernels have twins of `ranges`: plugins/attention/triton.py and plugins/paged_attention/context.cuh.
"""

from dataclasses import dataclass


def first_seen(position: int, window: int, *, chunked: bool) -> int:
    """The first key that the token at a position sees.

    Args:
        window: keys that it sees, its own included; 0: all.
        chunked: it sees those of its chunk of `window` positions instead (Llama 4).
    """
    if not window:
        return 0
    return position - position % window if chunked else max(0, position - window + 1)


@dataclass(frozen=True)
class SplitKv:
    """The splits of one family of kernels."""

    keys: int
    """Keys of the shortest split; a shorter context is a single split."""
    step: int
    """The length of a longer split is a multiple of this."""
    alignment: int
    """With a window, the first key is rounded down to a multiple of this."""
    max_splits: int
    """Splits of the longest context, whose splits are longer."""

    def ranges(
        self, context: int, window: int, max_splits: int, *, chunked: bool = False
    ) -> list[tuple[int, int]]:
        """[begin, end) of the keys of each split, for a sequence whose last token alone is new.

        Args:
            context: keys of the sequence, the new one's among them.
            window: keys that a token sees; 0: all.
            max_splits: of this engine, at most those of the family.
            chunked: see `first_seen`.
        """
        first = first_seen(context - 1, window, chunked=chunked) // self.alignment * self.alignment
        steps = -(-(context - first) // (max_splits * self.step))
        length = max(self.keys, steps * self.step)
        return [(begin, min(begin + length, context)) for begin in range(first, context, length)]

    def most(self, max_seq_len: int, window: int = 0) -> int:
        """Splits of the longest sequence."""
        keys = min(max_seq_len, window + self.alignment - 1) if window else max_seq_len
        return min(self.max_splits, -(-keys // self.keys))


CUDA = SplitKv(keys=256, step=256, alignment=16, max_splits=64)
"""Of split.cu. Aligned to the keys that one instruction of the tensor cores multiplies. A grid of
a captured graph grows with `most` of its bucket's longest context, so empty programs are few."""
TENSORRT = SplitKv(keys=256, step=64, alignment=64, max_splits=32)
"""Of TensorRT's plugins. Aligned to the keys that any tile multiplies at once. With 8 KV heads 32
splits are 256 programs for one sequence, more than a GPU has SMs; the partial sums, which TensorRT
allocates for the longest context, take as many times the memory of q."""
