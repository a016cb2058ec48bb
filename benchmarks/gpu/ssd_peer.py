"""mamba_ssm's five Triton kernels, from a folder that holds them, as a peer of ssd.

The folder holds `ssd_combined.py` and its neighbours, as they lie in mamba_ssm's
`ops/triton` or in sglang's `kernels/ops/mamba/triton_ops` (their wheel is not installed: what else
they import of their packages is replaced by what it would give here).
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

__all__ = ["Peer"]

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


class _Share:
    """What an autotuner keeps of its configurations in one of n processes that compile them."""

    def __init__(self, pruned: Callable[..., list[Any]], part: int, parts: int) -> None:
        self._pruned, self._part, self._parts = pruned, part, parts

    def __call__(self, configs: list[Any], named_args: Any, **kwargs: Any) -> list[Any]:
        kept = self._pruned(configs, named_args, **kwargs)
        return kept[self._part :: self._parts] or kept[:1]


def _once(launch: Callable[[], Any], quantiles: Any) -> list[float]:
    """Compile and launch; no time is taken."""
    launch()
    return [0.0] * len(quantiles)


def _short(launch: Callable[[], Any], quantiles: Any) -> Any:
    """Triton's own measurement, the L2 flushed, in 10 ms instead of 100."""
    from triton.testing import do_bench

    return do_bench(launch, warmup=2, rep=10, quantiles=quantiles)


class Peer:
    """mamba_ssm's scan, its kernels autotuned over all configurations that they come with.

    Args:
        folder: see the module.
        share: (i, n) takes every n-th configuration, from i on, and only launches it: for n
            processes that compile all of them beforehand.
    """

    def __init__(self, folder: Path, share: tuple[int, int] | None = None) -> None:
        self._combined = _import(folder)
        self._tuners: dict[str, Any] = {}
        for name in list(sys.modules):
            if name.startswith(f"{_NAME}."):
                for key, kernel in vars(sys.modules[name]).items():
                    if hasattr(kernel, "configs") and hasattr(kernel, "fn"):
                        self._tuners[key.strip("_")] = kernel
        for kernel in self._tuners.values():
            kernel.do_bench = _short if share is None else _once
            if share is not None:
                kept = kernel.early_config_prune or (lambda configs, _, **__: configs)
                kernel.early_config_prune = _Share(kept, *share)

    def __call__(self, args: Any, chunk: int) -> Any:
        """Write y of a `tilewright.ops.ssd.args.ScanArgs`; the final states [b, H, P, N]."""
        return self._combined.mamba_chunk_scan_combined(
            args.x, args.dt, args.A, args.B, args.C, chunk, D=args.D, dt_bias=args.dt_bias,
            dt_softplus=args.dt_softplus, dt_limit=args.dt_limit, out=args.y,
            return_final_states=True,
        )  # fmt: skip

    def chosen(self) -> dict[str, dict[str, str]]:
        """By kernel: the configuration that its autotuner chose, by its key."""
        return {
            name: {" ".join(map(str, key)): str(config) for key, config in kernel.cache.items()}
            for name, kernel in self._tuners.items()
            if kernel.cache
        }


def _import(folder: Path) -> ModuleType:
    """The folder's `ssd_combined`, its kernels new, whatever was imported before."""
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
    for name in [n for n in sys.modules if n == _NAME or n.startswith(f"{_NAME}.")]:
        del sys.modules[name]
    package = ModuleType(_NAME)
    package.__path__ = [str(folder)]
    sys.modules[_NAME] = package
    return importlib.import_module(f"{_NAME}.ssd_combined")
