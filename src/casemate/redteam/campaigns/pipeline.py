"""The stages of a campaign, shared by all kinds of attacks, on own and external systems.

1. **plan**: a `Campaign` holds the configuration and the operator's questions; names and options are validated. Nothing
   is opened or written yet.
2. **prepare**: builds the targets and an `AttackRunner`, and opens the campaign store. Only this stage differs between
   the system of this configuration (`own`) and external targets (`external`).
3. **execute**: checks that the targets are alive, runs the attacks, and checks again. Finished work is in the campaign
   store at once: a campaign killed at any point resumes when it is run again.
4. **audit**: measures what the attacks do not: traces of withheld documents, and the guard's cost for benign users.
5. **judge**: turns measurements into checks, and checks into one `CampaignResult`.
6. **write**: renders the result as HTML, JSON, JUnit and SARIF.

Campaigns in one folder exclude each other by a lock, and each has a directory of its own:

    redteam.folder/
      campaign.lock          held while a campaign runs; a second campaign fails at once
      campaigns.db           finished trials and cached replies of all campaigns, by fingerprint
      calibration-*/         calibrations of the lab's guard, by fingerprint
      runs/NAME/             one campaign: the lab's index, and its reports
      report.*, crawl.*      the newest reports of the operator's system; without one, of any target
      targets/NAME/          the newest reports of one external target

A campaign that is repeated or resumed has the same directory, because the name is a fingerprint of the campaign.

Path of an attack's question: `Campaign.run`, `MembershipRunner.execute`, `Experiment.run`, `Experiment._attack`,
`Experiment._attempt`, `MembershipAttack.run`, `TargetSession.ask`, `Target.ask`. Calls go down only: campaigns,
reporting, lab, attacks, crawling.
"""

from __future__ import annotations

import dataclasses
import platform
import sys
import time
import uuid
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np

from casemate import plugins
from casemate.config import Config, PluginSpec
from casemate.errors import BackendError, ConfigError
from casemate.protocols import Steps
from casemate.redteam.lab.judge import worst_status
from casemate.redteam.lab.results import CampaignResult, Check, CheckStatus
from casemate.redteam.lab.store import CampaignStore
from casemate.redteam.reporting.files import CRAWL, PROBE, REPORT, write_report
from casemate.runtime.file_lock import exclusive_lock
from casemate.runtime.files import write_error
from casemate.text.output_transforms import TRANSFORMS

SIMULATED_READER = (
    "The reader is simulated (`simulated_reader`): a script in place of a capable and obedient language model, which "
    "is the worst case for the operator."
)
SCRIPTED_ATTACKS = "The attacks' questions were written by script, without a language model."
COMPLETED = "The target answered until the end"
RUNS, INDEX = "runs", "index.db"
RUN = "run"  # key of `CampaignResult.evidence`: the campaign's directory


class CampaignKind(NamedTuple):
    """What distinguishes the campaigns: what each is called, the role of its attacks, and their configuration key."""

    purpose: str
    role: str
    key: str


KINDS: Mapping[str, CampaignKind] = {
    REPORT: CampaignKind("a membership campaign", "attack", "redteam.attacks"),
    CRAWL: CampaignKind("an extraction campaign", "crawler", "redteam.crawl.attacks"),
    PROBE: CampaignKind("an injection campaign", "injector", "redteam.probe.attacks"),
}
"""The kinds of campaigns, by the file name of their reports."""


def configured_attacks(config: Config, stem: str) -> tuple[PluginSpec, ...]:
    """The configured attacks of a kind of campaign."""
    section = config.redteam
    return {REPORT: section.attacks, CRAWL: section.crawl.attacks, PROBE: section.probe.attacks}[stem]


def campaign_lock(folder: Path, purpose: str) -> AbstractContextManager[None]:
    """Reserves `redteam.folder` for a campaign for the duration of the block.

    Raises:
        LockHeld: If another campaign runs there. The message names its process and purpose.
        BackendError: If the folder cannot be written.
    """
    return exclusive_lock(folder / "campaign.lock", purpose, "set redteam.folder to another folder")


