"""The canary monitor: known questions, asked on a schedule, and honest alarms when the answers change.

``canaries`` asks, ``trends`` concludes, ``watch`` keeps the time, ``alerts`` tells people; ``drift``, ``honey`` and
``poison`` look for other signs.
"""
