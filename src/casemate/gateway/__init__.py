"""An OpenAI-compatible HTTP API in front of a guarded system, with a dashboard.

No response contains verdicts, scores, thresholds or hidden documents; ``docs/how-to/serve.md`` lists what clients can
see. All modules except ``auth.keys`` need ``casemate[serve]``.
"""
