"""The boundary round a user's code: what an App raises becomes one error, with the user's lines alone.

    MyApp.train (app.py:42) on device-0003: ValueError: no such word
      app.py:30 in train
        x = self.look_up(examples)
      app.py:42 in look_up
        raise ValueError("no such word")

Who calls a method of an App does it inside `own_code`. Errors that the package raises on purpose, and what
ends a training from outside, go through as they are.
"""

from __future__ import annotations

import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import suppress
from contextvars import ContextVar
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from anabranch.core import errors
from anabranch.core.config.extras import EXTRAS, how_to_install
from anabranch.core.errors import AnabranchError, AppError, DataError
from anabranch.core.parts import installed

FRAMES_MAX = 6
MESSAGE_LINES_MAX = 6
INSTALLED = ("site-packages", "dist-packages")
TRACEBACK = "Traceback (most recent call last):\n"
_WORKER = re.compile(r"Caught \w+ in DataLoader worker process \d+\.\nOriginal " + re.escape(TRACEBACK))
_FRAME = re.compile(r'^  File "(.+)", line (\d+), in (.+)$', re.MULTILINE)
_RAISED = re.compile(r"^\S.*", re.MULTILINE | re.DOTALL)  # below its frames, which are set in
_SEED_BITS = re.compile(r"\bseed\b.*2\*\*32|\brandom_state\b.*4294967295", re.IGNORECASE)
_where: ContextVar[str] = ContextVar("where", default="")


class on_device:  # noqa: N801 - as contextlib names its own
    """Inside, an App works for this device: errors name it."""

    __slots__ = ("_name", "_token")

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        self._token = _where.set(self._name)

    def __exit__(self, *_: object) -> None:
        _where.reset(self._token)


class own_code:  # noqa: N801 - no generator: a simulation is in here for each device and each task
    """Inside, a method of the App runs. Raises `AppError`, or `DataError` where it was one.

    `about` says what for: `shard 3 of 8`. A process that the code inside has forked ends where it leaves it:
    it would be this one a second time, and both would go on with one run, on one connection, in one folder.
    """

    __slots__ = ("_about", "_app", "_forks", "_method")

    def __init__(self, app: Any, method: str, about: str = "") -> None:
        self._app, self._method, self._about = app, method, about

    def __enter__(self) -> None:
        self._forks = _Forks.count

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if self._forks != _Forks.count:
            _end(SystemExit() if error is None else error)
        if error is not None:
            self._raise(error)

    def _raise(self, error: BaseException) -> None:
        """What comes of an error; it goes through as it is where nothing is raised."""
        if isinstance(error, AnabranchError):
            if type(error) in (AppError, DataError) and own_frames(error):
                raise type(error)(told(self._head, error, str(error))) from error
        elif isinstance(error, Exception | SystemExit) and not is_signal(error):
            raise AppError(told(self._head, error)) from error

    @property
    def _head(self) -> str:
        return head(self._app, self._method, self._about)


class _Forks:
    """How many forks lie between this process and the first: to ask the system takes a microsecond."""

    count = 0

    @classmethod
    def counted(cls) -> None:
        """This is a child."""
        cls.count += 1


if hasattr(os, "register_at_fork"):  # where processes can be forked at all
    os.register_at_fork(after_in_child=_Forks.counted)


def is_signal(error: BaseException) -> bool:
    """Whether it is a signal that came meanwhile, and no `sys.exit`: see `stop_signals.Terminated`."""
    return isinstance(error, SystemExit) and type(error) is not SystemExit


def _end(error: BaseException) -> NoReturn:
    """As Python ends a process by this error, without what the process it was forked from has yet to do."""
    code: object = 1
    if isinstance(error, SystemExit):
        code = 0 if error.code is None else error.code
        if not isinstance(code, int):
            sys.stderr.write(f"{code}\n")
    else:
        traceback.print_exception(error)
    with suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 1)


def told(start: str, error: BaseException, what: str = "") -> str:
    """`start (file:line) on device: what`, and the user's frames below; `what` is the error if not given."""
    frames = own_frames(error)
    place = f" ({shown(frames[-1].filename)}:{frames[-1].lineno})" if frames else ""
    device = f" on {_where.get()}" if _where.get() else ""
    lines = [f"{start}{place}{device}: {what or _said(error)}"]
    for frame in frames[-FRAMES_MAX:]:
        lines.append(f"  {shown(frame.filename)}:{frame.lineno} in {frame.name}")
        lines += [f"    {frame.line}"] if frame.line else []
    return "\n".join(lines)


