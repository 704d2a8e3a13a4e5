"""Reading data files of any origin; their size in memory is checked before they are unpacked."""

from __future__ import annotations

import lzma
import warnings
import zipfile
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from fairpruner.core.reading import check_regular
from fairpruner.errors import FairprunerError

SMALL = 256 * 2**20  # bytes that any file may unpack to
RATIO = 100  # a file may unpack to more than SMALL, but not to more than so many times its size
TEXT_LIMIT = 2**30  # bytes of text in a file, unpacked
UNPACKING = 256 * 2**20  # bytes of memory that the unpacking may use
PIXELS = 2**26  # of an image
ASPECT = 100  # largest ratio of the sides of an image, because resizing keeps this ratio
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
    except Exception as error:  # zipfile, zlib and numpy raise many kinds of exceptions
        raise FairprunerError(f"Data {path} cannot be read: {type(error).__name__}: {error}") from error


def _member(archive: zipfile.ZipFile, name: str, path: Path) -> zipfile.ZipInfo:
    """The entry of an array in an .npz file."""
    for member in archive.infolist():
        if member.filename == f"{name}.npy":
            return member
    raise FairprunerError(f"Data {path} has no array {name!r}: expected x (inputs) and y (labels).")


def _read_array(archive: zipfile.ZipFile, member: zipfile.ZipInfo, path: Path) -> NDArray[Any]:
    """An array, refused if its header announces other bytes than the file holds; numpy trusts the header."""
    with archive.open(member) as file:
        version = npy.read_magic(file)
        header = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
        shape, _, dtype = header(file)
        held = member.file_size - file.tell()
    if dtype.hasobject:
        raise FairprunerError(f"Data {path}: {member.filename} holds Python objects, expected numbers.")
    if prod(shape) * dtype.itemsize != held:
        raise FairprunerError(
            f"Data {path}: the header of {member.filename} announces {dtype}{list(shape)}, and {held:,} bytes"
            " follow: save it again."
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
    while packed and left > 0:  # an .xz file may hold several streams, one after the other
        unpacker = lzma.LZMADecompressor(memlimit=UNPACKING)
        parts.append(unpacker.decompress(packed, max_length=left))
        left -= len(parts[-1])
        if not unpacker.eof and left > 0:
            raise EOFError("the file ends before its content does")
        packed = unpacker.unused_data.lstrip(b"\0")
    if left <= 0:
        raise FairprunerError(f"Data {path} unpacks to more than {TEXT_LIMIT:,} bytes: give a part of it.")
    return b"".join(parts)


def read_plain_text(path: str | Path) -> str:
    """The text of a file in UTF-8, unpacked if its name ends in .xz; line ends stay as they are."""
    try:
        return decoded(read_bytes(Path(path)))
    except (OSError, EOFError, lzma.LZMAError, UnicodeDecodeError) as error:
        raise FairprunerError(f"Text {path} cannot be read: {error}.") from error


def decoded(content: bytes) -> str:
    """The text of bytes in UTF-8, without the byte order mark that Excel writes at the start."""
    return content.decode("utf-8-sig")


def _check_unpacked(path: Path, size: int) -> None:
    """Refuse a file that would unpack to far more than its size."""
    held = path.stat().st_size
    if size > max(SMALL, RATIO * held):
        raise FairprunerError(
            f"Data {path} has {held:,} bytes and announces {size:,} unpacked, expected at most {RATIO} times"
            " its size: save it again without compression."
        )


def read_image(file: Path) -> Any:
    """A PIL image in RGB, refused if it is too large to decode safely."""
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
                return _in_eight_bits(image, file).convert("RGB")
    except FairprunerError:
        raise
    except Exception as error:  # each image format raises other exceptions
        raise FairprunerError(f"Image {file} cannot be read: {type(error).__name__}: {error}") from error


def _in_eight_bits(image: Any, file: Path) -> Any:
    """The image with 8 bits per channel; Pillow would clip larger numbers to white without a message."""
    if image.mode.startswith("I;16"):
        from PIL import Image

        return Image.fromarray(np.rint(np.asarray(image) / 257).astype(np.uint8))  # 65535 becomes 255
    if image.mode in ("I", "F"):  # the brightest value of such an image is not known
        raise FairprunerError(
            f"Image {file} has the mode {image.mode!r} (32 bits per pixel), expected 8 or 16 bits per"
            " channel: save it with 8 bits."
        )
    return image
