"""Methods that formats share: those that are only read, those of a single file, and those of folders of zarr arrays."""

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any

from ..._core.calls import SINGLE_PROCESS, Call
from ..._core.entries import ArrayEntry
from ..._core.source import Source
from ...errors import UnsupportedError
from ...stores.file_io import opened
from ...stores.read_errors import refusal
from ...stores.store import Store

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ..._core.layouts import Layout

_MEMBER_MAGIC = b"PK\x03\x04"  # the beginning of the header before each member of a zip file
_MEMBER_BYTES = 30  # of such a header before the name
_USUAL_BYTES = 512  # of the beginning of a file, with such a header and most names


class FormatDefaults:
    """The attributes of a format with neither suffixes nor steps, which records nothing but a tree."""

    suffixes: tuple[str, ...] = ()
    boxes: tuple[str, ...] = ()

    def steps(self, store: Store, folder: str, names: Sequence[str]) -> dict[int, str]:
        return {}

    def keeps(self, path: str, contents: Source) -> Collection[str]:
        return ()


class ReadOnly(FormatDefaults):
    """A format that is only read; see `treering.formats.Format`.

    contents: what it reads. advice: what to do instead of writing it.
    """

    contents: str
    advice = "choose another format, such as safetensors"

    def write(self, store: Store, path: str, contents: Source, *, overwrite: bool, **options: Any) -> int:
        raise self.only_read(path)

    def only_read(self, path: str) -> UnsupportedError:
        return UnsupportedError(f"{path}: {self.contents} are only read; {self.advice}")


def refuses_file(store: Store, path: str, examine: Callable[[], str | None]) -> str | None:
    """Returns the reason why a path is no file of a format; `examine` returns that of a file."""
    try:
        found = store.stat(path)
        if found is None or not found.is_file:
            return "there is nothing" if found is None else "not a file"
        return examine()
    except OSError as error:
        return refusal(error, path)


def refuses_zip(store: Store, path: str, ending: str) -> str | None:
    """Returns the reason why a path is no zip file whose first member has a name with this ending."""
    return refuses_file(store, path, lambda: _examine_zip(store, path, ending))


def _examine_zip(store: Store, path: str, ending: str) -> str | None:
    with opened(store, path) as blob:
        begin = blob.read_up_to(_USUAL_BYTES)
        if not begin.startswith(_MEMBER_MAGIC):
            return "it does not begin as a zip file does"
        end = _MEMBER_BYTES + int.from_bytes(begin[26:28], "little")
        begin = begin if end <= len(begin) else blob.read_up_to(end)
    return (
        None
        if begin[_MEMBER_BYTES:end].endswith(ending.encode())
        else f"the first file in it is not {ending.strip('/')}"
    )


class ZarrFolders(FormatDefaults):
    """Implements `treering.formats.JointFormat` for folders of zarr arrays.

    `_writer` of a subclass imports and returns its writing function, so that reading does not import it.
    """

    def _writer(self) -> Callable[..., int]:
        raise NotImplementedError

    def write(self, store: Store, path: str, contents: Source, *, overwrite: bool, **options: Any) -> int:
        return self.write_together(store, path, contents, SINGLE_PROCESS, {}, overwrite=overwrite, **options)

    def splits(self, entry: ArrayEntry) -> bool:
        return True

    def write_together(
        self,
        store: Store,
        path: str,
        contents: Source,
        call: Call,
        layouts: "Mapping[str, Layout]",
        *,
        overwrite: bool,
        **options: Any,
    ) -> int:
        return self._writer()(store, path, contents, call, layouts, options, overwrite=overwrite)
