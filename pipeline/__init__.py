"""Rows -> KV."""

if __name__ != "mmprefill.pipeline":  # the same file must never be imported twice under two names
    raise ImportError("import mmprefill.pipeline instead of pipeline")
