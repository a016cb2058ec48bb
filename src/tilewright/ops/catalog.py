"""Every op by name: ``SPECS["mmq"]``. A spec is imported when it is first asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module

from tilewright.errors import UnsupportedError
from tilewright.ops.contract import OpSpec

__all__ = ["SPECS", "find_spec", "load_spec"]

_HOMES = {
    "w4a16": "tilewright.ops.w4a16.spec",
    "mmq": "tilewright.ops.mmq.spec",
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


def load_spec(text: str) -> OpSpec:
    """An op of the catalog by name, or a user's: "path/to/file.py:NAME", "package.module:NAME", or
    the name of an entry point of the group `tilewright.ops`.

    Raises:
        UnsupportedError, GateError: as `tilewright.ops.user_spec.load_user_spec`.
    """
    if text in SPECS:
        return SPECS[text]
    from tilewright.ops.user_spec import load_user_spec

    return load_user_spec(text)
