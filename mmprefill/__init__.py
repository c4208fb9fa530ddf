"""Image+text requests in, KV caches out: exact multimodal prefill on stock Hugging Face models.

Importing the package is cheap: torch and transformers are loaded by the first name that needs them.
"""

import importlib
from pathlib import Path
from typing import Any

_root = Path(__file__).resolve().parent.parent
if all((_root / name).exists() for name in ("encoders", "pipeline", "pyproject.toml")):  # a source checkout
    __path__.append(str(_root))

_HOMES = {
    "AsyncPrefiller": "engine",
    "Choice": "types",
    "Generation": "types",
    "MMPrefillError": "errors",
    "MediaLimits": "config",
    "Metrics": "metrics",
    "Observer": "metrics",
    "PrefillConfig": "config",
    "PrefillResult": "results",
    "Prefiller": "prefiller",
    "Rendered": "types",
    "Request": "types",
    "Trace": "trace",
    "load": "pipeline.kv_read",
    "load_shard": "pipeline.kv_read",
    "run_job": "job",
    "save_shard": "pipeline.kv_store",
}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'mmprefill' has no attribute {name!r}")
    return getattr(importlib.import_module(f"mmprefill.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return [*__all__, "__all__"]
