"""Writes the reports of a campaign: HTML to read, JUnit and SARIF for CI servers, JSON for the next comparison."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

from casemate.config import FILE
from casemate.errors import DataError
from casemate.redteam.lab.results import CampaignResult, load_result
from casemate.redteam.reporting.html import render_html
from casemate.redteam.reporting.junit import to_junit
from casemate.redteam.reporting.sarif import to_sarif
from casemate.reports.format import scrub
from casemate.runtime.files import write_atomically

REPORT, CRAWL, PROBE = "report", "crawl", "probe"  # file names of membership, extraction and injection reports
OWN, TARGETS = "own", "targets"  # name of the operator's system in a report; folder of the reports of other targets
NAMES = "document-names.json"
"""File with the name of every document by its alias in the report. It stays with the operator."""


def write_report(
    campaign: CampaignResult,
    folder: Path,
    baseline: CampaignResult | None = None,
    stem: str = REPORT,
    archive: Path | None = None,
    configuration: Path = Path(FILE),
) -> dict[str, Path]:
    """Writes report.html, .json, .junit.xml and .sarif into a folder; returns their paths by kind.

    If the report has aliases of documents, their names are written to `NAMES` beside it (of a crawl: `crawl-` before).

    The page of a membership campaign also shows the last crawl in the folder, with a status of its own. All files are
    rendered before the first is replaced, and each is replaced atomically: readers see an old file or a new one. Only
    their owner can read them.

    With a ``baseline``, an earlier result, the page starts with the changes. ``archive`` is a folder that receives
    copies of the files. The SARIF report names the ``configuration`` file.

    Raises:
        BackendError: If a folder cannot be written.
    """
    campaign = scrub(campaign)
    last = _load(folder / f"{CRAWL}.json") if stem == REPORT else None
    texts = {
        "html": (f"{stem}.html", render_html(campaign, baseline, last)),
        "junit": (f"{stem}.junit.xml", to_junit(campaign)),
        "sarif": (f"{stem}.sarif", to_sarif(campaign, configuration)),
        "json": (f"{stem}.json", campaign.to_json()),
    }
    paths = {kind: folder / name for kind, (name, _) in texts.items()}
    if campaign.document_names:
        names = json.dumps(campaign.document_names, indent=1, ensure_ascii=False)
        texts["names"] = (NAMES if stem == REPORT else f"{stem}-{NAMES}", f"{names}\n")
    for place in filter(None, (archive, folder)):
        for name, text in texts.values():
            write_atomically(place / name, text.encode("utf-8"))
    return paths


def target_folder(folder: Path, name: str) -> Path:
    """The folder in `redteam.folder` with the reports of an external target, by its name or address.

    >>> target_folder(Path("lab"), "staging").as_posix()
    'lab/targets/staging'
    """
    plain = re.sub(r"[^A-Za-z0-9_]+", "-", name).strip("-")[:60]
    label = hashlib.sha256(name.encode(errors="surrogatepass")).hexdigest()[:8]
    return folder / TARGETS / (name if plain == name else f"{plain}-{label}")


def has_own_reports(folder: Path) -> bool:
    """Whether a folder has a report of the operator's system."""
    found = (_load(folder / f"{stem}.json") for stem in (REPORT, CRAWL, PROBE))
    return any(one is not None and one.evidence.get("target", OWN) == OWN for one in found)


def _load(path: Path) -> CampaignResult | None:
    """A result; None if missing or damaged."""
    try:
        return load_result(path)
    except DataError:
        return None


def newest_report(folder: Path) -> Path:
    """The newest JSON report of a campaign in a folder.

    Raises:
        DataError: If there is none.
    """
    folders = (folder, *(folder / TARGETS).glob("*"))
    found = [path for stem in (REPORT, CRAWL, PROBE) for f in folders if (path := f / f"{stem}.json").is_file()]
    if not found:
        raise DataError(f"no report in {folder}; run 'casemate redteam run', or give the path of a report.json")
    return max(found, key=lambda path: path.stat().st_mtime_ns)
