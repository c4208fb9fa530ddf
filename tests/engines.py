"""Tiny checkpoints loaded once a process, and engines on them: loading is most of what a test on one of them costs.

An engine leaves a bundle as it found it, but for packed weights; what changes models or processors loads its own.
"""

import functools
import warnings

import checkpoints

from mmprefill import AsyncPrefiller, PrefillConfig, Prefiller
from mmprefill.models import load


@functools.cache
def plain(family):
    """Model and processor as any user loads them, which raises no warning. Read only."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return checkpoints.load(checkpoints.cached(family))


@functools.cache
def bundle(family, dtype="fp32"):
    """What engines share; they take turns at it."""
    with checkpoints.quiet():
        return load(checkpoints.cached(family), dtype=dtype)


def open_prefiller(family, dtype="fp32", **settings):
    """A new engine, with stores and threads of its own."""
    return Prefiller(bundle(family, dtype), PrefillConfig(**settings))


def open_engine(family, dtype="fp32", **settings):
    """The same for code that awaits."""
    return AsyncPrefiller(bundle(family, dtype), PrefillConfig(**settings))


@functools.cache
def cold(family):
    """An engine that computes every request and keeps nothing, so that all tests can use it; closes itself at exit."""
    return open_prefiller(family, prefix_bytes=0, encoder_bytes=0)
