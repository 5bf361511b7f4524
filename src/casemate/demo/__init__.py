"""The sample corpus: a fictional clinic with policy pages and generated case notes."""