def own_frames(error: BaseException) -> list[traceback.FrameSummary]:
    """The frames of an error that are no library's, the innermost last; of a syntax error the line itself."""
    frames = [*traceback.extract_tb(error.__traceback__), *_frames_of_worker(error)]
    found = [f for f in frames if is_own(f.filename)]
    if isinstance(error, SyntaxError) and error.filename and is_own(error.filename):
        line = (error.text or "").strip()
        found.append(traceback.FrameSummary(error.filename, error.lineno, "this file", line=line))
    return found


def _frames_of_worker(error: BaseException) -> list[traceback.FrameSummary]:
    """The frames in the process of a DataLoader where the error was raised: none where it was raised here."""
    lines = _FRAME.findall(_of_worker(error))
    return [traceback.FrameSummary(file, int(line), name) for file, line, name in lines]


def _of_worker(error: BaseException) -> str:
    """The traceback that torch has put into the message of what a DataLoader's process raised; else empty.

    Of errors on errors the last, which is what was raised.
    """
    return str(error).rpartition(TRACEBACK)[2] if _WORKER.match(str(error)) else ""


def shown(file: str) -> str:
    """A path as it is named from here."""
    path = Path(file)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else file


def _said(error: BaseException) -> str:
    if raised := _RAISED.search(_of_worker(error)):
        return "\n".join(raised[0].splitlines()[:MESSAGE_LINES_MAX])
    what = error.msg if isinstance(error, SyntaxError) else str(error)
    text = "\n".join(what.splitlines()[:MESSAGE_LINES_MAX])
    if isinstance(error, ModuleNotFoundError):
        text += f": {_gone(error.name or '') or how_to_install(error.name) or 'install it'}"
    elif _SEED_BITS.search(text):
        text += ": seeds have 63 bits; give it seed % 2**32"
    notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
    return type(error).__name__ + (f": {text}" if text else "") + notes


def _gone(module: str) -> str:
    """What to say where a package is installed and lacks this module: no extra brings it."""
    package = module.partition(".")[0]
    if module in (package, *EXTRAS) or package not in sys.modules:
        return ""
    with suppress(PackageNotFoundError):
        return f"{package} {version(package)}, which is installed, has no such module"
    return ""


def head(app: Any, method: str, about: str) -> str:
    """How an error of a method begins."""
    name = own_name(app)
    return f"{name}.{method} for {about}" if about else f"{name}.{method}"


def own_name(app: Any) -> str:
    """As the user has named it: the class, or the module whose functions are the App."""
    target = getattr(app, "adapted", app)
    if isinstance(target, ModuleType):
        return Path(target.__file__ or target.__name__).stem
    return target.__name__ if isinstance(target, type) else type(target).__name__


def is_own(file: str) -> bool:
    """Whether code of this file is no library's: a package that brings parts is none."""
    if file.startswith("<") or not (os.path.isabs(file) or os.path.exists(file)):
        return False  # compiled elsewhere, as by Cython
    if any(part in INSTALLED for part in Path(file).parts):
        return any(file.startswith(place) for place in _packages_of_parts())
    return not any(file.startswith(folder) for folder in _libraries())


@lru_cache(maxsize=1)
def _libraries() -> tuple[str, ...]:
    """Folders whose code is nobody's own."""
    package = Path(errors.__file__).parents[1]
    parts = [package, *(p.resolve() for p in package.iterdir() if p.is_symlink()), package.resolve()]
    standard = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib")]
    return tuple(f"{folder}{os.sep}" for folder in [*map(str, parts), *standard])


def _packages_of_parts() -> Iterator[str]:
    """Where the installed packages lie that bring parts, of those that are imported."""
    for name in {entry.module.partition(".")[0] for entry in installed()}:
        module = sys.modules.get(name)
        yield from (f"{folder}{os.sep}" for folder in getattr(module, "__path__", ()))
        if module is not None and not hasattr(module, "__path__") and module.__file__:
            yield module.__file__
