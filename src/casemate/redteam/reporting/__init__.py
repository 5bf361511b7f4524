"""Reports of a campaign: HTML, JUnit, SARIF, JSON, and comparison of two campaigns."""
