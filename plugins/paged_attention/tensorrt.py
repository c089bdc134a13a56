"""trtc::paged_attention as an ahead-of-time TensorRT plugin around the CUDA kernel."""

from typing import Any

from trtc.plugins.cuda.qdp import Kernels, dtype_name, launch_params


def register(trtp: Any, kernels: Kernels, *, lazy: bool = False) -> None:
    """Make the plugin known to TensorRT, once a process.

    Args:
        trtp: the module `tensorrt.plugin`.
        lazy: leave TensorRT's registry alone (tests without the library).
    """
    Desc = trtp.TensorDesc

    @trtp.register("trtc::paged_attention", lazy_register=lazy)
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
        out_dtype: str,
    ) -> Desc:
        return q.like()

    @trtp.autotune("trtc::paged_attention")
    def autotune(
        q: Desc,
        pool: Desc,
        query_start: Desc,
        context_lens: Desc,
        page_table: Desc,
        k_scale: Desc,
        v_scale: Desc,
        outputs: tuple[Desc],
    ) -> list[trtp.AutoTuneCombination]:
        combination = trtp.AutoTuneCombination()
        combination.pos([0, 7], kernels.types("paged_attention", "q"))
        combination.pos([1], kernels.types("paged_attention", "pool"))
        combination.pos([2, 3, 4], "INT32")
        combination.pos([5, 6], "FP32")
        combination.tactics(kernels.tactics("paged_attention"))
        return [combination]

    # All attributes, in order: TensorRT 11.4 accepts fewer here and then passes all of them.
    @trtp.aot_impl("trtc::paged_attention")
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
        out_dtype: str,
        outputs: tuple[Desc],
        tactic: int,
    ) -> tuple[str | bytes, str | bytes, trtp.KernelLaunchParams, trtp.SymExprs]:
        kernel = kernels.find(
            "paged_attention",
            {"q": dtype_name(q), "pool": dtype_name(pool)},
            {
                "num_heads": num_heads,
                "num_kv_heads": num_kv_heads,
                "head_dim": head_dim,
                "scale": scale,
                "window": window,
                "softcap": softcap,
            },
            tactic,
        )
        sequences = context_lens.shape_expr[0]
        tiles = trtp.cdiv(q.shape_expr[0], kernel.rows) + sequences
        scalars = trtp.SymIntExprs(2)
        scalars[0] = trtp.SymInt32(sequences)
        scalars[1] = trtp.SymInt32(page_table.shape_expr[1])
        params = launch_params(trtp, kernel, (tiles, num_kv_heads))
        return kernel.entry, kernels.read(kernel.ptx), params, scalars
