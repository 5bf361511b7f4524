"""The monitor: canaries asked on a schedule, drift and poisoning detection, and alerts.

From a scheduled canary to a notification, each step calls only layers below it:

1. ``scheduler.watch.watch``: elects a leader among processes, sleeps until a run is due.
2. ``scheduler.run_executor.RunExecutor.run_due``: starts the run, repeats failed canaries, records the end.
3. ``canaries.run.CanaryRunner.ask``: asks the target through the guard, as a client does.
4. ``canaries.check.check_answer``: compares the answer with the canary; returns its deviations.
5. ``trends.cusum.analyze_run``: sequential test (CUSUM of likelihood ratios, e-BH) against the accepted baseline.
6. ``alerts.rules.alert_events``: opens, updates and closes alerts as events.
7. ``scheduler.watch.AlertDispatcher.run``: elects a sender per channel.
8. ``alerts.outbox.Outbox.deliver``: sends what the ``DeliveryQueue`` returns, with rate limit and retries.

A new document takes another path: ``poisoning.screening_gate.ScreeningGate.add`` (a ``DocumentSink``) scores it
(``poisoning.scoring``), and stores it in quarantine or passes it to the guard. ``service.open_document_sink`` opens the
gates of a long-running process.
"""
