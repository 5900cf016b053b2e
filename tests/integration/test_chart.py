"""The charts of a server and a keeper, linted and rendered by helm's own engine, held to what they do."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
import tomllib
from dataclasses import fields
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from commands import command_line

from anabranch.core.config.tables import IdentityTable, ServerTable, parse_override

ROOT = Path(__file__).parents[2]
CHART, KEEPER = ROOT / "deploy/helm/anabranch", ROOT / "deploy/helm/anabranch-keeper"
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


def run(values: dict[str, Any], chart: Path = CHART) -> dict[str, Any]:
    """What helm makes of a chart and these values."""
    done = subprocess.run(
        [sys.executable, str(RENDER), str(chart)],
        input=json.dumps(values),
        capture_output=True,
        text=True,
        timeout=600,
        check=True,
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def rendered(values: dict[str, Any], chart: Path = CHART) -> dict[tuple[str, str], dict[str, Any]]:
    """The manifests by kind and name."""
    found = run(values, chart)
    assert (found["errors"], found["failed"]) == ([], "")
    texts = (text for name, text in found["manifests"].items() if name.endswith(".yaml"))
    parts = [part for text in texts for part in yaml.safe_load_all(text) if part]
    return {(part["kind"], part["metadata"]["name"]): part for part in parts}


def pod_of(manifests: dict[tuple[str, str], dict[str, Any]]) -> dict[str, Any]:
    """The server's pod."""
    spec: dict[str, Any] = manifests["StatefulSet", "fed-anabranch"]["spec"]["template"]["spec"]
    return spec


def check_hardened(pod: dict[str, Any]) -> None:
    """No root, no capability, no token of the cluster, nothing that can be written but volumes."""
    for container in (*pod["initContainers"], *pod["containers"]):
        hardened = container["securityContext"]
        assert hardened["readOnlyRootFilesystem"]
        assert not hardened["allowPrivilegeEscalation"]
        assert hardened["capabilities"] == {"drop": ["ALL"]}
    assert pod["securityContext"]["runAsNonRoot"]
    assert not pod["automountServiceAccountToken"]


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
    check_hardened(pod)
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


SHAPES: dict[str, tuple[Path, dict[str, Any]]] = {
    "guarded": (CHART, {}),
    "insecure": (CHART, {"insecure": True, "networkPolicy": {"enabled": False}}),
    "standby": (CHART, STANDBY),
    "masked": (CHART, {"keepers": ["keeper.north:7075", "[fd00::7]:7076"]}),
    "all that a cluster may want": (
        CHART,
        {
            "imagePullSecrets": [{"name": "registry"}],
            "persistence": {"storageClass": "fast"},
            "backup": {"existingClaim": "kept"},
            "service": {"type": "LoadBalancer", "annotations": {"a/b": "c"}},
            "metrics": {"annotations": {"a/b": "c"}, "prometheusRule": True},
            "networkPolicy": {"devicesFrom": [{"ipBlock": {"cidr": "10.0.0.0/8"}}]},
            "nodeSelector": {"kind": "large"},
            "tolerations": [{"key": "k", "operator": "Exists"}],
            "podAnnotations": {"a/b": "c"},
        },
    ),
    "keeper": (KEEPER, {"ca": "PEM", "networkPolicy": {"serverFrom": [{"podSelector": {}}]}}),
}
OF_AN_OPERATOR = ("ServiceMonitor", "PrometheusRule")  # Prometheus', whose schemas Kubernetes does not have


@pytest.mark.parametrize("shape", SHAPES)
def test_kubernetes_takes_it(shape: str) -> None:
    """By the API's own schemas, which know every key: a misspelt one would be dropped without a word."""
    chart, values = SHAPES[shape]
    for (kind, _), part in rendered(values, chart).items():
        for release in ("1.25", "1.37"):  # the oldest and the newest that there is a schema of
            if kind not in OF_AN_OPERATOR:
                kubernetes_validate.validate(part, release, strict=True)


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


def test_who_stands_by_is_never_ready_so_no_rolling_update_waits_for_it() -> None:
    stateful = rendered(STANDBY)["StatefulSet", "fed-anabranch"]["spec"]
    assert stateful["updateStrategy"] == {"type": "OnDelete"}
    assert "updateStrategy" not in rendered({})["StatefulSet", "fed-anabranch"]["spec"]


@pytest.mark.parametrize("insecure", [True, False])
def test_only_what_is_in_the_clear_is_called_grpc(insecure: bool) -> None:
    found = rendered({"insecure": insecure})
    for name in ("fed-anabranch", "fed-anabranch-pods"):
        port = found["Service", name]["spec"]["ports"][0]
        assert ("grpc" in (port["name"], port.get("appProtocol"))) == insecure, name
    (port,) = rendered({"ca": "PEM"}, KEEPER)["Service", "fed-anabranch-keeper"]["spec"]["ports"]
    assert "grpc" not in (port["name"], port.get("appProtocol"))


def test_each_image_is_pulled_as_its_own_values_say() -> None:
    given = {"image": {"pullPolicy": "Never"}, "model": {"image": {"pullPolicy": "Always"}}}
    pod = pod_of(rendered(given))
    containers = (*pod["initContainers"], *pod["containers"])
    pulled = {container["name"]: container["imagePullPolicy"] for container in containers}
    assert pulled == {"model": "Always", "authority": "Never", "server": "Never"}


