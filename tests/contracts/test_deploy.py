"""The files in ``deploy/`` parse, agree with each other and with the program, and run nothing as root."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

from casemate import config as configuration
from casemate.gateway.api.operation import router
from casemate.monitor.canaries.canary_file import parse_canaries
from tests.gateways import chat, client, key, make

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
OBJECTS = list(yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text()))
KINDS = {
    "Namespace": "v1",
    "ServiceAccount": "v1",
    "ConfigMap": "v1",
    "Service": "v1",
    "Deployment": "apps/v1",
    "PodDisruptionBudget": "policy/v1",
    "HorizontalPodAutoscaler": "autoscaling/v2",
    "NetworkPolicy": "networking.k8s.io/v1",
}
PODS = [o for o in OBJECTS if o["kind"] == "Deployment"]
PINNED = re.compile(r"casemate:\d+(\.\d+)+|[\w./-]+:v?\d+(\.\d+)+[\w.-]*@sha256:[0-9a-f]{64}")
"""The version pins the image of the project; a version and a digest pin all others."""


def named(kind):
    return {o["metadata"]["name"]: o for o in OBJECTS if o["kind"] == kind}


def test_objects_have_known_kinds_and_one_namespace():
    for o in OBJECTS:
        assert o["apiVersion"] == KINDS[o["kind"]], o["kind"]
        assert o["kind"] == "Namespace" or o["metadata"]["namespace"] == "casemate"
        assert "Secret" not in o["kind"], "secrets are not kept in a repository"


@pytest.mark.parametrize("pod", PODS, ids=lambda o: o["metadata"]["name"])
def test_pods_run_without_root_on_a_read_only_file_system(pod):
    spec = pod["spec"]["template"]["spec"]
    labels = pod["spec"]["template"]["metadata"]["labels"]
    assert pod["spec"]["selector"]["matchLabels"].items() <= labels.items()
    assert spec["automountServiceAccountToken"] is False
    assert spec["serviceAccountName"] in named("ServiceAccount")
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert pod["spec"]["replicas"] >= 2
    volumes = {volume["name"] for volume in spec["volumes"]}
    for container in spec["containers"]:
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert container["resources"]["requests"].keys() == {"cpu", "memory"}
        assert "memory" in container["resources"]["limits"]
        assert {mount["name"] for mount in container["volumeMounts"]} == volumes
        assert PINNED.fullmatch(container["image"])
        assert not [e for e in container["env"] if "URL" in e["name"] and "value" in e], "secrets come from Secrets"


def test_probes_use_existing_routes_and_the_grace_period_exceeds_the_shutdown_time():
    spec = named("Deployment")["gateway"]["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    paths = {route.path for route in router.routes}
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        http_get = container[probe]["httpGet"]
        assert http_get["path"] in paths and http_get["port"] in ports
        assert container[probe]["timeoutSeconds"] >= 5  # the timeout of /readyz
    assert container["readinessProbe"]["httpGet"]["path"] == "/readyz"
    assert container["livenessProbe"]["httpGet"]["path"] == "/healthz"  # an unreachable store needs no restart
    assert spec["terminationGracePeriodSeconds"] > 30 + int(container["lifecycle"]["preStop"]["exec"]["command"][1])


def test_service_disruption_budget_autoscaler_and_network_policy_select_the_gateway():
    gateway = named("Deployment")["gateway"]
    labels = gateway["spec"]["template"]["metadata"]["labels"]
    ports = {p["name"]: p["containerPort"] for c in _containers(gateway) for p in c["ports"]}
    service = named("Service")["gateway"]["spec"]
    assert service["selector"].items() <= labels.items()
    assert {port["targetPort"] for port in service["ports"]} <= ports.keys()
    budget = named("PodDisruptionBudget")["gateway"]["spec"]
    assert budget["selector"]["matchLabels"].items() <= labels.items()
    assert 0 < budget["minAvailable"] < gateway["spec"]["replicas"]
    scaler = named("HorizontalPodAutoscaler")["gateway"]["spec"]
    assert scaler["scaleTargetRef"]["name"] == "gateway"
    assert scaler["minReplicas"] == gateway["spec"]["replicas"] <= scaler["maxReplicas"]
    policy = named("NetworkPolicy")["casemate"]["spec"]
    assert policy["podSelector"]["matchLabels"].items() <= labels.items()
    assert set(policy["policyTypes"]) == {"Ingress", "Egress"}
    assert {p["port"] for rule in policy["ingress"] for p in rule["ports"]} == set(ports.values())


def _containers(deployment):
    return deployment["spec"]["template"]["spec"]["containers"]


@pytest.fixture
def shared(monkeypatch):
    monkeypatch.setenv("DATABASE_URL", "postgresql://casemate:secret@postgres/casemate")
    return configuration.read(DEPLOY / "casemate.yaml")


def test_the_config_map_equals_the_deployed_files_and_casemate_reads_them(shared):
    config_map = named("ConfigMap")["casemate"]["data"]
    assert yaml.safe_load(config_map["casemate.yaml"]) == yaml.safe_load((DEPLOY / "casemate.yaml").read_text())
    assert yaml.safe_load(config_map["canaries.yaml"]) == yaml.safe_load((DEPLOY / "canaries.yaml").read_text())
    assert (shared.rag.index.use, shared.store.use) == ("pgvector", "sql")
    assert shared.gateway.port == 8000
    assert shared.gateway.shutdown_grace_s < int(COMPOSE["services"]["gateway-1"]["stop_grace_period"].rstrip("s"))
    assert parse_canaries((DEPLOY / "canaries.yaml").read_text(), "canaries.yaml")


def test_every_path_in_the_configuration_is_mounted(shared):
    mirabel = next(part for part in shared.guard.defenses if part.use == "mirabel")
    paths = [mirabel.options["calibration"], str(shared.monitor.canaries)]
    for pod in PODS:
        mounts = [mount["mountPath"] for c in _containers(pod) for mount in c["volumeMounts"]]
        assert all(any(path.startswith(mount) for mount in mounts) for path in paths)
    for name, service in COMPOSE["services"].items():
        if service.get("image", "").startswith("casemate:"):
            mounts = [volume.split(":")[1] for volume in service["volumes"]]
            assert all(any(path.startswith(mount) for mount in mounts) for path in paths), name


def test_compose_services_reference_existing_services_networks_and_volumes():
    services = COMPOSE["services"]
    assert {name for name in services if name.startswith("gateway")} == {"gateway-1", "gateway-2", "gateway-3"}
    for name, service in services.items():
        assert PINNED.fullmatch(service["image"]), name
        assert set(service.get("depends_on", ())) <= services.keys(), name
        assert set(service["networks"]) <= COMPOSE["networks"].keys(), name
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            assert source.startswith("./") or source in COMPOSE["volumes"], volume
            optional = {"./corpus"}  # provided by the operator
            assert not source.startswith("./") or source in optional or (DEPLOY / source).exists(), volume
        if service["image"].startswith("casemate:"):
            assert service["read_only"] and service["cap_drop"] == ["ALL"]
            assert "ports" not in service, "only the proxy is reached from outside"
    example = (DEPLOY / ".env.example").read_text()
    for variable in re.findall(r"\$\{([A-Z_]+)", (DEPLOY / "compose.yaml").read_text()):
        assert f"{variable}=" in example


def test_proxy_and_prometheus_list_all_gateways():
    places = [f"{name}:8000" for name in COMPOSE["services"] if name.startswith("gateway")]
    proxy = (DEPLOY / "Caddyfile").read_text()
    assert "reverse_proxy " + " ".join(places) in proxy
    assert "health_uri /readyz" in proxy and "flush_interval -1" in proxy
    scrape = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())["scrape_configs"]
    assert scrape[0]["static_configs"][0]["targets"] == places


def test_the_image_pins_its_base_and_copies_existing_files():
    text = (DEPLOY / "Dockerfile").read_text()
    assert set(re.findall(r"^FROM (\S+)", text, re.M)) == {"${BASE}"}  # one argument pins both stages by digest
    (base,) = re.findall(r"^ARG BASE=(\S+)$", text, re.M)
    assert PINNED.fullmatch(base) and text.index("ARG BASE=") < text.index("FROM ")
    wanted = set(re.search(r"^ARG EXTRAS=([\w,-]+)$", text, re.M)[1].split(","))
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert {"serve", "postgres"} <= wanted <= extras.keys()
    assert text.rindex("USER 10001") > text.rindex("FROM ")
    for source in re.search(r"^COPY ((?!--)[\w./ ]+) \./", text, re.M)[1].split():
        assert (ROOT / source).exists()
        assert f"!{source}" in (DEPLOY / "Dockerfile.dockerignore").read_text()


# Prometheus


def promtool(*words, text=None, folder=DEPLOY):
    if not shutil.which("promtool"):
        pytest.skip("promtool is not here; it comes with Prometheus")
    return subprocess.run(["promtool", *words], input=text, capture_output=True, text=True, check=False, cwd=folder)


@pytest.fixture(scope="module")
def metrics_text(tmp_path_factory):
    """The metrics of a gateway after some requests."""
    app = make(tmp_path_factory.mktemp("figures"), metrics="open")
    with client(app, key(app)) as http:
        for stream in (False, True):
            http.post("/v1/chat/completions", json=chat("only3", stream=stream))
        http.get("/nowhere")
        return http.get("/metrics").text


def test_promtool_accepts_the_metrics(metrics_text):
    done = promtool("check", "metrics", text=metrics_text)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_promtool_accepts_the_alert_rules():
    done = promtool("check", "rules", "alerts.yml")
    assert done.returncode == 0, done.stderr


def test_alert_rules_pass_their_promtool_unit_tests():
    done = promtool("test", "rules", "alerts.test.yml")
    assert done.returncode == 0, done.stdout + done.stderr


def test_promtool_accepts_the_prometheus_configuration(tmp_path):
    settings = (DEPLOY / "prometheus.yml").read_text().replace("/run/secrets/metrics_key", "key")
    (tmp_path / "prometheus.yml").write_text(settings)
    (tmp_path / "key").write_text("cmk_")
    shutil.copy(DEPLOY / "alerts.yml", tmp_path)
    done = promtool("check", "config", "prometheus.yml", folder=tmp_path)
    assert done.returncode == 0, done.stderr


def test_alert_rules_use_existing_metrics(metrics_text):
    exported = set(re.findall(r"^# TYPE (\S+)", metrics_text, re.M))
    rules = yaml.safe_load((DEPLOY / "alerts.yml").read_text())["groups"][0]["rules"]
    for rule in rules:
        for name in re.findall(r"casemate_\w+", rule["expr"]):
            assert name.removesuffix("_bucket") in exported, name
        assert rule["labels"]["severity"] in {"warning", "critical"}
        assert rule["annotations"].keys() == {"summary", "action"}


# Grafana

GRAFANA = json.loads((DEPLOY / "grafana.json").read_text("utf-8"))
EXPRESSIONS = [target["expr"] for panel in GRAFANA["panels"] for target in panel["targets"]]


def grafana_expression(expression):
    """The expression after Grafana replaced its variables."""
    return expression.replace("$instance", ".*")


def test_the_grafana_dashboard_can_be_imported():
    """The fields that Grafana's importer and a panel need."""
    assert GRAFANA["uid"] and GRAFANA["title"] and GRAFANA["schemaVersion"] >= 36
    assert "id" not in GRAFANA, "an id belongs to one installation"
    variables = {v["name"] for v in GRAFANA["templating"]["list"]}
    assert set(re.findall(r"\$\{?(\w+)", json.dumps(GRAFANA))) - {"__all"} == variables
    ids = [panel["id"] for panel in GRAFANA["panels"]]
    assert len(set(ids)) == len(ids)
    for panel in GRAFANA["panels"]:
        assert panel["type"] in {"stat", "timeseries"} and panel["title"] and panel["description"]
        assert {t["datasource"]["uid"] for t in [panel, *panel["targets"]]} == {"${datasource}"}
        assert len({t["refId"] for t in panel["targets"]}) == len(panel["targets"])


