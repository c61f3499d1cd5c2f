"""Local files: checks before they are read, arrays in ``.npz`` files, labels and names."""

import base64
import csv
import io
import json
import logging
import math
import os
import re
import sys
import unicodedata
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from importlib import resources
from io import BufferedReader
from itertools import compress
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from fairflower.config import DataConfig
from fairflower.data.federation import Ints, Pixels
from fairflower.errors import DataError, quoted
from fairflower.files import read_npy_header
from fairflower.tasks import CLASSIFICATION, Targets, task_of

logger = logging.getLogger(__name__)

#: What was said of data, each with its level in a log.
Remarks = list[tuple[str, str]]

#: Warnings that this process has said, and lists of open blocks of `noted`.
said: set[str] = set()
_open: list[Remarks] = []

NPZ_FORMAT = (
    "x_train, x_test (uint8 images [N, H, W] or [N, H, W, 3]) and y_train, y_test "
    "(whole-number labels [N])"
)


#: Maximum size of an image file or table in bytes: five times the largest image in 16-bit color.
MAX_BYTES = 2**30

_CGROUP = Path("/proc/self/cgroup")


def _note(record: logging.LogRecord) -> bool:
    """Keep a record for the open blocks; return whether it is news to who reads the log."""
    text = record.getMessage()
    for remarks in _open:
        remarks.append((record.levelname, text))
    if record.levelno != logging.WARNING:
        return logger.parent is None or record.levelno >= logger.parent.getEffectiveLevel()
    known = text in said
    said.add(text)
    return not known


logger.setLevel(logging.INFO)  # what no log shows is kept with the data
logger.addFilter(_note)


@contextmanager
def noted() -> Iterator[Remarks]:
    """Return a list that gets the levels and texts of what is said of data in the block.

    A warning that this process has said is in the list, and in no log.
    """
    remarks: Remarks = []
    _open.append(remarks)
    try:
        yield remarks
    finally:
        _open[:] = [other for other in _open if other is not remarks]


@contextmanager
def explained(problem: str, remedy: str = "") -> Iterator[None]:
    """Convert any exception of a file-reading library to a ``DataError``."""
    try:
        yield
    except DataError as error:
        error.public = error.public or "a file cannot be read"
        raise
    except Exception as error:
        reason = f"{problem} ({type(error).__name__}: {error})."
        public = f"a file cannot be read ({type(error).__name__})"
        raise DataError(f"{reason} {remedy}." if remedy else reason, public=public) from error


def open_regular(path: Path, most: int | None = MAX_BYTES) -> BufferedReader:
    """Open a regular file of at most ``most`` bytes for reading; None means any size.

    Raises ``DataError`` if the file is larger or not regular. Raises ``OSError`` if the operating
    system cannot open the file.
    """
    check_regular(path)
    if most is not None and (size := path.stat().st_size) > most:
        raise DataError(
            f"{path}: found {gigabytes(size)}; expected at most {gigabytes(most)}. Reduce its size."
        )
    return path.open("rb")


def check_regular(path: Path) -> None:
    """Raise ``DataError`` for what is no file: reading a pipe would wait, a device may not end."""
    if path.exists() and not path.is_file():
        raise DataError(f"{path} is not a regular file. Remove or replace it.")


#: What to do with files that are tables of numbers.
TABLES = "For a table of numbers set data.name = 'table': docs/data.md, Your own tables"


def check_columns(
    where: str, wanted: Iterable[str], columns: Iterable[str], remedy: str = ""
) -> None:
    """Raise ``DataError`` if a table, ``where``, lacks a column or has two of the same name."""
    columns, wanted = list(columns), list(wanted)
    if twice := [name for name in wanted if columns.count(name) > 1]:
        found = f"found several columns named {twice[0]}. Rename all but one."
        raise DataError(f"{where}: {found}", public=f"a table: {found}")
    if missing := [name for name in wanted if name not in columns]:
        lacks = f"missing: {', '.join(missing)}. Add or rename columns."
        raise DataError(
            f"{where}: found the columns {', '.join(columns)}; {lacks} {remedy}".rstrip(),
            public=f"a table: found {len(columns)} columns; {lacks}",
        )


