"""Reading data files of any origin: what they would take in memory is known before it is taken."""

from __future__ import annotations

import lzma
import warnings
import zipfile
from math import prod
from pathlib import Path
from typing import Any

from numpy.lib import format as npy
from numpy.typing import NDArray

from fairpruner.core.reading import check_regular
from fairpruner.errors import FairprunerError

SMALL = 256 * 2**20  # bytes that a file may unpack to, however small it is
RATIO = 100  # beyond them, how many times its own size it may unpack to; pictures and floats reach 10
TEXT_LIMIT = 2**30  # bytes of text in a file, unpacked
UNPACKING = 256 * 2**20  # bytes of memory that unpacking itself may take
PIXELS = 2**26  # of an image
ASPECT = 100  # of the sides of an image: resizing makes the longer one this much longer than what is asked
MOST_CLASSES = 10**6


def read_arrays(path: Path, *names: str) -> list[NDArray[Any]]:
    """Some arrays of an .npz file."""
    check_regular(path)
    try:
        with zipfile.ZipFile(path) as archive:
            members = [_member(archive, name, path) for name in names]
            _check_unpacked(path, sum(member.file_size for member in members))
            return [_read_array(archive, member, path) for member in members]
    except FairprunerError:
        raise
    except Exception as error:  # zipfile, zlib, numpy and the parser of its headers each raise their own
        raise FairprunerError(f"Data {path} cannot be read: {type(error).__name__}: {error}") from error


def _member(archive: zipfile.ZipFile, name: str, path: Path) -> zipfile.ZipInfo:
    for member in archive.infolist():
        if member.filename == f"{name}.npy":
            return member
    raise FairprunerError(f"Data {path} has no array {name!r}: expected x (inputs) and y (labels).")


def _read_array(archive: zipfile.ZipFile, member: zipfile.ZipInfo, path: Path) -> NDArray[Any]:
    """An array whose header says no more than the file holds: numpy makes room for what the header says."""
    with archive.open(member) as file:
        version = npy.read_magic(file)
        header = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
        shape, _, dtype = header(file)
        held = member.file_size - file.tell()
    if dtype.hasobject:
        raise FairprunerError(f"Data {path}: {member.filename} holds Python objects, expected numbers.")
    if prod(shape) * dtype.itemsize != held:
        raise FairprunerError(
            f"Data {path}: {member.filename} says that it is {dtype}{list(shape)} and has {held:,} bytes."
        )
    with archive.open(member) as file:
        array: NDArray[Any] = npy.read_array(file, allow_pickle=False)
    return array


def read_bytes(path: Path) -> bytes:
    """The content of a text file, unpacked if its name ends in .xz."""
    check_regular(path, limit=TEXT_LIMIT)
    if path.suffix != ".xz":
        return path.read_bytes()
    parts: list[bytes] = []
    left, packed = TEXT_LIMIT, path.read_bytes()
    while packed and left > 0:  # an .xz file may be several, one after the other
        unpacker = lzma.LZMADecompressor(memlimit=UNPACKING)
        parts.append(unpacker.decompress(packed, max_length=left))
        left -= len(parts[-1])
        if not unpacker.eof and left > 0:
            raise EOFError("the file ends before its content does")
        packed = unpacker.unused_data.lstrip(b"\0")
    if left <= 0:
        raise FairprunerError(f"Data {path} unpacks to more than {TEXT_LIMIT:,} bytes: give a part of it.")
    return b"".join(parts)


def _check_unpacked(path: Path, size: int) -> None:
    held = path.stat().st_size
    if size > max(SMALL, RATIO * held):
        raise FairprunerError(
            f"Data {path} has {held:,} bytes and says that it unpacks to {size:,}: no data shrinks so much."
        )


def read_image(file: Path) -> Any:
    """A PIL image in RGB."""
    try:
        from PIL import Image
    except ImportError as error:
        raise FairprunerError("Image folders need Pillow: pip install 'fairpruner[images]'.") from error
    check_regular(file)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(file) as image:
                short, long = sorted(image.size)
                if short * long > PIXELS or long > ASPECT * short:
                    raise FairprunerError(
                        f"Image {file} is {image.width} × {image.height}, expected at most {PIXELS:,} pixels"
                        f" and no side more than {ASPECT} times the other: remove it."
                    )
                return image.convert("RGB")
    except FairprunerError:
        raise
    except Exception as error:  # each of its formats raises its own
        raise FairprunerError(f"Image {file} cannot be read: {type(error).__name__}: {error}") from error
