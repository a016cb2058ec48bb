"""One HTML file that shows what tuning, comparing and verifying found; it needs no network.

A verb writes it from the dictionary that it also writes as JSON::

    from tilewright.report.page import write_page

    write_page("tune", report.to_dict(), path)
    write_page("compare", result.to_dict(), path, provenance=record)

Several results make one page::

    from tilewright.report.page import join_sections, render_page, sections_of

    parts = [sections_of("tune", tuned), sections_of("compare", compared)]
    render_page(join_sections(*parts), "report.html")

Sections
--------
`render_page` takes a dictionary of plain values. Every section may be missing, and so may every
value in it; what is missing is left out or shown as a dash.

=================  ================================================================================
title, subject     what the page is about
summary            list of sentences that come before those the page makes from the sections
provenance         `tilewright.report.provenance.provenance(...)`
tune               `TuneReport.to_dict()`: ``problems`` with ``candidates`` (``tile``, ``status``
                   "ok" or "rejected", ``kind``, ``check``, ``reason``, ``case``, ``us``, ``score``,
                   ``oracle_error``), ``planted``, ``header``, ``settings``
arms               {"a": {...}, "b": {...}}: ``title`` and ``verified`` of a comparison's arms
comparisons        list of `Comparison.to_dict()`, or of rows that hold one under ``comparison``
                   beside ``label``, ``cache``, ``verdict`` and ``note``
agreement          `tilewright.tune.agreement.Agreement.to_dict()`
ladder             `LadderResult.to_dict()`: ``base``, ``rungs`` with ``status`` "right" or "WRONG",
                   ``faults``, and ``tests`` that hold comparisons ``below`` and ``base``;
                   ``left_out``
table              a tile table as its file holds it: ``header`` and ``rows``
machine            {"label": [block dictionaries]} beyond those of `comparisons`
verification       `verify_json(...)`, or {"passed", "total", "lines"}
notes, faults      lists of lines; a fault is shown above everything else
=================  ================================================================================

Texts are shown as they are and never as markup: a reason that holds ``</script>`` is inert, and the
page's content security policy runs no script but its own and loads nothing.
"""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tilewright.errors import UnsupportedError
from tilewright.report.page.sections import join_sections, sections_of
from tilewright.tiles.table_file import write_atomically

__all__ = ["join_sections", "page_html", "render_page", "sections_of", "write_page"]

_TEMPLATES = Path(__file__).parent / "templates"
_NEED = "pip install 'tilewright[report]'"


def write_page(
    kind: str,
    result: Mapping[str, Any],
    path: str | os.PathLike[str],
    *,
    provenance: Mapping[str, Any] | None = None,
) -> Path:
    """Write the page of one verb's result: what its option `--html PATH` calls.

    Args:
        kind: "tune", "compare", "ladder", "table" or "verify".
        result: what the verb writes as JSON: the result's `to_dict()`, or that under the name of
            the kind beside "provenance".
        path: file to write; an old one is replaced once the new one is whole.
        provenance: where the result comes from, if `result` does not say.

    Returns:
        `path`.

    Raises:
        UnsupportedError: unknown kind; the extra "report" is not installed; the file cannot be
            written.
    """
    return render_page(sections_of(kind, result, provenance=provenance), path)


def render_page(sections: Mapping[str, Any], path: str | os.PathLike[str]) -> Path:
    """Write the page of `sections`, which the module describes.

    Raises:
        UnsupportedError: an unknown section; the extra "report" is not installed; the file cannot
            be written.
    """
    path = Path(path)
    text = page_html(sections)
    try:
        write_atomically(path, text)
    except OSError as error:
        raise UnsupportedError(
            f"the report cannot be written to {path}: {error.strerror}; give a file in a folder "
            "that exists and may be written"
        ) from error
    return path


def page_html(sections: Mapping[str, Any]) -> str:
    """The page as text.

    Raises:
        UnsupportedError: an unknown section; the extra "report" is not installed.
    """
    from tilewright.report.page.view import page_view

    view = page_view(sections)
    try:
        import jinja2
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise UnsupportedError(
            f"an HTML report needs {error.name}, which is not installed: {_NEED}"
        ) from error
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    scripts = [get_plotlyjs().replace("\r", ""), _own("page.js")] if view["data"] else []
    return environment.get_template("page.html").render(
        **view, css=_own("page.css"), scripts=scripts, policy=_policy(scripts)
    )


def _own(name: str) -> str:
    return (_TEMPLATES / name).read_text(encoding="utf-8")


def _policy(scripts: list[str]) -> str:
    """A content security policy under which only these scripts run and nothing is loaded."""
    allowed = [base64.b64encode(hashlib.sha256(s.encode()).digest()).decode() for s in scripts]
    return "; ".join(
        [
            "default-src 'none'",
            "script-src " + (" ".join(f"'sha256-{a}'" for a in allowed) or "'none'"),
            "style-src 'unsafe-inline'",
            "img-src data: blob:",
            "base-uri 'none'",
            "form-action 'none'",
        ]
    )
