"""Lock of a folder, so that one process at a time writes to it."""

import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path

# The operating system holds the lock, and takes it back from a process that is killed. Who holds it stands in a file
# beside it, since some systems let nobody else read a locked file.
_LOCK, _HOLDER = "run.lock", "run.holder.json"


@contextmanager
def sole_use(folder: Path) -> Iterator[None]:
    """Hold a folder's lock; make the folder if it is missing.

    Args:
        folder: the folder of a run.

    Raises:
        RuntimeError: if another process, or another thread, holds the lock.
    """
    from filelock import FileLock, Timeout  # needed by long runs alone

    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / _LOCK)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise RuntimeError(
            f"the folder {folder} is in use by {_holder(folder)}. Two runs in one folder would write over one another: "
            "wait for that one or end it, or pass another folder. StoredDraws reads the draws while the run continues."
        ) from None
    try:
        since = datetime.now().astimezone().isoformat(sep=" ", timespec="seconds")
        holder = {"pid": os.getpid(), "host": socket.gethostname(), "since": since}
        with suppress(OSError):  # a full disk is told of when the draws do not fit
            (folder / _HOLDER).write_text(json.dumps(holder), encoding="utf-8")
        yield
    finally:
        (folder / _HOLDER).unlink(missing_ok=True)
        lock.release()


def _holder(folder: Path) -> str:
    """Describe who holds the lock, as far as is known."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        known = json.loads((folder / _HOLDER).read_text(encoding="utf-8"))
        return f"process {known['pid']} on {known['host']} since {known['since']}"
    return "another process, which is just beginning or ending"
