"""What Python does about memory by itself, where it costs more than it gives."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collection_paused() -> Iterator[None]:
    """Does not look for lost objects meanwhile: while millions are made that all stay, as from a file, looking through
    them again and again takes longer than to make them."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
