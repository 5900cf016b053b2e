"""The compositions of docker/ name what is there: files, volumes, settings. `make docker-test` runs them."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from commands import command_line

from anabranch.core.config.tables import TABLES

DOCKER = Path(__file__).parents[2] / "docker"
COMPOSITIONS: dict[str, dict[str, Any]] = {
    str(path.relative_to(DOCKER)): yaml.safe_load(path.read_text()) for path in DOCKER.rglob("compose*.yaml")
}
SERVICES: dict[str, dict[str, Any]] = COMPOSITIONS["compose.yaml"]["services"]
MASKED: dict[str, dict[str, Any]] = COMPOSITIONS["masked/compose.yaml"]["services"]
PROFILES = {"standby": {"standby"}, "metrics": {"prometheus", "grafana"}, "cockpit": {"cockpit"}}


def test_what_is_started_when() -> None:
    by_profile: dict[str, set[str]] = {}
    for name, service in SERVICES.items():
        for profile in service.get("profiles", []):
            by_profile.setdefault(profile, set()).add(name)
    assert by_profile == PROFILES


@pytest.mark.parametrize(
    ("file", "name"), [(file, name) for file, made in COMPOSITIONS.items() for name in made["services"]]
)
def test_a_service_names_what_is_there(file: str, name: str) -> None:
    made, folder = COMPOSITIONS[file], (DOCKER / file).parent
    service = made["services"][name]
    for volume in service.get("volumes", []):
        source = volume.partition(":")[0]
        assert (folder / source).exists() if source.startswith(".") else source in made["volumes"], volume
    assert set(service.get("depends_on", {})) <= set(made["services"])
    assert set(service.get("networks", [])) <= set(made.get("networks", {}))
    if "build" in service:
        context = folder / service["build"]["context"]
        assert context.samefile(DOCKER.parent)
        assert (context / service["build"]["dockerfile"]).is_file()
    for port in service.get("ports", []):
        assert port.startswith("127.0.0.1:"), "published on this machine's loopback alone"
    environment = service.get("environment", {})
    for setting in (word for word in environment if word.startswith("ANABRANCH_")):
        table, _, key = setting.removeprefix("ANABRANCH_").lower().partition("_")
        assert hasattr(TABLES[table](), key), setting


@pytest.mark.parametrize(
    ("file", "name"), [(file, name) for file, made in COMPOSITIONS.items() for name in made["services"]]
)
def test_what_a_service_says_does_not_fill_the_disk(file: str, name: str) -> None:
    options = COMPOSITIONS[file]["services"][name]["logging"]["options"]
    assert (options["max-size"], options["max-file"]) == ("10m", "5")


def test_each_composition_is_a_project_of_its_own() -> None:
    """Its name is its folder's: two in one would take each other's services and volumes for their own."""
    assert len({(DOCKER / file).parent.name for file in COMPOSITIONS}) == len(COMPOSITIONS) == 2


@pytest.mark.parametrize("path", sorted(DOCKER.glob("*.Dockerfile")), ids=lambda path: path.stem)
def test_a_new_volume_of_an_image_is_empty_and_its_users(path: Path) -> None:
    """A home that useradd makes has files in it: a backup is put back into a folder that is empty."""
    text = path.read_text()
    assert "--no-create-home" in text
    (folders,) = re.findall(r"install -d -o 10001 -g 10001 -m 0700 (.+)$", text, re.M)
    assert folders.split() == ["/var/lib/anabranch", *(["/backup"] if path.stem == "server" else [])]


def test_prometheus_reads_both_servers() -> None:
    found = yaml.safe_load((DOCKER / "prometheus/compose.yml").read_text())
    assert all((DOCKER / "prometheus" / name).is_file() for name in found["rule_files"])
    port = SERVICES["server"]["environment"]["ANABRANCH_SERVER_METRICS_ADDRESS"].rpartition(":")[2]
    (job,) = found["scrape_configs"]
    assert job["static_configs"] == [{"targets": [f"server:{port}"]}]
    (looked_up,) = job["dns_sd_configs"]  # one that nobody started is no target
    assert (looked_up["names"], looked_up["port"]) == (["standby"], int(port))


def test_the_cockpit_is_told_what_it_knows() -> None:
    (script,) = SERVICES["cockpit"]["command"]
    words = script.rpartition("anabranch ui ")[2].split()
    known = {option for parameter in command_line().commands["ui"].params for option in parameter.opts}
    assert {word for word in words if word.startswith("--")} <= known


@pytest.mark.parametrize("given", ["", "9999"])
def test_the_cockpits_link_leads_to_the_port_that_it_is_published_at(given: str) -> None:
    """The link has the port that it listens at, which is all that it knows."""

    def interpolated(text: str) -> str:
        return re.sub(r"\$\{UI_PORT:-(\d+)\}", lambda found: given or found[1], text)

    (script,) = SERVICES["cockpit"]["command"]
    listens = re.search(r"--listen \S+:(\d+)", interpolated(script))
    published = [
        interpolated(port).split(":")[1:] for port in SERVICES["server"]["ports"] if "UI_PORT" in port
    ]
    assert listens is not None
    assert published == [[listens[1]] * 2] == [[given or "7080"] * 2]


def test_a_keeper_shares_a_network_with_the_server_alone() -> None:
    keepers = {name for name in MASKED if name.startswith("keeper-")}
    (network,) = {of for name in keepers for of in MASKED[name]["networks"]}
    assert {name for name, service in MASKED.items() if network in service.get("networks", [])} == {
        "server",
        *keepers,
    }
    run = tomllib.loads((DOCKER / "masked/masked.toml").read_text())
    assert run["server"]["keepers"] == [f"{name}:7075" for name in sorted(keepers)]


def test_nobody_has_the_keys_of_another() -> None:
    """What is handed from one to the other is on one volume; every other one is of one party."""
    parties: dict[str, set[str]] = {}
    for name, service in MASKED.items():
        for volume in service.get("volumes", []):
            parties.setdefault(volume.partition(":")[0], set()).add(name)
    assert parties.pop("handed") == set(MASKED)
    assert parties.pop("server") == {"server", "authority"}
    assert {volume: of for volume, of in parties.items() if of != {volume}} == {"./masked.toml": {"server"}}
