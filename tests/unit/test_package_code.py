"""A red-team result is reused only if the code of plug-ins of other packages is unchanged."""

import os
import sys
import zipfile
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from casemate import config as configuration
from casemate import plugins
from casemate.app import open_app
from casemate.config import PluginSpec
from casemate.guard.defenses.mirabel import Mirabel
from casemate.redteam.campaigns.external import ExternalMembershipCampaign
from casemate.redteam.campaigns.external_targets import build_external_targets
from casemate.redteam.campaigns.own import OwnMembershipCampaign
from casemate.redteam.campaigns.probe import OwnProbeCampaign
from casemate.redteam.lab.store import CampaignStore
from casemate.runtime import package_code as module
from casemate.runtime.package_code import package_code
from tests.campaign_process import registered

DEFENSE = """\
from dataclasses import dataclass
from casemate import Defense

@dataclass(frozen=True)
class Theirs(Defense):
    "Does nothing."
"""
TARGET = """\
from dataclasses import dataclass
from casemate.protocols import Target

@dataclass
class Remote(Target):
    "A remote system."
"""


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A third-party package with a defense, a target and a helper module."""
    folder = tmp_path / "site" / "acme_plug_ins"
    folder.mkdir(parents=True)
    for name, text in {"__init__": "", "theirs": DEFENSE, "remote": TARGET, "words": "WORDS = 3"}.items():
        (folder / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(folder.parent)
    entries = [
        EntryPoint("theirs", "acme_plug_ins.theirs:Theirs", "casemate.defense"),
        EntryPoint("remote", "acme_plug_ins.remote:Remote", "casemate.target"),
    ]
    monkeypatch.setattr(
        plugins, "entry_points", lambda group: [*registered(group), *(e for e in entries if e.group == group)]
    )
    yield folder
    for name in [name for name in sys.modules if name.startswith("acme_plug_ins")]:
        del sys.modules[name]
    module._fingerprint.cache_clear()


def edit_helper_module(package):
    """Simulates a new process after an edit of a helper module."""
    (package / "words.py").write_text("WORDS = 4")
    module._fingerprint.cache_clear()


def test_package_code_depends_on_all_modules(package):
    cls = plugins.load("defense", "theirs")
    before = package_code(cls)
    assert list(before) == ["acme_plug_ins"] and package_code(cls()) == before
    module._fingerprint.cache_clear()
    assert package_code(cls) == before
    edit_helper_module(package)
    assert package_code(cls) != before


def test_package_code_ignores_other_files(package):
    cls = plugins.load("defense", "theirs")
    before = package_code(cls)
    (package / ".#words.py").symlink_to("user@host.1234")  # a lock file of an editor
    (package / "templates.py").mkdir()
    os.mkfifo(package / "pipe.py")
    module._fingerprint.cache_clear()
    assert package_code(cls) == before


def test_package_code_depends_on_the_name_of_an_unreadable_file(package, monkeypatch):
    cls, read = plugins.load("defense", "theirs"), Path.read_bytes

    def deny_read(path):
        if path.name == "words.py":
            raise PermissionError(path)
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", deny_read)
    before = package_code(cls)
    edit_helper_module(package)
    assert before and package_code(cls) == before
    (package / "words.py").unlink()
    module._fingerprint.cache_clear()
    assert package_code(cls) != before


def test_package_code_of_a_zip_archive_depends_on_the_archive(package, monkeypatch):
    archive = package.parent / "acme.zip"

    def write_archive(words):
        with zipfile.ZipFile(archive, "w") as file:
            for name, text in {"__init__": "", "theirs": DEFENSE, "words": words}.items():
                file.writestr(f"acme_plug_ins/{name}.py", text)
        module._fingerprint.cache_clear()

    write_archive("WORDS = 3")
    monkeypatch.syspath_prepend(archive)
    cls = plugins.load("defense", "theirs")
    before = package_code(cls)
    write_archive("WORDS = 4")
    assert list(before) == ["acme_plug_ins"] and package_code(cls) != before


@pytest.mark.parametrize("part", [Mirabel, Mirabel(), None, 3, open_app])
def test_code_of_casemate_and_plain_values_have_no_fingerprint(part):
    assert package_code(part) == {}


def test_packages_include_those_of_plug_in_options(package):
    spec = PluginSpec(use="theirs")
    assert plugins.packages("defense", spec) == package_code(plugins.load("defense", "theirs"))
    assert plugins.packages("defense", PluginSpec(use="mirabel", embedder="minilm")) == {}


def campaign_facts(folder, guard):
    """Directory and label of the campaign on a system with this guard."""
    given = {"rag": {"corpus": "corpus.jsonl", "embedder": "bag"}, "guard": guard, "redteam": {"attacks": ["direct"]}}
    settings = configuration.parse(given, folder=folder)
    with open_app(settings) as app, CampaignStore(folder / "store.db") as store:
        campaign = OwnMembershipCampaign(app)
        return campaign.fingerprint("split"), campaign.label(campaign.bare_system(app.index, store), [])


def test_results_are_not_reused_after_a_change_of_a_plug_in_or_the_audience(package, tmp_path):
    guard = {"defenses": ["theirs"]}
    facts = [campaign_facts(tmp_path, guard), campaign_facts(tmp_path, guard)]
    assert facts[0] == facts[1]
    edit_helper_module(package)
    facts.append(campaign_facts(tmp_path, guard))
    facts.append(campaign_facts(tmp_path, guard | {"audience": {"unentitled": "nothing"}}))
    assert [len({one[i] for one in facts}) for i in range(2)] == [3, 3]


def test_results_are_not_reused_after_a_change_of_the_audience_function(package, tmp_path):
    (package / "words.py").write_text("def allow(query, document): return True")
    audience = {"unentitled": "nothing", "function": "acme_plug_ins.words:allow"}
    before = campaign_facts(tmp_path, {"audience": audience})
    (package / "words.py").write_text("def allow(query, document): return False")
    module._fingerprint.cache_clear()
    after = campaign_facts(tmp_path, {"audience": audience})
    assert before[0] != after[0] and before[1] != after[1]


def test_interrupted_campaign_is_not_resumed_after_a_change_of_the_target_code(package):
    section = {"target": "tested", "targets": {"tested": "remote"}, "i_own_this_target": True}
    settings = configuration.parse({"redteam": section})
    before = build_external_targets(settings).label
    assert build_external_targets(settings).label == before
    edit_helper_module(package)
    assert build_external_targets(settings).label != before
    campaign = ExternalMembershipCampaign(settings)
    assert campaign._versions()["versions.acme_plug_ins"] in package_code(plugins.load("target", "remote")).values()


def test_campaign_depends_on_the_code_of_the_personal_data_finder(package, tmp_path):
    probe = {"personal_data": "presidio"}
    given = {"rag": {"corpus": "corpus.jsonl", "embedder": "bag"}, "redteam": {"probe": probe}}
    with open_app(configuration.parse(given, folder=tmp_path)) as app:
        assert ("personal_data_finder", PluginSpec(use="presidio")) in OwnProbeCampaign(app).parts()
