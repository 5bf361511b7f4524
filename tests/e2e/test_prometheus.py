"""A real Prometheus scrapes a real gateway with a key, loads ``deploy/alerts.yml``, and evaluates every panel."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import time
from pathlib import Path

import httpx
import pytest
import yaml

from tests.gateways import HideNamed, chat, key, make, serving
from tests.waiting import wait_for

DEPLOY = Path(__file__).parents[2] / "deploy"
PANELS = json.loads((DEPLOY / "grafana.json").read_text("utf-8"))["panels"]
RULES = yaml.safe_load((DEPLOY / "alerts.yml").read_text("utf-8"))["groups"][0]["rules"]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="Prometheus is not installed"),
]


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


@pytest.fixture(scope="module")
def system(tmp_path_factory):
    """A gateway with traffic and uploads, one target that is down, and a Prometheus over both."""
    folder = tmp_path_factory.mktemp("prometheus")
    app = make(folder, defenses=(HideNamed("d3"),))
    texts = {role: key(app, role) for role in ("client", "admin", "metrics")}
    with serving(app) as url:
        settings = yaml.safe_load((DEPLOY / "prometheus.yml").read_text("utf-8"))
        settings["global"] = {"scrape_interval": "250ms", "evaluation_interval": "250ms"}
        scrape = settings["scrape_configs"][0]
        (folder / "metrics_key").write_text(texts["metrics"])
        scrape["authorization"]["credentials_file"] = "metrics_key"
        scrape["static_configs"] = [{"targets": [url.removeprefix("http://"), f"127.0.0.1:{free_port()}"]}]
        # the same rules with shorter durations
        rules = (DEPLOY / "alerts.yml").read_text("utf-8").replace("for: 1m", "for: 1s")
        (folder / "alerts.yml").write_text(rules)
        (folder / "prometheus.yml").write_text(yaml.safe_dump(settings))
        at = f"127.0.0.1:{free_port()}"
        command = [
            "prometheus",
            "--config.file=prometheus.yml",
            f"--web.listen-address={at}",
            "--storage.tsdb.path=data",
        ]
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log)
        try:
            with httpx.Client(base_url=f"http://{at}", timeout=20) as prometheus:
                wait_for(lambda: (folder / "log").read_text().count("ready to receive web requests"))
                # a rate needs two values: the first scrape must come before the traffic
                wait_for(lambda: ask(prometheus, f'up{{instance="{url.removeprefix("http://")}"}} == 1'))
                send_traffic(url, texts)
                yield prometheus, url.removeprefix("http://"), app
        finally:
            process.terminate()
            process.wait(20)


def send_traffic(url, texts):
    """Sends complete and streamed questions (some flagged), uploads and errors, over several scrapes."""
    client, admin = ({"Authorization": f"Bearer {texts[role]}"} for role in ("client", "admin"))
    upload = {"documents": [{"source": "new", "text": "a new page"}]}
    for number in range(8):
        for stream in (False, True):
            body = chat(f"only{number}", stream=stream)
            assert httpx.post(f"{url}/v1/chat/completions", json=body, headers=client, timeout=20).status_code == 200
        assert httpx.post(f"{url}/v1/documents", json=upload, headers=admin, timeout=20).status_code == 200
        assert httpx.post(f"{url}/v1/chat/completions", json={}, headers=client, timeout=20).status_code == 400
        time.sleep(0.5)


def ask(prometheus, expression):
    found = prometheus.get("/api/v1/query", params={"query": expression}).json()
    assert found["status"] == "success", found
    return found["data"]["result"]


def test_the_gateway_is_scraped_with_a_metrics_key(system):
    prometheus, gateway, _ = system
    wait_for(lambda: ask(prometheus, f'up{{job="casemate", instance="{gateway}"}} == 1'))
    targets = prometheus.get("/api/v1/targets").json()["data"]["activeTargets"]
    assert {t["health"] for t in targets if t["labels"]["instance"] == gateway} == {"up"}


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel["title"])
def test_every_panel_has_values(system, panel):
    """Only a series that no request can cause in this system is empty."""
    prometheus, gateway, _ = system
    for target in panel["targets"]:
        expression = target["expr"].replace("$instance", gateway)
        if panel["title"] == "Interrupted streams":
            assert ask(prometheus, expression) == []  # no stream was interrupted
            continue
        found = wait_for(lambda expression=expression: ask(prometheus, expression), 30)
        assert all(float(one["value"][1]) == float(one["value"][1]) for one in found), "no value is NaN"


def test_the_rate_of_flagged_verdicts_agrees_with_the_event_store(system):
    """A rate ignores the first value of a series, so the shares differ by a few questions."""
    prometheus, gateway, app = system
    (panel,) = [p for p in PANELS if p["title"] == "Flagged verdicts"]
    verdicts = [event.body["flagged"] for event in app.store.scan("verdict")]
    share = sum(verdicts) / len(verdicts)
    assert len(verdicts) == 16 and 0.1 < share < 0.9
    wait_for(lambda: ask(prometheus, "sum(casemate_verdicts_total) == 16"), 30)
    (found,) = ask(prometheus, panel["targets"][0]["expr"].replace("$instance", gateway))
    assert abs(float(found["value"][1]) - share) < 0.2


def test_every_rule_is_loaded_and_evaluated_without_an_error(system):
    prometheus, *_ = system

    def rules():
        (group,) = prometheus.get("/api/v1/rules").json()["data"]["groups"]
        return group["rules"] if all(r["health"] != "unknown" for r in group["rules"]) else []

    found = wait_for(rules)
    assert {(r["name"], r["health"]) for r in found} == {(r["alert"], "ok") for r in RULES}


def test_only_the_target_that_is_down_raises_an_alert(system):
    prometheus, gateway, _ = system

    def firing():
        alerts = prometheus.get("/api/v1/alerts").json()["data"]["alerts"]
        return [a for a in alerts if a["state"] == "firing"]

    (found,) = wait_for(firing)
    assert found["labels"]["alertname"] == "CasemateDown" and found["labels"]["instance"] != gateway
    assert "does not answer" in found["annotations"]["summary"]
