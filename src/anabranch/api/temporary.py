"""Folders that last as long as somebody has them."""

from __future__ import annotations

import tempfile
from pathlib import Path
from types import TracebackType

from anabranch.support.forks import remove_at_the_end


class TemporaryFolder:
    """A new folder, `path`, which goes once nobody holds this object any more, or the program ends.

    As a context manager it goes at once if what is done inside fails.
    """

    def __init__(self, prefix: str = "anabranch-") -> None:
        self.path = Path(tempfile.mkdtemp(prefix=prefix))
        self._remove = remove_at_the_end(self, self.path)

    def __enter__(self) -> Path:
        return self.path

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self._remove()


def folder_at(named: str | Path | None, prefix: str = "anabranch-") -> tuple[Path, TemporaryFolder | None]:
    """A folder, absolute, as what an App does may change the working directory; and what holds it.

    None: a new one, which lasts as long as that.
    """
    if named is not None:
        return Path(named).absolute(), None
    made = TemporaryFolder(prefix)
    return made.path, made
