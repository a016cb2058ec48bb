"""Reports: dataclasses in, a terminal table, Markdown, JSON or CSV out."""
