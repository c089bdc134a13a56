"""Into which pieces a context falls whose keys are shared out over programs.

It follows from a sequence's own length, so a row's sum never depends on the rest of the batch. The
kernels' twin of `pieces` is in plugins/cuda/attention_tiles.py.
"""

PIECE_KEYS = 256
"""The shortest piece: a shorter context is one."""
PIECE_ALIGNMENT = 64
"""Where a piece begins is a multiple of it: that of the keys which any tile multiplies at once."""
MAX_PIECES = 32
"""The longest context falls into so many, each of more keys. With 8 KV heads that is 256 programs
for one sequence, more than a GPU has SMs; the partial sums take as many times the memory of q."""


def pieces(context: int, window: int, max_pieces: int) -> list[tuple[int, int]]:
    """[begin, end) of the keys of each piece, for a sequence whose last token alone is new.

    Args:
        context: keys of the sequence, the new one's among them.
        window: keys that a token sees; 0: all.
    """
    first = max(0, context - window) // PIECE_ALIGNMENT * PIECE_ALIGNMENT if window else 0
    blocks = -(-(context - first) // (max_pieces * PIECE_ALIGNMENT))
    length = max(PIECE_KEYS, blocks * PIECE_ALIGNMENT)
    return [(begin, min(begin + length, context)) for begin in range(first, context, length)]


def most_pieces(max_seq_len: int, window: int) -> int:
    """What the longest sequence falls into."""
    keys = min(max_seq_len, window + PIECE_ALIGNMENT - 1) if window else max_seq_len
    return min(MAX_PIECES, -(-keys // PIECE_KEYS))
