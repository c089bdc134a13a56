"""trtc::attention_combine as an ahead-of-time TensorRT plugin around the CUDA kernel."""

from typing import Any

from trtc.plugins.cuda.qdp import Kernels, dtype_name, launch_params


def register(trtp: Any, kernels: Kernels, *, lazy: bool = False) -> None:
    """Make the plugin known to TensorRT, once a process.

    Args:
        trtp: the module `tensorrt.plugin`.
        lazy: leave TensorRT's registry alone (tests without the library).
    """
    Desc = trtp.TensorDesc

    @trtp.register("trtc::attention_combine", lazy_register=lazy)
    def describe(
        rows: Desc,
        partial: Desc,
        stats: Desc,
        query_start: Desc,
        context_lens: Desc,
        num_heads: int,
        head_dim: int,
        window: int,
        pieces: int,
    ) -> Desc:
        return rows.like()

    @trtp.autotune("trtc::attention_combine")
    def autotune(
        rows: Desc,
        partial: Desc,
        stats: Desc,
        query_start: Desc,
        context_lens: Desc,
        outputs: tuple[Desc],
    ) -> list[trtp.AutoTuneCombination]:
        combination = trtp.AutoTuneCombination()
        combination.pos([0, 5], kernels.types("attention_combine", "rows"))
        combination.pos([1, 2], "FP32")
        combination.pos([3, 4], "INT32")
        combination.tactics(kernels.tactics("attention_combine"))
        return [combination]

    @trtp.aot_impl("trtc::attention_combine")
    def implement(
        rows: Desc,
        partial: Desc,
        stats: Desc,
        query_start: Desc,
        context_lens: Desc,
        num_heads: int,
        head_dim: int,
        window: int,
        pieces: int,
        outputs: tuple[Desc],
        tactic: int,
    ) -> tuple[str | bytes, str | bytes, trtp.KernelLaunchParams, trtp.SymExprs]:
        kernel = kernels.find(
            "attention_combine",
            {"rows": dtype_name(rows)},
            {"num_heads": num_heads, "head_dim": head_dim, "window": window, "pieces": pieces},
            tactic,
        )
        scalars = trtp.SymIntExprs(1)
        scalars[0] = trtp.SymInt32(context_lens.shape_expr[0])
        programs = -(-num_heads // kernel.rows)
        params = launch_params(trtp, kernel, (rows.shape_expr[0], programs))
        return kernel.entry, kernels.read(kernel.ptx), params, scalars