class TargetSystem:
    """The attacked system: facts, limits and simulated parts for the report, one sentence each, and checks of itself.

    A check raises ``BackendError`` if the system fails.
    """

    def __init__(
        self, evidence: Mapping[str, Any], not_tested: Sequence[str] = (), simulated: Sequence[str] = ()
    ) -> None:
        self.evidence, self.not_tested, self.simulated = evidence, not_tested, simulated
        self.checks: list[Check] = []

    async def check_before(self, steps: Steps) -> None:
        """Checks before the attacks that the system answers from its collection."""

    async def check_after(self) -> None:
        """Checks after the attacks that the system still answers."""

    async def check_end(self) -> None:
        """Checks at the end, also of an interrupted campaign, that the system is still the same."""

    def cost(self) -> Mapping[str, float]:
        """Resources used so far."""
        return {}

    def finish(self) -> None:
        """Marks the campaign as complete: every attack finished."""


class AttackRunner(ABC):
    """Executes, audits and judges one kind of attack on prepared targets.

    The stages run in order, but any of them may have been interrupted or skipped when `judge` is called.
    """

    async def budget_objection(self) -> str:
        """Why the budget cannot suffice for all trials, found without a question. Default: empty, it may suffice."""
        return ""

    @abstractmethod
    async def execute(self, steps: Steps) -> None:
        """Runs the unfinished part of the attacks. ``BackendError``: the store or a target fails outside of one."""

    async def audit(self, steps: Steps) -> None:  # noqa: B027
        """Measures what the attacks do not. Default: nothing. ``BackendError``: a target fails."""

    @abstractmethod
    def judge(self) -> CampaignResult:
        """The measurements so far and their checks; the pipeline adds id, time, status and the target's facts."""

    @property
    @abstractmethod
    def complete(self) -> bool:
        """Whether every attack finished."""


@dataclass(frozen=True, kw_only=True)
class Campaign(ABC):
    """A planned campaign; ``stem`` is the file name of its reports without extension."""

    stem: ClassVar[str] = REPORT

    @property
    @abstractmethod
    def config(self) -> Config:
        """The operator's configuration."""

    @abstractmethod
    async def prepare(self, steps: Steps, resources: ExitStack) -> tuple[TargetSystem, AttackRunner]:
        """Builds what is attacked, and what attacks it; whatever it opens is closed with `resources`."""

    def parts(self) -> list[tuple[str, PluginSpec]]:
        """Role and configuration of everything that is built, for its code is evidence. Default: the attacks."""
        return [(KINDS[self.stem].role, part) for part in configured_attacks(self.config, self.stem)]

    async def run(self, steps: Steps) -> CampaignResult:
        """Runs all stages but `write`, or resumes an interrupted run.

        Raises:
            LockHeld: If another campaign runs in this folder.
            CasemateError: If the campaign cannot be prepared. Later failures of a target are in the result.
        """
        self.validate()
        with self._lock():
            return await self.run_locked(steps)

    async def run_and_write(
        self, steps: Steps, baseline: CampaignResult | None = None
    ) -> tuple[CampaignResult, dict[str, Path]]:
        """Runs all stages; returns the result and the paths of its reports. See `run` and `write`.

        Raises:
            ConfigError: If the budget cannot suffice for all trials.
        """
        self.validate()
        with self._lock():
            result = await self.run_locked(steps, whole=True)
            return result, self.write(result, baseline)

    def validate(self) -> None:
        """Checks the plan before anything is written; see `validate_plan`."""
        validate_plan(self.config, self.stem)

    def _lock(self) -> AbstractContextManager[None]:
        return campaign_lock(self.folder, KINDS[self.stem].purpose)

    async def run_locked(self, steps: Steps, whole: bool = False) -> CampaignResult:
        """As `run`, for a caller that has validated the plan. Requires the `campaign_lock`.

        ``whole``: a budget that cannot suffice for all trials is refused. Otherwise the run ends where it is used up.
        """
        began, interruption = time.monotonic(), ""
        with ExitStack() as resources:
            system, runner = await self.prepare(steps, resources)
            if whole and (objection := await runner.budget_objection()):
                raise ConfigError(objection)
            try:
                await system.check_before(steps)
                await runner.execute(steps)
                await system.check_after()
                await runner.audit(steps)
            except BackendError as error:
                interruption = str(error)
            try:
                await system.check_end()
            except BackendError as error:
                interruption = interruption or str(error)
            if runner.complete and not interruption:
                system.finish()
            return self._judge(system, runner.judge(), interruption, time.monotonic() - began)

    def write(self, result: CampaignResult, baseline: CampaignResult | None = None) -> dict[str, Path]:
        """Writes the reports into their folders and the campaign's directory; returns the paths in the first folder."""
        name = result.evidence.get(RUN)
        archive = self.folder / RUNS / name if name else None
        folders = self.report_folders(result)
        written = [write_report(result, f, baseline, self.stem, archive, self.config.file) for f in folders]
        return written[0]

    def report_folders(self, result: CampaignResult) -> Sequence[Path]:
        """The folders that receive the reports. Default: `redteam.folder`."""
        return [self.folder]

    @property
    def folder(self) -> Path:
        """The folder of reports and campaign state."""
        return self.config.folder / self.config.redteam.folder

    def open_store(self, resources: ExitStack) -> CampaignStore:
        """The campaign store in this folder."""
        return resources.enter_context(CampaignStore(self.folder / "campaigns.db"))

    def open_directory(self, fingerprint: str) -> Path:
        """The directory of the campaign with this fingerprint, created if missing. Requires the `campaign_lock`.

        The lab's indexes of other campaigns are deleted: copies that the next run of their campaign makes again.

        Raises:
            BackendError: If the folder cannot be written.
        """
        directory = self.folder / RUNS / f"{self.stem}-{fingerprint[:12]}"
        try:
            directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            for file in (self.folder / RUNS).glob(f"*/{INDEX}*"):
                if file.parent != directory:
                    file.unlink(missing_ok=True)
        except OSError as error:
            raise write_error(directory, error) from error
        return directory

    def _judge(self, system: TargetSystem, found: CampaignResult, interruption: str, seconds: float) -> CampaignResult:
        """The runner's judgment with everything that all campaigns report alike."""
        checks = [*found.checks, *system.checks]
        if interruption:
            reason = f"{interruption}; finished work is kept, run again to continue"
            checks.insert(0, Check(COMPLETED, CheckStatus.ERROR, None, None, reason))
        return dataclasses.replace(
            found,
            id=uuid.uuid4().hex,
            at=datetime.now(UTC).isoformat(timespec="seconds"),
            status=worst_status(check.status for check in checks),
            checks=tuple(checks),
            not_tested=(*found.not_tested, *system.not_tested),
            simulated=(*system.simulated, *found.simulated),
            evidence={**system.evidence, **found.evidence, "seed": self.config.redteam.seed, **self._versions()},
            cost={**found.cost, "seconds": seconds, **system.cost()},
        )

    def _versions(self) -> dict[str, str]:
        """Versions, and fingerprints of the code of other packages' plug-ins."""
        code = {name: text for role, part in self.parts() for name, text in plugins.packages(role, part).items()}
        return {
            "versions.casemate": version("casemate"),
            "versions.python": platform.python_version(),
            "versions.numpy": np.__version__,
            "versions.platform": sys.platform,
            **{f"versions.{name}": text for name, text in code.items()},
        }