def unknown_fields(given, read, path=""):
    """Paths of the fields with a value that ``read`` lacks or has with another value."""
    if isinstance(given, dict):
        rows = [(f"{path}.{name}", value, name in read, read.get(name)) for name, value in given.items()]
    elif isinstance(given, list):
        rows = [(f"{path}[{i}]", value, i < len(read), read[i : i + 1]) for i, value in enumerate(given)]
        rows = [(where, value, known, found[0] if found else None) for where, value, known, found in rows]
    else:
        return [] if given == read else [path]
    empty = (None, "", [], {})
    return [
        name
        for where, value, known, found in rows
        for name in (unknown_fields(value, found, where) if known else [] if value in empty else [where])
    ]


def test_the_grafana_sdk_preserves_every_field_of_the_dashboard():
    """The SDK's models are generated from Grafana's published schema, and drop fields that the schema lacks."""
    dashboard = pytest.importorskip("grafana_foundation_sdk.models.dashboard")
    from grafana_foundation_sdk.cog.encoder import JSONEncoder
    from grafana_foundation_sdk.cog.plugins import register_default_plugins
    from grafana_foundation_sdk.models import prometheus

    def read(given):
        return json.loads(JSONEncoder().encode(dashboard.Dashboard.from_json(given)))

    register_default_plugins()
    panels = dashboard.Dashboard.from_json(GRAFANA).panels
    assert all(isinstance(target, prometheus.Dataquery) for panel in panels for target in panel.targets)
    of_the_data_source = [".annotations.list[0].titleFormat"]  # each data source defines its own fields here
    assert unknown_fields(GRAFANA, read(GRAFANA)) == of_the_data_source
    broken = json.loads(json.dumps(GRAFANA))
    broken["panels"][1]["gridPos"]["width"] = 6  # the schema's name is w
    broken["panels"][1]["targets"][0]["expression"] = "up"  # the schema's name is expr
    assert unknown_fields(broken, read(broken)) == [
        *of_the_data_source,
        ".panels[1].gridPos.width",
        ".panels[1].targets[0].expression",
    ]


