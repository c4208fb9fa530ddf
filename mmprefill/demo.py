"""`mmprefill demo`: load a model, build the page, serve it. gradio is imported here and in `demo_page` only."""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mmprefill.config import PrefillConfig
from mmprefill.demo_limits import Limits
from mmprefill.trace import Trace

LOCAL = ("127.0.0.1", "localhost", "::1")


def check_extra() -> None:
    """Raises ValueError, with what to install, where gradio is missing."""
    if importlib.util.find_spec("gradio") is None:
        raise ValueError("the demo needs gradio: pip install 'mmprefill[demo]'")


@contextmanager
def serving(
    open_engine: Callable[..., Any], *, host: str = "127.0.0.1", port: int | None = None, limits: Limits | None = None
) -> Iterator[tuple[str, Any]]:
    """Serve the page while the block runs.

    Args:
        open_engine: called with `config` and `trace`, in a thread while gradio is imported; returns an AsyncPrefiller.
        host: address to listen on.
        port: None for the first free one from 7860 on.
        limits: what users may send.

    Yields:
        The page's address and its `Chats`.
    """
    check_extra()
    limits, trace = limits or Limits(), Trace(limit=20_000)
    with (
        tempfile.TemporaryDirectory(prefix="mmprefill-demo-", ignore_cleanup_errors=True) as folder,
        _environment(
            GRADIO_TEMP_DIR=str(Path(folder, "gradio")),  # uploads are nobody else's, and go when we go
            GRADIO_ANALYTICS_ENABLED="False",
        ),
    ):
        config = PrefillConfig(media=limits.media)
        with ThreadPoolExecutor(1) as pool:
            opening = pool.submit(open_engine, config=config, trace=trace)
            from mmprefill import demo_page
            from mmprefill.demo_sessions import Chats

            engine = opening.result()
        try:
            chats = Chats(engine, trace, Path(folder, "chats"), limits)
            page = demo_page.build(chats)
            _, address, _ = page.launch(
                server_name=host, server_port=port, max_file_size=limits.upload_bytes, **demo_page.LAUNCH
            )
            try:
                yield address, chats
            finally:
                page.close(verbose=False)
        finally:
            engine.close()


@contextmanager
def _environment(**values: str) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def run(open_engine: Callable[..., Any], *, host: str, port: int | None, limits: Limits) -> int:
    """Serve until interrupted or told to end, and clean up then; returns the exit code."""
    for each in (signal.SIGINT, signal.SIGTERM):  # a shell's background jobs are started with SIGINT ignored
        signal.signal(each, signal.default_int_handler)
    with serving(open_engine, host=host, port=port, limits=limits) as (address, _):
        print(f"mmprefill: the demo is at {address} (Ctrl-C ends it)", flush=True)
        if host not in LOCAL:
            print("mmprefill: whoever reaches this machine can use it; there is no login", file=sys.stderr)
        threading.Event().wait()
    return 0
