"""Stands in for matplotlib where a test wants no picture: see conftest.py."""

raise ImportError('no pictures in this test')
