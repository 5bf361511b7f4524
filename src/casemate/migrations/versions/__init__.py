"""The steps, in the order of their numbers. A published step is never changed: write the next one."""