@dataclass(frozen=True)
class Table:
    """Columns of text by name, of a CSV file or built in memory, and the line of each row."""

    path: Path
    columns: dict[str, list[str]]
    lines: list[int]

    def wrong(self, row: int, problem: str, public: str = "") -> DataError:
        """Return the error for a row; a site may send ``public`` instead of the ``problem``."""
        line = f"line {self.lines[row]}" if self.lines else f"row {row + 1}"
        return DataError(
            f"{self.path}: {line}{problem}", public=f"{line} of a table{public or problem}"
        )

    def numbers(self, name: str) -> npt.NDArray[np.float64]:
        """Return a column as numbers, [N], NaN if empty; raise ``DataError`` for another text."""
        numbers = []
        for row, text in enumerate(self.columns[name]):
            try:
                numbers.append(float(text or "nan"))
            except ValueError:
                found = f": {name}: found {quoted(text)}; expected a number, such as 1.5."
                raise self.wrong(row, found, ": a value is no number.") from None
        return np.array(numbers)

    def where(self, chosen: npt.NDArray[np.bool_]) -> "Table":
        """Return the table of the chosen rows, a mask, bool [N]."""
        columns = {name: [*compress(values, chosen)] for name, values in self.columns.items()}
        return Table(self.path, columns, [*compress(self.lines, chosen)])

    def is_test(self, classes: Any, patients: Any = None) -> npt.NDArray[np.bool_]:
        """Return a mask of test rows, by the column ``split`` or, without it, by `every_fifth`."""
        if "split" not in self.columns:
            return every_fifth(classes, patients)
        for row, split in enumerate(self.columns["split"]):
            if split not in ("test", "train"):
                remedy = "expected train or test. Correct it, or remove the column."
                found = f": found the split {split!r}; {remedy}"
                raise self.wrong(row, found, f": found another split; {remedy}")
        return np.array([split == "test" for split in self.columns["split"]], np.bool_)


@contextmanager
def long_fields() -> Iterator[None]:
    """Let the csv module read texts of any length, instead of at most 131,072 characters."""
    usual = csv.field_size_limit(MAX_BYTES)
    try:
        yield
    finally:
        csv.field_size_limit(usual)


#: Upper bound on the bytes that Python needs for a row of a table, besides its characters.
ROW_BYTES = 200


def read_csv(
    path: Path,
    needed: Mapping[str, str],
    optional: Iterable[str] = (),
    blank: Iterable[str] = (),
    remedy: str = "",
) -> Table:
    """Return columns of a CSV file in UTF-8 with a header; other columns are ignored.

    ``needed`` maps the columns that the file must have to the setting that names each, or "".
    Only the columns in ``blank`` may have empty values. ``remedy`` is what the error of a missing
    column says.
    """
    problem = f"{path} cannot be read as a CSV file in UTF-8"
    with explained(problem), open_regular(path) as file, long_fields():
        lines = sum(part.count(b"\n") for part in iter(partial(file.read, 2**20), b""))
        size = 2 * file.tell() + ROW_BYTES * lines
        check_memory(f"{path}: reading its {lines} lines takes", size, "Store fewer texts in it.")
        file.seek(0)
        reader = csv.reader(io.TextIOWrapper(file, "utf-8-sig", newline=""), strict=True)
        header = next(reader, [])
        check_columns(str(path), needed, header, remedy)
        names = [*needed, *(name for name in optional if name in header)]
        table = Table(path, {name: [] for name in names}, [])
        columns = [(name, header.index(name), table.columns[name]) for name in names]
        for row in filter(None, reader):  # without empty lines
            table.lines.append(reader.line_num)
            if any(row[len(header) :]):
                more = " has more values than the header. Quote texts that contain commas."
                raise table.wrong(-1, more)
            for name, at, values in columns:
                if at >= len(row) or not (row[at] or name in blank):
                    why = f" ({needed[name]})" if needed.get(name) else ""
                    lacks = f" has no {name}{why}. Add the value, or remove the row."
                    raise table.wrong(-1, lacks)
                values.append(row[at] if name in blank else sys.intern(row[at]))
    return table


