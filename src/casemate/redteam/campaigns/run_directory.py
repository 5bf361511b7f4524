"""Files of campaigns: a lock per folder, and a directory per campaign.

    redteam.folder/
      campaign.lock          held while a campaign runs; a second campaign fails at once
      campaigns.db           finished trials and cached replies of all campaigns, by fingerprint
      calibration-*/         calibrations of the lab's guard, by fingerprint
      runs/NAME/             one campaign: the lab's index, and its reports
      report.*, crawl.*      the newest reports of the operator's system; without one, of any target
      targets/NAME/          the newest reports of one external target

A campaign that is repeated or resumed has the same directory, because the name is a fingerprint of the campaign.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from casemate.runtime.file_lock import exclusive_lock
from casemate.runtime.files import write_error

LOCK, RUNS, INDEX = "campaign.lock", "runs", "index.db"


@contextmanager
def campaign_lock(folder: Path, purpose: str) -> Iterator[None]:
    """Reserves `redteam.folder` for a campaign for the duration of the block.

    Raises:
        LockHeld: If another campaign runs there. The message names its process and purpose.
        BackendError: If the folder cannot be written.
    """
    with exclusive_lock(folder / LOCK, purpose, "set redteam.folder to another folder"):
        yield


def open_run_directory(folder: Path, name: str) -> Path:
    """The directory of the campaign ``name``, created if missing. Requires the `campaign_lock`.

    The lab's indexes of other campaigns are deleted: copies that the next run of their campaign makes again.

    Raises:
        BackendError: If the folder cannot be written.
    """
    directory = folder / RUNS / name
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        for file in (folder / RUNS).glob(f"*/{INDEX}*"):
            if file.parent != directory:
                file.unlink(missing_ok=True)
    except OSError as error:
        raise write_error(directory, error) from error
    return directory