def test_a_server_that_is_down_is_missed_under_the_job_that_a_monitor_gives_it() -> None:
    """Prometheus' operator names a scrape's job after the Service."""
    found = rendered(STANDBY)
    monitor = found["ServiceMonitor", "fed-anabranch"]["spec"]
    assert "jobLabel" not in monitor
    wanted = monitor["selector"]["matchLabels"].items()
    watched = [
        n for (k, n), part in found.items() if k == "Service" and wanted <= part["metadata"]["labels"].items()
    ]
    rules = (ROOT / "docker/prometheus/alerts.yml").read_text(encoding="utf-8")
    (job,) = re.findall(r'expr: up\{job=~?"(.+)"\} == 0', rules)
    assert [bool(re.fullmatch(job, name)) for name in watched] == [True]


def test_the_alerts_are_those_that_a_prometheus_of_ones_own_has() -> None:
    """Word for word: what is between braces is for Prometheus, not for helm."""
    labels = {"release": "monitoring"}
    metrics = {"serviceMonitor": True, "prometheusRule": True, "labels": labels}
    found = rendered({"metrics": metrics})
    rules = yaml.safe_load((ROOT / "docker/prometheus/alerts.yml").read_text(encoding="utf-8"))
    assert found["PrometheusRule", "fed-anabranch"]["spec"] == rules
    for kind in ("PrometheusRule", "ServiceMonitor"):
        assert labels.items() <= found[kind, "fed-anabranch"]["metadata"]["labels"].items()
    assert ("PrometheusRule", "fed-anabranch") not in rendered(STANDBY)


def test_a_backup_has_a_volume_of_its_own() -> None:
    pod = pod_of(rendered({"backup": {"existingClaim": "kept"}}))
    assert {"name": "backup", "persistentVolumeClaim": {"claimName": "kept"}} in pod["volumes"]
    assert {"name": "backup", "mountPath": "/backup"} in pod["containers"][0]["volumeMounts"]
    assert all(volume["name"] != "backup" for volume in pod_of(rendered({}))["volumes"])


def test_a_server_of_masked_sums_reaches_its_keepers() -> None:
    found = rendered({"keepers": ["keeper.north:7075", "[fd00::7]:7076"]})
    (server,) = pod_of(found)["containers"]
    (keepers,) = (e["value"] for e in server["env"] if e["name"] == "ANABRANCH_SERVER_KEEPERS")
    _, _, read = parse_override(f"server.keepers={keepers}")
    assert read == ["keeper.north:7075", "[fd00::7]:7076"]
    names, asked = found["NetworkPolicy", "fed-anabranch"]["spec"]["egress"]
    assert {p["port"] for p in names["ports"]} == {53}
    assert [p["port"] for p in asked["ports"]] == [7075, 7076]


def test_a_keeper_is_one_and_calls_nobody() -> None:
    name = "fed-anabranch-keeper"
    server = [{"ipBlock": {"cidr": "10.0.0.7/32"}}]
    floors = {"cohortMin": 20, "noiseMin": 0.5, "epsilonMax": 8, "delta": 1e-7}
    found = rendered({"ca": "PEM", **floors, "networkPolicy": {"serverFrom": server}}, KEEPER)
    assert set(found) == {(kind, name) for kind in ("ConfigMap", "NetworkPolicy", "Service", "StatefulSet")}
    stateful, policy = found["StatefulSet", name]["spec"], found["NetworkPolicy", name]["spec"]
    pod = stateful["template"]["spec"]
    check_hardened(pod)
    assert stateful["replicas"] == 1
    assert policy["ingress"] == [{"ports": [{"port": "grpc", "protocol": "TCP"}], "from": server}]
    assert policy["egress"] == []
    assert found["ConfigMap", name]["data"] == {"ca.pem": "PEM\n"}
    (keeper,), (keys,) = pod["containers"], pod["initContainers"]
    volumes = {"data", *(volume["name"] for volume in pod["volumes"])}
    for container in (keeper, keys):
        assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
    (port,) = found["Service", name]["spec"]["ports"]
    assert port["targetPort"] in {p["name"] for p in keeper["ports"]}
    made = keys["command"][-1].rpartition("|| ")[2]
    assert made.endswith("--cohort-min 20 --noise-min 0.5 --epsilon-max 8 --delta 1e-07")
    for words in (
        made.split(),
        ["anabranch", "keeper", *keeper["args"]],
        keeper["readinessProbe"]["exec"]["command"],
    ):
        check_command(words)


def check_command(words: list[str]) -> None:
    """A command of ours, with options that it has."""
    program, group, name, *arguments = words
    assert program == "anabranch"
    commands: Any = command_line().commands[group]
    known = {option for parameter in commands.commands[name].params for option in parameter.opts}
    assert {word.partition("=")[0] for word in arguments if word.startswith("--")} <= known


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({}, "--set-file ca=ca.pem"),
        ({"ca": "PEM", "cohortMin": 1}, "cohortMin"),
        ({"ca": "PEM", "delta": 0}, "delta"),
        ({"replicas": 2}, "replicas"),
    ],
)
def test_what_no_keeper_is(values: dict[str, Any], why: str) -> None:
    found = run(values, KEEPER)
    assert why in found["failed"]
    assert found["manifests"] == {}


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({"replicas": 2}, "a standby needs PostgreSQL"),
        ({"replicas": 2, "database": {"existingSecret": "db"}}, "share one authority"),
        ({"replicas": 2, "insecure": True, "database": {"existingSecret": "db"}}, "the same weights"),
        ({"metrics": {"enabled": False, "serviceMonitor": True}}, "metrics.enabled"),
        ({"metrics": {"enabled": False, "prometheusRule": True}}, "metrics.enabled"),
        ({"insecure": "maybe"}, "want boolean"),
        ({"keepers": ["north"]}, "keepers"),
        ({"replica": 2}, "replica"),
    ],
)
def test_what_cannot_be_is_said_before(values: dict[str, Any], why: str) -> None:
    found = run(values)
    assert why in found["failed"]
    assert found["manifests"] == {}
