"""What a file's first bytes say it is: for errors that tell the user what they have."""

from __future__ import annotations

from pathlib import Path

from tilewright.errors import FormatError

__all__ = ["existing_file", "guess", "is_pickle"]


def is_pickle(head: bytes) -> bool:
    """True for a pickle or for the zip archive in which torch.save wraps one.

    Neither is ever opened: loading a pickle runs whatever code its author put there. A safetensors
    file whose header has, say, 1,408 bytes begins with a pickle's first two bytes; what follows
    tells them apart.
    """
    if head[4:9] == b"\0\0\0\0{":
        return False
    return head[:4] == b"PK\x03\x04" or (len(head) >= 2 and head[0] == 0x80 and 2 <= head[1] <= 5)


def guess(head: bytes) -> str:
    """A few words on what a file is, from at least its first 9 bytes."""
    if is_pickle(head):
        return "a pickle or zip archive (torch.save); it is not opened, as it can run code"
    if head[:4] == b"GGUF":
        return "a GGUF file"
    if head[:4] in (b"lmgg", b"fmgg", b"tjgg", b"algg"):
        return "a GGML file from before GGUF; convert it with llama.cpp"
    if len(head) >= 9 and head[8:9] == b"{":
        return "perhaps a safetensors file"
    return f"unknown: it starts with {head[:4]!r}"


def existing_file(path: str | Path) -> Path:
    """`path` as a Path. Raises FormatError unless it is a regular file."""
    path = Path(path)
    if not path.is_file():
        what = "this is a folder; a file is needed" if path.is_dir() else "there is no such file"
        raise FormatError(f"{what}; check the path", file=path)
    return path
