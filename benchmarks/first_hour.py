"""The first hour with anabranch, Flower and NVFlare: what their documentation has a new user type, typed.

    python -m benchmarks.first_hour --flower CHECKOUT --nvflare CHECKOUT [--only NVFlare]
    python -m benchmarks.first_hour --render

Somebody has a torch model and examples (`OWN`) and wants them learned (a) by a simulated fleet, (b) by a
live federation of three machines whose devices prove who they are. Each product and goal has a blank
environment, torch for CPUs first, and ends with a check of the model that it left. Machines are folders on
this one, and get only what is carried to them. The peers' examples come from checkouts of their repositories.
Writes `docs/first-hour.json` and, made of that alone, `docs/first-hour.md`; what `--only` leaves out stays.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.person import Person, Step, WentWrong, replaced

ROOT = Path(__file__).parents[1]
DATA, PAGE = ROOT / "docs" / "first-hour.json", ROOT / "docs" / "first-hour.md"
TORCH = "pip install torch==2.13.0"
LEARNED = 0.9  # of the test examples right: then a model counts as trained; by chance it is 0.25
MB = 1_000_000
SIMULATED, LIVE = "a simulated fleet", "three machines"
SERVER, DEVICES = "server", ("device-1", "device-2")
AT_ONCE = "the other machines do the same at the same time"
OWN = '''"""What somebody has before all: a torch model, and where its examples are."""

import os

import numpy as np
import torch


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))

    def forward(self, x):
        return self.layers(x)


def load():
    with np.load(os.environ["DATA"]) as arrays:
        return arrays["x"], arrays["y"]
'''
EXAMPLES = """import numpy as np
draw = np.random.default_rng(1)
centres = 1.2 * draw.normal(size=(4, 16))
for name, count in (("data", 1200), ("test", 400)):
    y = draw.integers(4, size=count)
    np.savez(name, x=(centres[y] + draw.normal(size=(count, 16))).astype("float32"), y=y.astype("int64"))
"""
CHECK = """import sys, numpy, torch
from mine import Net
model = Net()
if sys.argv[1].endswith(".safetensors"):
    from safetensors.torch import load_file
    state = load_file(sys.argv[1])
else:
    state = torch.load(sys.argv[1], weights_only=True)
model.load_state_dict(state.get("model", state))
with numpy.load(sys.argv[2]) as test:
    right = model(torch.from_numpy(test["x"])).argmax(1).numpy() == test["y"]
print(float(right.mean()))
"""


@dataclass
class Place:
    """Where a way begins: a person, checkouts of the peers. `torch_bytes`: an environment with torch."""

    person: Person
    sources: Mapping[str, Path]
    torch_bytes: int = 0

    def fetched(self, product: str, example: str, machine: str, into: str) -> Path:
        """An example of the documentation, as its command would lay it there."""
        target = self.person.at(machine) / into
        shutil.copytree(self.sources[product] / example, target)
        shutil.copy(self.person.at(machine) / "mine.py", target)
        return target

    def installs(self, *commands: str, machines: tuple[str, ...] = ()) -> None:
        """pip, in the one environment; `machines` need the same, and do it at the same time."""
        self.person.types(SERVER, TORCH)
        self.torch_bytes = installed_bytes(self.person.programs)
        for command in commands:
            self.person.types(SERVER, command)
        for machine in machines:
            self.person.repeats(machine, [TORCH, *commands])


@dataclass(frozen=True)
class Way:
    """What it took: `steps`; `megabytes` beside torch; `accuracy` of the model that was left, if any."""

    product: str
    goal: str
    release: str
    steps: tuple[Step, ...]
    megabytes: float
    accuracy: float | None
    wrong: str = ""
    notes: tuple[str, ...] = field(default=())

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Way:
        """As the file of figures has it."""
        steps = tuple(Step(**step) for step in found["steps"])
        return cls(**{**found, "steps": steps, "notes": tuple(found["notes"])})


# --- ours ------------------------------------------------------------------------------------------

APP = """from mine import Net, load

import anabranch as ab

