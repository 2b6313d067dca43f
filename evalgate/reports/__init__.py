"""Reports: one file each, its name is its CLI name; each has `render(summary) -> str`. Files with `_` are shared."""