def numbered(values: Any) -> Ints:
    """Return a number for each different value in the order of their first places, int64 [N].

    >>> numbered(["b", "a", "b", "c"]).tolist()
    [0, 1, 0, 2]
    """
    _, first, number = np.unique(values, return_index=True, return_inverse=True)
    return np.argsort(np.argsort(first))[number]


def every_fifth(classes: Any, patients: Any = None) -> npt.NDArray[np.bool_]:
    """Return a mask of test examples, bool [N]: in each class the first and every fifth after it.

    With ``patients``, a value for each example, patients are counted instead of examples, each in
    the class of the first example, and all examples of a patient are on one side.

    >>> every_fifth([0, 0, 0, 0, 0, 0, 1, 1]).nonzero()[0].tolist()
    [0, 5, 6]
    >>> every_fifth([0, 0, 0, 1, 0], ["a", "b", "b", "a", "c"]).nonzero()[0].tolist()
    [0, 3]
    """
    classes = np.asarray(classes)
    of = np.arange(len(classes)) if patients is None else numbered(patients)
    kinds = classes[np.unique(of, return_index=True)[1]]
    order = np.argsort(kinds, kind="stable")
    place = np.empty(len(kinds), np.int64)
    place[order] = np.arange(len(kinds)) - np.searchsorted(kinds[order], kinds[order])
    chosen: npt.NDArray[np.bool_] = (place % 5 == 0)[of]
    return chosen


def gigabytes(size: int) -> str:
    """Format a number of bytes as gigabytes.

    >>> gigabytes(2**30), gigabytes(10**12)
    ('1.1 GB', '1,000.0 GB')
    """
    return f"{size / 1e9:,.1f} GB"


def check_memory(subject: str, needed: int, remedy: str) -> None:
    """Raise ``DataError`` if ``needed`` bytes exceed the free memory.

    The message consists of ``subject``, both numbers of bytes and ``remedy``.
    """
    if needed > (free := free_memory()):
        problem = f"{gigabytes(needed)}; expected no more than the free memory, {gigabytes(free)}."
        raise DataError(f"{subject} {problem} {remedy}", public=f"a file takes {problem}")


def free_memory() -> int:
    """Return the number of bytes available without swapping or, if unknown, the total memory.

    The limit of a container or job (the process's control group, version 2) counts, too.
    """
    try:
        free = 1024 * _number(Path("/proc/meminfo"), r"MemAvailable:\s*")
    except (OSError, TypeError):
        if not hasattr(os, "sysconf"):  # Windows: a failed allocation will say the rest
            return sys.maxsize
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with suppress(OSError, TypeError, ValueError):  # no control group, or no limit ("max")
        (place,) = re.findall(r"^0::/?(.*)$", _CGROUP.read_text(encoding="utf-8"), re.MULTILINE)
        group = Path("/sys/fs/cgroup", place)
        used = _number(group / "memory.current") - _number(group / "memory.stat", "inactive_file ")
        free = min(free, max(0, _number(group / "memory.max") - used))
    return free


def _number(path: Path, before: str = "") -> int:
    """Return the number at the start of a line of a file, after the text ``before``."""
    text = path.read_text(encoding="ascii")
    return int(re.search(rf"^{before}(\d+)", text, re.MULTILINE)[1])  # type: ignore[index]


def described(dtype: np.dtype[Any], shape: tuple[int, ...]) -> str:
    """Return the type and shape of an array as text, such as "uint8 [9, 28, 28]"."""
    return f"{dtype} {list(shape)}"


