"""Renders Jinja2 templates: values are escaped, and undefined names are errors.

A report is a single file that loads nothing. The only script that it may run is a template file of this package, which
its Content-Security-Policy names by hash. The dashboard uses an environment of its own, with the same filters.
"""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from importlib.resources import files
from typing import Any

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from casemate.reports import format as formats
from casemate.reports.durations import duration

CSP = "default-src 'none'; style-src 'unsafe-inline'"
"""Content-Security-Policy of a report without script: no script and no network access, even if escaping failed."""


@cache
def template_environment(package: str) -> Environment:
    """The environment over the folder ``templates`` of a package, and behind it that of the reports. Built once."""
    environment = Environment(
        loader=ChoiceLoader([PackageLoader(package), PackageLoader("casemate.reports")]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,
    )
    filters = (
        formats.decimal, duration, formats.interval, formats.iso_time, formats.number, formats.one_in,
        formats.plural, formats.short_rate, formats.unbroken, formats.utc_datetime, formats.utc_time,
    )  # fmt: skip
    environment.filters |= {one.__name__: one for one in filters}
    environment.filters["measured"] = lambda rate, share=False: formats.unbroken(formats.measured(rate, share))
    environment.filters["percent"] = lambda x: formats.unbroken(formats.percent(x))
    environment.globals["csp"] = CSP
    return environment


def render(template: str, **context: Any) -> str:
    """Renders a file of ``reports/templates``. Strings are escaped; scrub them first (``format.scrub``).

    Raises ``UndefinedError`` if the template uses a name that is not in the context.
    """
    return template_environment("casemate.reports").get_template(template).render(context)


@cache
def load_script(name: str) -> tuple[Markup, str]:
    """Reads a script of ``reports/templates``, whose text may not contain "</".

    Returns it, marked as safe, and the Content-Security-Policy of a report that may run this script only.
    """
    text = files("casemate.reports").joinpath("templates", name).read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return Markup(text), f"{CSP}; script-src 'sha256-{digest}'"