def validate_plan(config: Config, stem: str = REPORT) -> None:
    """Checks the names and options of everything that a campaign of a kind of `KINDS` builds. Opens nothing.

    Raises:
        ConfigError: If a name or option is unknown, an option has a wrong value, or a file is missing.
    """
    section, folder = config.redteam, config.folder
    (_, role, key), attacks = KINDS[stem], configured_attacks(config, stem)
    if not attacks:
        raise ConfigError(f"{key} is empty; name at least one of: {', '.join(plugins.names(role))}")
    twice = [name for name, count in Counter(part.use for part in attacks).items() if count > 1]
    if twice:
        raise ConfigError(f"the {role} {twice[0]!r} is configured twice; results are stored by name, so remove one")
    unknown = [name for name in section.crawl.transforms if name not in TRANSFORMS]
    if unknown and stem == CRAWL:
        raise ConfigError(f"unknown transform {unknown[0]!r}; known: {', '.join(TRANSFORMS)}, or all with --transform")
    parts: list[tuple[str, PluginSpec]] = [(role, part) for part in attacks]
    if stem == PROBE and section.probe.personal_data is not None:
        parts.append(("personal_data_finder", section.probe.personal_data))
    parts += [("generator", section.reader)] if section.reader.use != "own" else []
    for kind, part in parts:
        plugins.validate(kind, part, folder)
    if stem == REPORT and section.target.use == "own" and config.rag.corpus is None:
        raise ConfigError("membership inference needs whole documents: set rag.corpus in casemate.yaml to their folder")
    files = {"split": section.split, "benign": section.benign}
    for name, path in files.items():
        if path is not None and not (folder / path).is_file():
            raise ConfigError(f"redteam.{name}: there is no file {folder / path}")
