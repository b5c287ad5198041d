"""Explanations for people: a terminal's tables, Markdown, a page."""
