"""The Helm chart, linted and rendered by helm's own engine; what is in it is held to what the server does."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import tomllib
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml

from anabranch.core.config.tables import IdentityTable, ServerTable

ROOT = Path(__file__).parents[2]
CHART = ROOT / "deploy/helm/anabranch"
RENDER = ROOT / "tests/support/render_chart.py"
STANDBY = {
    "replicas": 2,
    "database": {"existingSecret": "db", "podSelector": {"matchLabels": {"app": "pg"}}},
    "identity": {"existingClaim": "ids"},
    "model": {"existingClaim": "weights"},
    "metrics": {"serviceMonitor": True},
}
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("helm_python") is None,
    reason="helm's engine is not here: pip install helm-python-sdk",
)


def run(values: dict[str, Any]) -> dict[str, Any]:
    """What helm makes of the chart and these values."""
    done = subprocess.run(
        [sys.executable, str(RENDER), str(CHART)],
        input=json.dumps(values),
        capture_output=True,
        text=True,
        timeout=600,
        check=True,
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def rendered(values: dict[str, Any]) -> dict[tuple[str, str], dict[str, Any]]:
    """The manifests by kind and name."""
    found = run(values)
    assert (found["errors"], found["failed"]) == ([], "")
    texts = (text for name, text in found["manifests"].items() if name.endswith(".yaml"))
    parts = [part for text in texts for part in yaml.safe_load_all(text) if part]
    return {(part["kind"], part["metadata"]["name"]): part for part in parts}


def pod_of(manifests: dict[tuple[str, str], dict[str, Any]]) -> dict[str, Any]:
    """The server's pod."""
    spec: dict[str, Any] = manifests["StatefulSet", "fed-anabranch"]["spec"]["template"]["spec"]
    return spec


def test_by_default_it_is_guarded_and_keeps_to_itself() -> None:
    found = rendered({})
    assert set(found) == {
        ("ConfigMap", "fed-anabranch"),
        ("NetworkPolicy", "fed-anabranch"),
        ("Service", "fed-anabranch"),
        ("Service", "fed-anabranch-metrics"),
        ("Service", "fed-anabranch-pods"),
        ("StatefulSet", "fed-anabranch"),
    }
    pod = pod_of(found)
    assert [c["name"] for c in pod["initContainers"]] == ["model", "authority"]
    for container in (*pod["initContainers"], *pod["containers"]):
        hardened = container["securityContext"]
        assert hardened["readOnlyRootFilesystem"]
        assert not hardened["allowPrivilegeEscalation"]
        assert hardened["capabilities"] == {"drop": ["ALL"]}
    assert pod["securityContext"]["runAsNonRoot"]
    assert not pod["automountServiceAccountToken"]
    (server,) = pod["containers"]
    assert not {"--insecure", "--standby"} & set(server["args"])
    assert server["readinessProbe"]["exec"]["command"] == ["anabranch", "health", "127.0.0.1:7071"]
    policy = found["NetworkPolicy", "fed-anabranch"]["spec"]
    assert policy["egress"] == [], "without a database it calls nobody"
    assert {p["port"] for rule in policy["ingress"] for p in rule["ports"]} == {"grpc", "join", "metrics"}


@pytest.mark.parametrize("values", [{}, {"insecure": True}, STANDBY], ids=["guarded", "insecure", "standby"])
def test_what_it_names_is_there(values: dict[str, Any]) -> None:
    """Every mount has its volume, every port of a service or policy a container's, every setting its key."""
    found = rendered(values)
    pod, stateful = pod_of(found), found["StatefulSet", "fed-anabranch"]["spec"]
    claims = {claim["metadata"]["name"] for claim in stateful["volumeClaimTemplates"]}
    volumes = {volume["name"] for volume in pod["volumes"]}
    assert not claims & volumes
    for container in (*(pod["initContainers"] or ()), *pod["containers"]):
        assert {mount["name"] for mount in container["volumeMounts"]} <= claims | volumes
    (server,) = pod["containers"]
    ports = {port["name"] for port in server["ports"]}
    for (kind, _), part in found.items():
        if kind == "Service":
            assert {port["targetPort"] for port in part["spec"]["ports"]} <= ports
            assert part["spec"]["selector"].items() <= stateful["template"]["metadata"]["labels"].items()
    settings = {f"ANABRANCH_SERVER_{f.name.upper()}" for f in fields(ServerTable)}
    settings |= {f"ANABRANCH_IDENTITY_{f.name.upper()}" for f in fields(IdentityTable)}
    assert {entry["name"] for entry in server["env"]} <= settings
    assert (
        tomllib.loads(found["ConfigMap", "fed-anabranch"]["data"]["run.toml"])["strategy"]["name"]
        == "fedbuff"
    )


def test_without_tls_the_probe_is_of_grpc() -> None:
    found = rendered({"insecure": True, "networkPolicy": {"enabled": False}})
    (server,) = pod_of(found)["containers"]
    assert server["readinessProbe"]["grpc"] == {"port": 7070}
    assert "--insecure" in server["args"]
    assert [port["name"] for port in server["ports"]] == ["grpc", "metrics"]
    assert ("NetworkPolicy", "fed-anabranch") not in found


def test_a_standby_shares_database_authority_and_weights() -> None:
    found = rendered(STANDBY)
    stateful = found["StatefulSet", "fed-anabranch"]["spec"]
    (server,) = pod_of(found)["containers"]
    assert stateful["replicas"] == 2
    assert "--standby" in server["args"]
    (database,) = (e for e in server["env"] if e["name"] == "ANABRANCH_SERVER_DATABASE")
    assert database["valueFrom"]["secretKeyRef"] == {"name": "db", "key": "url"}
    egress = found["NetworkPolicy", "fed-anabranch"]["spec"]["egress"]
    assert egress[-1]["to"] == [{"podSelector": {"matchLabels": {"app": "pg"}}}]
    assert ("ServiceMonitor", "fed-anabranch") in found


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({"replicas": 2}, "a standby needs PostgreSQL"),
        ({"replicas": 2, "database": {"existingSecret": "db"}}, "share one authority"),
        ({"replicas": 2, "insecure": True, "database": {"existingSecret": "db"}}, "the same weights"),
        ({"metrics": {"enabled": False, "serviceMonitor": True}}, "metrics.enabled"),
        ({"insecure": "maybe"}, "want boolean"),
        ({"replica": 2}, "replica"),
    ],
)
def test_what_cannot_be_is_said_before(values: dict[str, Any], why: str) -> None:
    found = run(values)
    assert why in found["failed"]
    assert found["manifests"] == {}