app = ab.app(Net, load(), name="mine")
"""


def _our_folder(person: Person) -> None:
    person.types(SERVER, "anabranch new mine")
    shutil.copy(person.at(SERVER) / "mine.py", person.at(SERVER) / "mine")
    person.writes(SERVER, "mine/app.py", APP)


def ours_simulated(place: Place) -> Path:
    """docs/new.md."""
    person = place.person
    place.installs('pip install "anabranch[client,server,workloads,testing]"')
    _our_folder(person)
    person.types(SERVER, "anabranch simulate run.toml", "mine")
    return person.at(SERVER) / "mine/runs/mine-fedbuff-seed0/final.safetensors"


def ours_live(place: Place) -> Path:
    """docs/new.md, and docs/deploying.md from its five commands."""
    person = place.person
    place.installs('pip install "anabranch[client,server,workloads,testing]"', machines=DEVICES)
    _our_folder(person)
    person.types(SERVER, "anabranch init app.py:app --out model", "mine")
    said = person.types(SERVER, "anabranch admin ca init", "mine")
    authority = said.partition("ca-sha256: ")[2].split()[0]
    server = "anabranch server run.toml --model model --address 0.0.0.0:7070"
    serving = person.starts(SERVER, server, "mine", until="devices join on")
    started = []
    for device in DEVICES:
        said = person.types(SERVER, f"anabranch admin enrol {device}", "mine")
        token = said.partition("--token ")[2].split()[0]
        for file in ("mine/app.py", "mine.py"):
            person.carries(SERVER, device, file)
        person.tells(device, "a token and the authority's fingerprint")
        words = "anabranch client app.py:app --server 127.0.0.1:7070 --token {} --ca-sha256 {} --shard 0/1"
        command, typed = words.format(token, authority), words.format("TOKEN", "HEX")
        started.append(person.starts(device, command, until="pushed", as_typed=typed))
    for terminal in started:
        person.waits(terminal)
    person.waits(serving, "the run ended")
    person.types(SERVER, "anabranch admin export final.safetensors", "mine")
    return person.at(SERVER) / "mine/final.safetensors"


# --- Flower ----------------------------------------------------------------------------------------

FLOWER_HEAD = '''"""{name}: A Flower / PyTorch app."""

import torch
from torch.utils.data import DataLoader, TensorDataset

from {name}.mine import Net, load


def loader(x, y, batch_size):
    pairs = TensorDataset(torch.from_numpy(x), torch.from_numpy(y))
    return DataLoader(pairs, batch_size=batch_size, shuffle=True)


'''
FLOWER_PARTS = """def load_data(partition_id: int, num_partitions: int, batch_size: int):
    x, y = load()
    x, y = x[partition_id::num_partitions], y[partition_id::num_partitions]
    cut = len(x) * 4 // 5
    return loader(x[:cut], y[:cut], batch_size), loader(x[cut:], y[cut:], batch_size)


def load_centralized_dataset():
    return loader(*load(), 128)


"""
FLOWER_OWN = """def load_data_from_disk(path: str, batch_size: int):
    x, y = load()
    cut = len(x) * 4 // 5
    return loader(x[:cut], y[:cut], batch_size), loader(x[cut:], y[cut:], batch_size)


