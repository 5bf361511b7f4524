"""``python -m casemate``."""

from casemate.cli import main

main()
