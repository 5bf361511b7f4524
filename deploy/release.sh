#!/usr/bin/env bash
# Builds the release into a folder: source archive, wheel, SBOM (CycloneDX), digests. Two builds must be equal, and the
# licenses of all packages allowed.
# usage: deploy/release.sh [folder [--build-only]]      PYTHON: an interpreter with the dependency group "release"
# REPOSITORY_URL: https address of the repository, for the project URLs in the metadata; without it there are none.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-$root/.venv/bin/python}
out=${1:-$root/dist}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
SOURCE_DATE_EPOCH=$(git -C "$root" log -1 --format=%ct)
export SOURCE_DATE_EPOCH PIP_CONSTRAINT=$root/constraints.txt PIP_DISABLE_PIP_VERSION_CHECK=1
umask 022

if [[ -n "${REPOSITORY_URL:-}" && ! "$REPOSITORY_URL" =~ ^https://[A-Za-z0-9._~/-]+$ ]]; then
  echo "REPOSITORY_URL is '$REPOSITORY_URL'; allowed: an https address without query" >&2
  exit 2
fi
[ -n "${REPOSITORY_URL:-}" ] || echo "NOT SET: project URLs; set REPOSITORY_URL to the repository's address"

for copy in first second; do
  mkdir "$work/$copy"
  git -C "$root" archive HEAD | tar -x -C "$work/$copy"  # committed files only
  [ -z "${REPOSITORY_URL:-}" ] || printf '\n[project.urls]\nRepository = "%s"\nIssues = "%s/issues"\n' \
    "$REPOSITORY_URL" "$REPOSITORY_URL" >> "$work/$copy/pyproject.toml"
  (cd "$work/$copy" && "$python" -m build --outdir "$work/$copy.dist" > "$work/$copy.log" 2>&1) ||
    { cat "$work/$copy.log" >&2; exit 1; }
done
cmp "$work"/first.dist/*.whl "$work"/second.dist/*.whl
echo "two builds of the wheel are equal"
"$python" -m twine check --strict "$work"/first.dist/*

mkdir -p "$out"
cp "$work"/first.dist/* "$out"
[ "${2:-}" != --build-only ] || exit 0
wheel=$(echo "$out"/casemate-*.whl)
python3 -m venv "$work/environment"
"$work/environment/bin/python" -m pip install --quiet "$wheel[serve,http,openai]"
"$work/environment/bin/python" "$root/deploy/licenses.py"
"$python" -m cyclonedx_py environment "$work/environment" --output-reproducible --pyproject "$root/pyproject.toml" \
  --output-file "$out/casemate.cdx.json"
"$work/environment/bin/python" -m pip freeze --all | grep -v '^casemate' > "$work/installed.txt"
if "$python" -m pip_audit --requirement "$work/installed.txt" --no-deps --disable-pip --strict > "$work/audit.txt" 2>&1; then
  cat "$work/audit.txt"
elif grep -q 'Found .* vulnerabilit' "$work/audit.txt"; then
  cat "$work/audit.txt" >&2
  exit 1
else
  echo "NOT RUN: pip-audit could not reach its database: $(tail -n 1 "$work/audit.txt")"
fi
(cd "$out" && sha256sum casemate-* casemate.cdx.json > SHA256SUMS && cat SHA256SUMS)
