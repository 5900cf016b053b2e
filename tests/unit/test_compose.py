"""docker/compose.yaml names what is there: files, volumes, services, settings. `make docker-test` runs it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from commands import command_line

from anabranch.core.config.tables import TABLES

DOCKER = Path(__file__).parents[2] / "docker"
COMPOSE: dict[str, Any] = yaml.safe_load((DOCKER / "compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
PROFILES = {"standby": {"standby"}, "metrics": {"prometheus", "grafana"}, "cockpit": {"cockpit"}}


def test_what_is_started_when() -> None:
    by_profile: dict[str, set[str]] = {}
    for name, service in SERVICES.items():
        for profile in service.get("profiles", []):
            by_profile.setdefault(profile, set()).add(name)
    assert by_profile == PROFILES


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_names_what_is_there(name: str) -> None:
    service = SERVICES[name]
    for volume in service.get("volumes", []):
        source = volume.partition(":")[0]
        assert (DOCKER / source).exists() if source.startswith(".") else source in COMPOSE["volumes"], volume
    assert set(service.get("depends_on", {})) <= set(SERVICES)
    if "build" in service:
        assert (DOCKER.parent / service["build"]["dockerfile"]).is_file()
    for port in service.get("ports", []):
        assert port.startswith("127.0.0.1:"), "published on this machine's loopback alone"
    environment = service.get("environment", {})
    for setting in (word for word in environment if word.startswith("ANABRANCH_")):
        table, _, key = setting.removeprefix("ANABRANCH_").lower().partition("_")
        assert hasattr(TABLES[table](), key), setting


def test_prometheus_reads_both_servers() -> None:
    found = yaml.safe_load((DOCKER / "prometheus/compose.yml").read_text())
    assert all((DOCKER / "prometheus" / name).is_file() for name in found["rule_files"])
    port = SERVICES["server"]["environment"]["ANABRANCH_SERVER_METRICS_ADDRESS"].rpartition(":")[2]
    (job,) = found["scrape_configs"]
    assert job["static_configs"] == [{"targets": [f"server:{port}", f"standby:{port}"]}]


def test_the_cockpit_is_told_what_it_knows() -> None:
    (script,) = SERVICES["cockpit"]["command"]
    words = script.rpartition("anabranch ui ")[2].split()
    known = {option for parameter in command_line().commands["ui"].params for option in parameter.opts}
    assert {word for word in words if word.startswith("--")} <= known
