"""Trends: the accepted baseline, sequential tests (CUSUM), and what they show over many runs."""