@dataclass(frozen=True)
class NpzFile:
    """A domain in an ``.npz`` file with ``x_train``, ``y_train``, ``x_test`` and ``y_test``.

    The file may be compressed (deflate, LZMA). Python objects are rejected, and so are arrays whose
    header states a size above the free memory. Labels must fit the task and the number of outputs.
    """

    path: Path
    num_outputs: int | None = None
    task: str = CLASSIFICATION

    def labels(self, split: str) -> Targets:
        """Return the targets of a split."""
        key = f"y_{split}"
        with self._member(key) as (_, _, member):
            values = np.lib.format.read_array(member)
        return checked_labels(f"{self.path}: {key}", values, self.num_outputs, self.task)

    def values(self, setting: str, name: str, split: str) -> list[str]:
        """Return the values of ``<name>_<split>`` as strings, one for each label of the split."""
        key, count = f"{name}_{split}", len(self.labels(split))
        expected = f"whole numbers or strings [{count}], one for each label in y_{split}"
        with self._member(key, f"{expected} ({setting} = {name!r})") as (dtype, shape, member):
            if dtype.kind not in "iubU" or shape != (count,):
                raise self._wrong(key, described(dtype, shape), expected)
            values = [str(value) for value in np.lib.format.read_array(member)]
        if "" in values:
            raise self._wrong(key, f"an empty text for example {values.index('')}", expected)
        return values

    def images(self, split: str, rows: Ints) -> Pixels:
        """Return the images of these rows, after checking the whole array."""
        key, count = f"x_{split}", len(self.labels(split))
        with self._member(key) as (dtype, shape, member):
            picture = len(shape) == 3 or (len(shape) == 4 and shape[3] in (1, 3))
            if dtype != np.uint8 or not picture or 0 in shape[1:]:
                expected = "uint8 images [N, H, W] or [N, H, W, 3]"
                expected += f". {TABLES}" if len(shape) == 2 else ""
                raise self._wrong(key, described(dtype, shape), expected)
            if shape[0] != count:
                images = f"{shape[0]} images"
                raise self._wrong(key, images, f"{count}, the number of labels in y_{split}")
            return np.lib.format.read_array(member)[rows]

    @contextmanager
    def _member(
        self, key: str, expected: str = NPZ_FORMAT
    ) -> Iterator[tuple[np.dtype[Any], tuple[int, ...], IO[bytes]]]:
        """Open an array, check its size, and yield its dtype, its shape and its file."""
        with explained(f"{self.path} cannot be read"), open_regular(self.path, None) as file:
            if not zipfile.is_zipfile(file):
                raise DataError(f"{self.path} is not an .npz file. Expected {NPZ_FORMAT}.")
            remedy = f"Expected an .npz file with {NPZ_FORMAT}, without Python objects"
            problem = f"{self.path}: {key} cannot be read"
            with explained(problem, remedy), zipfile.ZipFile(file) as archive:
                keys = [name.removesuffix(".npy") for name in archive.namelist()]
                if key not in keys:
                    raise self._wrong(key, f"only {', '.join(keys) or 'nothing'}", expected)
                size = archive.getinfo(f"{key}.npy").file_size
                with archive.open(f"{key}.npy") as member:
                    shape, _, dtype = read_npy_header(member)
                    size, needed = size - member.tell(), math.prod(shape) * dtype.itemsize
                    array = described(dtype, shape)
                    if not dtype.hasobject and needed != size:
                        there = f"{size} bytes of data for {array}"
                        raise self._wrong(key, there, f"{needed} bytes")
                    found = f"{self.path}: {key}: found {array},"
                    check_memory(found, needed, "Store fewer or smaller images.")
                    member.seek(0)
                    yield dtype, shape, member

    def _wrong(self, key: str, content: object, expected: str) -> DataError:
        public = f"{key} in an .npz file is missing or wrong; expected {expected}"
        return DataError(
            f"{self.path}: {key}: found {content}; expected {expected}.", public=public
        )


def data_folder(config: DataConfig) -> Path | None:
    """Return the absolute path of ``data.dir`` or ``$FAIRFLOWER_DATA``; None if neither is set."""
    name = config.dir or os.environ.get("FAIRFLOWER_DATA", "")
    if not name:
        return None
    folder = Path(name).expanduser().absolute()
    if not folder.is_dir():
        key = "data.dir" if config.dir else "FAIRFLOWER_DATA"
        raise DataError(
            f"{key} = {name!r}: the folder {folder} does not exist.",
            public="the folder of the data does not exist",
        )
    return folder


