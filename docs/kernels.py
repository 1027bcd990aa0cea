"""Kernels of the build that talk through files: two that start at once could take one port."""

import itertools
import logging
import os
import shutil
import tempfile
from pathlib import Path

import jupyter_client
from jupyter_client.manager import AsyncKernelManager

NUMBERS = itertools.count()


def setup(app):
    """Have the pages of this build executed by such kernels."""
    folder = Path(
        tempfile.mkdtemp(prefix="docs-")
    )  # short: a socket's path has at most 107 characters
    builder = os.getpid()  # processes that are forked share the folder, and leave it

    class FileKernelManager(AsyncKernelManager):
        def __init__(self, **options):
            super().__init__(
                transport="ipc",
                ip=str(folder / f"{os.getpid()}-{next(NUMBERS)}"),
                **options,
            )

    def clean(app, exception):
        if os.getpid() == builder:
            shutil.rmtree(folder, ignore_errors=True)

    logging.getLogger("traitlets").setLevel(logging.WARNING)
    jupyter_client.AsyncKernelManager = (
        FileKernelManager  # which nbclient looks up for every page
    )
    app.connect("build-finished", clean)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