def test_panels_of_the_grafana_dashboard_do_not_overlap():
    occupied = set()
    for panel in GRAFANA["panels"]:
        at = panel["gridPos"]
        cells = {(at["x"] + i, at["y"] + j) for i in range(at["w"]) for j in range(at["h"])}
        assert not cells & occupied and at["x"] + at["w"] <= 24
        occupied |= cells


def test_the_grafana_dashboard_uses_existing_metrics_and_labels(metrics_text):
    exported = set(re.findall(r"^# TYPE (\S+)", metrics_text, re.M))
    declared = (ROOT / "src/casemate/gateway/metrics.py").read_text("utf-8")
    for expression in EXPRESSIONS:
        for name in re.findall(r"casemate_\w+", expression):
            assert name.removesuffix("_bucket") in exported, name
        for label in re.findall(r"(\w+)(?:=|!=)~?\"", expression):
            assert label in {"job", "instance"} or f'"{label}"' in declared, label
        for labels in re.findall(r"by \(([\w, ]+)\)", expression):
            assert all(label in {"le", "instance"} or f'"{label}"' in declared for label in labels.split(", "))


def test_the_grafana_dashboard_shows_every_metric(metrics_text):
    exported = {name for name in re.findall(r"^# TYPE (\S+)", metrics_text, re.M) if name.startswith("casemate_")}
    shown = {name.removesuffix("_bucket") for e in EXPRESSIONS for name in re.findall(r"casemate_\w+", e)}
    assert {name for name in exported if not name.endswith("_created")} == shown


def test_promtool_accepts_the_expressions_of_the_grafana_dashboard(tmp_path):
    rules = [{"record": f"panel:{i}", "expr": grafana_expression(e)} for i, e in enumerate(EXPRESSIONS)]
    (tmp_path / "rules.yml").write_text(yaml.safe_dump({"groups": [{"name": "grafana", "rules": rules}]}))
    done = promtool("check", "rules", "rules.yml", folder=tmp_path)
    assert done.returncode == 0, done.stderr