def needed_folder(config: DataConfig, content: str) -> Path:
    """Return `data_folder`; raise ``DataError``, which names the ``content``, if it is not set."""
    folder = data_folder(config)
    if folder is None:
        raise DataError(
            f"The data set {config.name!r} needs a folder. Set data.dir (or FAIRFLOWER_DATA) to a "
            f"folder with {content}."
        )
    return folder


def checked_labels(
    where: str, values: npt.NDArray[Any], num_outputs: int | None, task: str = CLASSIFICATION
) -> Targets:
    """Return the targets in a file; raise ``DataError`` if there are none or they do not fit."""
    if len(values) == 0:
        raise DataError(f"{where}: found no labels; expected at least one example.")
    return read_targets(where, values, num_outputs, task)


def read_targets(where: str, values: Any, num_outputs: int | None, task: str) -> Targets:
    """Return values as targets; raise ``DataError`` if they do not fit the task.

    ``where`` says in the error message where they are. For the rest see `fairflower.tasks.Task`.
    """
    learns = task_of(task)
    try:
        return learns.read(np.asarray(values), num_outputs)
    except ValueError as error:
        of_task = f" (data.task = {task!r})" if task != CLASSIFICATION else ""
        raise DataError(f"{where}: {error}{of_task}.") from error


def places(names: Iterable[str], every: Sequence[str]) -> Ints:
    """Return the place of each name among all names, int64 [N]."""
    known = {name: k for k, name in enumerate(every)}
    return np.array([known[name] for name in names], np.int64)


def all_names(what: str, held: Mapping[str, Iterable[str]], remedy: str) -> tuple[str, ...]:
    """Return the sorted names of all domains; ``held`` maps each domain to its names.

    Raises ``DataError``, which says ``what`` they are, if names are too similar.
    """
    of = {domain: set(names) for domain, names in held.items()}
    alike: dict[str, list[str]] = {}
    every = tuple(sorted(set().union(*of.values())))
    for name in every:
        alike.setdefault(_plain(name).casefold(), []).append(name)
    for twins in alike.values():
        # If a domain has both "A" and "a", they are different.
        together = any(names.issuperset(twins) for names in of.values())
        if len(twins) > 1 and not (together and len(set(map(_plain, twins))) == len(twins)):
            places = [next(d for d, names in of.items() if name in names) for name in twins]
            listed = ", ".join(f"{n!r} (in {d})" for n, d in zip(twins, places, strict=True))
            raise DataError(
                f"{what} {listed} differ only in case, spaces or code points. {remedy}. If they "
                "are the same, use the same name; otherwise, use clearly different names."
            )
    return every


def _plain(name: str) -> str:
    """Normalize a name, because an accented letter may have one or two code points."""
    return unicodedata.normalize("NFC", name).strip()


def embedded(package: str, name: str, packed: str) -> dict[str, Any]:
    """Return a JSON file of a package, with the text in ``packed``, if it has it, unpacked."""
    text = resources.files(package).joinpath(f"{name}.json").read_text(encoding="utf-8")
    content: dict[str, Any] = json.loads(text)
    if packed in content:
        content[packed] = zlib.decompress(base64.b85decode(content[packed])).decode()
    return content


def stamp(path: Path) -> list[Any]:
    """Return a cheap fingerprint: the path, size and time of a file or of all files in a folder.

    Subfolders may be symbolic links, as class folders may. Deeper linked folders are not read.
    """
    files = [path]
    if path.is_dir():
        linked = (p for p in path.iterdir() if p.is_symlink() and p.is_dir())
        files = sorted(file for folder in (path, *linked) for file in folder.rglob("*"))
    stats = ((file, file.stat()) for file in files if file.is_file())
    return [[str(file), stat.st_size, stat.st_mtime_ns] for file, stat in stats]


def stamp_of(tokenizer: str) -> Any:
    """Return a JSON value that changes with the files of a tokenizer in a folder."""
    folder = Path(tokenizer).expanduser()
    return stamp(folder) if folder.is_dir() else tokenizer
