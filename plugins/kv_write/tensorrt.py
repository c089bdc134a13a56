"""trtc::kv_write as an ahead-of-time TensorRT plugin around the CUDA kernel."""

from typing import Any

from trtc.plugins.cuda.qdp import Kernels, dtype_name, launch_params


def register(trtp: Any, kernels: Kernels, *, alias_pools: bool, lazy: bool = False) -> None:
    """Make the plugin known to TensorRT, once a process.

    Args:
        trtp: the module `tensorrt.plugin`.
        alias_pools: declare that the output is the input's memory.
        lazy: leave TensorRT's registry alone (tests without the library).
    """
    Desc = trtp.TensorDesc

    @trtp.register("trtc::kv_write", lazy_register=lazy)
    def describe(
        k: Desc,
        v: Desc,
        pool: Desc,
        slots: Desc,
        k_scale: Desc,
        v_scale: Desc,
        num_kv_heads: int,
        head_dim: int,
    ) -> Desc:
        return pool.aliased() if alias_pools else pool.like()

    @trtp.autotune("trtc::kv_write")
    def autotune(
        k: Desc,
        v: Desc,
        pool: Desc,
        slots: Desc,
        k_scale: Desc,
        v_scale: Desc,
        outputs: tuple[Desc],
    ) -> list[trtp.AutoTuneCombination]:
        combination = trtp.AutoTuneCombination()
        combination.pos([0, 1], kernels.types("kv_write", "k"))
        combination.pos([2, 6], kernels.types("kv_write", "pool"))
        combination.pos([3], "INT32")
        combination.pos([4, 5], "FP32")
        combination.tactics(kernels.tactics("kv_write"))
        return [combination]

    @trtp.aot_impl("trtc::kv_write")
    def implement(
        k: Desc,
        v: Desc,
        pool: Desc,
        slots: Desc,
        k_scale: Desc,
        v_scale: Desc,
        num_kv_heads: int,
        head_dim: int,
        outputs: tuple[Desc],
        tactic: int,
    ) -> tuple[str | bytes, str | bytes, trtp.KernelLaunchParams, trtp.SymExprs]:
        kernel = kernels.find(
            "kv_write",
            {"k": dtype_name(k), "pool": dtype_name(pool)},
            {"num_kv_heads": num_kv_heads, "head_dim": head_dim},
            tactic,
        )
        params = launch_params(trtp, kernel, (slots.shape_expr[0], 1))
        return kernel.entry, kernels.read(kernel.ptx), params, trtp.SymIntExprs(0)
