"""The laboratory: runs attacks against a target, guard off and on, and says what they achieved."""
