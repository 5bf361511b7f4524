"""What each error rate costs."""

from casemate.calibration import Calibration


def render_html(calibration: Calibration, significance: float) -> str:
    """The page."""
    return ""
