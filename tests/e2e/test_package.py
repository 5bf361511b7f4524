"""The release: builds are reproducible, the metadata is valid, and the wheel runs outside the repository."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
TOOLS = Path(sys.executable).parent
ENVIRONMENT = {
    "PATH": f"{TOOLS}{os.pathsep}{os.environ['PATH']}",
    "PYTHON": sys.executable,
    "PIP_CONSTRAINT": str(ROOT / "constraints.txt"),
    "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    "REPOSITORY_URL": "https://git.example/casemate",
}


def run(*command, cwd=ROOT, home):
    kept = {name: os.environ[name] for name in os.environ if name.startswith(("PIP_", "SSL_"))}
    found = subprocess.run(
        command, cwd=cwd, env={**kept, **ENVIRONMENT, "HOME": str(home)}, capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, found.stdout[-3000:] + found.stderr[-3000:]
    return found.stdout


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def wheel(home):
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        pytest.skip("a release is built from a git checkout")
    printed = run("deploy/release.sh", str(home / "dist"), "--build-only", home=home)
    assert "two builds of the wheel are equal" in printed
    assert printed.count("PASSED") == 2, "twine check of the wheel and of the source archive"
    (made,) = (home / "dist").glob("*.whl")
    return made


@pytest.mark.slow
def test_the_wheel_contains_the_package_and_its_data_only(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert {name.split("/")[0].split("-")[0] for name in names} == {"casemate"}
    assert "casemate/py.typed" in names
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = [name for name in names if name.endswith(".dist-info/METADATA")]
        metadata_text = archive.read(metadata).decode()
    assert "Project-URL: Repository, https://git.example/casemate\n" in metadata_text
    assert "Author: The Casemate developers\n" in metadata_text and "Classifier: Topic :: Security\n" in metadata_text
    assert "casemate/reports/templates/report.html" in names
    assert "casemate/gateway/dashboard/templates/base.html" in names


def test_the_metadata_has_no_project_url_by_default_and_rejects_an_invalid_one(tmp_path):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert "urls" not in project, "no public address is known; deploy/release.sh adds REPOSITORY_URL"
    for wrong in ("http://git.example/x", 'https://x"\n[evil]', "https://x y", "git@example:x"):
        command = ["deploy/release.sh", str(tmp_path / "dist"), "--build-only"]
        done = subprocess.run(
            command, cwd=ROOT, env={**os.environ, "REPOSITORY_URL": wrong}, capture_output=True, text=True, check=False
        )
        assert done.returncode == 2 and "allowed: an https address" in done.stderr


@pytest.mark.slow
def test_pipx_runs_the_wheel_outside_the_repository(wheel, home, tmp_path):
    casemate = (sys.executable, "-m", "pipx", "run", "--spec", str(wheel), "casemate")
    assert run(*casemate, "--version", cwd=tmp_path, home=home).strip().endswith("0.1.0")
    assert "casemate try FOLDER" in run(*casemate, "--help", cwd=tmp_path, home=home)


def test_the_action_matches_the_schema_and_passes_inputs_as_variables_only():
    checked = (str(TOOLS / "check-jsonschema"), "--builtin-schema", "vendor.github-actions", "action.yml")
    subprocess.run(checked, cwd=ROOT, check=True, capture_output=True)
    action = yaml.safe_load((ROOT / "action.yml").read_text())
    scripts = [step["run"] for step in action["runs"]["steps"] if "run" in step]
    assert scripts
    assert not any("${{" in script for script in scripts), "an input in a script can run any command"


def test_the_pre_commit_hook_matches_the_schema_and_checks_a_configuration(tmp_path):
    subprocess.run(
        (str(TOOLS / "pre-commit"), "validate-manifest", ".pre-commit-hooks.yaml"),
        cwd=ROOT,
        check=True,
        env={**os.environ, "PRE_COMMIT_HOME": str(tmp_path / "pre-commit")},
    )
    (hook,) = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())
    command = [sys.executable, "-m", *hook["entry"].split()]
    file = tmp_path / "casemate.yaml"
    file.write_text('rag:\n  generator: {use: openai, model: m, api_key: "${NOT_SET_ANYWHERE}"}\n')
    assert subprocess.run(command, cwd=tmp_path, check=False).returncode == 0, "secrets need not be set"
    file.write_text("guard:\n  defenses: [{use: mirabel, significanse: .01}]\n")
    wrong = subprocess.run(command, cwd=tmp_path, check=False, capture_output=True, text=True)
    assert wrong.returncode == 1
    assert "did you mean 'significance'?" in wrong.stdout
    assert {p.name for p in tmp_path.iterdir()} <= {"pre-commit", "casemate.yaml"}, "nothing is opened"
