"""Checks the licenses of installed packages against a list of allowed ones.

    python deploy/licenses.py     all packages of this environment; exit code 1 if one is not allowed

A package states its license as an SPDX expression, as a classifier, or as free text, in this order of trust. Names that
are not SPDX are translated by ``NAMES``. A package without a known license is refused.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from importlib.metadata import Distribution, distributions

ALLOWED = {
    "0BSD",
    "AFL-2.1",
    "Apache-2.0",
    "BSD-2-Clause",
    "BSD-3-Clause",
    "BSL-1.0",
    "CC0-1.0",
    "CNRI-Python",
    "ISC",
    "MIT",
    "MIT-0",
    "MIT-CMU",
    "MPL-2.0",
    "PSF-2.0",
    "Unlicense",
    "Zlib",
}
"""Licenses that permit use and redistribution beside code under Apache-2.0."""
EXCEPTIONS = {
    "psycopg": "LGPL-3.0-only",
    "psycopg-binary": "LGPL-3.0-only",
    "psycopg-pool": "LGPL-3.0-only",
}
"""Optional packages that are installed unmodified, so the LGPL permits their use."""
NAMES = {
    "3-clause bsd license": "BSD-3-Clause",
    "academic free license (afl)": "AFL-2.1",
    "apache 2.0": "Apache-2.0",
    "apache 2.0 license": "Apache-2.0",
    "apache license 2.0": "Apache-2.0",
    "apache license, version 2.0": "Apache-2.0",
    "apache software license": "Apache-2.0",
    "bsd license": "BSD-3-Clause",
    "isc license (iscl)": "ISC",
    "mit license": "MIT",
    "mozilla public license 2.0 (mpl 2.0)": "MPL-2.0",
    "python software foundation license": "PSF-2.0",
}
"""Names of licenses in classifiers and free text, in lower case."""


def license_of(package: Distribution) -> str:
    """The license that a package states, as an SPDX expression where it is known; empty if it states none."""
    metadata = package.metadata
    if expression := metadata.get("License-Expression"):
        return expression
    classifiers = [c for c in metadata.get_all("Classifier", []) if c.startswith("License ::")]
    names = [c.rpartition("::")[2].strip() for c in classifiers if not c.endswith("OSI Approved")]
    stated = names or [(metadata.get("License") or "").strip().partition("\n")[0]]
    return " AND ".join(NAMES.get(name.lower(), name) for name in stated)


def is_allowed(expression: str) -> bool:
    """Whether a license permits the use.

    >>> is_allowed("MIT AND (GPL-3.0-only OR Apache-2.0 WITH LLVM-exception)"), is_allowed("MIT AND GPL-3.0-only")
    (True, False)
    """
    without = re.sub(r" WITH [\w.-]+", "", expression)
    if re.search(r"[^\w.+() -]", without) or not without.strip():
        return False
    tokens = re.findall(r"[()]|[\w.+-]+", without)
    terms = [{"AND": "and", "OR": "or"}.get(t, t if t in "()" else str(t in ALLOWED)) for t in tokens]
    try:
        return bool(eval(" ".join(terms), {"__builtins__": {}}))  # only True, False, and, or, and parentheses
    except SyntaxError:
        return False


def refused(packages: Iterable[Distribution]) -> dict[str, str]:
    """Packages whose license is not allowed, with it."""
    found = {re.sub(r"[-_.]+", "-", p.metadata["Name"]).lower(): license_of(p) for p in packages}
    return {name: stated for name, stated in found.items() if not is_allowed(stated) and EXCEPTIONS.get(name) != stated}


def main() -> int:
    """Checks all packages of this environment."""
    packages = list(distributions())
    wrong = refused(packages)
    for name, stated in sorted(wrong.items()):
        print(f"{name}: the license {stated or '(none stated)'} is not allowed")
    print(f"licenses of {len(packages)} packages: {len(wrong)} not allowed")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
