"""The store in which ranks leave word for one another: only what a rank of the same start has signed counts there.

Whoever reaches the port of a store can write into it. So each value carries an HMAC of its key and of itself, under a
secret that only the ranks know: that in the variable `CLOZE_SECRET`, or one that rank 0 writes for each start into a
file which its user alone can read. The key names the restart of torchrun, whose store outlives the ranks.
"""

from __future__ import annotations

import hmac
import os
import secrets
import stat
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from data_prep.common.errors import UserError
from data_prep.common.files import writable

SECRET = "CLOZE_SECRET"
"""The variable with the secret of one start of a run, the same for all of its ranks."""
LOOK_SECONDS = 0.05
"""The pause between two looks into the store."""
LOOKS_A_SECOND = 1000
"""How often all ranks together look into the store at most."""
READ_SECONDS = 10.0
"""For every rank to read why it ends, before the store ends with rank 0."""


def restart() -> str:
    """How often torchrun has begun the ranks again."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")


def write_secret(path: Path) -> None:
    """Writes a new secret into a file that only this user can read; UserError where a disk keeps no modes."""
    secret = secrets.token_hex(32).encode()
    with writable(f"--out {path.parent}"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)  # of an earlier start
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(secret)
    if read_secret(path) != secret:
        path.unlink()
        cure = f"set one, the same for all ranks, before the command: export {SECRET}=$(openssl rand -hex 32)"
        raise UserError(f"{path}: others can read what is written there, and the ranks' secret with it\n{cure}")


def read_secret(path: Path) -> bytes:
    """Reads the secret from the environment, or else from the file. Returns nothing if there is no such file, if it
    belongs to another user, or if others may read it."""
    if given := os.environ.get(SECRET):
        return given.encode()
    with suppress(OSError), open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
        found = os.fstat(file.fileno())
        if stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077:
            return file.read(1000)
    return b""


class SignedStore:
    """A store of torch, in which values that no rank of this start has signed are as if they were not there."""

    def __init__(self, raw: Any, secret: bytes) -> None:
        """Signs in a store, which is `raw` to torch."""
        self.raw, self._secret = raw, secret

    def clone(self) -> SignedStore:
        """Another connection to the same store: one serves one thread at a time."""
        return SignedStore(self.raw.clone(), self._secret)

    def set(self, key: str, value: str) -> None:
        self.raw.set(_name(key), self._sign(key, value))

    def claim(self, key: str, value: str) -> str:
        """Sets a value unless a rank has set one before; returns the one that is there."""
        own, found = self._sign(key, value), b""
        for _ in range(100):  # a value that is not signed gives way
            found = self.raw.compare_set(_name(key), found, own)
            if (first := self._verify(key, found)) is not None:
                return first
        self.set(key, value)
        return value

    def get(self, key: str) -> str | None:
        """The value of a key; None where there is none, at once."""
        return self._verify(key, self.raw.get(_name(key))) if self.raw.check([_name(key)]) else None

    def get_all(self, keys: Sequence[str]) -> list[str | None]:
        """The values of keys; None for all where one of the keys is not there."""
        names = [_name(key) for key in keys]
        if not self.raw.check(names):
            return [None] * len(keys)
        return [self._verify(key, found) for key, found in zip(keys, self.raw.multi_get(names), strict=True)]

    def find(self, key: str, seconds: float, pause: float = LOOK_SECONDS) -> str | None:
        """The value of a key, if it comes within so many seconds. (The store's `wait` would print a warning.)"""
        deadline = time.monotonic() + seconds
        while (value := self.get(key)) is None and time.monotonic() <= deadline:
            time.sleep(pause)
        return value

    def await_all(self, keys: Sequence[str], seconds: float) -> list[str]:
        """The values of keys, once all are there; DistStoreError where they do not come within so many seconds."""
        self.raw.wait([_name(key) for key in keys], timedelta(seconds=seconds))
        values = [self.find(key, seconds) for key in keys]  # where others have written, a rank may still come
        if None in values:
            raise dist.DistStoreError(f"a rank has not signed {keys[values.index(None)]} in {seconds:.0f} s")
        return [str(value) for value in values]

    def leave(self, key: str, rank: int, ranks: Iterable[int]) -> None:
        """Says under a key that this rank has read why it ends. Rank 0, with which the store may end, waits for a while
        until the others among `ranks` have said so."""
        with suppress(dist.DistError):
            if rank:
                self.set(f"{key}/{rank}", "yes")
                return
            names = [f"{key}/{other}" for other in ranks if other]
            deadline = time.monotonic() + READ_SECONDS + len(names) / LOOKS_A_SECOND
            while names and None in self.get_all(names) and time.monotonic() < deadline:
                time.sleep(LOOK_SECONDS)

    def _sign(self, key: str, value: str) -> str:
        return hmac.new(self._secret, f"{_name(key)}\n{value}".encode(), "sha256").hexdigest() + value

    def _verify(self, key: str, found: bytes) -> str | None:
        """The value that was signed for this key."""
        with suppress(UnicodeDecodeError):
            value = found.decode()[64:]
            if hmac.compare_digest(self._sign(key, value).encode(), found):
                return value
        return None


def _name(key: str) -> str:
    return f"cloze/{restart()}/{key}"
