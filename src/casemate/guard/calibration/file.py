"""The calibration file of a defense: JSON, one ``Calibration`` per tenant.

``fitting.calibrate`` fits a calibration, a ``CalibratedDefense`` reads it.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from casemate.errors import DataError
from casemate.guard.calibration.closeness import FEATURES
from casemate.maths.calibration import Calibration
from casemate.runtime.files import write_atomically

FORMAT = 1
_TENANTS = TypeAdapter(dict[str, Calibration])
LARGEST = 1e7
"""Upper bound of plausible values, and of the inverse of a scale."""


class CalibrationFile:
    """The calibrations in a file, read again when the file changes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._state: tuple[int, int, int] | None = None
        self._calibrations: dict[str, Calibration] = {}

    def of(self, tenant: str) -> Calibration | None:
        """Returns the calibration of a tenant, if there is one.

        Raises:
            DataError: If the file is damaged.
        """
        try:
            stat = self.path.stat()
        except OSError:
            return None
        state = (stat.st_mtime_ns, stat.st_ino, stat.st_size)
        if state != self._state:
            self._calibrations = read_calibrations(self.path)
            self._state = state
        return self._calibrations.get(tenant)


def read_calibrations(path: Path) -> dict[str, Calibration]:
    """Returns the calibrations in a file by tenant; empty if there is no file.

    Raises:
        DataError: If the file is damaged or has another format.
    """
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        if raw.get("format") != FORMAT:
            what = f"calibration format {raw.get('format')!r}, this version reads {FORMAT}"
            raise DataError(f"{path} has {what}; delete it and run 'casemate calibrate'")
        calibrations = _TENANTS.validate_python(raw.get("tenants"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, AttributeError, OverflowError, RecursionError, ValidationError) as error:
        raise DataError(
            f"{path} is damaged or not a calibration ({type(error).__name__}); delete it and run 'casemate calibrate'"
        ) from error
    for tenant, calibration in calibrations.items():
        _require_valid(path, tenant, calibration)
    return calibrations


def write_calibration(path: Path, tenant: str, calibration: Calibration) -> None:
    """Replaces one tenant's calibration in the file, atomically and with mode 0600.

    Raises:
        DataError: If the existing file is damaged.
        BackendError: If the file cannot be written; it does not change.
    """
    calibrations = read_calibrations(path) | {tenant: calibration}
    text = json.dumps({"format": FORMAT, "tenants": {t: asdict(c) for t, c in calibrations.items()}}, indent=1)
    write_atomically(path, f"{text}\n".encode())


def _require_valid(path: Path, tenant: str, c: Calibration) -> None:
    """Refuses values that would give absurd scores, or a guard that silently withholds nothing."""
    what = f"{path}: the calibration of tenant {tenant!r}"
    if c.features != FEATURES:
        raise DataError(f"{what} was made by another version; delete the file and run 'casemate calibrate'")
    sizes = {len(c.features), len(c.centre), len(c.scale), len(c.weights)}
    numbers = (*c.centre, *c.scale, *c.weights, *c.benign, c.jitter)
    valid = (
        len(sizes) == 1
        and all(abs(x) <= LARGEST for x in numbers)  # refuses NaN too
        and min(c.weights) >= 0
        and min(c.scale) >= 1 / LARGEST
        and 0 <= c.documents < 1 << 60
        and c.k > 0
        and c.jitter >= 0
        and not math.isnan(c.doubt)
        and bool(c.benign) == any(c.weights)
        and (not c.jitter or (bool(c.salt) and c.salt.isascii()))
    )
    if not valid:
        raise DataError(f"{what} has invalid values; delete the file and run 'casemate calibrate'")