"""
NO_HUB = "its hub is not reached from here: the files are its repository's"


def _flower_app(person: Person, folder: str, name: str, data: str) -> None:
    """Put the own model and data into an example: its pyproject.toml and task.py."""
    at = person.at(SERVER) / folder
    shutil.move(at / "mine.py", at / name)
    project = (at / "pyproject.toml").read_text(encoding="utf-8")
    kept = [
        line for line in project.splitlines() if "torchvision" not in line and "flwr-datasets" not in line
    ]
    person.writes(SERVER, f"{folder}/pyproject.toml", "\n".join(kept).replace("torch==", "torch>=") + "\n")
    task = (at / name / "task.py").read_text(encoding="utf-8")
    text = FLOWER_HEAD.format(name=name) + data + task[task.index("def train(") :]
    for batches in ("trainloader", "testloader"):
        pairs = f"for images, labels in {batches}:\n            "
        text = replaced(
            text, f"for batch in {batches}:", "optimizer" if "train" in batches else "outputs", pairs
        )
    person.writes(SERVER, f"{folder}/{name}/task.py", text)


def flower_simulated(place: Place) -> Path:
    """The README of its examples/quickstart-pytorch."""
    person = place.person
    place.installs('pip install "flwr[simulation]"')
    person.cannot(SERVER, "flwr new @flwrlabs/quickstart-pytorch", NO_HUB)
    place.fetched("Flower", "examples/quickstart-pytorch", SERVER, "quickstart-pytorch")
    _flower_app(person, "quickstart-pytorch", "pytorchexample", FLOWER_PARTS)
    person.types(SERVER, "pip install -e .", "quickstart-pytorch")
    person.types(SERVER, "flwr run . --stream", "quickstart-pytorch")
    return person.at(SERVER) / "quickstart-pytorch/final_model.pt"


CONNECTION = """[superlink]
default = "my-connection"

[superlink.my-connection]
address = "127.0.0.1:8000"
root-certificates = "{folder}/certificates/ca.crt"
"""
SUPERLINK = (
    "flower-superlink --ssl-ca-certfile certificates/ca.crt --ssl-certfile certificates/server.pem"
    " --ssl-keyfile certificates/server.key --enable-supernode-auth"
)


def flower_live(place: Place) -> Path:
    """The README of its examples/supernode-authentication: TLS, and devices that sign with known keys."""
    person, folder = place.person, "supernode-authentication"
    place.installs("pip install flwr", machines=DEVICES)
    person.cannot(SERVER, "flwr new @flwrlabs/supernode-authentication", NO_HUB)
    at = place.fetched("Flower", f"examples/{folder}", SERVER, folder)
    _flower_app(person, folder, "authexample", FLOWER_OWN)
    person.types(SERVER, "pip install -e .", folder)
    person.types(SERVER, "python generate_creds.py", folder)
    person.types(SERVER, "flwr config list", folder)
    person.writes(SERVER, "home/.flwr/config.toml", CONNECTION.format(folder=at))
    person.starts(SERVER, SUPERLINK, folder, until="Uvicorn running")
    for number, device in enumerate(DEVICES, 1):
        person.types(SERVER, f"flwr supernode register keys/supernode_credentials_{number}.pub", folder)
        person.carries(SERVER, device, f"{folder}/certificates/ca.crt", "certificates")
        person.carries(SERVER, device, f"{folder}/keys/supernode_credentials_{number}", "keys")
        command = (
            "flower-supernode --root-certificates certificates/ca.crt"
            f" --auth-supernode-private-key keys/supernode_credentials_{number}"
            """ --superlink "127.0.0.1:8000" --node-config 'dataset-path="data.npz"'"""
            f" --port {9093 + number}"
        )
        person.starts(device, command, until="(?i)starting flower supernode")
    person.types(SERVER, "flwr run . --stream", folder)
    return at / "final_model.pt"


# --- NVFlare ---------------------------------------------------------------------------------------

NVFLARE_DATA = """    x, y = (torch.from_numpy(array) for array in load())
    cut = len(x) * 4 // 5
    train_set = torch.utils.data.TensorDataset(x[:cut], y[:cut])
    test_set = torch.utils.data.TensorDataset(x[cut:], y[cut:])

