"""trtc::attention_split as an ahead-of-time TensorRT plugin: partial sums are further outputs."""

from typing import Any

from trtc.plugins.attention_pieces import PIECE_KEYS
from trtc.plugins.cuda.qdp import Kernels, dtype_name, launch_params


def register(trtp: Any, kernels: Kernels, *, lazy: bool = False) -> None:
    """Make the plugin known to TensorRT, once a process.

    Args:
        trtp: the module `tensorrt.plugin`.
        lazy: leave TensorRT's registry alone (tests without the library).
    """
    Desc = trtp.TensorDesc

    @trtp.register("trtc::attention_split", lazy_register=lazy)
    def describe(
        q: Desc,
        pool: Desc,
        query_start: Desc,
        context_lens: Desc,
        page_table: Desc,
        k_scale: Desc,
        v_scale: Desc,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        scale: float,
        window: int,
        softcap: float,
        pieces: int,
        out_dtype: str,
    ) -> tuple[Desc, Desc, Desc]:
        sequences, rows = context_lens.shape_expr[0], pieces * num_heads
        partial = trtp.from_shape_expr((sequences, rows * head_dim), k_scale.dtype)
        stats = trtp.from_shape_expr((sequences, rows * 2), k_scale.dtype)
        return q.like(), partial, stats

    @trtp.autotune("trtc::attention_split")
    def autotune(
        q: Desc,
        pool: Desc,
        query_start: Desc,
        context_lens: Desc,
        page_table: Desc,
        k_scale: Desc,
        v_scale: Desc,
        outputs: tuple[Desc, Desc, Desc],
    ) -> list[trtp.AutoTuneCombination]:
        combination = trtp.AutoTuneCombination()
        combination.pos([0, 7], kernels.types("attention_split", "q"))
        combination.pos([1], kernels.types("attention_split", "pool"))
        combination.pos([2, 3, 4], "INT32")
        combination.pos([5, 6, 8, 9], "FP32")
        combination.tactics(kernels.tactics("attention_split"))
        return [combination]

    # All attributes, in order: TensorRT 11.4 accepts fewer here and then passes all of them.
    @trtp.aot_impl("trtc::attention_split")
    def implement(
        q: Desc,
        pool: Desc,
        query_start: Desc,
        context_lens: Desc,
        page_table: Desc,
        k_scale: Desc,
        v_scale: Desc,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        scale: float,
        window: int,
        softcap: float,
        pieces: int,
        out_dtype: str,
        outputs: tuple[Desc, Desc, Desc],
        tactic: int,
    ) -> tuple[str | bytes, str | bytes, trtp.KernelLaunchParams, trtp.SymExprs]:
        kernel = kernels.find(
            "attention_split",
            {"q": dtype_name(q), "pool": dtype_name(pool)},
            {
                "num_heads": num_heads,
                "num_kv_heads": num_kv_heads,
                "head_dim": head_dim,
                "scale": scale,
                "window": window,
                "softcap": softcap,
                "pieces": pieces,
            },
            tactic,
        )
        sequences, width = context_lens.shape_expr[0], page_table.shape_expr[1]
        tiles = trtp.cdiv(q.shape_expr[0], kernel.rows) + sequences
        # A step whose page table is narrow has no long context: fewer programs have nothing to do.
        most = trtp.min(pieces, trtp.cdiv(width * pool.shape_expr[2], PIECE_KEYS))
        scalars = trtp.SymIntExprs(2)
        scalars[0] = trtp.SymInt32(sequences)
        scalars[1] = trtp.SymInt32(width)
        params = launch_params(trtp, kernel, (tiles, most * num_kv_heads))
        return kernel.entry, kernels.read(kernel.ptx), params, scalars
