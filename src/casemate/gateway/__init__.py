"""An OpenAI-compatible door in front of a guarded system.

Nothing that goes out tells of verdicts, scores, thresholds or hidden documents; ``docs/how-to/serve.md`` says what
clients may see. Importing a module of this package other than ``keys`` needs ``casemate[serve]``.
"""