"""
NO_GITHUB = "the files are of a copy of that repository"


def _nvflare_app(place: Place) -> None:
    """Put the own model and data into examples/hello-world/hello-pt: its client.py and job.py."""
    person = place.person
    person.cannot(SERVER, "git clone https://github.com/NVIDIA/NVFlare.git", NO_GITHUB)
    at = place.fetched("NVFlare", "examples/hello-world/hello-pt", SERVER, "hello-pt")
    client = (at / "client.py").read_text(encoding="utf-8")
    unused = ("import torchvision", "from torchvision")
    client = "\n".join(line for line in client.splitlines() if not line.startswith(unused))
    client = client.replace("from model import SimpleNetwork", "from mine import Net, load")
    client = client.replace("SimpleNetwork()", "Net()")
    client = replaced(client, "    # Data transforms", "    train_loader = ", NVFLARE_DATA)
    person.writes(SERVER, "hello-pt/client.py", client + "\n")
    job = (at / "job.py").read_text(encoding="utf-8")
    job = job.replace("from model import SimpleNetwork", "from mine import Net")
    person.writes(SERVER, "hello-pt/job.py", job.replace("model=SimpleNetwork()", "model=Net()"))


def nvflare_simulated(place: Place) -> Path:
    """The README of its examples/hello-world/hello-pt."""
    place.installs("pip install nvflare", "pip install tensorboard")
    _nvflare_app(place)
    said = place.person.types(SERVER, "python job.py", "hello-pt")
    found = said.rpartition("Result can be found in :")[2].split()[0]
    return Path(found) / "server/simulate_job/app_server/FL_global_model.pt"


def nvflare_live(place: Place) -> Path:
    """Its pages on provisioning, on deployment and on `nvflare job`; start-up kits with mutual TLS."""
    person = place.person
    place.installs("pip install nvflare", "pip install tensorboard", machines=DEVICES)
    _nvflare_app(place)
    person.types(SERVER, "python job.py --export --export-dir jobs", "hello-pt")
    person.types(SERVER, "nvflare provision -g")
    project = (person.at(SERVER) / "project.yml").read_text(encoding="utf-8")
    person.writes(SERVER, "project.yml", project.replace("- name: server1", "- name: localhost"))
    person.types(SERVER, "nvflare provision -p project.yml")
    kits = "workspace/example_project/prod_00"
    for number, device in enumerate(DEVICES, 1):
        person.carries(SERVER, device, f"{kits}/site-{number}")
    person.types(SERVER, "./startup/start.sh", f"{kits}/localhost")
    for number, device in enumerate(DEVICES, 1):
        person.types(device, "./startup/start.sh", f"site-{number}")
    admin = f"{kits}/admin@nvidia.com"
    person.types(SERVER, f"nvflare config add project_admin {admin}")
    person.types(SERVER, "nvflare config use project_admin")
    said = person.types(SERVER, "nvflare job submit -j hello-pt/jobs/hello-pt")
    job = said.partition("job_id: ")[2].split()[0]
    person.types(SERVER, f"nvflare job wait {job}")
    person.types(SERVER, f"nvflare job download {job}")
    return next(person.at(SERVER).rglob("FL_global_model.pt"))


# --- all of them -----------------------------------------------------------------------------------

WAYS: Mapping[str, Mapping[str, Callable[[Place], Path]]] = {
    "anabranch": {SIMULATED: ours_simulated, LIVE: ours_live},
    "Flower": {SIMULATED: flower_simulated, LIVE: flower_live},
    "NVFlare": {SIMULATED: nvflare_simulated, LIVE: nvflare_live},
}
PACKAGES = {"anabranch": "anabranch", "Flower": "flwr", "NVFlare": "nvflare"}
LEFT_OUT = {
    "Flower": (
        "Its devices sign with registered keys, inside of TLS; the server alone has a certificate.",
        "The copy of its documentation is older than the release: the release serves all on port 8000.",
        "With a run it makes an environment of the app's needs, torch too, on each machine: its MB has all.",
        "On machines apart its generate_creds.py wants the server's address: a line more by hand.",
        "On one machine each device wants a port of its own, `--port`, which machines apart do not.",
    ),
    "NVFlare": ("On machines apart the server's name in project.yml is its DNS name.",),
    "anabranch": ("On machines apart `127.0.0.1` is the server's name or address.",),
}


def installed_bytes(*folders: Path) -> int:
    """What lies in folders, less what programs keep in `.cache`; a file of several names counts once."""
    found = {}
    for folder in folders:
        for path in folder.rglob("*"):
            if path.is_file() and not path.is_symlink() and ".cache" not in path.parts:
                state = path.stat()
                found[state.st_dev, state.st_ino] = state.st_size
    return sum(found.values())


def measured(product: str, goal: str, work: Path, sources: Mapping[str, Path], wheel: Path) -> Way:
    """Go one way in a blank environment; where it goes wrong, that is what came of it."""
    programs = work / "environment"
    venv.create(programs, with_pip=True)
    python = programs / "bin/python"
    own = work / "own"
    own.mkdir()
    (own / "mine.py").write_text(OWN, encoding="utf-8")
    person = Person(work / "machines", programs, (own / "mine.py", own / "data.npz"))
    place = Place(person, sources)
    if product == "anabranch":  # it stands where the index would
        subprocess.run([python, "-m", "pip", "install", "-q", "--no-deps", wheel], check=True)
    subprocess.run([sys.executable, "-c", EXAMPLES], cwd=own, check=True)
    accuracy, wrong = None, ""
    try:
        model = WAYS[product][goal](place)
        said = subprocess.run(
            [python, "-c", CHECK, model, own / "test.npz"],
            cwd=own,
            check=True,
            capture_output=True,
            text=True,
        )
        accuracy = float(said.stdout)
    except (WentWrong, OSError, LookupError, subprocess.CalledProcessError) as error:
        wrong = str(error)
        sys.stderr.write(f"{product}, {goal}: {wrong}\n")
    finally:
        person.ends()
    homes = person.home.glob("*/home") if person.home.exists() else ()
    added = installed_bytes(programs, *homes) - place.torch_bytes
    release = _release(python, PACKAGES[product])
    return Way(
        product, goal, release, tuple(person.steps), round(added / MB, 1), accuracy, wrong, LEFT_OUT[product]
    )


def _release(python: Path, package: str) -> str:
    code = f"import importlib.metadata as m; print(m.version({package!r}))"
    return subprocess.run([python, "-c", code], check=True, capture_output=True, text=True).stdout.strip()


# --- the page --------------------------------------------------------------------------------------

ABOUT = """# The first hour

