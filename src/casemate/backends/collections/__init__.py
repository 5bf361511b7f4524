"""Collections: existing vector stores that Casemate guards in place."""
