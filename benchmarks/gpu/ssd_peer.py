"""mamba_ssm's five Triton kernels, from a folder that holds them, as a peer of ssd.

The folder holds `ssd_combined.py` and its neighbours, as they lie in mamba_ssm's
`ops/triton` or in sglang's `kernels/ops/mamba/triton_ops` (their wheel is not installed: what else
they import of their packages is replaced by what it would give here).
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

__all__ = ["load_peer"]

_NAME = "ssd_peer_kernels"


def _rearrange(t: Any, pattern: str, **sizes: int) -> Any:
    return t.unflatten(-1, (-1, sizes["n"])) if sizes else t.flatten(-2)


def _stub(name: str, **members: Any) -> None:
    """A module of this name, and the packages around it, unless there is one."""
    parts = name.split(".")
    for i in range(1, len(parts) + 1):
        part = ".".join(parts[:i])
        if part not in sys.modules:
            module = ModuleType(part)
            module.__path__ = []
            sys.modules[part] = module
    for key, value in members.items():
        setattr(sys.modules[name], key, value)


def load_peer(folder: Path, share: tuple[int, int] = (0, 1)) -> Callable[..., Any]:
    """`(args, chunk) -> None`, which runs the peer on a `tilewright.ops.ssd.args.ScanArgs`.

    Args:
        folder: see the module.
        share: (i, n) keeps every n-th configuration of the peer's autotuner, from i on: for n
            processes that compile all of them.
    """
    try:
        import einops  # noqa: F401
    except ImportError:
        _stub("einops", rearrange=_rearrange)
    try:
        import packaging.version  # noqa: F401
    except ImportError:
        _stub("packaging.version", parse=lambda text: [int(i) for i in text.split(".")[:2]])
        sys.modules["packaging"].version = sys.modules["packaging.version"]  # type: ignore[attr-defined]
    _stub("sglang.kernels.ops.attention.fla.utils", autotune_cache_kwargs={})
    _stub("sglang.kernels.jit.utils", is_arch_support_pdl=lambda: False)
    os.environ.setdefault("TRITON_PRINT_AUTOTUNING", "0")
    package = ModuleType(_NAME)
    package.__path__ = [str(folder)]
    sys.modules[_NAME] = package
    combined = importlib.import_module(f"{_NAME}.ssd_combined")
    for name in list(sys.modules):
        if name.startswith(f"{_NAME}."):
            for kernel in vars(sys.modules[name]).values():
                if hasattr(kernel, "configs") and hasattr(kernel, "fn"):
                    kernel.configs = kernel.configs[share[0] :: share[1]] or kernel.configs[:1]

    def run(args: Any, chunk: int) -> None:
        final = combined.mamba_chunk_scan_combined(
            args.x, args.dt, args.A, args.B, args.C, chunk, D=args.D, dt_bias=args.dt_bias,
            dt_softplus=args.dt_softplus, dt_limit=args.dt_limit, out=args.y,
            return_final_states=True,
        )  # fmt: skip
        args.final_states.copy_(final)

    return run
