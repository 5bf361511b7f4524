"""Drift: has a system, its traffic or its corpus changed, and is one system better than another?"""