Made by `python -m benchmarks.first_hour`; do not edit. {machine}.

Somebody has a torch model and examples of their own, and wants them learned: by a simulated fleet, and by a
live federation of three machines, a server and two devices that prove who they are. What the documentation of
each product has a new user type was typed, in a blank environment each, and the model that was left was tried
on {tests} examples that nobody trained on. Their model and data are one file, the same for all ({own} lines).
How long is trained is as each example has it.

**Machine time and hand steps are measured, not people's time**: nobody read, looked for or mistyped anything.
Machines are folders on one computer, with a home of their own and what was carried to them; they share its
loopback and its environment of Python: pip runs once where each machine would run it, at the same time. The
seconds were taken beside other work, at a load of {load} on {cores} cores: they tell minutes from seconds.
"""
TITLES = {
    SIMULATED: "From pip to an own model in a simulated fleet",
    LIVE: "From pip to a live federation of three machines",
}
HEADS = (
    "commands",
    "files edited",
    "lines by hand",
    "carried",
    "pip, s",
    "the rest, s",
    "MB beside torch",
    "model",
)


def figures(way: Way) -> tuple[str, ...]:
    """A row of the table: what a person did, what the machine took, what was left."""
    typed = [step for step in way.steps if step.does == "types"]
    written = [step for step in way.steps if step.does == "writes"]
    carried = [step for step in way.steps if step.does == "carries"]
    apart = sum(step.seconds is None for step in typed)
    files = sum(step.files for step in carried)
    said = sum(step.lines for step in carried)
    pip = sum(step.seconds or 0.0 for step in typed if step.what.startswith("pip "))
    rest = sum(step.seconds or 0.0 for step in typed) - pip
    handed = [f"{files} files"] * bool(files) + [f"{said} lines told"] * bool(said)
    return (
        f"{len(typed)}" + (f" ({apart} not run here)" if apart else ""),
        str(len({(step.machine, step.what) for step in written})),
        str(sum(step.lines for step in written)),
        ", ".join(handed) or "nothing",
        f"{pip:.0f}",
        f"{rest:.0f}",
        f"{way.megabytes:.0f}",
        "none" if way.accuracy is None else _learned(way.accuracy),
    )


def _learned(accuracy: float) -> str:
    return f"{'trained' if accuracy >= LEARNED else 'not trained'}: {100 * accuracy:.1f} % right"


def page(data: Mapping[str, Any]) -> str:
    """docs/first-hour.md, of the figures alone."""
    ways = [Way.from_json(found) for found in data["ways"]]
    about = ABOUT.format(
        machine=data["machine"], load=data["load"], cores=data["cores"], own=len(OWN.splitlines()), tests=400
    )
    parts = [about]
    for goal, title in TITLES.items():
        rows = [(f"{way.product} {way.release}", *figures(way)) for way in ways if way.goal == goal]
        parts.append(f"## {title}\n\n{_table(('', *HEADS), rows)}\n")
    notes = {note: way.product for way in ways for note in way.notes}
    parts.append("\n".join(f"- {product}: {note}" for note, product in notes.items()) + "\n")
    parts.extend(_steps(way) for way in ways)
    return "\n".join(parts)


def _table(heads: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines = [heads, ("---",) * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _steps(way: Way) -> str:
    """All that was done, in its order."""
    rows = []
    for step in way.steps:
        took = "not run here" if step.seconds is None else f"{step.seconds:.1f} s" if step.seconds else ""
        amount = {"writes": f"{step.lines} lines", "carries": f"{step.files} files" if step.files else "told"}
        what = f"`{step.what}`" if step.does == "types" else step.what
        rows.append((step.machine, step.does, what, amount.get(step.does, took) or AT_ONCE, step.why))
    heads = ("machine", "", "what", "", "")
    wrong = f"\nIt went wrong: {way.wrong}\n" if way.wrong else ""
    return f"## {way.product}: {way.goal}\n\n{_table(heads, rows)}\n{wrong}"


# --- the command -----------------------------------------------------------------------------------


def main() -> None:
    """Go every way, one after the other, and write the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--flower", type=Path, help="A checkout of Flower's repository.", default=Path("flower")
    )
    parser.add_argument("--nvflare", type=Path, help="A checkout of NVFlare's.", default=Path("NVFlare"))
    parser.add_argument("--only", help="Products and goals whose name has this.", default="")
    parser.add_argument("--render", action="store_true", help="Make the page of the figures that are there.")
    given = parser.parse_args()
    data = json.loads(DATA.read_text(encoding="utf-8")) if DATA.exists() else {"ways": []}
    if not given.render:
        sources = {"Flower": given.flower.resolve(), "NVFlare": given.nvflare.resolve()}
        data |= {"ways": _all_measured(data["ways"], given.only, sources), **_where()}
        DATA.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(page(data), encoding="utf-8")


def _where() -> dict[str, Any]:
    load = f"{os.getloadavg()[2]:.0f}"
    machine = f"Python {sys.version.split()[0]}, {os.uname().machine}, {time.strftime('%Y-%m-%d')}"
    return {"machine": machine, "load": load, "cores": os.cpu_count()}


def _all_measured(known: list[Any], only: str, sources: Mapping[str, Path]) -> list[Any]:
    before = {(way["product"], way["goal"]): way for way in known}
    with tempfile.TemporaryDirectory(prefix="hour-") as folder:
        build = [sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", folder]
        subprocess.run([*build, ROOT], check=True, stdout=subprocess.DEVNULL)
        wheel = next(Path(folder).glob("*.whl"))
        for product, goals in WAYS.items():
            for goal in goals:
                if only in f"{product}, {goal}":
                    work = Path(folder) / f"{product}-{len(before)}-{goal.replace(' ', '-')}"
                    work.mkdir()
                    before[product, goal] = asdict(measured(product, goal, work, sources, wheel))
                    shutil.rmtree(work)
    order = [(product, goal) for product, goals in WAYS.items() for goal in goals]
    return [before[key] for key in order if key in before]


if __name__ == "__main__":
    main()
