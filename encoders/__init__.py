"""Raw modality -> rows of the language model's embedding space."""

if __name__ != "mmprefill.encoders":  # the same file must never be imported twice under two names
    raise ImportError("import mmprefill.encoders instead of encoders")
