"""`new`: a folder to begin with, which runs, tests itself and deploys; `init` makes its model."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from anabranch.cli.next_steps import with_commands
from anabranch.cli.options import AsJson, writing
from anabranch.cli.output import Output
from anabranch.core.config.extras import EXTRAS
from anabranch.core.errors import ConfigError
from anabranch.core.ids import stranger

ENDING, DOT = ".in", "dot-"  # of a file of a template, and in the place of a leading dot
NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]*\Z")
FLOWER_NAME_MAX = 32  # of a Flower app, which has no _ in its name either: `flwr run` refuses others
SCRIPT = "python train.py 127.0.0.1:7070 device-0"
IN_IMAGE = frozenset({"client", "workloads"})  # of docker/client.Dockerfile
NOT_OF_DEVICES = frozenset({"server", "testing"})
INSTALL = 'USER root\nRUN pip install --no-cache-dir "anabranch[{}]"\nUSER 10001:10001\n'
JOINED = ". `train.py` takes both:\n`python train.py HOST:7070 device-1 TOKEN CA_SHA256`"


@dataclass(frozen=True)
class Template:
    """What a folder is made from. `app`: how its App is called; `device`: the command that starts one.

    `own`: how it is said that each machine has data of its own.
    `rate` and `updates` are those with which it learns in its own test.
    """

    about: str
    extras: tuple[str, ...]
    app: str = "app.py:app"
    code: str = "`app.py`"
    device: str = ""
    own: str = "`own_data=True` in `ab.app(...)`"
    rate: float = 0.05
    updates: int = 20

    def words(self, name: str) -> Mapping[str, str]:
        """What stands where a file of the template has `@WORD@`."""
        more = [extra for extra in self.extras if extra not in IN_IMAGE | NOT_OF_DEVICES]
        return {
            "NAME": name,
            "APPNAME": name.replace("_", "-")[:FLOWER_NAME_MAX].rstrip("-"),
            "ABOUT": self.about,
            "EXTRAS": ",".join(self.extras),
            "INSTALL": INSTALL.format(",".join(more)) if more else "",
            "OWN": self.own,
            "APP": self.app,
            "PLACED": "flower:/app" if self.app == "flower:." else f"/app/{self.app}",
            "CODE": self.code,
            "JOINED": JOINED if self.device else "",
            "DEVICE": self.device or f"anabranch client {self.app} --id device-0",
            "RATE": str(self.rate),
            "UPDATES": str(self.updates),
        }


TEMPLATES = {
    "pytorch": Template(
        "A torch model and its data, learned by a fleet.", ("client", "server", "workloads", "testing")
    ),
    "transformers": Template(
        "A model of Hugging Face's and its data, learned by a fleet.",
        ("client", "server", "transformers", "testing"),
        code="`app.py`, and in `train.py` where it has a Trainer of its own",
        device=SCRIPT,
        rate=0.003,
    ),
    "lightning": Template(
        "A LightningModule and its data, learned by a fleet.",
        ("client", "server", "workloads", "lightning", "testing"),
        code="`app.py`, and in `train.py` where it has a Trainer of its own",
        device=SCRIPT,
        rate=0.003,
    ),
    "numpy": Template(
        "A model in numpy and its data, learned by a fleet: no device needs torch.",
        ("server", "workloads", "testing"),
        app="app.py:App",
        own="`own_data = True` in the App",
    ),
    "flower": Template(
        "A Flower app, which a fleet also learns without rounds.",
        ("server", "workloads", "flower", "testing"),
        app="flower:.",
        own="`--shard 0/1` to each device",
        code="`client_app.py` and `task.py`",
    ),
}


def new(
    name: Annotated[
        str, typer.Argument(help="The folder to make, and what its runs are called.", metavar="NAME")
    ],
    template: Annotated[str, typer.Option(help=f"What it is made from: {', '.join(TEMPLATES)}.")] = next(
        iter(TEMPLATES)
    ),
    as_json: AsJson = False,
) -> None:
    """Make a folder with an App, settings, tests and a README: to run as it is, and to put your own into."""
    folder, chosen = Path(name), TEMPLATES.get(template)
    if chosen is None:
        raise ConfigError(f"--template {template!r}: take one of {', '.join(TEMPLATES)}")
    if not NAME.match(folder.name):
        raise ConfigError(
            f"{folder.name!r}{stranger(folder.name, '_-')}: a name has ASCII letters, digits, - and _, and "
            "begins with a letter"
        )
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} is there and not empty: take another name")
    made = {}
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for file, text in _filled(template, chosen.words(folder.name)):
            (folder / file).write_text(text, encoding="utf-8")
            made[file] = text
    missing = [extra for extra in chosen.extras if not _installed(extra)]
    install = [f'pip install "anabranch[{",".join(missing)}]"'] if missing else []
    steps = [f"cd {folder}", *install, "anabranch simulate run.toml", "python -m pytest"]
    told = {"folder": str(folder), "template": template, "files": sorted(made), "next": steps}
    Output(as_json).result(told, with_commands(f"{folder}: {', '.join(sorted(made))}\nnext:", steps))


def _filled(template: str, words: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """The files of a template and those of all, by name."""
    for part in ("common", template):
        for file in (files("anabranch.cli") / "templates" / part).iterdir():
            if file.name.endswith(ENDING):
                text = file.read_text(encoding="utf-8")
                for word, by in words.items():
                    text = text.replace(f"@{word}@", by)
                called = file.name.removesuffix(ENDING)
                yield (f".{called.removeprefix(DOT)}" if called.startswith(DOT) else called), text


def _installed(extra: str) -> bool:
    return all(find_spec(module) for module, its in EXTRAS.items() if its == extra)
