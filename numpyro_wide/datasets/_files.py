"""Files as published: where they are looked for, how they are opened, and what is raised if they are missing."""

import gzip
import tarfile
import zlib
from collections.abc import Iterable
from os import PathLike
from pathlib import Path

Folder = str | PathLike[str]


def read_gzipped_or_not(folder: Folder, name: str, source: str) -> tuple[bytes, Path]:
    """Read the file ``name`` or ``name.gz`` in a folder.

    Args:
        folder: path of the folder.
        name: name of the file, not compressed.
        source: address where the file is had, for messages.

    Returns:
        The contents, and the path that they were read from.

    Raises:
        FileNotFoundError: if neither is there.
        ValueError: if the compressed file is damaged.
    """
    for path in (Path(folder) / name, Path(folder) / f"{name}.gz"):
        if path.is_file():
            return decompressed(path), path
    raise missing(folder, [name, f"{name}.gz"], source)


def decompressed(path: Path) -> bytes:
    """Read a file, gzipped or not."""
    contents = path.read_bytes()
    if not contents.startswith(b"\x1f\x8b"):
        return contents
    try:
        return gzip.decompress(contents)
    except (EOFError, OSError, zlib.error) as error:
        raise damaged(path, f"it is a gzip file that cannot be read ({error})") from error


def read_members(archive: Path, names: Iterable[str]) -> dict[str, bytes]:
    """Read files of an archive.

    Args:
        archive: path of the archive.
        names: names of the files, without folders.

    Returns:
        The contents by name.

    Raises:
        ValueError: if the archive is damaged or lacks a file.
    """
    wanted = list(names)
    contents: dict[str, bytes] = {}
    try:
        with tarfile.open(archive) as tar:
            for member in tar:
                name = Path(member.name).name
                file = tar.extractfile(member) if name in wanted and member.isfile() else None
                if file is not None:
                    contents[name] = file.read()
    except (EOFError, OSError, tarfile.TarError, zlib.error) as error:
        raise damaged(archive, f"it is an archive that cannot be read ({error})") from error
    lacking = [name for name in wanted if name not in contents]
    if lacking:
        raise damaged(archive, f"it lacks {', '.join(lacking)}")
    return contents


def missing(folder: Folder, names: Iterable[str], source: str) -> FileNotFoundError:
    """Make the error for a file that is not there."""
    there = sorted(path.name for path in Path(folder).iterdir()) if Path(folder).is_dir() else None
    state = "does not exist" if there is None else f"holds {', '.join(there[:20]) or 'nothing'}"
    return FileNotFoundError(
        f"expected {' or '.join(names)} in the folder {folder}, which {state}. It is had from {source}; this package "
        "never downloads."
    )


def damaged(path: Path, what: str) -> ValueError:
    """Make the error for a file that is not as published."""
    return ValueError(f"{path} is not as published: {what}. Fetch it again.")
