"""Every op by name: ``SPECS["mmq"]``. A spec is imported when it is first asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module

from tilewright.device import kind_of
from tilewright.errors import UnsupportedError
from tilewright.ops.contract import OpSpec

__all__ = ["SPECS", "find_spec", "load_spec", "spec_for", "specs_on"]

_HOMES = {
    "w4a16": "tilewright.ops.w4a16.spec",
    "mmq": "tilewright.ops.mmq.spec",
    "moe": "tilewright.ops.moe.spec",
    "ssd": "tilewright.ops.ssd.spec",
    "conv1d": "tilewright.ops.conv1d.spec",
}


class _Catalog(Mapping[str, OpSpec]):
    """The modules of `_HOMES`, imported one by one as they are read."""

    def __getitem__(self, name: str) -> OpSpec:
        spec: OpSpec = import_module(_HOMES[name]).SPEC
        return spec

    def __iter__(self) -> Iterator[str]:
        return iter(_HOMES)

    def __len__(self) -> int:
        return len(_HOMES)


SPECS: Mapping[str, OpSpec] = _Catalog()
"""OpSpecs by the name of their op."""


def find_spec(name: str) -> OpSpec:
    """The op of this name.

    Raises:
        UnsupportedError: there is none; the message lists those there are.
    """
    if name not in SPECS:
        raise UnsupportedError(f"op is {name!r}; the catalog has {', '.join(SPECS)}")
    return SPECS[name]


def spec_for(name: str, arch: str) -> OpSpec:
    """The op of this name on devices of an arch.

    Raises:
        UnsupportedError: there is no such op, or it has no kernels for such a device.
    """
    spec, kind = find_spec(name), kind_of(arch)
    if not _runs_on(spec, kind):
        raise UnsupportedError(
            f"op {name} has no kernels for {arch}; it runs on {', '.join(['cpu', *spec.devices])}"
        )
    return spec.on(kind, arch)


def specs_on(arch: str) -> dict[str, OpSpec]:
    """The catalog's ops that have kernels for an arch, by name."""
    kind = kind_of(arch)
    return {name: spec.on(kind, arch) for name, spec in SPECS.items() if _runs_on(spec, kind)}


def _runs_on(spec: OpSpec, kind: str) -> bool:
    return kind == "cpu" or kind in spec.devices


def load_spec(text: str) -> OpSpec:
    """An op of the catalog by name, "w4a16" or, on another kind of device, "w4a16@cuda"; or a
    user's: "path/to/file.py:NAME", "package.module:NAME", or the name of an entry point of the
    group `tilewright.ops`.

    Raises:
        UnsupportedError, GateError: as `tilewright.ops.user_spec.load_user_spec`.
    """
    name, _, kind = text.partition("@")
    if name in SPECS:
        spec = SPECS[name]
        if kind in ("", "cpu"):
            return spec
        if kind not in spec.devices:
            raise UnsupportedError(
                f"op {name} has no kernels for {kind!r}; it runs on "
                f"{', '.join(['cpu', *spec.devices])}"
            )
        return spec.on(kind)
    from tilewright.ops.user_spec import load_user_spec

    return load_user_spec(text)
