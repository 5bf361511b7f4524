"""Scheduler: when runs are due, leader election, execution of runs, and the long-running watch."""
