"""Red team: attacks, the lab that runs them, campaigns, and reports."""
